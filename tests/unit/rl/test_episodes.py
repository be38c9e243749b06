"""Sequences that continue as a new request in the middle of a turn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from dagrl.data.tokenization import Prompt
from dagrl.rl.generation import FinishedRequest, pack_generated
from dagrl.rl.rollout.episodes import TOKEN_FIELDS, Episode, stop_prefix, turn_seed

WORDS = ("a", "b", "\n", "\n\n", "Us", "er", "ser:", "\nU")


def decode(tokens: Sequence[int]) -> str:
    return "".join(WORDS[token] for token in tokens)


@pytest.mark.parametrize(
    ("text", "stops", "again"),
    [
        (["a", "\n\n", "Us"], ["\n\nUser:"], 2),
        (["a", "\n", "\nU"], ["\n\nUser:"], 2),
        (["a", "b"], ["\n\nUser:"], 0),
        (["\n\n", "a"], ["\n\nUser:"], 0),
        (["b", "\nU"], ["User:", "bb"], 1),  # only the end of a token begins one
        (["a", "b"], ["ba", "abc"], 2),  # the longest beginning
        (["a"], ["ab"], 1),
        ([], ["ab"], 0),
        (["a", "b"], [], 0),
    ],
)
def test_tokens_that_may_begin_a_stop_string_are_found(text: list[str], stops: list[str], again: int) -> None:
    tokens = [WORDS.index(word) for word in text]
    assert stop_prefix(tokens, stops, decode) == again


def test_take_back_removes_tokens_from_every_column() -> None:
    episode = Episode(
        Prompt("p", np.array([7]), "", ""), 0, 8, [1, 2, 3], [-0.1, -0.2, -0.3], [4, 4, 5], [False, True, True]
    )
    episode.take_back(0)
    assert len(episode.tokens) == 3
    episode.take_back(2)
    columns = [column.tolist() for column in (episode.tokens, episode.logprobs, episode.versions, episode.sampled)]
    assert columns == [[1], [np.float32(-0.1)], [4], [False]]


def test_all_columns_follow_every_change() -> None:
    made = [
        FinishedRequest(0, [5, 6, 7], [-0.1, -0.2, -0.3], [1, 1, 1], "stop"),
        FinishedRequest(1, [8], [-1.5], [2], "stop"),
    ]
    packed = pack_generated(made, [], 3)
    first, second = packed.requests()
    episode = Episode(Prompt("p", np.array([7]), "", ""), 0, 8)
    changes = (
        lambda: episode.append(first),
        lambda: episode.take_back(1),
        lambda: episode.answer([9, 9]),
        lambda: episode.append(second),
    )
    for change, length in zip(changes, (3, 2, 4, 5), strict=True):
        change()
        whole = [5, 6, 9, 9, 8], [-0.1, -0.2, 0.0, 0.0, -1.5], [1, 1, 1, 1, 2], [True, True, False, False, True]
        expected = whole if length != 3 else ([5, 6, 7], [-0.1, -0.2, -0.3], [1, 1, 1], [True, True, True])
        for (name, dtype), column in zip(TOKEN_FIELDS.items(), expected, strict=True):
            found = getattr(episode, name)
            assert found.dtype == dtype
            np.testing.assert_array_equal(found, np.array(column[:length], dtype))
    assert not np.shares_memory(first.tokens, packed.tokens)


def test_every_request_of_a_sequence_has_its_own_seed() -> None:
    """Equal seeds would repeat the draws in each turn. A resumed run uses the same seeds."""
    prompt = Prompt("", np.array([1, 2]), "", "")
    seeds = {(seed, made): turn_seed(Episode(prompt, seed, 9, [0] * made)) for seed in (5, 6) for made in range(20)}
    assert (seeds[5, 0], seeds[6, 0]) == (5, 6)
    assert len(set(seeds.values())) == len(seeds)
    assert seeds == {(seed, made): turn_seed(Episode(prompt, seed, 9, [1] * made)) for seed, made in seeds}
