"""A process that ends while it imports the user's function: tried again, and then one error that says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from dagrl.errors import RunError
from dagrl.rl.functions.process import START_TRIES, FunctionProcess
from dagrl.runtime.deadline import Deadline

ENDS = """
import os
from pathlib import Path
starts = Path(__file__).with_name("starts")
starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
if len(starts.read_text()) <= {bad}:
    os._exit(3)
def reward(prompt, completion, reference):
    return 1.0
"""


def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: int) -> list[object]:
    (tmp_path / "ending_reward.py").write_text(ENDS.format(bad=bad))
    monkeypatch.syspath_prepend(str(tmp_path))
    deadline = Deadline(20.0, "reward.timeout_s")
    process = FunctionProcess("ending_reward:reward", "reward.function", False, deadline, deadline)
    try:
        return [process.ask([["p"], ["c"], ["r"]]) for _ in range(START_TRIES)]
    finally:
        process.close(final=True)


def test_one_that_ends_once_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *later = asked(tmp_path, monkeypatch, bad=1)
    assert first == "the process that runs it ended"
    assert not any(isinstance(answer, str) for answer in later)


def test_one_that_always_ends_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match=r"ending_reward:reward ended 3 times while it imported the function"):
        asked(tmp_path, monkeypatch, bad=99)
    assert (tmp_path / "starts").read_text() == "x" * START_TRIES
