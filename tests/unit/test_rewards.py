"""Reward functions run under a deadline, and one bad sample costs itself alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dagrl.config import RewardConfig, RewardShapingConfig
from dagrl.deadline import Deadline
from dagrl.errors import ConfigError, RunError
from dagrl.function_runner import Failed, _FunctionProcess, is_coroutine
from dagrl.rewards import (
    RewardRunner,
    Rewards,
    check_failures,
    exact_match,
    join_rewards,
    math_answer,
    overlong_penalty,
    rewards_of,
    shuffled,
)
from tests.gsm8k import GSM8K, needs_gsm8k

FUNCTIONS = """
import json
import multiprocessing.reduction
import os
import re
import time

def length(prompts, completions, references):
    return [float(len(completion)) for completion in completions]

def picky(prompts, completions, references):
    for completion in completions:
        if completion == "raise":
            raise ValueError("no such answer")
        if completion == "hang":
            re.fullmatch(r"(a+)+b", "a" * 60)  # holds the interpreter's lock for ages
        if completion == "die":
            os._exit(3)
    return length(prompts, completions, references)

def pid(prompts, completions, references):
    return [float(os.getpid())] * len(prompts)

def pid_beside_a_daemon(prompts, completions, references):
    # which nobody can tell to be of this process, and which holds the connection
    if child := os.fork():
        os.waitpid(child, 0)
        return pid(prompts, completions, references)
    os.setsid()
    if not os.fork():
        time.sleep(10.0)
    os._exit(0)

def short(prompts, completions, references):
    return [1.0]

under_way = 0

async def together(prompt, completion, reference):
    import asyncio
    global under_way
    under_way += 1
    while under_way < int(prompt):
        await asyncio.sleep(0.01)
    if completion == "raise":
        raise ValueError("no such answer")
    return float(len(completion))

async def stuck(prompt, completion, reference):
    import asyncio
    with open(prompt, "a") as file:
        file.write(completion + "\\n")
    await asyncio.sleep(3600 if completion == "hang" else 0)
    return float(len(completion))

def noted(prompts, completions, references):
    with open(prompts[0], "a") as file:
        file.write(completions[0] + "\\n")
    return picky(prompts, completions, references)

async def slowly_batched(prompts, completions, references):
    import asyncio
    await asyncio.sleep(0.01)
    return [float(len(completion)) for completion in completions]

import asyncio

at_once = asyncio.Semaphore(1)  # bound to the loop of the first call that waits for it
left_behind = []

async def one_at_a_time(prompt, completion, reference):
    async with at_once:
        await asyncio.sleep(0.001)
    return float(len(completion))

async def one_at_a_time_batched(prompts, completions, references):
    assert len(prompts) > 1
    return await asyncio.gather(*map(one_at_a_time, prompts, completions, references))

def with_a_loop_of_its_own(prompt, completion, reference):
    return asyncio.run(together("0", completion, reference))

async def leaves_tasks(prompts, completions, references):
    ended = [float(task.cancelled()) for task in left_behind] or [0.0]
    left_behind.append(asyncio.create_task(asyncio.sleep(3600)))
    return ended[-1:]

def steady(prompt, completion, reference):
    with open(prompt, "a") as file:
        file.write(completion)
    time.sleep(0.25)
    if completion == "hang":
        time.sleep(3600)
    return float(len(completion))

def beside(prompts, completions, references):
    with open(os.path.join(prompts[0], str(os.getpid())), "w"):
        pass
    while len(os.listdir(prompts[0])) < 2:
        time.sleep(0.01)
    return [1.0] * len(prompts)

def sandboxed(prompts, completions, references):
    import subprocess
    child = subprocess.Popen(["sleep", "600"], start_new_session=completions[0] == "apart")
    with open(prompts[0], "a") as file:
        file.write(f"{child.pid}\\n")
    child.wait()

class Odd:
    def __init__(self, fails):
        self.fails = fails
    def __float__(self):
        if self.fails:
            raise RuntimeError("not a number after all")
        return 2.0

class OneWay(Odd):
    def __reduce__(self):
        return cannot_be_rebuilt, (1,)

def cannot_be_rebuilt(value):
    raise KeyError("not here")

class Shared(Odd):
    pass

multiprocessing.reduction.ForkingPickler.register(Shared, lambda value: (cannot_be_rebuilt, (1,)))

def shared(prompts, completions, references):
    return [Shared(False) for _ in completions]

def odd(prompts, completions, references):
    kinds = {"rebuilt": lambda: OneWay(False), "pickled": lambda: (lambda: 1.0), "number": lambda: Odd(True)}
    return [kinds.get(completion, lambda: Odd(False))() for completion in completions]

def undefined(prompts, completions, references):
    return [float(completion) if completion != "a" else 1.0 for completion in completions]
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"rewards_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def run(function: str, completions: list[str], timeout_s: float = 5.0) -> tuple[list[float], int, str]:
    config = RewardConfig(function=function, timeout_s=timeout_s, call_timeout_s=600.0, max_failed_share=1.0)
    with RewardRunner(config) as runner:
        rewards = runner(["p"] * len(completions), completions, ["r"] * len(completions))
    return rewards.values.tolist(), rewards.failed, rewards.message


def test_exact_match() -> None:
    assert exact_match(["1+1="] * 3, ["2", " 2\n", "22"], ["2", "2", "2"]) == [1.0, 1.0, 0.0]


def test_rewards_of_a_list(functions: str) -> None:
    assert run(f"{functions}:length", ["a", "", "abc"]) == ([1.0, 0.0, 3.0], 0, "")


def test_sample_that_raises_costs_itself(functions: str, caplog: pytest.LogCaptureFixture) -> None:
    values, failed, message = run(f"{functions}:picky", ["ab", "raise", "abc"])
    assert (values, failed) == ([2.0, 0.0, 3.0], 1)
    assert "samples together" not in caplog.text, "it is counted"
    assert message == "ValueError: no such answer"


def test_sample_that_hangs_or_ends_the_process_costs_itself(functions: str) -> None:
    values, failed, _ = run(f"{functions}:picky", ["ab", "hang", "abc", "die"], timeout_s=1.0)
    assert (values, failed) == ([2.0, 0.0, 3.0, 0.0], 2)


@pytest.mark.parametrize("hangs, good", [(4, 12), (5, 0)], ids=["good ones after them", "nothing else"])
def test_many_hangs_end(functions: str, tmp_path: Path, hangs: int, good: int) -> None:
    """And cost themselves alone: all together are asked once, then each alone once, as far as the call has time."""
    noted, completions = tmp_path / "calls", ["hang"] * hangs + ["abc"] * good
    with RewardRunner(RewardConfig(function=f"{functions}:noted", timeout_s=0.7, call_timeout_s=600.0)) as runner:
        rewards = rewards_of(runner.submit([str(noted)] * len(completions), completions, ["r"] * len(completions)).result())
    assert rewards.values.tolist() == [0.0] * hangs + [3.0] * good
    assert (rewards.failed, rewards.message) == (hangs, "no answer within reward.timeout_s = 0.7 s")
    assert noted.read_text().splitlines() == ["hang", *completions]


def test_a_batch_that_hangs_in_every_call_costs_the_calls_time_and_is_counted(functions: str, tmp_path: Path) -> None:
    """Thirty processes do not start within a second: some samples are not asked a second time, and fail as the others do."""
    noted = tmp_path / "calls"
    ends = r"failed for all 30 samples: (no answer within what|its turn .* did not come within) reward\.call_timeout_s"
    config = RewardConfig(function=f"{functions}:noted", timeout_s=0.5, call_timeout_s=1.0)
    with RewardRunner(config) as runner:
        rewards = rewards_of(runner.submit([str(noted)] * 30, ["hang"] * 30, ["r"] * 30).result())
        with pytest.raises(RunError, match=ends):
            runner.check(rewards)
    assert (rewards.failed, rewards.values.tolist()) == (30, [0.0] * 30)
    assert 1 <= len(noted.read_text().splitlines()) <= 30


START_S = 2.0


class TimedProcess:
    """In place of a process: each row takes as many seconds as its completion says, on a clock of its own."""

    now = 0.0

    def __init__(self, path: str, key: str, batched: bool, deadline: Deadline, start: Deadline) -> None:
        self._deadline, self._alive = deadline, False

    def start(self) -> None:
        TimedProcess.now += 0.0 if self._alive else START_S
        self._alive = True

    def ask(self, columns: list[list[str]], limit: Deadline | None = None) -> list[float] | str:
        self.start()
        taken, deadline = sum(map(float, columns[1])), limit or self._deadline
        TimedProcess.now += min(taken, deadline.seconds)
        self._alive = taken <= deadline.seconds
        return [1.0] * len(columns[1]) if self._alive else deadline.missed

    def close(self, *, for_good: bool) -> None: ...


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> type[TimedProcess]:
    monkeypatch.setattr(TimedProcess, "now", 0.0)
    monkeypatch.setattr("dagrl.function_runner._FunctionProcess", TimedProcess)
    monkeypatch.setattr("dagrl.function_runner.time", SimpleNamespace(monotonic=lambda: TimedProcess.now))
    return TimedProcess


@pytest.mark.parametrize(
    ("completions", "call_s", "rewarded"),
    [
        (["inf"] * 8, None, [0.0] * 8),
        (["inf"] * 100, None, [0.0] * 100),
        (["inf"] * 100, 200.0, [0.0] * 100),
        (["inf"] * 7 + ["0.5"], None, [0.0] * 7 + [1.0]),  # who hangs has a share of the 30 s that are left, no more
        (["0.5"] + ["inf"] * 7, None, [1.0] + [0.0] * 7),
        (["0.5"] * 63 + ["inf"], None, [1.0] * 56 + [0.0] * 8),  # shares of a second at least, though all have 28 s
        (["2"] * 8, None, [1.0] * 8),  # 16 s together
    ],
)
def test_a_call_takes_no_longer_than_its_whole_time(
    timed: type[TimedProcess], functions: str, completions: list[str], call_s: float | None, rewarded: list[float]
) -> None:
    config = RewardConfig(function=f"{functions}:length", timeout_s=10.0, call_timeout_s=call_s)
    with RewardRunner(config) as runner:
        found = rewards_of(runner.submit([""] * len(completions), completions, [""] * len(completions)).result())
    assert found.values.tolist() == rewarded
    assert timed.now <= START_S + (call_s or 4 * 10.0) + START_S


@pytest.mark.parametrize(("call_s", "takes_s"), [(None, 6 * (START_S + 10.0)), (30.0, 30.0 + START_S)])
def test_single_samples_have_a_bound_together_only_if_it_is_given(
    timed: type[TimedProcess], functions: str, call_s: float | None, takes_s: float
) -> None:
    config = RewardConfig(function=f"{functions}:steady", batched=False, timeout_s=10.0, call_timeout_s=call_s)
    with RewardRunner(config) as runner:
        found = rewards_of(runner.submit([""] * 6, ["inf"] * 6, [""] * 6).result())
    assert found.failed == 6
    assert takes_s - START_S <= timed.now <= takes_s + START_S


def test_wrong_results(functions: str) -> None:
    with pytest.raises(RunError, match=r"failed for all 2 samples: ValueError: no such answer"):
        run(f"{functions}:picky", ["raise", "raise"])
    said = "it returned a reward that is not finite, or too large for float32"
    for bad in ("nan", "-inf", "1e39"):
        assert run(f"{functions}:undefined", [bad, "a"]) == ([0.0, 1.0], 1, said)
    assert run(f"{functions}:short", ["a", "b"])[:2] == ([1.0, 1.0], 0)  # right for one sample at a time


def test_a_batch_that_fails_while_its_samples_do_not_is_told_once(functions: str, caplog: pytest.LogCaptureFixture) -> None:
    with RewardRunner(RewardConfig(function=f"{functions}:short")) as runner:
        for rows in (2, 2, 3, 1):
            assert runner(["p"] * rows, ["a"] * rows, ["r"] * rows).values.tolist() == [1.0] * rows
    assert [record.getMessage() for record in caplog.records] == [
        "reward.function fails for samples together and answers each of them alone, which takes longer: "
        f"it returned 1 answers; expected: a list of {rows} (said once)"
        for rows in (2, 3)
    ]


def test_answers_travel_by_value_and_those_that_cannot_cost_themselves(functions: str) -> None:
    """As torch's tensors do, which `multiprocessing` would share; whatever their classes raise on the way to a number."""
    assert run(f"{functions}:shared", ["a", "b"]) == ([2.0, 2.0], 0, "")
    said = {
        "rebuilt": "its answer cannot be unpickled: KeyError: 'not here'",
        "pickled": "its answer cannot be pickled: ",
        "number": "it returned a reward that is no number: not a number after all",
    }
    with RewardRunner(RewardConfig(function=f"{functions}:odd", max_failed_share=1.0)) as runner:
        for bad, message in said.items():
            rewards = runner(["p"] * 3, ["a", bad, "c"], ["r"] * 3)
            assert (rewards.values.tolist(), rewards.failed) == ([2.0, 0.0, 2.0], 1)
            assert rewards.message.startswith(message)


def test_process_lives_from_call_to_call_and_ends(functions: str) -> None:
    with RewardRunner(RewardConfig(function=f"{functions}:pid")) as runner:
        first, second = (runner(["p"], ["c"], ["r"]).values[0] for _ in range(2))
        assert first == second != os.getpid()
        assert Path(f"/proc/{int(first)}").exists()
    assert not Path(f"/proc/{int(first)}").exists()


def test_unknown_function() -> None:
    with pytest.raises(ConfigError, match=r"reward\.function: .*has no 'exact_mach'; did you mean 'exact_match'"):
        RewardRunner(RewardConfig(function="dagrl.rewards:exact_mach"))


def test_shuffled_deals_out_the_same_rewards() -> None:
    rewards = np.arange(64, dtype=np.float32)
    dealt = shuffled(rewards, 0, 1)
    assert sorted(dealt.tolist()) == rewards.tolist()
    assert dealt.tolist() != rewards.tolist()
    assert shuffled(rewards, 0, 1).tolist() == dealt.tolist() != shuffled(rewards, 0, 2).tolist()


def test_coroutines_of_single_samples_run_side_by_side_and_fail_alone(functions: str) -> None:
    """None of the twenty ends before all are under way."""
    with RewardRunner(RewardConfig(function=f"{functions}:together", batched=False, timeout_s=60.0)) as runner:
        rewards = runner(["20"] * 20, ["raise", *["ab"] * 19], ["r"] * 20)
    assert rewards.values.tolist() == [0.0, *[2.0] * 19]
    assert (rewards.failed, rewards.message) == (1, "ValueError: no such answer")


def test_a_batched_coroutine(functions: str) -> None:
    assert run(f"{functions}:slowly_batched", ["a", "abc"]) == ([1.0, 3.0], 0, "")


@pytest.mark.parametrize(("function", "batched"), [("one_at_a_time", False), ("one_at_a_time_batched", True)])
def test_what_coroutines_keep_lives_from_call_to_call(functions: str, function: str, batched: bool) -> None:
    """As a judge's HTTP client does, it belongs to the event loop."""
    with RewardRunner(RewardConfig(function=f"{functions}:{function}", batched=batched)) as runner:
        for _ in range(3):
            assert runner(["p"] * 3, ["a", "", "abc"], ["r"] * 3).values.tolist() == [1.0, 0.0, 3.0]


def test_a_function_of_single_samples_may_run_a_loop_of_its_own(functions: str) -> None:
    with RewardRunner(RewardConfig(function=f"{functions}:with_a_loop_of_its_own", batched=False)) as runner:
        assert runner(["p"] * 2, ["a", "abc"], ["r"] * 2).values.tolist() == [1.0, 3.0]


def test_tasks_that_a_coroutine_leaves_behind_end_with_its_call(functions: str) -> None:
    with RewardRunner(RewardConfig(function=f"{functions}:leaves_tasks")) as runner:
        assert [runner(["p"], ["c"], ["r"]).values.tolist() for _ in range(3)] == [[0.0], [1.0], [1.0]]


def test_calls_run_beside_the_caller_in_several_processes(functions: str, tmp_path: Path) -> None:
    """Neither of two calls ends before the other has begun, in another process."""
    (meeting := tmp_path / "meeting").mkdir()
    with RewardRunner(RewardConfig(function=f"{functions}:beside", num_workers=2, timeout_s=60.0)) as runner:
        futures = [runner.submit([str(meeting)] * 3, ["c"] * 3, ["r"] * 3) for _ in range(2)]
        assert [rewards_of(future.result()).values.tolist() for future in futures] == [[1.0] * 3] * 2


def test_a_coroutine_that_hangs_costs_itself_and_no_second_call(functions: str, tmp_path: Path) -> None:
    noted = tmp_path / "calls"
    with RewardRunner(RewardConfig(function=f"{functions}:stuck", batched=False, timeout_s=1.0)) as runner:
        rewards = runner([str(noted)] * 20, ["hang", *["ab"] * 19], ["r"] * 20)
    assert noted.read_text().splitlines() == ["hang", *["ab"] * 19], "each is asked once"
    assert rewards.values.tolist() == [0.0, *[2.0] * 19]
    assert (rewards.failed, rewards.message) == (1, "no answer within reward.timeout_s = 1 s")


def test_a_function_of_single_samples_has_the_deadline_for_each(functions: str, tmp_path: Path) -> None:
    """Five samples take longer together than one may; none is asked twice, and those that hang cost themselves."""
    noted, completions = tmp_path / "calls", ["ab", *["hang"] * 2, *["ab"] * 2]
    with RewardRunner(RewardConfig(function=f"{functions}:steady", batched=False, timeout_s=1.0)) as runner:
        rewards = runner([str(noted)] * 5, completions, ["r"] * 5)
    assert noted.read_text() == "".join(completions)
    assert rewards.values.tolist() == [2.0, 0.0, 0.0, 2.0, 2.0]
    assert (rewards.failed, rewards.message) == (2, "no answer within reward.timeout_s = 1 s")


def test_a_function_whose_module_takes_too_long_to_import_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = "import sys, time\nif 'function_process' in sys.argv[0]: time.sleep(60)\ndef reward(*texts): return [1.0]\n"
    (tmp_path / "slow_to_import.py").write_text(slow)
    monkeypatch.syspath_prepend(str(tmp_path))
    with RewardRunner(RewardConfig(function="slow_to_import:reward", start_timeout_s=0.3)) as runner:
        with pytest.raises(RunError, match=r"was not imported within reward\.start_timeout_s = 0\.3 s; raise it"):
            runner(["p"], ["c"], ["r"])


def test_a_function_that_only_its_process_cannot_import_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = "import sys\nif 'function_process' in sys.argv[0]: sys.exit('no sandbox')\ndef reward(*texts): return [1.0]\n"
    (tmp_path / "fails_there.py").write_text(fails)
    monkeypatch.syspath_prepend(str(tmp_path))
    with RewardRunner(RewardConfig(function="fails_there:reward")) as runner:
        with pytest.raises(RunError, match=r"SystemExit: no sandbox.*the process that is to run it could not"):
            runner(["p"], ["c"], ["r"])


@pytest.mark.parametrize("waits", [True, False])
def test_processes_start_before_the_first_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    """And end with the runner, also one that is closed while they start."""
    module = f"known_by_pid_{waits}_{os.getpid()}"  # not that of another run of the tests beside this one
    known = (
        "if 'function_process' in sys.argv[0]:\n    open(f'{os.path.dirname(__file__)}/{os.getpid()}.pid', 'w').close()\n"
    )
    (tmp_path / f"{module}.py").write_text(f"import os, sys\n{known}def reward(*texts): return [float(os.getpid())]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with RewardRunner(RewardConfig(function=f"{module}:reward", num_workers=2)) as runner:
        deadline = time.monotonic() + 60
        while waits and len(list(tmp_path.glob("*.pid"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        if waits:
            (answered,) = runner(["p"], ["c"], ["r"]).values
            assert {path.stem for path in tmp_path.glob("*.pid")} > {str(int(answered))}
    assert not [path for path in Path("/proc").glob("[0-9]*") if module in _command(path)]


@pytest.mark.parametrize("session", ["its own", "apart"])
def test_what_a_function_started_ends_with_its_process(functions: str, tmp_path: Path, session: str) -> None:
    config = RewardConfig(function=f"{functions}:sandboxed", timeout_s=1.0)
    with RewardRunner(config) as runner:
        (answer,) = runner.submit([str(tmp_path / "children")], [session], [""]).result(30.0)
    assert answer == Failed("no answer within reward.timeout_s = 1 s")
    (child,) = (tmp_path / "children").read_text().split()
    assert not Path(f"/proc/{child}").exists() or "\nState:\tZ" in Path(f"/proc/{child}/status").read_text()


@pytest.mark.parametrize("function", ["pid", "pid_beside_a_daemon"])
def test_a_process_that_does_not_read_ends_the_call(functions: str, function: str) -> None:
    config = RewardConfig(function=f"{functions}:{function}", timeout_s=0.5, max_failed_share=1.0)
    with RewardRunner(config) as runner:
        process = int(runner(["p"], ["c"], ["r"]).values[0])
        os.kill(process, signal.SIGSTOP)
        large = "x" * (4 << 20)  # more than a pipe holds
        assert runner.submit(["p"], [large], ["r"]).result(8.0) == [Failed("the process that runs it ended")]
        assert runner(["p"], ["c"], ["r"]).failed == 0


def test_a_deadline_that_passes_as_the_answer_comes_costs_no_later_call(
    functions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class LateTimer(threading.Timer):
        """Its function has begun when it is cancelled, and acts a moment later."""

        def run(self) -> None:
            self.finished.wait()
            time.sleep(0.1)
            self.function()

    monkeypatch.setattr("dagrl.function_runner.threading.Timer", LateTimer)
    with RewardRunner(RewardConfig(function=f"{functions}:steady", batched=False)) as runner:
        for _ in range(2):
            assert runner.submit([os.devnull], ["abc"], ["r"]).result() == [3.0]


def test_a_process_that_starts_while_the_runner_closes_ends_too(functions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    starting, closing, popen = threading.Event(), threading.Event(), subprocess.Popen

    def held_back(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        starting.set()
        closing.wait(5.0)
        started.append(popen(*args, **options))
        return started[-1]

    monkeypatch.setattr("dagrl.function_runner.subprocess.Popen", held_back)
    runner = RewardRunner(RewardConfig(function=f"{functions}:pid"))
    with runner:
        assert starting.wait(30.0)
        threading.Timer(0.5, closing.set).start()  # by then the runner is closing
    assert [process.wait(30.0) for process in started] == [-signal.SIGKILL]


def test_a_process_that_is_closed_for_good_stays_so_when_a_call_that_was_under_way_closes_it_again() -> None:
    process = _FunctionProcess("dagrl.rewards:exact_match", "reward", True, Deadline(5.0, "a"), Deadline(5.0, "b"))
    process.close(for_good=True)
    process.close()
    assert process.ask([["p"], ["c"], ["r"]]) == "the process that runs it ended"


def test_an_object_that_is_awaited_is_a_coroutine_function() -> None:
    class Judge:
        async def __call__(self, prompt: str) -> float:
            return 0.0

    assert is_coroutine(Judge()) and is_coroutine(Judge().__call__) and not is_coroutine(exact_match)


def test_a_start_that_fails_is_told_by_the_first_call_and_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = "open(f'{os.path.dirname(__file__)}/{os.getpid()}.tried', 'w').close(); time.sleep(60)"
    slow = f"import os, sys, time\nif 'function_process' in sys.argv[0]: {noted}\ndef reward(*texts): return [1.0]\n"
    (tmp_path / "slow_once.py").write_text(slow)
    monkeypatch.syspath_prepend(str(tmp_path))
    with RewardRunner(RewardConfig(function="slow_once:reward", start_timeout_s=3.0)) as runner:
        with pytest.raises(RunError, match=r"was not imported within reward\.start_timeout_s = 3 s"):
            runner(["p"], ["c"], ["r"])
    assert len(list(tmp_path.glob("*.tried"))) == 1


def test_a_process_that_cannot_be_started_again_costs_the_samples_that_waited_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second import takes too long, as on a machine that is busy; the third does not."""
    source = """
import os, sys, time
here = os.path.dirname(__file__)
if "function_process" in sys.argv[0]:
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
    config = RewardConfig(function="slow_at_second:reward", timeout_s=1.0, start_timeout_s=5.0)
    with RewardRunner(config) as runner:
        hung, waited, asked = (rewards_of(runner.submit(["p"], [text], ["r"]).result()) for text in ("hang", "a", "b"))
    assert (hung.failed, hung.message) == (1, "no answer within reward.timeout_s = 1 s")
    assert waited.failed == 1 and "was not imported within reward.start_timeout_s = 5 s" in waited.message
    assert (asked.failed, asked.values.tolist()) == (0, [1.0])
    assert len(list(tmp_path.glob("*.tried"))) == 3


def _command(process: Path) -> str:
    try:
        return (process / "cmdline").read_text()
    except OSError:  # it has ended meanwhile
        return ""


def test_a_single_sample_is_asked_once(functions: str, tmp_path: Path) -> None:
    noted = tmp_path / "calls"
    with RewardRunner(RewardConfig(function=f"{functions}:noted", max_failed_share=1.0)) as runner:
        assert rewards_of(runner.submit([str(noted)], ["raise"], ["r"]).result()).message == "ValueError: no such answer"
    assert noted.read_text() == "raise\n"


def test_more_failures_than_tolerated_end_the_run() -> None:
    failing = Rewards(np.zeros(8, np.float32), np.arange(8) >= 3, "ValueError: why")
    joined = join_rewards([Rewards(np.ones(8, np.float32), np.ones(8, np.bool_)), failing])
    assert (joined.failed, len(joined.values), joined.message) == (3, 16, "ValueError: why")
    check_failures("reward", 3, 16, joined.message, 0.2)
    with pytest.raises(RunError, match=r"3 of 16 samples, .* than reward\.max_failed_share = 0\.1: ValueError: why"):
        check_failures("reward", 3, 16, joined.message, 0.1)
    with pytest.raises(RunError, match=r"environment.function failed for all 2 samples: why"):
        check_failures("environment", 2, 2, "why", 1.0)


@pytest.mark.parametrize("total", [1, 2])
def test_where_all_samples_may_fail_the_share_alone_counts(total: int, caplog: pytest.LogCaptureFixture) -> None:
    check_failures("reward", total, total, "why", 1.0, may_all_fail=True)
    assert f"reward.function failed for {total} of {total} samples: why" in caplog.text
    with pytest.raises(RunError, match=rf"{total} of {total} samples, a larger share than reward\.max_failed_share = 0\.9"):
        check_failures("reward", total, total, "why", 0.9, may_all_fail=True)


def test_failures_of_a_call_are_held_against_the_tolerated_share(functions: str) -> None:
    with RewardRunner(RewardConfig(function=f"{functions}:picky", max_failed_share=0.4)) as runner:
        assert runner(["p"] * 3, ["raise", "a", "b"], ["r"] * 3).failed == 1
        with pytest.raises(RunError, match=r"2 of 3 samples, a larger share than reward\.max_failed_share = 0\.4"):
            runner(["p"] * 3, ["raise", "a", "raise"], ["r"] * 3)


def test_overlong_penalty_is_dapos_equation_13() -> None:
    """With a maximum of 20480 tokens and a cache of 4096: 0 up to 16384, -0.5 half-way, -1 from the end on."""
    config = RewardShapingConfig(enabled=True, max_response_length=20480, overlong_buffer_length=4096)
    found = overlong_penalty([0, 16384, 16385, 18432, 20480, 30000], config, max_new_tokens=1)
    assert found.tolist() == [0.0, 0.0, -1 / 4096, -0.5, -1.0, -1.0]


def test_math_answers() -> None:
    pytest.importorskip("math_verify")
    gsm8k = "She sold 48/2 = <<48/2=24>>24 clips in May.\n48+24 = 72 altogether.\n#### 72"
    rows = [
        (r"So the answer is \boxed{72}.", gsm8k, 1.0),
        ("48 + 24 = 72", gsm8k, 1.0),
        ("That makes 71.", gsm8k, 0.0),
        ("no idea", gsm8k, 0.0),
        (r"\boxed{\frac{2}{4}}", r"\frac{1}{2}", 1.0),
        ("0.5", r"\frac{1}{2}", 1.0),
        ("1000 dollars", "#### 1,000", 1.0),
    ]
    completions, references, expected = (list(column) for column in zip(*rows, strict=True))
    assert math_answer(["q"] * len(rows), completions, references) == expected


@needs_gsm8k
def test_math_answers_of_gsm8k() -> None:
    """Every twentieth problem: its own answer in three wordings is right, a neighbouring number is not."""
    pytest.importorskip("math_verify")
    lines = (GSM8K / "test.jsonl").read_text().splitlines()[::20]
    references = [json.loads(line)["answer"] for line in lines]
    answers = [reference.rpartition("####")[2].strip() for reference in references]
    wordings: dict[str, float] = {"\\boxed{{{}}}": 1.0, "So the answer is {}.": 1.0, "It takes 3 steps. #### {}": 1.0}
    for wording, expected in wordings.items():
        found = math_answer(["q"] * len(lines), [wording.format(answer) for answer in answers], references)
        assert found == [expected] * len(lines), wording
    wrong = [str(int(answer.replace(",", "")) + 1) for answer in answers]
    assert not any(math_answer(["q"] * len(lines), [f"\\boxed{{{answer}}}" for answer in wrong], references))
