"""The process that runs a reward function: `python -m dagrl.reward_process FD module:function`, started by `RewardRunner`.

It answers every list of rows on the connection `FD` with the function's rewards, or with a text that says what it raised,
and ends when the other end is closed or its parent dies.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from multiprocessing.connection import Connection

from dagrl.imports import load_callable

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Serve until the connection is closed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    descriptor, path = sys.argv[1:]
    function = load_callable(path, "reward.function")
    with Connection(int(descriptor)) as connection:
        connection.send("ready")
        while True:
            try:
                rows = connection.recv()
            except EOFError:
                return
            try:
                connection.send(list(function(*rows)))
            except Exception as error:
                connection.send(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
