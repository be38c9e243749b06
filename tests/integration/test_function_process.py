"""A process that ends while it imports the user's function: tried again, and then one error that says so."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dagrl.errors import RunError
from dagrl.machine import descendants_of
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


STARTS_OTHERS = """
import subprocess
def reward(prompt, completion, reference):
    own = dict(start_new_session=True)
    started = [subprocess.Popen(["sleep", "600"], **own), subprocess.Popen(["sh", "-c", "sleep 600 & wait"], **own)]
    open(completion, "w").write(" ".join(str(one.pid) for one in started))
    return 1.0
"""

DRIVER = """
import asyncio, sys
from dagrl.rl.functions.process import FunctionProcess
from dagrl.runtime.deadline import Deadline

async def run():
    deadline = Deadline(60.0, "reward.timeout_s")
    process = FunctionProcess("starting_reward:reward", "reward.function", False, deadline, deadline, "named")
    await process.ask([["p"], [sys.argv[1]], ["r"], [{}]])
    print(process._process.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(run())
"""


@pytest.mark.parametrize("stopped", [False, True], ids=["reaper runs", "reaper is stopped"])
def test_nothing_that_a_function_started_outlives_a_killed_driver(tmp_path: Path, stopped: bool) -> None:
    (tmp_path / "starting_reward.py").write_text(STARTS_OTHERS)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", DRIVER, str(tmp_path / "pids")]
    until = time.monotonic() + 20.0
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as driver:
        try:
            assert driver.stdout is not None
            reaper = int(driver.stdout.readline())
            started = list(map(int, (tmp_path / "pids").read_text().split()))
            while len(gone := [reaper, *descendants_of(reaper)]) < 5 and time.monotonic() < until:
                time.sleep(0.02)
            assert len(gone) == 5 and set(started) < set(gone), "it, the function's process, and those that it started"
            if stopped:
                os.kill(reaper, signal.SIGSTOP)
        finally:
            driver.kill()
    while (left := [pid for pid in gone if Path(f"/proc/{pid}").exists()]) and time.monotonic() < until:
        time.sleep(0.02)
    assert not left


def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: int) -> list[object]:
    (tmp_path / "ending_reward.py").write_text(ENDS.format(bad=bad))
    monkeypatch.syspath_prepend(str(tmp_path))
    deadline = Deadline(20.0, "reward.timeout_s")

    async def asked_again() -> list[object]:
        process = FunctionProcess("ending_reward:reward", "reward.function", False, deadline, deadline, "named")
        try:
            return [await process.ask([["p"], ["c"], ["r"], [{}]]) for _ in range(START_TRIES)]
        finally:
            await process.close()

    return asyncio.run(asked_again())


def test_a_process_that_ends_once_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *later = asked(tmp_path, monkeypatch, bad=1)
    assert first == "the process that runs it ended"
    assert not any(isinstance(answer, str) for answer in later)


def test_a_process_that_always_ends_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match=r"ending_reward:reward ended 3 times while it imported the function"):
        asked(tmp_path, monkeypatch, bad=99)
    assert (tmp_path / "starts").read_text() == "x" * START_TRIES
