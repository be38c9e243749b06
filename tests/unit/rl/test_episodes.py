"""Episodes and finished requests: tokens, texts, seeds, forced lengths, packing, and ranks that must agree."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Sequence
from itertools import groupby

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dagrl.config import ForcedLengths
from dagrl.data.tokenization import Prompt
from dagrl.errors import RunError
from dagrl.rl.generation import (
    FIRST_QUANTUM,
    FinishedRequest,
    Generated,
    RequestProgress,
    checksum,
    merge_generated,
    pack_generated,
    quantum_steps,
)
from dagrl.rl.rollout.episodes import TOKEN_FIELDS, Episode, RolloutGroup, forced_lengths, samples_of, stop_prefix, turn_seed
from dagrl.runtime.shapes import Batch

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
        lambda: episode.take_back(0),
        lambda: episode.answer([9, 9], np.array([-3, 3])),
        lambda: episode.append(second),
    )
    for change, length in zip(changes, (3, 2, 2, 4, 5), strict=True):
        change()
        sampled = [True, True, False, False, True]
        whole = [5, 6, 9, 9, 8], [-0.1, -0.2, 0.0, 0.0, -1.5], [1, 1, 1, 1, 2], sampled, [0, 0, -3, 3, 0]
        expected = whole if length != 3 else ([5, 6, 7], [-0.1, -0.2, -0.3], [1, 1, 1], [True] * 3, [0] * 3)
        for (name, dtype), column in zip(TOKEN_FIELDS.items(), expected, strict=True):
            actual = getattr(episode, name)
            assert actual.dtype == dtype
            np.testing.assert_array_equal(actual, np.array(column[:length], dtype))
    assert not np.shares_memory(first.tokens, packed.tokens)


def test_every_request_of_a_sequence_has_its_own_seed() -> None:
    """Equal seeds would repeat the draws in each turn. A resumed run uses the same seeds."""
    prompt = Prompt("", np.array([1, 2]), "", "")
    seeds = {(seed, made): turn_seed(Episode(prompt, seed, 9, [0] * made)) for seed in (5, 6) for made in range(20)}
    assert (seeds[5, 0], seeds[6, 0]) == (5, 6)
    assert len(set(seeds.values())) == len(seeds)
    assert seeds == {(seed, made): turn_seed(Episode(prompt, seed, 9, [1] * made)) for seed, made in seeds}


PROMPT = Prompt("x", np.array([1]), "", "row 0")


@pytest.mark.parametrize("cleans", [False, True])
def test_texts_are_those_of_transformers(cleans: bool) -> None:
    special = {"eos_token": "<eos>", "unk_token": "<unk>"}
    words = [*special.values(), "do", "n't", ".", "1", "é"]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, words[1]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece(cleanup=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special, clean_up_tokenization_spaces=cleans)
    episodes = [Episode(PROMPT, 0, 8, tokens) for tokens in ([2, 3, 4, 0], [], [5, 6])]
    groups = [RolloutGroup(number, 0, part) for number, part in enumerate((episodes[:2], episodes[2:]))]
    actual = [sample.text for sample in samples_of(tokenizer, *groups)]
    assert actual == [tokenizer.decode(episode.tokens, skip_special_tokens=True) for episode in episodes]
    assert samples_of(tokenizer) == []
    assert actual[0] == ("don't." if cleans else "do n't .")


@pytest.mark.parametrize("sampled", [[], [True], [True] * 5, [False, True], [True, False, False, True]])
def test_spans_are_of_turns(sampled: list[bool]) -> None:
    versions = list(range(len(sampled)))
    episode = Episode(PROMPT, 0, 8, versions, [0.0] * len(sampled), versions, sampled)
    runs = [list(run) for _, run in groupby(versions, lambda at: sampled[at])]
    assert episode.spans() == [(run[0], run[-1] + 1) for run in runs]


def test_median_spread_and_share_between_prompts() -> None:
    config = ForcedLengths(median=640, sigma=0.8)
    table = np.log([forced_lengths(config, 0, key, range(key * 100, key * 100 + 30), 10**9) for key in range(500)])
    assert np.exp(np.median(table)) == pytest.approx(640, rel=0.06)
    assert table.std() == pytest.approx(0.8, rel=0.05)
    between = table.mean(axis=1).var() - table.var(axis=1).mean() / 30
    assert between / table.var() == pytest.approx(0.5, abs=0.05)


def test_lengths_follow_the_seed_and_are_bounded() -> None:
    config = ForcedLengths(median=30, sigma=2.0)
    first = forced_lengths(config, 0, 3, range(100), 64)
    assert first == forced_lengths(config, 0, 3, range(100), 64) != forced_lengths(config, 0, 4, range(100), 64)
    assert min(first) >= 1 and max(first) == 64


ROWS = [
    FinishedRequest(9, [4, 5, 6], [-1.0, -2.0, -0.5], [0, 0, 1], "length"),
    FinishedRequest(2, [7], [-0.25], [1], "stop"),
]
RUNNING = [RequestProgress(5, 2, checksum([8, 9])), RequestProgress(3), RequestProgress(4, 1, checksum([8]))]


def generated(**changes: object) -> Generated:
    """Returns the rows with the first one changed."""
    return pack_generated([dataclasses.replace(ROWS[0], **changes), ROWS[1]], RUNNING, engine_steps=4)


def test_rows_are_sorted_by_id() -> None:
    packed = generated()
    assert packed.request_ids.tolist() == [2, 9]
    assert packed.tokens.tolist() == [[7, 0, 0], [4, 5, 6]]
    assert [packed.request(row) for row in range(len(packed))] == [ROWS[1], ROWS[0]]
    assert (packed.unfinished, packed.engine_steps, packed.finish_reasons) == (3, 4, ("stop", "length"))


def test_nothing_finished() -> None:
    packed = pack_generated([], RUNNING, 4)
    assert (len(packed), packed.tokens.shape, packed.unfinished) == (0, (0, 0), 3)
    assert merge_generated([packed, pack_generated([], RUNNING[::-1], 4)]) is packed


def test_equal_parts_merge_in_a_tree_and_survive_pickling() -> None:
    parts = [pickle.loads(pickle.dumps(generated())) for _ in range(4)]  # noqa: S301
    merged = merge_generated([merge_generated(parts[:2]), merge_generated(parts[2:])])
    assert merged.digest == generated().digest
    np.testing.assert_array_equal(merged.tokens, parts[0].tokens)


def test_logprobs_may_differ_in_their_last_bits() -> None:
    assert merge_generated([generated(), generated(logprobs=[-1.0, -2.0, -0.50000006])])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (generated(tokens=[4, 5, 7]), r"9 finished \(length\) with 3 new .*, but finished .*\(part 2 of 3 against part 0\)"),
        (generated(tokens=[4, 5], logprobs=[-1.0, -2.0], versions=[0, 0]), r"request 9 .* 3 new .* 2 new"),
        (generated(versions=[0, 1, 1]), "request 9 finished"),
        (generated(finish_reason="stop"), r"request 9 finished \(length\) .* finished \(stop\)"),
        (generated(request_id=8), r"request 8 is absent, but finished"),
        (pack_generated(ROWS, RUNNING, engine_steps=3), "the engine steps are 4 and 3"),
        (
            pack_generated(ROWS, [RequestProgress(5, 2, checksum([8, 7])), *RUNNING[1:]], 4),
            "request 5 runs with 2 new .*, but runs with 2 new",
        ),
        (
            pack_generated(ROWS, [*RUNNING[:2], RequestProgress(4, 2, checksum([8]))], 4),
            "request 4 runs with 1 new .*, but runs with 2 new",
        ),
        (pack_generated(ROWS, RUNNING[:2], 4), "request 4 runs with .*, but is absent"),
    ],
)
def test_errors_name_the_request_that_differs(other: Generated, message: str) -> None:
    with pytest.raises(RunError, match=message):
        merge_generated([generated(), generated(), other])


def test_checksums_continue() -> None:
    assert checksum([4, 5], checksum([1, 2, 3])) == checksum([1, 2, 3, 4, 5]) != checksum([1, 2, 3, 5, 4])


def test_engine_steps_of_all_shards_or_per_shard() -> None:
    rows = Batch({"lengths": np.zeros(0, np.int64)})
    assert [quantum_steps(rows.with_scalars(engine_steps=5), shard) for shard in range(3)] == [5, 5, 5]
    assert [quantum_steps(rows.with_scalars(engine_steps=(1, 2, 0)), shard) for shard in range(3)] == [1, 2, 0]
    assert quantum_steps(rows, 1) == FIRST_QUANTUM
