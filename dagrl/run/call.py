"""The child process of `ForkServer.call`: reads a pickled call from standard input, and writes its result and its log."""

import gc
import logging
import os
import pickle
import sys
from logging.handlers import QueueHandler
from queue import SimpleQueue


def main() -> None:
    """Answers the one call of this process. What the function prints goes to standard error."""
    gc.disable()  # the process ends with the call
    sys.path[:], call = pickle.load(sys.stdin.buffer)  # noqa: S301
    output = os.dup(1)
    os.dup2(2, 1)
    records: SimpleQueue[logging.LogRecord] = SimpleQueue()
    root = logging.getLogger()
    root.handlers[:] = [QueueHandler(records)]
    root.setLevel(logging.INFO)
    answer: tuple[object, BaseException | None]
    try:
        function, arguments = pickle.loads(call)  # noqa: S301
        answer = function(*arguments), None
    except BaseException as error:
        answer = None, error
    with os.fdopen(output, "wb") as file:
        pickle.dump((*answer, [records.get() for _ in range(records.qsize())]), file)


if __name__ == "__main__":
    main()
