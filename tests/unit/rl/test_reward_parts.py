"""Rewards of several parts and functions, with the columns of their examples."""

from __future__ import annotations

import asyncio
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dagrl.config import DataConfig, RewardConfig
from dagrl.data import read_examples
from dagrl.data.tokenization import Prompt, digest_of, encode_prompts
from dagrl.errors import ConfigError
from dagrl.rl.rewards import RewardRunner, Rewards, check_keywords, check_weights, join_rewards, rewards_of
from dagrl.rl.rollout.episodes import Episode, RolloutGroup, Sample
from dagrl.rl.rollout.scoring import reward_means, reward_values
from dagrl.run.model import character_tokenizer
from tests.unit.rl.in_process import in_process

__all__ = ["in_process"]

pytestmark = pytest.mark.usefixtures("in_process")


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


def rewarded(config: RewardConfig, completions: list[str], prompt: Prompt | None = None) -> Rewards:
    tokenizer = character_tokenizer("0123456789+=")
    prompt = prompt or Prompt("1=", np.array([5, 15]), "1", "row 0")
    samples = []
    for text in completions:
        tokens = tokenizer(text)["input_ids"]
        made = Episode(prompt, 0, 8, tokens, [-0.5] * len(tokens), [1] * len(tokens), [True] * len(tokens), "stop")
        samples.append(Sample(prompt, made, text))
    group = RolloutGroup(0, 0, [sample.completion for sample in samples])
    texts = ([prompt.text] * len(samples), completions, [prompt.reference] * len(samples))
    with RewardRunner(config) as runner:
        return rewards_of(runner.submit(*texts, partial(reward_values, group, samples, tokenizer)).result())


def test_a_reward_asks_for_columns_by_name(tmp_path: Path) -> None:
    (prompt,) = prompts_of(tmp_path, [{"prompt": "1+", "response": "2", "level": 7}])
    actual = rewarded(RewardConfig(function=f"{__name__}:level"), ["1", "22"], prompt)
    assert actual.values.tolist() == [7.0, 7.0] and not actual.message
    actual = rewarded(RewardConfig(function=f"{__name__}:everything", batched=False), ["1", "22"], prompt)
    assert not actual.message
    columns = {name: values.tolist() for name, values in actual.parts.items()}
    assert columns == {"prompt_ids": [2.0, 2.0], "completion_ids": [1.0, 2.0], "logprobs": [1.0, 2.0]}


def test_only_values_with_a_parameter_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of turns and lists of numbers for 512 samples take longer than many rewards."""
    (prompt,) = prompts_of(tmp_path, [{"prompt": "1+", "response": "2", "level": 7}])
    monkeypatch.setattr("dagrl.rl.rollout.scoring.messages_of", None)
    assert rewarded(RewardConfig(function=f"{__name__}:level"), ["1"], prompt).values.tolist() == [7.0]


def test_rows_without_a_column_get_none(tmp_path: Path) -> None:
    (prompt,) = prompts_of(tmp_path, [{"prompt": "1+", "response": "2"}])
    actual = rewarded(RewardConfig(function=f"{__name__}:level"), ["1"], prompt)
    assert actual.failed == 1 and "NoneType" in actual.message


def test_columns_are_part_of_the_data(tmp_path: Path) -> None:
    """A resumed run rejects data with other columns, as rewards may depend on them."""
    one, other = ({"prompt": "1+", "response": "2", "level": level} for level in (1, 2))
    assert digest_of(prompts_of(tmp_path, [one])) != digest_of(prompts_of(tmp_path, [other]))


def test_named_parts_are_weighted_and_kept() -> None:
    config = RewardConfig(function=f"{__name__}:parts", weights={"short": 0.25})
    actual = rewarded(config, ["1", "22"])
    assert actual.values.tolist() == [1.0 - 0.25, -0.5]
    assert {name: values.tolist() for name, values in actual.parts.items()} == {"right": [1.0, 0.0], "short": [-1.0, -2.0]}


def test_none_excludes_a_sample_without_counting_it_as_failed() -> None:
    actual = rewarded(RewardConfig(function=f"{__name__}:only_odd"), ["1", "2", "3", "4"])
    assert actual.answered.tolist() == [True, False, True, False]
    assert (actual.excluded, actual.failed, actual.values.tolist()) == (2, 0, [1.0, 0.0, 3.0, 0.0])


def test_several_functions_are_summed_and_a_failure_fails_one_sample() -> None:
    config = RewardConfig.model_validate(
        {
            "functions": {
                "odd": {"function": f"{__name__}:only_odd"},
                "fine": {"function": f"{__name__}:fails_for_three"},
                "form": {"function": f"{__name__}:parts"},
            },
            "weights": {"odd": 10.0, "form/short": 0.0},
        }
    )
    actual = rewarded(config, ["1", "2", "3"])
    assert actual.values.tolist() == [10.0 + 1.0 + 1.0, 1.0, 0.0]
    assert (actual.failed, actual.excluded) == (1, 0) and actual.message.startswith("ValueError: no threes (")
    assert actual.means(actual.answered) == {"odd": 1.0, "fine": 1.0, "form/right": 0.5, "form/short": -1.0}


def test_functions_of_other_tasks_are_not_asked() -> None:
    both = {
        "sums": {"function": f"{__name__}:fails_for_three", "tasks": ["sums"]},
        "odd": {"function": f"{__name__}:only_odd", "tasks": ["odd"]},
    }
    config = RewardConfig.model_validate({"functions": both})
    prompts = {task: Prompt("1=", np.array([5, 15]), "1", "row 0", task=task) for task in ("sums", "odd")}
    actual = {task: rewarded(config, ["5", "7"], prompt) for task, prompt in prompts.items()}
    assert actual["sums"].values.tolist() == [1.0, 1.0] and actual["odd"].values.tolist() == [5.0, 7.0]
    samples = [Sample(prompt, Episode(prompt, 0, 8, finish_reason="stop"), "") for prompt in prompts.values() for _ in "12"]
    means = reward_means(join_rewards([*actual.values()]), samples, "reward/")
    assert means == {"reward/parts/sums": 1.0, "reward/parts/odd": 6.0, "reward/tasks/odd": 6.0, "reward/tasks/sums": 1.0}


@pytest.mark.parametrize("limit", [2, None])
def test_a_remote_judge_has_a_concurrency_limit(limit: int | None) -> None:
    """Calls that wait for their turn are not late."""
    judge = "two_at_once" if limit else "all_at_once"
    config = RewardConfig(function=f"{__name__}:{judge}", batched=False, max_concurrency=limit, timeout_s=0.12)
    began = time.monotonic()
    actual = rewarded(config, ["1"] * 6)
    assert actual.failed == 0 and actual.values.max() == (limit or 6)
    assert limit is None or time.monotonic() - began >= 0.15


def test_an_unknown_parameter_is_found_before_the_run() -> None:
    with pytest.raises(
        ConfigError, match=r"reward\.function: .* has the parameters levl, which no example has; .*level, log"
    ):
        check_keywords(RewardConfig(function=f"{__name__}:misnamed"), ["level"])


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
    config = RewardConfig(function=f"{__name__}:{name}", weights=weights)
    check_weights(config, has_environment=False)  # the parts of one function are not known yet
    runner, actual = RewardRunner(config), rewarded(config, ["1", "3"])
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
    with pytest.raises(ConfigError, match=r"no part has the name 'parts/rigth'; the parts are parts/right, parts/short$"):
        RewardRunner(config).check_parts(rewarded(config, ["2"]))  # `only_odd` has not rewarded a sample
