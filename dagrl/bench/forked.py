"""Runs a function in a forked process, and tells why it failed."""

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from typing import Any

import torch


def run_forked(target: Callable[..., None], arguments: tuple[Any, ...], seconds: float | None = None) -> str:
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
    """Returns the error's class, message, and place in the code: the last one that is not torch's."""
    message = " ".join(str(error).split())[:300]
    places = traceback.extract_tb(error.__traceback__)
    files = [place.filename.rpartition("site-packages/")[2] for place in places]
    last = max((at for at, file in enumerate(files) if not file.startswith("torch/")), default=len(files) - 1)
    parts = files[last].rpartition("/dagrl/")
    return f"{type(error).__name__}: {message} ({''.join(parts[1:]).lstrip('/')}:{places[last].lineno})"


def _told(target: Callable[..., None], arguments: tuple[Any, ...], writer: Any, leads: bool) -> None:
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
