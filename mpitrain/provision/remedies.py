"""What the commonest words of ssh, sudo and Ansible call for, where our own tasks do not say it."""

from __future__ import annotations

# A pattern, and what to do; the first that is found in the message counts.
REMEDIES = (
    (
        r"Host key verification failed|IDENTIFICATION HAS CHANGED|host key for .* has changed",
        "look at its key: mpitrain cluster trust {node}",
    ),
    (
        r"Permission denied \(|Too many authentication failures",
        "let {node} accept your key (ssh-copy-id), or mend ansible_user and the key in its line of the inventory",
    ),
    (
        r"[Ii]ncorrect (sudo |su )?password|Sorry, try again",
        "give the right password: --ask-become-pass asks for it",
    ),
    (
        r"[Mm]issing (sudo|become) password|a password is required|privilege output closed",
        "sudo on {node} wants a password: add --ask-become-pass",
    ),
    (
        # A connection from before to a machine that has lost its power since, mostly.
        r"waiting for privilege escalation prompt",
        "see that {node} is on: mpitrain cluster trust {node}; if it is, see what its sudo waits for",
    ),
    (
        (
            r"could not be sent to remote host|timed out|No route to host|Connection refused|Network is unreachable|"
            r"Connection (closed|reset)"
        ),
        "see that {node} is on and that its sshd answers: mpitrain cluster trust {node}",
    ),
    (
        r"No space left on device",
        "make room on {node} (df -h), then run it again",
    ),
)
