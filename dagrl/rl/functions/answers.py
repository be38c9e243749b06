"""Answers of a user's function."""

import inspect
import re
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dagrl.errors import error_text

Item = TypeVar("Item")

_OTHERS = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[2]), "<")
"""Path prefixes of code that is not the user's: Python's, dagrl's, and code without a file."""

_FRAME = re.compile(r'File "(.+)", line (\d+) in ')

_PACKAGES = ("site-packages", "dist-packages")  # directories of installed packages, in any environment


@dataclass(frozen=True)
class Failed:
    """Stands for the answer to a row for which the function has none; `message` says why."""

    message: str


def described(error: BaseException) -> str:
    """Describes an error of a user's function and its line: the deepest one outside installed packages."""
    return error_text(error) + place_of(error)


def place_of(error: BaseException) -> str:
    """Returns ` (file, line n)`: the deepest line of an error outside installed packages; "" if it has none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_own(frame.filename)] or frames
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


def place_in_dump(dump: str) -> str:
    """Returns the same of a traceback that `faulthandler` wrote, whose most recent call comes first."""
    own = [(path, line) for path, line in _FRAME.findall(dump) if is_own(path)]
    return f" ({own[0][0]}, line {own[0][1]})" if own else ""


def is_own(filename: str) -> bool:
    """Whether a file has the user's code: neither Python's, nor dagrl's, nor that of an installed package."""
    return not (filename.startswith(_OTHERS) or any(name in filename for name in _PACKAGES))


@contextmanager
def without_exit() -> Iterator[None]:
    """Turns `sys.exit`, which programs written by a model call, into an error. It would end the process."""
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(f"it called sys.exit({error.code!r})").with_traceback(error.__traceback__) from None


Answers = list[Any]  # one answer per row, `Failed` where there is none


def is_coroutine(function: Callable[..., Any]) -> bool:
    """Returns whether `function` is a coroutine function, or an object with an async `__call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def split_done(items: Iterable[Item], future: Callable[[Item], Future[Any]]) -> tuple[list[Item], list[Item]]:
    """Splits items into those whose future is done and those still pending. Checks each future once, as it may change."""
    done: list[Item] = []
    pending: list[Item] = []
    for item in items:
        (done if future(item).done() else pending).append(item)
    return done, pending


def join_futures(futures: Sequence[Future[Any]], result: Callable[[], Item]) -> Future[Item]:
    """Returns a future of `result()`, which is called when all `futures` are done; an error or a cancellation passes on."""
    whole: Future[Item] = Future()
    left, lock = len(futures), threading.Lock()

    def count(_: Future[Any]) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            finish()

    def finish() -> None:
        if any(future.cancelled() for future in futures):
            whole.cancel()
            return
        try:
            whole.set_result(result())
        except BaseException as error:  # passed on to the reader of the future
            whole.set_exception(error)

    for future in futures:
        future.add_done_callback(count)
    if not futures:
        finish()
    return whole
