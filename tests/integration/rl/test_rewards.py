"""Reward functions run under deadlines, and a bad sample costs only itself."""

from __future__ import annotations

import json
import os
import re
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
from dagrl.errors import ConfigError, RunError
from dagrl.rl.functions.answers import Failed, is_coroutine, raised
from dagrl.rl.functions.runner import FunctionRunner
from dagrl.rl.rewards import (
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
from dagrl.runtime.deadline import Deadline
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
            re.fullmatch(r"(a+)+b", "a" * 60)  # holds the GIL for hours
        if completion == "die":
            os._exit(3)
    return length(prompts, completions, references)

def one_by_one(prompts, completions, references):
    for completion in completions:
        yield from picky([""], [completion], [""])

def pid(prompts, completions, references):
    return [float(os.getpid())] * len(prompts)

def pid_with_a_daemon(prompts, completions, references):
    # The daemon cannot be traced to this process, and holds the connection.
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

at_once = asyncio.Semaphore(1)  # bound to the event loop of the first call that waits
left_behind = []

async def one_at_a_time(prompt, completion, reference):
    async with at_once:
        await asyncio.sleep(0.001)
    return float(len(completion))

async def one_at_a_time_batched(prompts, completions, references):
    assert len(prompts) > 1
    return await asyncio.gather(*map(one_at_a_time, prompts, completions, references))

def with_its_own_loop(prompt, completion, reference):
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

def meet(prompts, completions, references):
    with open(os.path.join(prompts[0], str(os.getpid())), "w"):
        pass
    while len(os.listdir(prompts[0])) < 2:
        time.sleep(0.01)
    return [1.0] * len(prompts)

def sandboxed(prompts, completions, references):
    import subprocess
    child = subprocess.Popen(["sleep", "600"], start_new_session=completions[0] == "own")
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


@pytest.mark.parametrize("name", ["picky", "one_by_one"])
def test_sample_that_raises_costs_only_itself(name: str, functions: str, caplog: pytest.LogCaptureFixture) -> None:
    values, failed, message = run(f"{functions}:{name}", ["ab", "raise", "abc"])
    assert (values, failed) == ([2.0, 0.0, 3.0], 1)
    assert "for a batch" not in caplog.text, "the failed sample is counted instead"
    assert re.fullmatch(r"ValueError: no such answer \(.*/rewards_\w+\.py, line 14\)", message), "of the function's own file"


def test_an_error_of_a_package_names_the_users_line() -> None:
    with pytest.raises(np.linalg.LinAlgError) as caught:
        np.linalg.cholesky(np.ones(3))
    message = raised(caught.value)
    assert message.startswith("LinAlgError: ") and message.endswith(f"({__file__}, line {caught.traceback[0].lineno + 1})")


def test_sample_that_hangs_or_kills_the_process_costs_only_itself(functions: str) -> None:
    values, failed, _ = run(f"{functions}:picky", ["ab", "hang", "abc", "die"], timeout_s=1.0)
    assert (values, failed) == ([2.0, 0.0, 3.0, 0.0], 2)


@pytest.mark.parametrize("hangs, good", [(4, 12), (5, 0)], ids=["followed by good samples", "alone"])
def test_many_hangs_cost_only_themselves(functions: str, tmp_path: Path, hangs: int, good: int) -> None:
    """The batch is asked once, then each sample once alone, as far as the call has time."""
    noted, completions = tmp_path / "calls", ["hang"] * hangs + ["abc"] * good
    with RewardRunner(RewardConfig(function=f"{functions}:noted", timeout_s=0.7, call_timeout_s=600.0)) as runner:
        rewards = rewards_of(runner.submit([str(noted)] * len(completions), completions, ["r"] * len(completions)).result())
    assert rewards.values.tolist() == [0.0] * hangs + [3.0] * good
    assert (rewards.failed, rewards.message) == (hangs, "no answer within reward.timeout_s = 0.7 s")
    assert noted.read_text().splitlines() == ["hang", *completions]


def test_a_batch_that_always_hangs_ends_with_the_call_timeout(functions: str, tmp_path: Path) -> None:
    """Thirty processes do not start within a second: some samples fail without a retry."""
    noted = tmp_path / "calls"
    ends = r"failed for all 30 samples: (no answer within its share of|not retried alone within) reward\.call_timeout_s"
    config = RewardConfig(function=f"{functions}:noted", timeout_s=0.5, call_timeout_s=1.0)
    with RewardRunner(config) as runner:
        rewards = rewards_of(runner.submit([str(noted)] * 30, ["hang"] * 30, ["r"] * 30).result())
        with pytest.raises(RunError, match=ends):
            runner.check(rewards)
    assert (rewards.failed, rewards.values.tolist()) == (30, [0.0] * 30)
    assert 1 <= len(noted.read_text().splitlines()) <= 30


START_S = 2.0


class TimedProcess:
    """Stands in for a process. Each row takes as many seconds of a simulated clock as its completion says."""

    now = 0.0

    def __init__(self, path: str, key: str, batched: bool, deadline: Deadline, start: Deadline, *_: object) -> None:
        self._deadline, self._alive = deadline, False

    async def start(self) -> None:
        TimedProcess.now += 0.0 if self._alive else START_S
        self._alive = True

    async def ask(self, columns: list[list[str]], limit: Deadline | None = None) -> list[float] | str:
        await self.start()
        taken, deadline = sum(map(float, columns[1])), limit or self._deadline
        TimedProcess.now += min(taken, deadline.seconds)
        self._alive = taken <= deadline.seconds
        return [1.0] * len(columns[1]) if self._alive else deadline.missed

    async def close(self) -> None: ...


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> type[TimedProcess]:
    monkeypatch.setattr(TimedProcess, "now", 0.0)
    monkeypatch.setattr("dagrl.rl.functions.runner.FunctionProcess", TimedProcess)
    monkeypatch.setattr("dagrl.rl.functions.runner.time", SimpleNamespace(monotonic=lambda: TimedProcess.now))
    return TimedProcess


@pytest.mark.parametrize(
    ("completions", "call_s", "rewarded"),
    [
        (["inf"] * 8, None, [0.0] * 8),
        (["inf"] * 100, None, [0.0] * 100),
        (["inf"] * 100, 200.0, [0.0] * 100),
        (["inf"] * 7 + ["0.5"], None, [0.0] * 7 + [1.0]),  # a hanging sample gets its share of the 30 s left
        (["0.5"] + ["inf"] * 7, None, [1.0] + [0.0] * 7),
        (["0.5"] * 63 + ["inf"], None, [1.0] * 56 + [0.0] * 8),  # shares are at least a second, though 64 samples have 28 s
        (["2"] * 8, None, [1.0] * 8),  # 16 s in total
    ],
)
def test_a_call_keeps_to_its_timeout(
    timed: type[TimedProcess], functions: str, completions: list[str], call_s: float | None, rewarded: list[float]
) -> None:
    config = RewardConfig(function=f"{functions}:length", timeout_s=10.0, call_timeout_s=call_s)
    with RewardRunner(config) as runner:
        found = rewards_of(runner.submit([""] * len(completions), completions, [""] * len(completions)).result())
    assert found.values.tolist() == rewarded
    assert timed.now <= START_S + (call_s or 4 * 10.0) + START_S


@pytest.mark.parametrize(("call_s", "takes_s"), [(None, 6 * (START_S + 10.0)), (30.0, 30.0 + START_S)])
def test_single_samples_have_a_call_timeout_only_if_it_is_set(
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
    with pytest.raises(RunError, match=r"it returned a float; expected: a list of 1 answers.*needs batched=false"):
        run(f"{functions}:with_its_own_loop", ["a", "b"])
    said = "it returned a reward that is not finite in float32"
    for bad in ("nan", "-inf", "1e39"):
        assert run(f"{functions}:undefined", [bad, "a"]) == ([0.0, 1.0], 1, said)
    assert run(f"{functions}:short", ["a", "b"])[:2] == ([1.0, 1.0], 0)  # correct for one sample at a time


def test_one_warning_if_a_batch_fails_but_its_samples_do_not(functions: str, caplog: pytest.LogCaptureFixture) -> None:
    with RewardRunner(RewardConfig(function=f"{functions}:short")) as runner:
        for rows in (2, 2, 3, 1):
            assert runner(["p"] * rows, ["a"] * rows, ["r"] * rows).values.tolist() == [1.0] * rows
    assert [record.getMessage() for record in caplog.records] == [
        "reward.function fails for a batch but answers each of its rows alone, which takes longer: "
        f"it returned 1 answers; expected: a list of {rows} (warned once)"
        for rows in (2, 3)
    ]


def test_answers_are_pickled_by_value_and_bad_ones_cost_only_themselves(functions: str) -> None:
    """`multiprocessing` would share torch tensors. Classes of answers may raise in pickling, unpickling and `float`."""
    assert run(f"{functions}:shared", ["a", "b"]) == ([2.0, 2.0], 0, "")
    said = {
        "rebuilt": "its answer cannot be unpickled: KeyError: 'not here'",
        "pickled": "its answer cannot be pickled: ",
        "number": "it returned a reward that is not a number: not a number after all",
    }
    with RewardRunner(RewardConfig(function=f"{functions}:odd", max_failed_share=1.0)) as runner:
        for bad, message in said.items():
            rewards = runner(["p"] * 3, ["a", bad, "c"], ["r"] * 3)
            assert (rewards.values.tolist(), rewards.failed) == ([2.0, 0.0, 2.0], 1)
            assert rewards.message.startswith(message)


def test_the_process_is_reused_and_ends_with_the_runner(functions: str) -> None:
    with RewardRunner(RewardConfig(function=f"{functions}:pid")) as runner:
        first, second = (runner(["p"], ["c"], ["r"]).values[0] for _ in range(2))
        assert first == second != os.getpid()
        assert Path(f"/proc/{int(first)}").exists()
    assert not Path(f"/proc/{int(first)}").exists()


def test_unknown_function() -> None:
    with pytest.raises(ConfigError, match=r"reward\.function: .*has no 'exact_mach'; did you mean 'exact_match'"):
        RewardRunner(RewardConfig(function="dagrl.rl.rewards:exact_mach"))


def test_shuffled_permutes_the_rewards() -> None:
    rewards = np.arange(64, dtype=np.float32)
    permuted = shuffled(rewards, 0, 1)
    assert sorted(permuted.tolist()) == rewards.tolist()
    assert permuted.tolist() != rewards.tolist()
    assert shuffled(rewards, 0, 1).tolist() == permuted.tolist() != shuffled(rewards, 0, 2).tolist()


def test_coroutines_of_single_samples_run_concurrently_and_fail_alone(functions: str) -> None:
    """None of the twenty ends before all have started."""
    with RewardRunner(RewardConfig(function=f"{functions}:together", batched=False, timeout_s=60.0)) as runner:
        rewards = runner(["20"] * 20, ["raise", *["ab"] * 19], ["r"] * 20)
    assert rewards.values.tolist() == [0.0, *[2.0] * 19]
    assert rewards.failed == 1 and rewards.message.startswith("ValueError: no such answer (")


def test_a_batched_coroutine(functions: str) -> None:
    assert run(f"{functions}:slowly_batched", ["a", "abc"]) == ([1.0, 3.0], 0, "")


@pytest.mark.parametrize(("function", "batched"), [("one_at_a_time", False), ("one_at_a_time_batched", True)])
def test_the_event_loop_is_shared_by_all_calls(functions: str, function: str, batched: bool) -> None:
    """A semaphore, like a judge's HTTP client, is bound to its event loop."""
    with RewardRunner(RewardConfig(function=f"{functions}:{function}", batched=batched)) as runner:
        for _ in range(3):
            assert runner(["p"] * 3, ["a", "", "abc"], ["r"] * 3).values.tolist() == [1.0, 0.0, 3.0]


def test_a_function_of_single_samples_may_run_its_own_loop(functions: str) -> None:
    with RewardRunner(RewardConfig(function=f"{functions}:with_its_own_loop", batched=False)) as runner:
        assert runner(["p"] * 2, ["a", "abc"], ["r"] * 2).values.tolist() == [1.0, 3.0]


def test_leftover_tasks_end_with_their_call(functions: str) -> None:
    with RewardRunner(RewardConfig(function=f"{functions}:leaves_tasks")) as runner:
        assert [runner(["p"], ["c"], ["r"]).values.tolist() for _ in range(3)] == [[0.0], [1.0], [1.0]]


def test_calls_run_in_the_background_in_several_processes(functions: str, tmp_path: Path) -> None:
    """Neither of two calls ends before the other has started in another process."""
    (meeting := tmp_path / "meeting").mkdir()
    with RewardRunner(RewardConfig(function=f"{functions}:meet", num_workers=2, timeout_s=60.0)) as runner:
        futures = [runner.submit([str(meeting)] * 3, ["c"] * 3, ["r"] * 3) for _ in range(2)]
        assert [rewards_of(future.result()).values.tolist() for future in futures] == [[1.0] * 3] * 2


def test_a_hanging_coroutine_costs_only_itself_and_no_retry(functions: str, tmp_path: Path) -> None:
    noted = tmp_path / "calls"
    with RewardRunner(RewardConfig(function=f"{functions}:stuck", batched=False, timeout_s=1.0)) as runner:
        rewards = runner([str(noted)] * 20, ["hang", *["ab"] * 19], ["r"] * 20)
    assert noted.read_text().splitlines() == ["hang", *["ab"] * 19], "each is asked once"
    assert rewards.values.tolist() == [0.0, *[2.0] * 19]
    assert (rewards.failed, rewards.message) == (1, "no answer within reward.timeout_s = 1 s")


def test_the_deadline_of_single_samples_is_per_sample(functions: str, tmp_path: Path) -> None:
    """Five samples together take longer than the deadline of one. None is retried, and only the hanging ones fail."""
    noted, completions = tmp_path / "calls", ["ab", *["hang"] * 2, *["ab"] * 2]
    with RewardRunner(RewardConfig(function=f"{functions}:steady", batched=False, timeout_s=1.0)) as runner:
        rewards = runner([str(noted)] * 5, completions, ["r"] * 5)
    assert noted.read_text() == "".join(completions)
    assert rewards.values.tolist() == [2.0, 0.0, 0.0, 2.0, 2.0]
    assert (rewards.failed, rewards.message) == (2, "no answer within reward.timeout_s = 1 s")


def test_a_slow_import_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = "import sys, time\nif 'functions/child' in sys.argv[0]: time.sleep(60)\ndef reward(*texts): return [1.0]\n"
    (tmp_path / "slow_to_import.py").write_text(slow)
    monkeypatch.syspath_prepend(str(tmp_path))
    with RewardRunner(RewardConfig(function="slow_to_import:reward", start_timeout_s=0.3)) as runner:
        with pytest.raises(RunError, match=r"was not imported within reward\.start_timeout_s = 0\.3 s; raise it"):
            runner(["p"], ["c"], ["r"])


def test_an_import_that_fails_only_in_the_process_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = "import sys\nif 'functions/child' in sys.argv[0]: sys.exit('no sandbox')\ndef reward(*texts): return [1.0]\n"
    (tmp_path / "fails_there.py").write_text(fails)
    monkeypatch.syspath_prepend(str(tmp_path))
    with RewardRunner(RewardConfig(function="fails_there:reward")) as runner:
        with pytest.raises(RunError, match=r"SystemExit: no sandbox.*the process that runs it could not"):
            runner(["p"], ["c"], ["r"])


@pytest.mark.parametrize("waits", [True, False])
def test_processes_start_before_the_first_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    """They end with the runner, even if it is closed while they start."""
    module = f"known_by_pid_{waits}_{os.getpid()}"  # unique among concurrent runs of the tests
    known = "if 'functions/child' in sys.argv[0]:\n    open(f'{os.path.dirname(__file__)}/{os.getpid()}.pid', 'w').close()\n"
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


@pytest.mark.parametrize("session", ["shared", "own"])
def test_child_processes_end_with_the_process(functions: str, tmp_path: Path, session: str) -> None:
    config = RewardConfig(function=f"{functions}:sandboxed", timeout_s=1.0)
    with RewardRunner(config) as runner:
        (answer,) = runner.submit([str(tmp_path / "children")], [session], [""]).result(30.0)
    assert answer == Failed("no answer within reward.timeout_s = 1 s")
    (child,) = (tmp_path / "children").read_text().split()
    end = time.monotonic() + 10.0  # a busy machine takes a while to deliver the signal
    while _is_alive(child) and time.monotonic() < end:
        time.sleep(0.01)
    assert not _is_alive(child)


@pytest.mark.parametrize("function", ["pid", "pid_with_a_daemon"])
def test_a_stopped_process_does_not_block_the_call(functions: str, function: str) -> None:
    config = RewardConfig(function=f"{functions}:{function}", timeout_s=0.5, max_failed_share=1.0)
    with RewardRunner(config) as runner:
        process = int(runner(["p"], ["c"], ["r"]).values[0])
        os.kill(process, signal.SIGSTOP)
        large = "x" * (4 << 20)  # more than a pipe holds
        assert runner.submit(["p"], [large], ["r"]).result(8.0) == [Failed("no answer within reward.timeout_s = 0.5 s")]
        assert runner(["p"], ["c"], ["r"]).failed == 0


def test_a_process_that_starts_during_close_is_killed(functions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    starting, closing, popen = threading.Event(), threading.Event(), subprocess.Popen

    def held_back(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        starting.set()
        closing.wait(5.0)
        started.append(popen(*args, **options))
        return started[-1]

    monkeypatch.setattr("dagrl.rl.functions.process.subprocess.Popen", held_back)
    runner = RewardRunner(RewardConfig(function=f"{functions}:pid"))
    with runner:
        assert starting.wait(30.0)
        threading.Timer(0.5, closing.set).start()  # during close
    (process,) = started
    assert process.wait(30.0) in (-signal.SIGUSR1, 1), "before or after it has started another one, which it then ends"


def test_a_closed_runner_starts_no_process(functions: str, tmp_path: Path) -> None:
    """Even if a call that was running at the time closes the process again."""
    config = RewardConfig(timeout_s=60.0)
    with FunctionRunner(f"{functions}:noted", "reward", config, float, arguments="named") as runner:
        running = runner.submit([str(tmp_path / "calls")], ["hang"], ["r"], [{}])
        while not (tmp_path / "calls").exists():
            time.sleep(0.01)
    ended = [Failed("the process that runs it ended")]
    assert running.result(30.0) == ended
    assert [runner([str(tmp_path / "calls")], ["ab"], ["r"], [{}]) for _ in range(2)] == [ended] * 2
    assert (tmp_path / "calls").read_text() == "hang\n"


def test_an_object_with_an_async_call_is_a_coroutine_function() -> None:
    class Judge:
        async def __call__(self, prompt: str) -> float:
            return 0.0

    assert is_coroutine(Judge()) and is_coroutine(Judge().__call__) and not is_coroutine(exact_match)


def test_a_failed_start_is_reported_by_the_first_call_and_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = "open(f'{os.path.dirname(__file__)}/{os.getpid()}.tried', 'w').close(); time.sleep(60)"
    slow = f"import os, sys, time\nif 'functions/child' in sys.argv[0]: {noted}\ndef reward(*texts): return [1.0]\n"
    (tmp_path / "slow_once.py").write_text(slow)
    monkeypatch.syspath_prepend(str(tmp_path))
    with RewardRunner(RewardConfig(function="slow_once:reward", start_timeout_s=3.0)) as runner:
        with pytest.raises(RunError, match=r"was not imported within reward\.start_timeout_s = 3 s"):
            runner(["p"], ["c"], ["r"])
    assert len(list(tmp_path.glob("*.tried"))) == 1


def test_a_failed_restart_costs_the_samples_that_waited_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    config = RewardConfig(function="slow_at_second:reward", timeout_s=1.0, start_timeout_s=5.0)
    with RewardRunner(config) as runner:
        hung, waited, asked = (rewards_of(runner.submit(["p"], [text], ["r"]).result()) for text in ("hang", "a", "b"))
    assert (hung.failed, hung.message) == (1, "no answer within reward.timeout_s = 1 s")
    assert waited.failed == 1 and "was not imported within reward.start_timeout_s = 5 s" in waited.message
    assert (asked.failed, asked.values.tolist()) == (0, [1.0])
    assert len(list(tmp_path.glob("*.tried"))) == 3


def _is_alive(pid: str) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def _command(process: Path) -> str:
    try:
        return (process / "cmdline").read_text()
    except OSError:  # the process has ended
        return ""


def test_a_single_sample_is_not_retried(functions: str, tmp_path: Path) -> None:
    noted = tmp_path / "calls"
    with RewardRunner(RewardConfig(function=f"{functions}:noted", max_failed_share=1.0)) as runner:
        assert rewards_of(runner.submit([str(noted)], ["raise"], ["r"]).result()).message.startswith("ValueError: no such")
    assert noted.read_text() == "raise\n"


def test_too_many_failures_end_the_run() -> None:
    failing = Rewards(np.zeros(8, np.float32), np.arange(8) >= 3, "ValueError: why")
    joined = join_rewards([Rewards(np.ones(8, np.float32), np.ones(8, np.bool_)), failing])
    assert (joined.failed, len(joined.values), joined.message) == (3, 16, "ValueError: why")
    check_failures("reward", 3, 16, joined.message, 0.2)
    with pytest.raises(RunError, match=r"3 of 16 samples, .* than reward\.max_failed_share = 0\.1: ValueError: why"):
        check_failures("reward", 3, 16, joined.message, 0.1)
    with pytest.raises(RunError, match=r"environment failed for all 2 samples: why"):
        check_failures("environment", 2, 2, "why", 1.0)


@pytest.mark.parametrize("total", [1, 2])
def test_with_may_all_fail_only_the_share_counts(total: int, caplog: pytest.LogCaptureFixture) -> None:
    check_failures("reward", total, total, "why", 1.0, may_all_fail=True)
    assert f"reward failed for {total} of {total} samples: why" in caplog.text
    with pytest.raises(RunError, match=rf"{total} of {total} samples, more than reward\.max_failed_share = 0\.9"):
        check_failures("reward", total, total, "why", 0.9, may_all_fail=True)


def test_failures_of_a_call_count_towards_the_limit(functions: str) -> None:
    with RewardRunner(RewardConfig(function=f"{functions}:picky", max_failed_share=0.4)) as runner:
        assert runner(["p"] * 3, ["raise", "a", "b"], ["r"] * 3).failed == 1
        with pytest.raises(RunError, match=r"2 of 3 samples, more than reward\.max_failed_share = 0\.4"):
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
