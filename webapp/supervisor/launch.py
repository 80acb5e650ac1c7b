"""`python -I -S launch.py --nice N --death SIGNAL --parent PID COMMAND...`: become COMMAND, tied to the supervisor.

Standard library only, and run before COMMAND takes this process over: the niceness and the parent-death signal survive
exec. Doing it here, not between fork and exec in the supervisor, keeps threads there safe.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    nice, death, parent = int(arguments[1]), int(arguments[3]), int(arguments[5])
    if nice:
        os.nice(nice)
    if sys.platform == "linux" and death:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, death, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl")
        if os.getppid() != parent:  # it died before it could be tied to us
            os.kill(os.getpid(), signal.SIGKILL)
    os.execvp(arguments[6], arguments[6:])


if __name__ == "__main__":
    main(sys.argv[1:])
