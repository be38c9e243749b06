"""What an evaluation counts, on completions with chosen rewards; pass@k against counting all choices, and its intervals."""

import math
from itertools import combinations

import numpy as np
import pytest

from dagrl.config import Config
from dagrl.data.tokenization import Prompt
from dagrl.errors import RunError
from dagrl.rl.environments import FAILED
from dagrl.rl.pass_at_k import gain, interval, pass_at_k
from dagrl.rl.rewards import RewardRunner, Rewards
from dagrl.rl.rollout.episodes import Episode, RolloutGroup, Sample
from dagrl.rl.rollout.scoring import ScoredGroup, scored_group
from dagrl.run.evaluate import Completion, Evaluation, _report, against, completions_of

WANTED = Evaluation(samples=3, ks=(1, 2, 3), right_from=0.5)


def completions(task: str, *rewards: float | None) -> list[Completion]:
    """Returns the completions of one prompt, the greedy one first."""
    prompt = Prompt("1+1", np.array([1]), "2", "row 0", task=task)
    samples = [Sample(prompt, Episode(prompt, 0, 9, tokens=[5] * (place + 1)), "") for place in range(len(rewards))]
    return [Completion(samples[place], place == 0, reward) for place, reward in enumerate(rewards)]


def test_tasks_have_rows_of_their_own() -> None:
    sums, words = completions("sums", 1.0, 0.5, 0.0, 0.0), completions("words", 0.0, None, 0.4, 0.9)
    rows = _report([sums, words, words], WANTED).rows
    assert list(rows) == ["sums", "words", "all"]
    bounds = {name for name in rows["sums"] if name.endswith(("_low", "_high"))}
    assert len(bounds) == 2 * 5
    greedy = {"prompts": 1, "greedy/reward": 1.0, "greedy/right": 1.0, "greedy/tokens": 1.0}
    sampled = {"sampled/reward": 0.5 / 3, "sampled/right": 1 / 3, "sampled/tokens": 3.0}
    pass_at = {"pass@1": 1 / 3, "pass@2": 2 / 3, "pass@3": 1.0}  # of 3 pairs, 2 have the right one
    found = {name: value for name, value in rows["sums"].items() if name not in bounds}
    assert found == pytest.approx(greedy | sampled | pass_at)
    assert rows["words"]["sampled/reward"] == pytest.approx(0.65), "a completion without a reward is in no mean"
    assert rows["words"]["sampled/right"] == pytest.approx(1 / 3) and rows["words"]["failed"] == 2.0
    assert rows["all"]["greedy/right"] == pytest.approx(1 / 3) and rows["all"]["prompts"] == 3.0


def test_a_second_model_is_compared_prompt_by_prompt() -> None:
    first = [completions("sums", 0.0, 1.0, 0.0, 0.0), completions("words", 0.0, 0.0, 0.0, None)]
    second = [completions("sums", 1.0, 1.0, 1.0, 0.0), completions("words", 0.0, 0.0, 0.0, 1.0)]
    report = _report(second, WANTED)
    rows = against(_report(first, WANTED), report, WANTED).rows
    assert rows["sums"].items() >= report.rows["sums"].items()
    assert rows["sums"]["greedy/gain"] == 1.0 and rows["words"]["greedy/gain"] == 0.0 and rows["all"]["greedy/gain"] == 0.5
    assert rows["all"]["sampled/gain"] == pytest.approx(1 / 3) and rows["words"]["greedy/gain_p"] == 1.0
    greedy_only = Evaluation(samples=0, ks=())
    alone = _report([completions("", 1.0)], greedy_only)
    assert list(alone.rows) == ["all"], "without tasks there is one row"
    assert not [name for name in against(alone, alone, greedy_only).rows["all"] if name.startswith("sampled")]


CONFIG = Config.model_validate({"name": "test", "algorithm": "grpo", "data": {}, "policy": {}})


def scored(number: int, *, fails: str = "") -> ScoredGroup:
    """Returns one completion of a prompt with the reward 1, for which the `environment` or the `reward` may fail."""
    episode = Episode(Prompt("1+1", np.array([1]), "2", "row 0"), 0, 9, tokens=[5], finish_reason="stop")
    if fails == "environment":
        episode.finish_reason, episode.failure = FAILED, "no idea"
    rewards = Rewards(np.ones(1, np.float32), np.array([fails != "reward"]), "no idea")
    return scored_group(CONFIG, RolloutGroup(number, number, [episode]), [Sample(episode.prompt, episode, "")], rewards)


@pytest.mark.parametrize("fails", ["reward", "environment"])
def test_failures_are_a_share_of_all_prompts(fails: str) -> None:
    groups = [scored(2), scored(0, fails=fails), scored(1)]
    found = completions_of(CONFIG, groups, RewardRunner(CONFIG.reward))
    assert [[one.reward for one in of_prompt] for of_prompt in found] == [[None], [1.0], [1.0]]
    with pytest.raises(RunError, match=rf"{fails} failed for 2 of 3 samples, more than .*: no idea"):
        completions_of(CONFIG, [*groups[:2], scored(1, fails=fails)], RewardRunner(CONFIG.reward))


@pytest.mark.parametrize("samples, right", [(1, 0), (1, 1), (6, 0), (6, 2), (6, 5), (6, 6)])
def test_it_is_the_share_of_choices_with_a_right_one(samples: int, right: int) -> None:
    outcomes = [place < right for place in range(samples)]
    for k in range(1, samples + 1):
        choices = list(combinations(outcomes, k))
        assert pass_at_k(samples, right, k) == pytest.approx(sum(map(any, choices)) / len(choices))


@pytest.mark.parametrize("right, count", [(0, 20), (41, 1319), (7, 7), (250, 500)])
def test_the_interval_is_wilsons(right: int, count: int) -> None:
    """Its ends are the shares p of which the one found is 1.96 standard deviations sqrt(p (1 - p) / n) away."""
    share = right / count
    for end in interval(share, count):
        assert abs(share - end) == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / count), abs=1e-9)
    assert interval(share, count)[0] < interval(share, count)[1]


def test_a_gain_is_that_of_pairs() -> None:
    """McNemar's example as in Agresti, "Categorical Data Analysis", table 10.1: 86 and 150 of 1,600 changed their minds."""
    before = [1.0] * (794 + 150) + [0.0] * (86 + 570)
    after = [1.0] * 794 + [0.0] * 150 + [1.0] * 86 + [0.0] * 570
    found = gain("gain", before, after)
    assert found["gain"] == pytest.approx(-0.04)
    assert (found["gain_low"], found["gain_high"]) == pytest.approx((-0.0587, -0.0213), abs=5e-5)
    assert found["gain_p"] == pytest.approx(sum(math.comb(236, k) for k in range(87)) / 2**235)
    assert gain("gain", [1.0, 0.0], [1.0, 0.0]) == {"gain": 0.0, "gain_low": 0.0, "gain_high": 0.0, "gain_p": 1.0}
