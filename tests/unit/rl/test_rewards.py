"""Rewards of functions and of their parts; tests/integration/rl/test_reward_functions.py has their processes."""

import asyncio
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dagrl.config import DataConfig, RewardConfig, RewardShapingConfig
from dagrl.data import read_examples
from dagrl.data.tokenization import Prompt, digest_of, encode_prompts
from dagrl.errors import ConfigError, RunError
from dagrl.rl import rewards as of_rewards
from dagrl.rl.functions.answers import described
from dagrl.rl.rewards import RewardRunner, Rewards, check_failures, check_weights, join_rewards, rewards_of
from dagrl.rl.rollout.episodes import Episode, RolloutGroup, Sample
from dagrl.rl.rollout.scoring import reward_means, reward_values
from dagrl.run.model import character_tokenizer
from dagrl.runtime.deadline import Deadline
from tests.unit.rl.conftest import rewarded

pytestmark = pytest.mark.usefixtures("in_process")


def length(prompts: Any, completions: Any, references: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def picky(prompts: Any, completions: Any, references: Any) -> list[float]:
    if "raise" in completions:
        raise ValueError("no such answer")
    return length(prompts, completions, references)


def one_by_one(prompts: Any, completions: Any, references: Any) -> Any:
    yield from (picky([""], [completion], [""])[0] for completion in completions)


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


def config_of(function: str, **keys: Any) -> RewardConfig:
    return RewardConfig(function=f"{__name__}:{function}", **keys)


def run(function: str, completions: list[str]) -> tuple[list[float], int, str]:
    with RewardRunner(config_of(function, timeout_s=5.0, max_failed_share=1.0)) as runner:
        rewards = rewarded(runner, ["p"] * len(completions), completions, ["r"] * len(completions))
    return rewards.values.tolist(), rewards.failed, rewards.message


@pytest.mark.parametrize("name", ["picky", "one_by_one"])
def test_a_sample_that_raises_fails_alone(name: str, caplog: pytest.LogCaptureFixture) -> None:
    values, failed, message = run(name, ["ab", "raise", "abc"])
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


def test_each_sample_has_the_time_of_a_call_after_a_failed_batch_and_alone(timed: type[TimedProcess]) -> None:
    with RewardRunner(config_of("length", timeout_s=10.0)) as runner:
        actual = rewards_of(runner.submit([""] * 4, ["inf", "9", "inf", "0.5"], [""] * 4).result())
    assert actual.values.tolist() == [0.0, 1.0, 0.0, 1.0]
    assert timed.now == 4 * START_S + 3 * 10.0 + 9.5, "the batch, and two of its samples, hang until the deadline"
    timed.now = 0.0
    with RewardRunner(config_of("single", batched=False, timeout_s=10.0)) as runner:
        actual = rewards_of(runner.submit([""] * 6, ["inf"] * 6, [""] * 6).result())
    assert actual.failed == 6
    assert timed.now == 6 * (START_S + 10.0)


def test_wrong_results() -> None:
    for function, text, says in (
        ("picky", "raise", r"failed for all 2 samples: ValueError: no such answer"),
        ("with_its_own_loop", "a", r"it returned a float; expected: a list of 1 answers.*needs batched=false"),
    ):
        with pytest.raises(RunError, match=says):
            run(function, [text, text])
    said = "it returned a reward that is not finite in float32"
    for bad in ("nan", "-inf", "1e39"):
        assert run("undefined", [bad, "a"]) == ([0.0, 1.0], 1, said)
    assert run("short", ["a", "b"])[:2] == ([1.0, 1.0], 0)  # correct for one sample at a time


def test_one_warning_if_a_batch_fails_but_its_samples_do_not(caplog: pytest.LogCaptureFixture) -> None:
    with RewardRunner(config_of("short")) as runner:
        for rows in (2, 2, 3, 1):
            assert rewarded(runner, ["p"] * rows, ["a"] * rows, ["r"] * rows).values.tolist() == [1.0] * rows
    says = "reward.function fails for a batch but answers each of its rows alone, which takes longer: it returned 1 answers"
    assert caplog.messages == [f"{says}; expected: a list of {rows} (warned once)" for rows in (2, 3)]


def test_coroutines_of_single_samples_run_concurrently_and_fail_alone() -> None:
    """None of the twenty ends before all have started."""
    with RewardRunner(config_of("together", batched=False, timeout_s=60.0)) as runner:
        rewards = rewarded(runner, ["20"] * 20, ["raise", *["ab"] * 19], ["r"] * 20)
    assert rewards.values.tolist() == [0.0, *[2.0] * 19]
    assert rewards.failed == 1 and rewards.message.startswith("ValueError: no such answer (")


@pytest.mark.parametrize(
    ("function", "batched"), [("one_at_a_time", False), ("one_at_a_time_batched", True), ("with_its_own_loop", False)]
)
def test_the_event_loop_is_shared_by_all_calls(function: str, batched: bool) -> None:
    """A semaphore, like a judge's HTTP client, is bound to its event loop. A function may also run its own."""
    with RewardRunner(config_of(function, batched=batched)) as runner:
        for _ in range(3):
            assert rewarded(runner, ["p"] * 3, ["a", "", "abc"], ["r"] * 3).values.tolist() == [1.0, 0.0, 3.0]


def test_single_samples_are_not_retried_and_a_hanging_coroutine_fails_alone(tmp_path: Path) -> None:
    noted = tmp_path / "call"
    with RewardRunner(config_of("noted", max_failed_share=1.0)) as runner:
        assert rewards_of(runner.submit([str(noted)], ["raise"], ["r"]).result()).message.startswith("ValueError: no such")
    assert noted.read_text() == "raise\n"
    noted = tmp_path / "calls"
    with RewardRunner(config_of("stuck", batched=False, timeout_s=0.5)) as runner:
        rewards = rewarded(runner, [str(noted)] * 20, ["hang", *["ab"] * 19], ["r"] * 20)
    assert noted.read_text().splitlines() == ["hang", *["ab"] * 19], "each is asked once"
    assert rewards.values.tolist() == [0.0, *[2.0] * 19]
    assert (rewards.failed, rewards.message.partition(" (")[0]) == (1, "no answer within reward.timeout_s = 0.5 s")


def test_too_many_failures_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    """With `may_all_fail` only the share counts."""
    failing = Rewards(np.zeros(8, np.float32), np.arange(8) >= 3, "ValueError: why")
    joined = join_rewards([Rewards(np.ones(8, np.float32), np.ones(8, np.bool_)), failing])
    assert (joined.failed, len(joined.values), joined.message) == (3, 16, "ValueError: why")
    check_failures("reward", 3, 16, joined.message, 0.2)
    with pytest.raises(RunError, match=r"3 of 16 samples, .* than reward\.max_failed_share = 0\.1: ValueError: why"):
        check_failures("reward", 3, 16, joined.message, 0.1)
    with pytest.raises(RunError, match=r"environment failed for all 2 samples: why"):
        check_failures("environment", 2, 2, "why", 1.0)
    for total in (1, 2):
        check_failures("reward", total, total, "why", 1.0, may_all_fail=True)
        assert f"reward failed for {total} of {total} samples: why" in caplog.text
        with pytest.raises(RunError, match=rf"{total} of {total} samples, more than reward\.max_failed_share = 0\.9"):
            check_failures("reward", total, total, "why", 0.9, may_all_fail=True)


def test_overlong_penalty_is_dapos_equation_13() -> None:
    """With a maximum of 20480 tokens and a cache of 4096: 0 up to 16384, -0.5 half-way, -1 from the end on."""
    config = RewardShapingConfig(enabled=True, max_response_length=20480, overlong_buffer_length=4096)
    actual = of_rewards.overlong_penalty([0, 16384, 16385, 18432, 20480, 30000], config, max_new_tokens=1)
    assert actual.tolist() == [0.0, 0.0, -1 / 4096, -0.5, -1.0, -1.0]


def test_exact_and_math_answers() -> None:
    assert of_rewards.exact_match(["1+1="] * 3, ["2", " 2\n", "22"], ["2", "2", "2"]) == [1.0, 1.0, 0.0]
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
    assert of_rewards.math_answer(["q"] * len(rows), completions, references) == expected


def level(prompts: Any, completions: Any, references: Any, level: Any, *, metadata: Any) -> Any:
    assert [item["place"] for item in metadata] == list(range(len(prompts)))
    return [float(value) for value in level]


def everything(prompt: str, completion: str, reference: str, **given: Any) -> Any:
    assert given["columns"]["level"] == given["level"]
    assert given["messages"][-1] == {"role": "assistant", "content": completion}
    return {name: float(len(given[name])) for name in ("prompt_ids", "completion_ids", "logprobs")}


def parts(prompts: Any, completions: Any, references: Any) -> Any:
    return [{"right": float(c == r), "short": -float(len(c))} for c, r in zip(completions, references, strict=True)]


def only_odd(prompts: Any, completions: Any, references: Any) -> Any:
    return [float(c) if int(c) % 2 else None for c in completions]


def fails_for_three(prompts: Any, completions: Any, references: Any) -> Any:
    if "3" in completions:
        raise ValueError("no threes")
    return [1.0] * len(prompts)


def sometimes(prompts: Any, completions: Any, references: Any) -> Any:
    return [{"right": float(c == r), "odd": None} for c, r in zip(completions, references, strict=True)]


def misnamed(prompts: Any, completions: Any, references: Any, levl: Any) -> Any: ...


class Judge:
    """Answers with the most calls of it that were under way at once."""

    most = running = 0

    async def __call__(self, prompt: str, completion: str, reference: str) -> float:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.05)
        self.running -= 1
        return float(self.most)


two_at_once, all_at_once = Judge(), Judge()


def prompts_of(tmp_path: Path, rows: list[dict[str, Any]]) -> list[Prompt]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return encode_prompts(read_examples(path, "train", DataConfig(path=str(path))), character_tokenizer("0123456789+="))


def rewards_by_part(config: RewardConfig, completions: list[str], prompt: Prompt | None = None) -> Rewards:
    tokenizer = character_tokenizer("0123456789+=")
    prompt = prompt or Prompt("1=", np.array([5, 15]), "1", "row 0")
    samples = []
    for text in completions:
        columns = tokenizer(text)["input_ids"], [-0.5] * len(text), [1] * len(text), [True] * len(text)
        samples.append(Sample(prompt, Episode(prompt, 0, 8, *columns, "stop"), text))
    group = RolloutGroup(0, 0, [sample.completion for sample in samples])
    texts = ([prompt.text] * len(samples), completions, [prompt.reference] * len(samples))
    with RewardRunner(config) as runner:
        return rewards_of(runner.submit(*texts, partial(reward_values, group, samples, tokenizer)).result())


def test_a_reward_asks_for_columns_by_name(tmp_path: Path) -> None:
    """They are part of the data: a resumed run rejects data with others."""
    (prompt,) = prompts_of(tmp_path, [{"prompt": "1+", "response": "2", "level": 7}])
    assert digest_of([prompt]) != digest_of(prompts_of(tmp_path, [{"prompt": "1+", "response": "2", "level": 8}]))
    actual = rewards_by_part(config_of("level"), ["1", "22"], prompt)
    assert actual.values.tolist() == [7.0, 7.0] and not actual.message
    actual = rewards_by_part(config_of("everything", batched=False), ["1", "22"], prompt)
    assert not actual.message
    columns = {name: values.tolist() for name, values in actual.parts.items()}
    assert columns == {"prompt_ids": [2.0, 2.0], "completion_ids": [1.0, 2.0], "logprobs": [1.0, 2.0]}
    (without,) = prompts_of(tmp_path, [{"prompt": "1+", "response": "2"}])
    actual = rewards_by_part(config_of("level"), ["1"], without)
    assert actual.failed == 1 and "NoneType" in actual.message


def test_only_values_with_a_parameter_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of turns and lists of numbers for 512 samples take longer than many rewards."""
    (prompt,) = prompts_of(tmp_path, [{"prompt": "1+", "response": "2", "level": 7}])
    monkeypatch.setattr("dagrl.rl.rollout.scoring.messages_of", None)
    assert rewards_by_part(config_of("level"), ["1"], prompt).values.tolist() == [7.0]


def test_named_parts_are_weighted_and_kept() -> None:
    config = config_of("parts", weights={"short": 0.25})
    actual = rewards_by_part(config, ["1", "22"])
    assert actual.values.tolist() == [1.0 - 0.25, -0.5]
    assert {name: values.tolist() for name, values in actual.parts.items()} == {"right": [1.0, 0.0], "short": [-1.0, -2.0]}


def test_none_excludes_a_sample_without_counting_it_as_failed() -> None:
    actual = rewards_by_part(config_of("only_odd"), ["1", "2", "3", "4"])
    assert actual.answered.tolist() == [True, False, True, False]
    assert (actual.excluded, actual.failed, actual.values.tolist()) == (2, 0, [1.0, 0.0, 3.0, 0.0])


def test_several_functions_are_summed_and_a_failure_fails_one_sample() -> None:
    named = {"odd": "only_odd", "fine": "fails_for_three", "form": "parts"}
    functions = {name: {"function": f"{__name__}:{function}"} for name, function in named.items()}
    config = RewardConfig.model_validate({"functions": functions, "weights": {"odd": 10.0, "form/short": 0.0}})
    actual = rewards_by_part(config, ["1", "2", "3"])
    assert actual.values.tolist() == [10.0 + 1.0 + 1.0, 1.0, 0.0]
    assert (actual.failed, actual.excluded) == (1, 0) and actual.message.startswith("ValueError: no threes (")
    assert actual.means(actual.answered) == {"odd": 1.0, "fine": 1.0, "form/right": 0.5, "form/short": -1.0}


def test_functions_of_other_tasks_are_not_asked() -> None:
    named = {"sums": "fails_for_three", "odd": "only_odd"}
    both = {task: {"function": f"{__name__}:{function}", "tasks": [task]} for task, function in named.items()}
    config = RewardConfig.model_validate({"functions": both})
    prompts = {task: Prompt("1=", np.array([5, 15]), "1", "row 0", task=task) for task in ("sums", "odd")}
    actual = {task: rewards_by_part(config, ["5", "7"], prompt) for task, prompt in prompts.items()}
    assert actual["sums"].values.tolist() == [1.0, 1.0] and actual["odd"].values.tolist() == [5.0, 7.0]
    samples = [Sample(prompt, Episode(prompt, 0, 8, finish_reason="stop"), "") for prompt in prompts.values() for _ in "12"]
    means = reward_means(join_rewards([*actual.values()]), samples, "reward/")
    assert means == {"reward/parts/sums": 1.0, "reward/parts/odd": 6.0, "reward/tasks/odd": 6.0, "reward/tasks/sums": 1.0}


@pytest.mark.parametrize("limit", [2, None])
def test_a_remote_judge_has_a_concurrency_limit(limit: int | None) -> None:
    """Calls that wait for their turn are not late."""
    judge = "two_at_once" if limit else "all_at_once"
    config = config_of(judge, batched=False, max_concurrency=limit, timeout_s=0.12)
    began = time.monotonic()
    actual = rewards_by_part(config, ["1"] * 6)
    assert actual.failed == 0 and actual.values.max() == (limit or 6)
    assert limit is None or time.monotonic() - began >= 0.15


def test_an_unknown_parameter_is_found_before_the_run() -> None:
    with pytest.raises(ConfigError, match=r"reward\.function: .* has the parameters levl, which no .* has; .*level, log"):
        of_rewards.check_keywords(config_of("misnamed"), ["level"])


@pytest.mark.parametrize(
    "name, weights, message",
    [
        ("parts", {"rigth": 2.0, "short": 1.0}, "no part has the name 'rigth'; the parts are right, short"),
        ("only_odd", {"right": 2.0}, "no part has the name 'right'; the reward has no named parts"),
        ("sometimes", {"odd": 2.0}, ""),
        ("parts", {"right": 2.0, "environment": 0.5}, ""),
    ],
)
def test_a_weight_of_no_part_is_an_error_once_parts_are_known(name: str, weights: dict[str, float], message: str) -> None:
    config = config_of(name, weights=weights)
    check_weights(config, has_environment=False)  # the parts of one function are not known yet
    runner, actual = RewardRunner(config), rewards_by_part(config, ["1", "3"])
    if not message:
        runner.check_parts(actual)
        assert actual.values[0] == 1, "2 for the right answer and -1 for its length, or 1 for the right answer"
        return
    with pytest.raises(ConfigError, match=message):
        runner.check_parts(actual)
    runner.check_parts(rewards_of([]))  # nothing is known of parts without a reward


def test_weights_of_several_functions_are_checked_before_the_run() -> None:
    two = {name: {"function": f"{__name__}:{name}"} for name in ("parts", "only_odd")}
    for weights, has_environment in (({"parts/right": 2.0, "only_odd": 1.0}, False), ({"environment": 1.0}, True)):
        check_weights(RewardConfig(functions=two, weights=weights), has_environment)  # type: ignore[arg-type]
    for weights in ({"part": 2.0}, {"environment": 1.0}):
        with pytest.raises(ConfigError, match="the parts are parts, only_odd, parts/<part>, only_odd/<part>"):
            check_weights(RewardConfig(functions=two, weights=weights), has_environment=False)  # type: ignore[arg-type]
    config = RewardConfig(functions=two, weights={"parts/rigth": 2.0, "only_odd/a": 1.0})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"no part has the name 'parts/rigth'; the parts are parts/right, parts/short\. "):
        RewardRunner(config).check_parts(rewards_by_part(config, ["2"]))  # `only_odd` has not rewards_by_part a sample
