"""Rewards: answers and failures of functions; tests/integration/test_reward_functions.py has their processes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dagrl.config import RewardConfig, RewardShapingConfig
from dagrl.errors import ConfigError, RunError
from dagrl.rl.functions.answers import described
from dagrl.rl.rewards import (
    RewardRunner,
    Rewards,
    check_failures,
    exact_match,
    join_rewards,
    math_answer,
    overlong_penalty,
    rewards_of,
)
from dagrl.runtime.deadline import Deadline
from tests.unit.rl.in_process import in_process, rewarded

__all__ = ["in_process"]

pytestmark = pytest.mark.usefixtures("in_process")


def length(prompts: Any, completions: Any, references: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def picky(prompts: Any, completions: Any, references: Any) -> list[float]:
    if "raise" in completions:
        raise ValueError("no such answer")
    return length(prompts, completions, references)


def one_by_one(prompts: Any, completions: Any, references: Any) -> Any:
    for completion in completions:
        yield from picky([""], [completion], [""])


def noted(prompts: Any, completions: Any, references: Any) -> list[float]:
    with Path(prompts[0]).open("a") as file:
        file.write(completions[0] + "\n")
    return picky(prompts, completions, references)


def single(prompt: str, completion: str, reference: str) -> float:
    return float(len(completion))


def short(prompts: Any, completions: Any, references: Any) -> list[float]:
    return [1.0]


def undefined(prompts: Any, completions: Any, references: Any) -> list[float]:
    return [float(completion) if completion != "a" else 1.0 for completion in completions]


class Together:
    """Answers once as many calls are under way as the prompt says."""

    under_way = 0

    async def __call__(self, prompt: str, completion: str, reference: str) -> float:
        self.under_way += 1
        while self.under_way < int(prompt):  # noqa: ASYNC110  # an event would be bound to one loop
            await asyncio.sleep(0.01)
        if completion == "raise":
            raise ValueError("no such answer")
        return float(len(completion))


together = Together()


async def stuck(prompt: str, completion: str, reference: str) -> float:
    noted([prompt], [completion], [reference])
    await asyncio.sleep(3600 if completion == "hang" else 0)
    return float(len(completion))


class OneAtATime:
    """Has a semaphore, which is bound to the event loop of the first call that waits, as a judge's HTTP client is."""

    def __init__(self) -> None:
        self.turn = asyncio.Semaphore(1)

    async def __call__(self, prompt: str, completion: str, reference: str) -> float:
        async with self.turn:
            await asyncio.sleep(0.001)
        return float(len(completion))


one_at_a_time, of_the_batch = OneAtATime(), OneAtATime()


async def one_at_a_time_batched(prompts: Any, completions: Any, references: Any) -> Any:
    assert len(prompts) > 1
    return await asyncio.gather(*map(of_the_batch, prompts, completions, references))


def with_its_own_loop(prompt: str, completion: str, reference: str) -> float:
    return asyncio.run(Together()("0", completion, reference))


def run(function: str, completions: list[str], timeout_s: float = 5.0) -> tuple[list[float], int, str]:
    config = RewardConfig(function=function, timeout_s=timeout_s, max_failed_share=1.0)
    with RewardRunner(config) as runner:
        rewards = rewarded(runner, ["p"] * len(completions), completions, ["r"] * len(completions))
    return rewards.values.tolist(), rewards.failed, rewards.message


def test_exact_match() -> None:
    assert exact_match(["1+1="] * 3, ["2", " 2\n", "22"], ["2", "2", "2"]) == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("name", ["picky", "one_by_one"])
def test_a_sample_that_raises_fails_alone(name: str, caplog: pytest.LogCaptureFixture) -> None:
    values, failed, message = run(f"{__name__}:{name}", ["ab", "raise", "abc"])
    assert (values, failed) == ([2.0, 0.0, 3.0], 1)
    assert "for a batch" not in caplog.text, "the failed sample is counted instead"
    line = picky.__code__.co_firstlineno + 2
    assert message == f"ValueError: no such answer ({__file__}, line {line})", "of the function's own file"


def test_an_error_of_a_package_names_the_users_line() -> None:
    with pytest.raises(np.linalg.LinAlgError) as caught:
        np.linalg.cholesky(np.ones(3))
    message = described(caught.value)
    assert message.startswith("LinAlgError: ") and message.endswith(f"({__file__}, line {caught.traceback[0].lineno + 1})")


START_S = 2.0


class TimedProcess:
    """Stands in for a process. Each row takes as many seconds of a simulated clock as its completion says."""

    now = 0.0

    def __init__(self, path: str, key: str, batched: bool, deadline: Deadline, start: Deadline, *_: object) -> None:
        self._deadline, self._alive = deadline, False

    async def start(self) -> None:
        TimedProcess.now += 0.0 if self._alive else START_S
        self._alive = True

    async def ask(self, columns: list[list[str]]) -> list[float] | str:
        await self.start()
        taken = sum(map(float, columns[1]))
        TimedProcess.now += min(taken, self._deadline.seconds)
        self._alive = taken <= self._deadline.seconds
        return [1.0] * len(columns[1]) if self._alive else self._deadline.missed

    async def close(self) -> None: ...


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> type[TimedProcess]:
    monkeypatch.setattr(TimedProcess, "now", 0.0)
    monkeypatch.setattr("dagrl.rl.functions.runner.FunctionProcess", TimedProcess)
    return TimedProcess


def test_each_sample_of_a_failed_batch_has_the_time_of_a_call(timed: type[TimedProcess]) -> None:
    with RewardRunner(RewardConfig(function=f"{__name__}:length", timeout_s=10.0)) as runner:
        actual = rewards_of(runner.submit([""] * 4, ["inf", "9", "inf", "0.5"], [""] * 4).result())
    assert actual.values.tolist() == [0.0, 1.0, 0.0, 1.0]
    assert timed.now == 4 * START_S + 3 * 10.0 + 9.5, "the batch, and two of its samples, hang until the deadline"


def test_each_single_sample_has_its_time(timed: type[TimedProcess]) -> None:
    with RewardRunner(RewardConfig(function=f"{__name__}:single", batched=False, timeout_s=10.0)) as runner:
        actual = rewards_of(runner.submit([""] * 6, ["inf"] * 6, [""] * 6).result())
    assert actual.failed == 6
    assert timed.now == 6 * (START_S + 10.0)


def test_wrong_results() -> None:
    with pytest.raises(RunError, match=r"failed for all 2 samples: ValueError: no such answer"):
        run(f"{__name__}:picky", ["raise", "raise"])
    with pytest.raises(RunError, match=r"it returned a float; expected: a list of 1 answers.*needs batched=false"):
        run(f"{__name__}:with_its_own_loop", ["a", "b"])
    said = "it returned a reward that is not finite in float32"
    for bad in ("nan", "-inf", "1e39"):
        assert run(f"{__name__}:undefined", [bad, "a"]) == ([0.0, 1.0], 1, said)
    assert run(f"{__name__}:short", ["a", "b"])[:2] == ([1.0, 1.0], 0)  # correct for one sample at a time


def test_one_warning_if_a_batch_fails_but_its_samples_do_not(caplog: pytest.LogCaptureFixture) -> None:
    with RewardRunner(RewardConfig(function=f"{__name__}:short")) as runner:
        for rows in (2, 2, 3, 1):
            assert rewarded(runner, ["p"] * rows, ["a"] * rows, ["r"] * rows).values.tolist() == [1.0] * rows
    assert [record.getMessage() for record in caplog.records] == [
        "reward.function fails for a batch but answers each of its rows alone, which takes longer: "
        f"it returned 1 answers; expected: a list of {rows} (warned once)"
        for rows in (2, 3)
    ]


def test_unknown_function() -> None:
    with pytest.raises(ConfigError, match=r"reward\.function: .*has no 'exact_mach'; did you mean 'exact_match'"):
        RewardRunner(RewardConfig(function="dagrl.rl.rewards:exact_mach"))


def test_coroutines_of_single_samples_run_concurrently_and_fail_alone() -> None:
    """None of the twenty ends before all have started."""
    with RewardRunner(RewardConfig(function=f"{__name__}:together", batched=False, timeout_s=60.0)) as runner:
        rewards = rewarded(runner, ["20"] * 20, ["raise", *["ab"] * 19], ["r"] * 20)
    assert rewards.values.tolist() == [0.0, *[2.0] * 19]
    assert rewards.failed == 1 and rewards.message.startswith("ValueError: no such answer (")


@pytest.mark.parametrize(("function", "batched"), [("one_at_a_time", False), ("one_at_a_time_batched", True)])
def test_the_event_loop_is_shared_by_all_calls(function: str, batched: bool) -> None:
    """A semaphore, like a judge's HTTP client, is bound to its event loop."""
    with RewardRunner(RewardConfig(function=f"{__name__}:{function}", batched=batched)) as runner:
        for _ in range(3):
            assert rewarded(runner, ["p"] * 3, ["a", "", "abc"], ["r"] * 3).values.tolist() == [1.0, 0.0, 3.0]


def test_a_function_of_single_samples_may_run_its_own_loop() -> None:
    with RewardRunner(RewardConfig(function=f"{__name__}:with_its_own_loop", batched=False)) as runner:
        assert rewarded(runner, ["p"] * 2, ["a", "abc"], ["r"] * 2).values.tolist() == [1.0, 3.0]


def test_a_hanging_coroutine_fails_alone_without_a_retry(tmp_path: Path) -> None:
    noted = tmp_path / "calls"
    with RewardRunner(RewardConfig(function=f"{__name__}:stuck", batched=False, timeout_s=0.5)) as runner:
        rewards = rewarded(runner, [str(noted)] * 20, ["hang", *["ab"] * 19], ["r"] * 20)
    assert noted.read_text().splitlines() == ["hang", *["ab"] * 19], "each is asked once"
    assert rewards.values.tolist() == [0.0, *[2.0] * 19]
    assert (rewards.failed, rewards.message.partition(" (")[0]) == (1, "no answer within reward.timeout_s = 0.5 s")


def test_a_single_sample_is_not_retried(tmp_path: Path) -> None:
    noted = tmp_path / "calls"
    with RewardRunner(RewardConfig(function=f"{__name__}:noted", max_failed_share=1.0)) as runner:
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


def test_overlong_penalty_is_dapos_equation_13() -> None:
    """With a maximum of 20480 tokens and a cache of 4096: 0 up to 16384, -0.5 half-way, -1 from the end on."""
    config = RewardShapingConfig(enabled=True, max_response_length=20480, overlong_buffer_length=4096)
    actual = overlong_penalty([0, 16384, 16385, 18432, 20480, 30000], config, max_new_tokens=1)
    assert actual.tolist() == [0.0, 0.0, -1 / 4096, -0.5, -1.0, -1.0]


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
        ("They earn 70 in all.", "10 * 7 = 70\n#### 70 dollars", 1.0),
        ("#### 70 dollars", "70", 1.0),
        ("That is 7 dollars.", "#### 70 dollars", 0.0),
        ("She pays $12.50.", "#### $12.5", 1.0),
        (r"First \boxed{3}. Wait, that is wrong: \boxed{5}", "5", 1.0),
        (r"First \boxed{3}. Wait, that is wrong: \boxed{5}", "3", 0.0),
        (r"$\boxed{3}$, no, $$\boxed{\frac{1}{2}}$$ is the answer of all 4.", r"\frac{1}{2}", 1.0),
        (r"The roots are \boxed{3} and \boxed{5}.", "3, 5", 1.0),
    ]
    completions, references, expected = (list(column) for column in zip(*rows, strict=True))
    assert math_answer(["q"] * len(rows), completions, references) == expected
