"""Signals, and the children of a process that handles them."""

from __future__ import annotations

import os
import signal

from dagrl.run.stop import stop_on_signals


def test_a_forked_child_ignores_the_signal() -> None:
    """Ctrl-C signals all processes in the foreground; a child must not print a traceback."""
    with stop_on_signals() as stop, stop.at_once():
        child = os.fork()
        if not child:
            try:
                signal.raise_signal(signal.SIGINT)
                os._exit(stop.requested)
            except BaseException:
                os._exit(2)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
