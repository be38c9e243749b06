"""Rows of `rollouts/`: marks of samples, and texts of tokens where several make one character."""

from __future__ import annotations

import numpy as np
import pytest

from dagrl.data.tokenization import Prompt
from dagrl.rl.environments import FAILED
from dagrl.rl.rewards import Rewards
from dagrl.rl.rollout.episodes import Episode, RolloutGroup, Sample
from dagrl.rl.rollout.record import TokenTexts, rollout_rows, untrained_rows
from dagrl.rl.rollout.scoring import TRAIN, ScoredGroup, Untrained, valid_samples
from dagrl.runtime.shapes import Batch
from tests.unit.data.test_data import byte_tokenizer

TOKENIZER = byte_tokenizer("")


@pytest.mark.parametrize("text", ["x = 1", "größer", "日本", "a😀b", "é😀é"])
def test_texts_join_to_the_whole(text: str) -> None:
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    actual = TokenTexts(TOKENIZER)(tokens)
    assert len(actual) == len(tokens) == len(text.encode()) and "".join(actual) == text


def test_each_plain_character_has_its_token() -> None:
    tokens = TOKENIZER.encode("a😀b", add_special_tokens=False)
    assert TokenTexts(TOKENIZER)(tokens) == ["a", "😀", "", "", "", "b"]


def scored(*reasons: str, answered: tuple[bool, ...]) -> ScoredGroup:
    prompt = Prompt("é", np.array([1]), "", "row 0")
    completions = [Episode(prompt, 0, 8, [2], [-0.5], [0], [True], reason, turns=1) for reason in reasons]
    samples = [Sample(prompt, episode, "x") for episode in completions]
    values = np.arange(1, len(completions) + 1).astype(np.float32)
    rewards = Rewards(values, np.array(answered), "ValueError: no")
    return ScoredGroup(RolloutGroup(0, 0, completions), samples, rewards, values, valid_samples(rewards, samples))


def test_samples_that_are_not_trained_on_are_marked() -> None:
    group = scored("stop", "length", "stop", FAILED, answered=(True, True, False, True))
    mask = np.array([[0, 1], [0, 0], [0, 0], [0, 0]], np.float32)  # the second is filtered for its length
    columns = {"loss_mask": mask, "advantages": 3 * mask, "row_ids": np.arange(4), "lengths": np.full(4, 2)}
    rows = rollout_rows([group], Batch(columns), {}, 5, TokenTexts(TOKENIZER))
    assert [row["dropped"] for row in rows] == ["", "overlong", "no_reward", "failed"]
    assert [row["valid"] for row in rows] == [True, False, False, False]
    assert [row["failure"] for row in rows] == ["", "", "ValueError: no", ""]
    assert [row["advantage"] for row in rows] == [3, 0, 0, 0] and {row["split"] for row in rows} == {"train"}
    assert {len(row["conversations"]) for row in rows} == {0}
    others = [Untrained(group), Untrained(group, TRAIN, "zero_variance")]
    rows = untrained_rows(others, 5, TokenTexts(TOKENIZER))
    assert [(row["split"], row["dropped"]) for row in rows[::4]] == [("validation", ""), ("train", "zero_variance")]
    assert rows[0]["valid"] and not rows[4]["valid"] and rows[0]["reward"] == 1 and rows[0]["train_logprobs"] is None


def test_all_conversations_of_an_agent_are_kept() -> None:
    """One row of the batch for each that is trained on; others have no log-probabilities of the train workers."""
    group = scored("stop", "stop", answered=(True, True))
    trained, other = (Episode(Prompt(text, np.array([1, 1]), "", "row 0"), 0, 8, [3], [-1.0], [1], [True]) for text in "tu")
    for completions in group.group.episodes:
        completions.more, completions.others = [trained], [other]
    mask = np.array([[0, 1, 0], [0, 0, 1]] * 2, np.float32)
    batch = Batch({"loss_mask": mask, "advantages": mask, "row_ids": np.arange(4), "lengths": np.full(4, 2)})
    kept = {"prev_logprobs": {row: np.array([0, 10 * row, 100 * row], np.float32) for row in range(4)}}
    texts = TokenTexts(TOKENIZER)
    rows = rollout_rows([group], batch, kept, 5, texts)
    assert [row["train_logprobs"].tolist() for row in rows] == [[0, 0], [20, 200]]
    assert [[one["prompt"] for one in row["conversations"]] for row in rows] == [["t", "u"]] * 2
    assert [[one["trained"] for one in row["conversations"]] for row in rows] == [[True, False]] * 2
    assert [row["conversations"][0]["train_logprobs"].tolist() for row in rows] == [[100], [300]]
    assert rows[0]["conversations"][1]["train_logprobs"] is None and rows[0]["conversations"][1]["logprobs"] == [-1.0]
    (first, _) = untrained_rows([Untrained(group)], 5, texts)
    assert [one["trained"] for one in first["conversations"]] == [False, False]


@pytest.mark.parametrize(
    ("rewards", "expected"), [([0.5, 1.0], [0.5, None, 1.0]), ([1.0], [1.0, None, None]), ([None, 1.0], [None, None, 1.0])]
)
def test_turns_have_the_rewards_of_the_environment(rewards: list[float | None], expected: list[float | None]) -> None:
    group = scored("stop", answered=(True,))
    (episode,) = group.group.episodes
    episode.tokens, episode.sampled = np.array([2, 3, 4]), np.array([True, False, True])
    episode.logprobs, episode.versions, episode.turn_rewards = np.zeros(3, np.float32), np.zeros(3, np.int64), rewards
    (row,) = untrained_rows([Untrained(group)], 5, TokenTexts(TOKENIZER))
    assert [turn["reward"] for turn in row["turns"]] == expected
