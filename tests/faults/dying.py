"""Functions by which the scripts of tests fail once: in the try of the job that comes to the place first."""

from __future__ import annotations

# The script has a `folder`, and has imported os and signal. `once` is true at the first call with a name, in any try.
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
