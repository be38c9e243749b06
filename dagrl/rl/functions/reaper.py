"""The parent of a process that runs a user's function. When that ends, or the driver does, it kills all that they started:

    python -I -S reaper.py DRIVER_PID COMMAND...

Orphans of its descendants become its children (PR_SET_CHILD_SUBREAPER of prctl(2)), also those in sessions of their own. The
driver ends it with SIGUSR1. It imports little, to start in milliseconds. Elsewhere than on Linux it becomes the command.
"""

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
SIGNALS = (signal.SIGCHLD, signal.SIGCONT, signal.SIGTERM, signal.SIGUSR1)
END_S = 10.0  # seconds to go on killing processes that start other ones


def main() -> None:
    """Runs the command, and exits with its code when nothing is left."""
    driver, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform != "linux":
        os.execv(command[0], command)  # noqa: S606  # our own module
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    prctl(PR_SET_PDEATHSIG, signal.SIGCONT)  # which also wakes it if it is stopped
    child = os.fork()
    if not child:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        os.execv(command[0], command)  # noqa: S606
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # the connection is the child's
    code = 1
    while os.getppid() == driver:
        if (ended := reaped(child)) is not None:
            code = ended
            break
        if signal.sigwait(SIGNALS) == signal.SIGUSR1:  # SIGCONT also comes when the driver's thread ends that started it
            break
    kill_children()
    sys.exit(code)


def reaped(child: int) -> int | None:
    """Reaps what has ended. Returns the exit code of `child` once it has."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                return os.waitstatus_to_exitcode(ended[1]) & 0xFF
    return None


def kill_children() -> None:
    """Kills children until there are none: those of a killed one become children of this process."""
    until = time.monotonic() + END_S
    while time.monotonic() < until:
        for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(int(pid), signal.SIGKILL)
        try:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(0.005)
        except ChildProcessError:
            return


if __name__ == "__main__":
    main()
