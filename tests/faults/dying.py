"""What the scripts of tests use to fail once, in whichever try of the job comes to it first."""

from __future__ import annotations

# The script has a `folder`, and has imported os and signal. `once` is true at its first call, in any try.
DYING = """
def once(name):
    try:
        (folder / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

def die():
    os.kill(os.getpid(), signal.SIGKILL)
"""
