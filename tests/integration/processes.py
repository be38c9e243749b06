"""Processes of this machine, as tests look for them."""

import os
import time
from collections.abc import Callable
from contextlib import suppress

import psutil


def alive(process: psutil.Process | int) -> bool:
    """Whether a process runs, and is not a zombie."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(process) if isinstance(process, int) else process
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def running() -> set[psutil.Process]:
    return {process for process in psutil.process_iter() if alive(process)}


def descendants(pid: int) -> list[psutil.Process]:
    """Returns the process and what it has started, with all that these have."""
    try:
        return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def command_line(pid: int) -> str:
    """Returns the command line of a process; empty if it has ended."""
    with suppress(psutil.Error):
        return " ".join(psutil.Process(pid).cmdline())
    return ""


def processor_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def of_session(leader: int) -> set[psutil.Process]:
    """Returns the processes of the session that `leader` began."""

    def belongs(pid: int) -> bool:
        with suppress(OSError):  # it has ended
            return os.getsid(pid) == leader
        return False

    return {process for process in running() if belongs(process.pid)}


def ends_within(seconds: float, condition: Callable[[], object]) -> bool:
    """Waits until a condition, such as that something is left, no longer holds. Returns whether that came in time."""
    until = time.monotonic() + seconds
    while condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True
