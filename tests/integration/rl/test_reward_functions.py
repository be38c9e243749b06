"""Functions of users in processes, under deadlines: what hangs, dies or leaves something behind fails alone."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from dagrl.config import EnvironmentConfig, RewardConfig
from dagrl.data.tokenization import Prompt
from dagrl.errors import RunError
from dagrl.rl.environments import FAILED, EnvironmentRunner, Question, Reply, Step
from dagrl.rl.functions.answers import Failed
from dagrl.rl.functions.process import START_TRIES, FunctionProcess
from dagrl.rl.functions.runner import FunctionRunner
from dagrl.rl.rewards import RewardRunner, Rewards, rewards_of
from dagrl.run.model import character_tokenizer
from dagrl.runtime.deadline import Deadline
from tests.integration.processes import alive, command_line, descendants, ends_within, running
from tests.unit.rl.conftest import rewarded

FUNCTIONS = "tests.integration.rl.reward_functions"


def run(name: str, completions: list[str], prompt: str = "p", **keys: Any) -> Rewards:
    with RewardRunner(RewardConfig(function=f"{FUNCTIONS}:{name}", max_failed_share=1.0, **keys)) as runner:
        return rewards_of(runner.submit([prompt] * len(completions), completions, ["r"] * len(completions)).result())


def test_a_sample_that_hangs_or_kills_the_process_fails_alone() -> None:
    rewards = run("picky", ["ab", "hang", "abc", "die"], timeout_s=1.0)
    assert (rewards.values.tolist(), rewards.failed) == ([2.0, 0.0, 3.0, 0.0], 2)


def test_samples_that_hang_fail_alone(tmp_path: Path) -> None:
    """The batch is asked once, then each sample once alone."""
    noted, completions = tmp_path / "calls", ["hang"] * 3 + ["abc"] * 12
    rewards = run("noted", completions, str(noted), timeout_s=0.7)
    assert rewards.values.tolist() == [0.0] * 3 + [3.0] * 12
    assert (rewards.failed, rewards.message.partition(" (")[0]) == (3, "no answer within reward.timeout_s = 0.7 s")
    assert noted.read_text().splitlines() == ["hang", *completions]


def test_fast_calls_share_a_message_and_hang_alone(tmp_path: Path) -> None:
    """Those that wait for the process are sent to it together; after a hang each is made again, with its own deadline."""
    noted = tmp_path / "calls"

    async def busy() -> None:
        time.sleep(0.1)  # noqa: ASYNC251  # so that all calls wait

    with RewardRunner(RewardConfig(function=f"{FUNCTIONS}:noted", max_failed_share=1.0, timeout_s=0.7)) as runner:
        for _ in range(2):  # the second is fast, as the process has started
            runner.submit([str(noted)], ["a"], ["r"]).result()
        runner._runners[0]._loop.spawn(busy())
        calls = [runner.submit([str(noted)], [text], ["r"]) for text in ("ab", "hang", "abc")]
        rewards = [rewards_of(call.result()) for call in calls]
    assert [reward.values.tolist() for reward in rewards] == [[2.0], [0.0], [3.0]]
    assert [reward.failed for reward in rewards] == [0, 1, 0]
    assert noted.read_text().split() == ["a", "a", "ab", "hang", "ab", "hang", "abc"]


def test_answers_are_pickled_by_value_and_invalid_ones_fail_alone() -> None:
    """`multiprocessing` would share torch tensors. Classes of answers may raise in pickling, unpickling and `float`."""
    said = {
        "rebuilt": "its answer cannot be unpickled: KeyError: 'not here'",
        "pickled": "its answer cannot be pickled: ",
        "number": "it returned a reward that is not a number: not a number after all",
    }
    with RewardRunner(RewardConfig(function=f"{FUNCTIONS}:odd", max_failed_share=1.0)) as runner:
        assert rewarded(runner, ["p"] * 2, ["shared", "a"], ["r"] * 2).values.tolist() == [2.0, 2.0]
        for bad, message in said.items():
            rewards = rewarded(runner, ["p"] * 3, ["a", bad, "c"], ["r"] * 3)
            assert (rewards.values.tolist(), rewards.failed) == ([2.0, 0.0, 2.0], 1)
            assert rewards.message.startswith(message)


def test_the_process_is_reused_and_ends_with_the_runner() -> None:
    with RewardRunner(RewardConfig(function=f"{FUNCTIONS}:pid")) as runner:
        first, second = (rewarded(runner, ["p"], ["c"], ["r"]).values[0] for _ in range(2))
        assert first == second != os.getpid()
        assert psutil.pid_exists(int(first))
    assert not psutil.pid_exists(int(first))


def test_leftover_tasks_end_with_their_call() -> None:
    with RewardRunner(RewardConfig(function=f"{FUNCTIONS}:leaves_tasks")) as runner:
        assert [rewarded(runner, ["p"], ["c"], ["r"]).values.tolist() for _ in range(3)] == [[0.0], [1.0], [1.0]]


def test_calls_run_in_the_background_in_several_processes(tmp_path: Path) -> None:
    """Neither of two calls ends before the other has started in another process."""
    (meeting := tmp_path / "meeting").mkdir()
    with RewardRunner(RewardConfig(function=f"{FUNCTIONS}:meet", num_workers=2, timeout_s=60.0)) as runner:
        futures = [runner.submit([str(meeting)] * 3, ["c"] * 3, ["r"] * 3) for _ in range(2)]
        assert [rewards_of(future.result()).values.tolist() for future in futures] == [[1.0] * 3] * 2


def test_the_deadline_of_single_samples_is_per_sample(tmp_path: Path) -> None:
    """Five samples together take longer than the deadline of one. None is retried, and only the hanging ones fail."""
    noted, completions = tmp_path / "calls", ["ab", *["hang"] * 2, *["ab"] * 2]
    rewards = run("steady", completions, str(noted), batched=False, timeout_s=1.0, num_workers=1)
    assert noted.read_text() == "".join(completions)
    assert rewards.values.tolist() == [2.0, 0.0, 0.0, 2.0, 2.0]
    assert (rewards.failed, rewards.message.partition(" (")[0]) == (2, "no answer within reward.timeout_s = 1 s")


def test_slow_samples_run_side_by_side_and_hanging_ones_are_logged_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has the line at which the function hangs."""
    monkeypatch.setattr("dagrl.rl.functions.runner.SLOW_S", 0.1)
    config = RewardConfig(function=f"{FUNCTIONS}:side_by_side", batched=False, timeout_s=20.0)
    with RewardRunner(config) as runner:
        rewards = rewards_of(runner.submit([str(tmp_path)] * 4, ["c"] * 4, ["r"] * 4).result())
    assert rewards.values.tolist() == [1.0] * 4 and len(set(tmp_path.iterdir())) == 4
    run("picky", ["hang"], timeout_s=3.0)
    (message,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert message.startswith("reward.function: 1 of 1 calls so far had no answer within reward.timeout_s = 3 s (")
    assert "reward_functions.py, line " in message


def test_an_import_that_fails_only_in_the_process_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = "import sys\nif 'functions/child' in sys.argv[0]: sys.exit('no sandbox')\ndef reward(*texts): return [1.0]\n"
    (tmp_path / "fails_there.py").write_text(fails)
    monkeypatch.syspath_prepend(str(tmp_path))
    with RewardRunner(RewardConfig(function="fails_there:reward")) as runner:
        with pytest.raises(RunError, match=r"SystemExit: no sandbox.*the process that runs it could not"):
            rewarded(runner, ["p"], ["c"], ["r"])


@pytest.mark.parametrize("waits", [True, False])
def test_processes_start_before_the_first_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    """They end with the runner, even if it is closed while they start."""
    module = f"known_by_pid_{waits}_{os.getpid()}"  # unique among concurrent runs of the tests
    known = "if 'functions/child' in sys.argv[0]:\n    open(f'{os.path.dirname(__file__)}/{os.getpid()}.pid', 'w').close()\n"
    (tmp_path / f"{module}.py").write_text(f"import os, sys\n{known}def reward(*texts): return [float(os.getpid())]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with RewardRunner(RewardConfig(function=f"{module}:reward", num_workers=2)) as runner:
        if waits:
            assert ends_within(60.0, lambda: len(list(tmp_path.glob("*.pid"))) < 2)
            (answered,) = rewarded(runner, ["p"], ["c"], ["r"]).values
            assert {path.stem for path in tmp_path.glob("*.pid")} > {str(int(answered))}
    assert not [process for process in running() if module in command_line(process.pid)]


@pytest.mark.parametrize("session", ["shared", "own"])
def test_child_processes_end_with_the_process(tmp_path: Path, session: str) -> None:
    config = RewardConfig(function=f"{FUNCTIONS}:sandboxed", timeout_s=1.0)
    with RewardRunner(config) as runner:
        (answer,) = runner.submit([str(tmp_path / "children")], [session], [""]).result(30.0)
    assert isinstance(answer, Failed) and answer.message.startswith("no answer within reward.timeout_s = 1 s (")
    (child,) = (tmp_path / "children").read_text().split()
    assert ends_within(10.0, lambda: alive(int(child))), "a busy machine takes a while to deliver the signal"


@pytest.mark.parametrize("function", ["pid", "pid_with_a_daemon"])
def test_a_stopped_process_does_not_block_the_call(function: str) -> None:
    config = RewardConfig(function=f"{FUNCTIONS}:{function}", timeout_s=0.5, max_failed_share=1.0)
    with RewardRunner(config) as runner:
        process = int(rewarded(runner, ["p"], ["c"], ["r"]).values[0])
        os.kill(process, signal.SIGSTOP)
        large = "x" * (4 << 20)  # more than a pipe holds
        assert runner.submit(["p"], [large], ["r"]).result(8.0) == [Failed("no answer within reward.timeout_s = 0.5 s")]
        assert rewarded(runner, ["p"], ["c"], ["r"]).failed == 0


def test_a_process_that_starts_during_close_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    starting, closing, popen = threading.Event(), threading.Event(), subprocess.Popen

    def held_back(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        starting.set()
        closing.wait(5.0)
        started.append(popen(*args, **options))
        return started[-1]

    monkeypatch.setattr("dagrl.rl.functions.process.subprocess.Popen", held_back)
    runner = RewardRunner(RewardConfig(function=f"{FUNCTIONS}:pid"))
    with runner:
        assert starting.wait(30.0)
        threading.Timer(0.5, closing.set).start()  # during close
    (process,) = started
    assert process.wait(30.0) in (-signal.SIGUSR1, 1), "before or after it has started another one, which it then ends"


def test_a_closed_runner_starts_no_process(tmp_path: Path) -> None:
    """Even if a call that was running at the time closes the process again."""
    config = RewardConfig(timeout_s=60.0)
    with FunctionRunner(f"{FUNCTIONS}:noted", "reward", config, float, arguments="named") as runner:
        running = runner.submit([str(tmp_path / "calls")], ["hang"], ["r"], [{}])
        while not (tmp_path / "calls").exists():
            time.sleep(0.01)
    ended = [Failed("the process that runs it ended")]
    assert running.result(30.0) == ended
    assert [runner.submit([str(tmp_path / "calls")], ["ab"], ["r"], [{}]).result() for _ in range(2)] == [ended] * 2
    assert (tmp_path / "calls").read_text() == "hang\n"


def test_a_failed_start_is_reported_by_the_first_call_and_not_repeated(tmp_path: Path, monkeypatch: Any) -> None:
    noted = "open(f'{os.path.dirname(__file__)}/{os.getpid()}.tried', 'w').close(); time.sleep(60)"
    slow = f"import os, sys, time\nif 'functions/child' in sys.argv[0]: {noted}\ndef reward(*texts): return [1.0]\n"
    (tmp_path / "slow_once.py").write_text(slow)
    monkeypatch.syspath_prepend(str(tmp_path))
    with RewardRunner(RewardConfig(function="slow_once:reward", start_timeout_s=3.0)) as runner:
        with pytest.raises(RunError, match=r"was not imported within reward\.start_timeout_s = 3 s"):
            rewarded(runner, ["p"], ["c"], ["r"])
    assert len(list(tmp_path.glob("*.tried"))) == 1


def test_a_failed_restart_fails_the_samples_that_waited_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the second import takes too long, as on a busy machine."""
    source = """
import os, sys, time
here = os.path.dirname(__file__)
if 'functions/child' in sys.argv[0]:
    open(f"{here}/{os.getpid()}.tried", "w").close()
    if len([name for name in os.listdir(here) if name.endswith(".tried")]) == 2:
        time.sleep(60)
def reward(prompts, completions, references):
    if "hang" in completions:
        time.sleep(60)
    return [1.0] * len(prompts)
"""
    (tmp_path / "slow_at_second.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = RewardConfig(function="slow_at_second:reward", timeout_s=1.0, start_timeout_s=3.0)
    with RewardRunner(config) as runner:
        hung, waited, asked = (rewards_of(runner.submit(["p"], [text], ["r"]).result()) for text in ("hang", "a", "b"))
    assert (hung.failed, hung.message.partition(" (")[0]) == (1, "no answer within reward.timeout_s = 1 s")
    assert waited.failed == 1 and "was not imported within reward.start_timeout_s = 3 s" in waited.message
    assert (asked.failed, asked.values.tolist()) == (0, [1.0])
    assert len(list(tmp_path.glob("*.tried"))) == 3


class Counts:
    """Counts turns, unless it is told to end its process or to hang."""

    def reset(self, example: Any) -> None:
        self.turns = 0

    def step(self, completion: str) -> Step:
        if completion == "die":
            os._exit(3)
        if completion == "hang":
            re.fullmatch(r"(a+)+b", "a" * 60)  # holds the GIL for hours
        self.turns += 1
        return Step(f"turn {self.turns}", reward=len(completion))


@pytest.mark.parametrize("end", ["die", "hang"])
def test_a_lost_process_fails_one_episode(end: str) -> None:
    config = EnvironmentConfig(function=f"{__name__}:Counts", timeout_s=1.0)
    prompt = Prompt("1", np.array([1]), "", "row 0")
    with EnvironmentRunner(config, character_tokenizer("0123456789")) as runner:

        def ask(*episodes: tuple[str, list[str]]) -> list[Reply]:
            return runner.submit(0, [Question(name, prompt, 7, turns) for name, turns in episodes]).result()

        ask(("a", ["x"]))
        bad, good = ask(("b", [end]), ("a", ["x", "xy"]))
        assert good == Reply("turn 2", reward=2.0), "both turns count, and the reward is that of the last"
        assert bad.reason == FAILED
        assert ask(("a", ["x", "xy", "z"])) == [Reply("turn 3", reward=1.0)]


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
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as driver:
        try:
            assert driver.stdout is not None
            reaper = int(driver.stdout.readline())
            started = list(map(int, (tmp_path / "pids").read_text().split()))
            ends_within(20.0, lambda: len(descendants(reaper)) < 5)
            gone = [process.pid for process in descendants(reaper)]
            assert len(gone) == 5 and set(started) < set(gone), "it, the function's process, and those that it started"
            if stopped:
                os.kill(reaper, signal.SIGSTOP)
        finally:
            driver.kill()
    assert ends_within(20.0, lambda: any(map(psutil.pid_exists, gone)))


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
