"""Calls a function that is read, pickled, from standard input, and writes what it returned or raised, and what it logged:
`ForkServer.call`."""

import logging
import logging.handlers
import os
import pickle
import sys


class Kept(logging.handlers.QueueHandler):
    """Keeps records, in a form that can be pickled."""

    def __init__(self) -> None:
        self.records: list[logging.LogRecord] = []
        super().__init__(self.records)  # type: ignore[arg-type]

    def enqueue(self, record: logging.LogRecord) -> None:
        """Keeps a record."""
        self.records.append(record)


def main() -> None:
    """Answers the one call of this process. What the function prints goes to standard error."""
    sys.path[:], call = pickle.load(sys.stdin.buffer)  # noqa: S301
    output = os.dup(1)
    os.dup2(2, 1)
    kept = Kept()
    root = logging.getLogger()
    root.handlers[:] = [kept]
    root.setLevel(logging.INFO)
    answer: tuple[object, BaseException | None]
    try:
        function, arguments = pickle.loads(call)  # noqa: S301
        answer = function(*arguments), None
    except BaseException as error:
        answer = None, error
    with os.fdopen(output, "wb") as file:
        pickle.dump((*answer, kept.records), file)


if __name__ == "__main__":
    main()
