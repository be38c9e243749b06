"""Runs a function in a forked process, and tells why it failed."""

import multiprocessing
import os
import re
import signal
import traceback
from collections.abc import Callable
from textwrap import shorten
from typing import Any

import torch


def run_forked(target: Callable[..., object], arguments: tuple[Any, ...], seconds: float | None = None) -> str:
    """Runs `target` in a forked process. Returns why it failed; empty after success.

    With a deadline it is the first of a group of processes, which all end with it.
    """
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_told, args=(target, arguments, writer, seconds is not None))
    process.start()
    writer.close()
    process.join(seconds)
    if process.is_alive() and process.pid:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
        return f"not done after {seconds:.0f} s"
    try:
        return str(reader.recv())
    except EOFError:
        return f"the process ended with {process.exitcode}"


def own_threads() -> None:
    """Gives a forked process the one thread that its parent has set, and a pool for it.

    Torch 2.11 remakes the pool on its next use, without a lock. That would be in autograd's threads, one for each visible
    GPU, and all but the first abort: "Invalid thread pool!".
    """
    torch.set_num_threads(1)


def reason_of(error: BaseException) -> str:
    """Returns the error's class, what its message begins with, and the place in the code: the last one that is not torch's.

    Without a message it is the code there. The place is that of the first cause, where a library's error led to ours.
    """
    first = error
    while first.__cause__ is not None and first.__cause__.__traceback__ is not None:
        first = first.__cause__
    places = [place for place in traceback.extract_tb(first.__traceback__) if not place.name.startswith("__getattr")]
    files = [place.filename.rpartition("site-packages/")[2] for place in places]
    last = max((at for at, file in enumerate(files) if not file.startswith("torch/")), default=len(files) - 1)
    parts = files[last].rpartition("/dagrl/")
    message = re.split(r"(?<=\.) (?=[A-Z])", " ".join(str(error).split()) or places[last].line or "")[0]
    return f"{type(error).__name__}: {shorten(message, 240)} ({''.join(parts[1:]).lstrip('/')}:{places[last].lineno})"


def _told(target: Callable[..., object], arguments: tuple[Any, ...], writer: Any, leads: bool) -> None:
    if leads:
        os.setpgrp()
    own_threads()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    reason = ""
    try:
        target(*arguments)
    except Exception as error:
        reason = reason_of(error)
    writer.send(reason)
    os._exit(0)  # without the exit handlers of the parent
