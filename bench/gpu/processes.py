"""Ends processes that a command leaves behind. Ray gives its workers their own process groups, but not sessions."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

POLL_S = 0.1


def session_of(leader: int) -> list[int]:
    """Returns the live processes of the session that `leader` opened, even if it has ended (`/proc/<pid>/stat`, proc(5))."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
        state, _parent, _group, session = text.rpartition(")")[2].split()[:4]
        if int(session) == leader and state != "Z":
            found.append(int(path.parent.name))
    return found


def end_session(leader: int, grace_s: float, kill_s: float) -> list[int]:
    """Waits `grace_s` for a session's processes to end, then kills them. Returns those still alive after `kill_s`."""
    left = _wait(leader, grace_s)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return _wait(leader, kill_s) if left else []


def _wait(leader: int, seconds: float) -> list[int]:
    deadline = time.monotonic() + seconds
    while (left := session_of(leader)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return left
