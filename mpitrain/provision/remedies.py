"""Remedies for the most frequent messages of ssh, sudo and Ansible, if mpitrain's own tasks do not give one."""

from __future__ import annotations

# A pattern, and what to do. The first pattern in the message counts.
REMEDIES = (
    (
        r"Host key verification failed|IDENTIFICATION HAS CHANGED|host key for .* has changed",
        "look at its key: mpitrain cluster trust {node}",
    ),
    (
        r"Permission denied \(|Too many authentication failures",
        "let {node} accept your key (ssh-copy-id), or correct ansible_user and the key in its line of the inventory",
    ),
    (
        r"[Ii]ncorrect (sudo |su )?password|Sorry, try again",
        "enter the right password: --ask-become-pass asks for it",
    ),
    (
        r"[Mm]issing (sudo|become) password|a password is required|privilege output closed",
        "sudo on {node} asks for a password: add --ask-become-pass",
    ),
    (
        # Usually a kept connection to a machine that has lost its power since.
        r"waiting for privilege escalation prompt",
        "check that {node} is on: mpitrain cluster trust {node}; if it is, find out what its sudo waits for",
    ),
    (
        (
            r"could not be sent to remote host|timed out|No route to host|Connection refused|Network is unreachable|"
            r"Connection (closed|reset)"
        ),
        "check that {node} is on and that its sshd answers: mpitrain cluster trust {node}",
    ),
    (
        r"No space left on device",
        "free space on {node} (df -h), then run it again",
    ),
)
