"""Episodes, requests and groups: tokens, texts, dispatch to shards, order of training, records of rollouts and experts."""

import dataclasses
import pickle
from itertools import groupby, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dagrl.config import ForcedLengths
from dagrl.data.tokenization import Prompt
from dagrl.errors import ConfigError, RunError
from dagrl.rl import generation
from dagrl.rl.environments import FAILED
from dagrl.rl.generation import FIRST_QUANTUM, FinishedRequest, RequestProgress, checksum, merge_generated, pack_generated
from dagrl.rl.rewards import Rewards
from dagrl.rl.rollout import episodes as of_episodes
from dagrl.rl.rollout.episodes import Episode, RolloutGroup, Sample, forced_lengths, samples_of
from dagrl.rl.rollout.experience import TrajectoryBuffer
from dagrl.rl.rollout.record import TokenTexts, rollout_rows, untrained_rows
from dagrl.rl.rollout.rollouts import QuantumSize, ShardLoad, dispatch
from dagrl.rl.rollout.scoring import TRAIN, ScoredGroup, Untrained, valid_samples
from dagrl.rl.routed_experts import MISSING, RoutedLayers, field_bytes, field_of, join_records, routed_layers
from dagrl.runtime.edges.packet import encoded
from dagrl.runtime.shapes import Batch, Bucket, Field, check_batch, field_types
from dagrl.runtime.split import Split
from tests.unit.data.test_data import byte_tokenizer

PROMPT = Prompt("x", np.array([1]), "", "row 0")
WORDS = ["do", "n't", ".", "\u65e5", "", "\u2581do", "\u2581", "<0xE6>", "<0x97>", "<0xA5>"]
GEMMA = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
PLAIN = [decoders.WordPiece(cleanup=False), None, decoders.Fuse(), decoders.ByteLevel(), decoders.Metaspace()]
DECODERS = [*PLAIN, *map(decoders.Sequence, (GEMMA, [*GEMMA, decoders.Strip(" ", 1, 0)], GEMMA[1:]))]


def test_all_columns_follow_every_change() -> None:
    made = FinishedRequest(0, [5, 6, 7], [-0.1, -0.2, -0.3], [1, 1, 1], "stop")
    packed = pack_generated([made, FinishedRequest(1, [8], [-1.5], [2], "stop")], [], 3)
    first, second = packed.requests()
    episode = Episode(Prompt("p", np.array([7]), "", ""), 0, 8)
    changes = (
        lambda: episode.append(first),
        lambda: episode.answer([9, 9], np.array([-3, 3])),
        lambda: episode.append(second),
    )
    for change, length in zip(changes, (3, 5, 6), strict=True):
        change()
        sampled = [True, True, True, False, False, True]
        logprobs, media = [-0.1, -0.2, -0.3, 0.0, 0.0, -1.5], [0, 0, 0, -3, 3, 0]
        expected = [5, 6, 7, 9, 9, 8], logprobs, [1, 1, 1, 1, 1, 2], sampled, media
        for (name, dtype), column in zip(of_episodes.TOKEN_FIELDS.items(), expected, strict=True):
            actual = getattr(episode, name)
            assert actual.dtype == dtype
            np.testing.assert_array_equal(actual, np.array(column[:length], dtype))
    assert not np.shares_memory(first.tokens, packed.tokens)


def test_every_request_of_a_sequence_has_its_own_seed() -> None:
    """Equal seeds would repeat the draws in each turn. A resumed run uses the same seeds."""
    seed_of, each = of_episodes.turn_seed, list(product((5, 6), range(20)))
    seeds = {(seed, made): seed_of(Episode(PROMPT, seed, 9, [0] * made)) for seed, made in each}
    assert (seeds[5, 0], seeds[6, 0]) == (5, 6) and len(set(seeds.values())) == len(seeds)
    assert seeds == {(seed, made): seed_of(Episode(PROMPT, seed, 9, [1] * made)) for seed, made in each}


@pytest.mark.parametrize("model", [models.WordLevel, models.BPE])  # whose spaces transformers does not clean up
@pytest.mark.parametrize("decoder", DECODERS)
def test_texts_are_those_of_transformers(decoder: decoders.Decoder | None, model: type[Any]) -> None:
    """Also those of parts of characters, of special and added tokens, and of ids that no token has."""
    special = {"eos_token": "<eos>", "unk_token": "<unk>"}
    words = [*special.values(), *WORDS, *sorted({*pre_tokenizers.ByteLevel.alphabet()} - {"."})]
    vocabulary, bpe = {word: 2 * number for number, word in enumerate(words)}, model is models.BPE
    backend = Tokenizer(model(vocabulary, *([[]] if bpe else []), unk_token=words[1]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoder
    backend.add_tokens(["<a b>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special, clean_up_tokenization_spaces=bpe or not decoder)
    made = np.random.default_rng(0).integers(0, 2 * len(words) + 9, (50, 80))
    episodes = [Episode(PROMPT, 0, 8, tokens) for tokens in ([4, 6, 8, 0], [14, 6], [], *made.tolist())]
    groups = [RolloutGroup(number, 0, part) for number, part in enumerate((episodes[:2], episodes[2:]))]
    for later in ([], ["<a b>", "<new>"]):  # one becomes special
        tokenizer.add_tokens(later, special_tokens=True)
        actual = [sample.text for sample in samples_of(tokenizer, *groups)]
        assert actual == [tokenizer.decode(episode.tokens, skip_special_tokens=True) for episode in episodes]
    assert samples_of(tokenizer) == []
    assert actual[0] == ("do n't ." if isinstance(decoder, decoders.WordPiece) or (decoder is None and bpe) else "don't.")


@pytest.mark.parametrize("sampled", [[], [True], [True] * 5, [False, True], [True, False, False, True]])
def test_spans_are_of_turns(sampled: list[bool]) -> None:
    versions = list(range(len(sampled)))
    episode = Episode(PROMPT, 0, 8, versions, [0.0] * len(sampled), versions, sampled)
    runs = [list(run) for _, run in groupby(versions, lambda at: sampled[at])]
    assert episode.spans() == [(run[0], run[-1] + 1) for run in runs]


def test_lengths_follow_the_seed_with_a_median_a_spread_and_a_share_between_prompts() -> None:
    config = ForcedLengths(median=640, sigma=0.8)
    table = np.log([forced_lengths(config, 0, key, range(key * 100, key * 100 + 30), 10**9) for key in range(500)])
    assert np.exp(np.median(table)) == pytest.approx(640, rel=0.06)
    assert table.std() == pytest.approx(0.8, rel=0.05)
    between = table.mean(axis=1).var() - table.var(axis=1).mean() / 30
    assert between / table.var() == pytest.approx(0.5, abs=0.05)
    config = ForcedLengths(median=30, sigma=2.0)
    first = forced_lengths(config, 0, 3, range(100), 64)
    assert first == forced_lengths(config, 0, 3, range(100), 64) != forced_lengths(config, 0, 4, range(100), 64)
    assert min(first) >= 1 and max(first) == 64


ROWS = [
    FinishedRequest(9, [4, 5, 6], [-1.0, -2.0, -0.5], [0, 0, 1], "length"),
    FinishedRequest(2, [7], [-0.25], [1], "stop"),
]
RUNNING = [RequestProgress(5, 2, checksum([8, 9])), RequestProgress(3), RequestProgress(4, 1, checksum([8]))]


def generated(**changes: object) -> generation.Generated:
    return pack_generated([dataclasses.replace(ROWS[0], **changes), ROWS[1]], RUNNING, engine_steps=4)


def running(*progress: RequestProgress) -> generation.Generated:
    return pack_generated(ROWS, progress, 4)


def test_rows_are_sorted_by_id() -> None:
    packed = generated()
    assert packed.request_ids.tolist() == [2, 9]
    assert packed.tokens.tolist() == [[7, 0, 0], [4, 5, 6]]
    assert [packed.request(row) for row in range(len(packed))] == [ROWS[1], ROWS[0]]
    assert (packed.unfinished, packed.engine_steps, packed.finish_reasons) == (3, 4, ("stop", "length"))
    none = pack_generated([], RUNNING, 4)
    assert (len(none), none.tokens.shape, none.unfinished) == (0, (0, 0), 3)
    assert merge_generated([none, pack_generated([], RUNNING[::-1], 4)]) is none


def test_equal_parts_merge_in_a_tree_and_survive_pickling() -> None:
    parts = [pickle.loads(pickle.dumps(generated())) for _ in range(4)]  # noqa: S301
    merged = merge_generated([merge_generated(parts[:2]), merge_generated(parts[2:])])
    assert merge_generated([generated(), generated(logprobs=[-1.0, -2.0, -0.50000006])]), "their last bits may differ"
    np.testing.assert_array_equal(merged.tokens, parts[0].tokens)
    assert checksum([4, 5], checksum([1, 2, 3])) == checksum([1, 2, 3, 4, 5]) != checksum([1, 2, 3, 5, 4])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (generated(tokens=[4, 5, 7]), r"9 finished \(length\) with 3 new .*, but finished .*\(part 2 of 3 against part 0\)"),
        (generated(tokens=[4, 5], logprobs=[-1.0, -2.0], versions=[0, 0]), r"request 9 .* 3 new .* 2 new"),
        (generated(versions=[0, 1, 1]), "request 9 finished"),
        (generated(finish_reason="stop"), r"request 9 finished \(length\) .* finished \(stop\)"),
        (generated(request_id=8), r"request 8 is absent, but finished"),
        (pack_generated(ROWS, RUNNING, engine_steps=3), "the engine steps are 4 and 3"),
        (running(RequestProgress(5, 2, checksum([8, 7])), *RUNNING[1:]), "request 5 runs with 2 .*, but runs with 2 new"),
        (running(*RUNNING[:2], RequestProgress(4, 2, checksum([8]))), "request 4 runs with 1 new .*, but runs with 2 new"),
        (running(*RUNNING[:2]), "request 4 runs with .*, but is absent"),
    ],
)
def test_errors_name_the_request_that_differs(other: generation.Generated, message: str) -> None:
    with pytest.raises(RunError, match=message):
        merge_generated([generated(), generated(), other])


def test_engine_steps_of_all_shards_or_per_shard() -> None:
    rows = Batch({"lengths": np.zeros(0, np.int64)})
    for wanted, steps in ((5, [5, 5, 5]), ((1, 2, 0), [1, 2, 0])):
        assert [generation.quantum_steps(rows.with_scalars(engine_steps=wanted), shard) for shard in range(3)] == steps
    assert generation.quantum_steps(rows, 1) == FIRST_QUANTUM


def test_a_slow_group_is_waited_for_in_its_last_step() -> None:
    """One group per step, ages up to 1. Group 0 is slow: group 1 may pass it once, then training waits."""
    buffer: TrajectoryBuffer[str] = TrajectoryBuffer(groups_per_step=1, max_age_steps=1)
    slow, quick = buffer.start(), buffer.start()
    assert buffer.room() == 0
    buffer.finish(quick, "quick")
    assert [group.number for group in buffer.take() or ()] == [quick]
    buffer.advance(1)
    later = buffer.start()
    buffer.finish(later, "later")
    assert buffer.take() is None, "taking group 2 now would leave group 0 for version 2, at age 2"
    buffer.finish(slow, "slow")
    assert [group.number for group in buffer.take() or ()] == [slow]


def test_finished_groups_are_taken_and_listed_by_number() -> None:
    buffer: TrajectoryBuffer[str] = TrajectoryBuffer(groups_per_step=2, max_age_steps=1)
    for number in reversed([buffer.start() for _ in range(4)]):
        buffer.finish(number, "")
    assert [group.number for group in buffer.take() or ()] == [0, 1]
    assert [group.number for group in buffer.finished()] == [2, 3]


TOKENIZER = byte_tokenizer("")


def test_texts_join_to_the_whole() -> None:
    for text in ("x = 1", "größer", "日本", "a😀b", "é😀é"):
        tokens = TOKENIZER.encode(text, add_special_tokens=False)
        actual = TokenTexts(TOKENIZER)(tokens)
        assert len(actual) == len(tokens) == len(text.encode()) and "".join(actual) == text
        assert text != "a😀b" or actual == ["a", "😀", "", "", "", "b"]


def scored(*reasons: str, answered: tuple[bool, ...]) -> ScoredGroup:
    completions = [Episode(PROMPT, 0, 8, [2], [-0.5], [0], [True], reason, turns=1) for reason in reasons]
    samples = [Sample(PROMPT, episode, "x") for episode in completions]
    values = np.arange(1, len(completions) + 1).astype(np.float32)
    rewards = Rewards(values, np.array(answered), "ValueError: no")
    return ScoredGroup(RolloutGroup(0, 0, completions), samples, rewards, values, valid_samples(rewards, samples))


def test_samples_that_are_not_trained_on_are_marked() -> None:
    group = scored("stop", "length", "stop", FAILED, answered=(True, True, False, True))
    mask = np.array([[0, 1], [0, 0], [0, 0], [0, 0]], np.float32)  # the second is filtered for its length
    columns = {"loss_mask": mask, "advantages": 3 * mask, "row_ids": np.arange(4), "lengths": np.full(4, 2)}
    rows = rollout_rows([group], Batch(columns), {}, 5, TokenTexts(TOKENIZER))
    found = [(row["dropped"], row["valid"], row["failure"], row["advantage"]) for row in rows]
    whole, failed = ("", True, "", 3), ("no_reward", False, "ValueError: no", 0)
    assert found == [whole, ("overlong", False, "", 0), failed, ("failed", False, "", 0)]
    assert {(row["split"], len(row["conversations"])) for row in rows} == {("train", 0)}
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


@pytest.mark.parametrize(("first", "last"), [([0.5], [1.0]), ([1.0], []), ([None], [1.0])])
def test_turns_have_the_rewards_of_the_environment(first: list[float | None], last: list[float]) -> None:
    group = scored("stop", answered=(True,))
    (episode,) = group.group.episodes
    episode.tokens, episode.sampled = np.array([2, 3, 4]), np.array([True, False, True])
    episode.logprobs, episode.versions, episode.turn_rewards = np.zeros(3), np.zeros(3, np.int64), [*first, *last]
    (row,) = untrained_rows([Untrained(group)], 5, TokenTexts(TOKENIZER))
    assert [turn["reward"] for turn in row["turns"]] == [*first, None, *(last or [None])]


def record(tokens: int, size: int = 6, seed: int = 0) -> np.ndarray:
    """Returns bytes with zeros at the ends of tokens, which numpy's strings would hide."""
    expected = np.random.default_rng(seed).integers(0, 3, (tokens, size)).astype(np.uint8)
    expected[:, -2:] = 0
    return expected


def test_the_field_keeps_every_byte_through_padding_and_splitting() -> None:
    records = [record(3, seed=1), record(5, seed=2), record(1, seed=3)]
    batch = Batch({"lengths": np.array([4, 5, 2]), "experts": field_of(records, 5)})
    check_batch("train_step", batch, field_types({"experts": Field(RoutedLayers(3, 4, 2).field_dtype)}))
    split = Split((np.array([0, 2]), np.array([1])), Bucket(2, 8), 5)
    sent = [pickle.loads(pickle.dumps(split.share(batch, shard))) for shard in range(2)]  # noqa: S301
    for (shard, row), expected in zip(((0, 0), (1, 0), (0, 1)), records, strict=True):
        actual = field_bytes(sent[shard]["experts"])[row]
        np.testing.assert_array_equal(actual[: len(expected)], expected)
        assert (actual[len(expected) : 5] == MISSING).all()
    assert encoded(batch) is not None
    with pytest.raises(RunError, match="1 of 2 sequences have no record"):
        field_of([record(2), None], 4)


def test_the_first_record_of_a_token_counts() -> None:
    first, second = record(4, seed=1), record(6, seed=2)
    first[1] = MISSING  # was in a prefix cache
    joined = join_records(first, second)
    np.testing.assert_array_equal(joined, [first[0], second[1], first[2], first[3], second[4], second[5]])
    np.testing.assert_array_equal(join_records(first, second[:2]), [first[0], second[1], first[2], first[3]])
    assert join_records(None, second) is second and join_records(first, None) is first


def test_sizes_are_read_from_the_model() -> None:
    for key, experts, width in (("num_experts", 128, 1), ("num_local_experts", 8, 1), ("n_routed_experts", 256, 2)):
        sizes = routed_layers({"num_hidden_layers": 4, "num_experts_per_tok": 2, key: experts})
        assert sizes == RoutedLayers(4, experts, 2) and sizes.token_bytes == 4 * 2 * width, "two bytes for an id of 256"
    with pytest.raises(ConfigError, match="'qwen3' has no experts to replay or balance"):
        routed_layers({"model_type": "qwen3", "num_hidden_layers": 4})


@settings(deadline=None, max_examples=30)
@given(cohorts=st.lists(st.integers(0, 3), max_size=40), shards=st.integers(1, 4), slots=st.integers(1, 8))
def test_requests_of_lower_cohorts_go_first_and_evenly(cohorts: list[int], shards: int, slots: int) -> None:
    loads = [ShardLoad(slots) for _ in range(shards)]
    sent = dispatch(dict(enumerate(cohorts)), loads)
    ids = [request for shard in sent for request in shard]
    assert len(ids) == len(set(ids)) == min(len(cohorts), shards * slots)
    assert [load.requests for load in loads] == [set(shard) for shard in sent]
    assert max(map(len, sent)) - min(map(len, sent)) <= 1
    order = sorted(range(len(cohorts)), key=lambda request: (cohorts[request], request))
    assert sorted(ids) == sorted(order[: len(ids)])
    loads = [ShardLoad(4, {7, 8, 9}), ShardLoad(0), ShardLoad(4, {6})]  # the shard with the most free slots is filled first
    assert dispatch(dict.fromkeys(range(6), 0), loads) == [[2], [], [0, 1, 3]]


@pytest.mark.parametrize(
    ("seconds", "in_flight", "step_s", "overhead_s", "expected"),
    [
        (1.0, 1, 0.01, 0.000905, 12),  # 0.905 ms is 0.75 % of 120 ms, twelve steps of 10 ms and itself
        (1.0, 1, 0.01, 0.00091, 13),
        (1.0, 1, 0.01, 0.0002, 6),  # and 60 ms are the least
        (1.0, 2, 0.01, 0.002, 27),
        (0.1, 1, 0.01, 0.002, 10),  # the bound on time wins
        (0.1, 2, 0.01, 0.002, 5),  # and is one of all quanta in flight together
        (0.001, 1, 0.01, 0.002, 1),  # but one step there must be
    ],
)
def test_quantum_size(seconds: float, in_flight: int, step_s: float, overhead_s: float, expected: int) -> None:
    size, fixed = QuantumSize(None, seconds, in_flight), QuantumSize(7, seconds, in_flight)
    assert size.next() == (FIRST_QUANTUM,)
    for one in (size, fixed):
        for _ in range(100):
            one.record([8], [8 * step_s], overhead_s)
    longest = max(int(seconds / in_flight / step_s + 1e-9), 1)
    assert size.next() == (expected,) and fixed.next() == fixed.next(long=True) == (7,)
    assert size.next(long=True) == (longest,) and expected <= longest


@pytest.mark.parametrize("mean_s", [0.0005, 0.001, 0.0018])
def test_costly_quanta_are_longer_and_overhead_stays_under_its_share(mean_s: float) -> None:
    """With long-tailed overheads, and every tenth quantum ending early, within 0.5 s."""
    random, size = np.random.default_rng(0), QuantumSize(None, seconds=0.5)
    busy = spent = 0.0
    for number in range(4000):
        (steps,) = size.next()
        completed = 3 if number % 10 == 9 else steps
        overhead = mean_s * float(np.exp(random.normal() - 0.5))
        size.record([completed if completed == steps else 0], [completed * 0.001], overhead)
        if number >= 100:
            busy, spent = busy + completed * 0.001, spent + overhead
    assert 0.005 < spent / (busy + spent) < 0.01


def test_slower_steps_make_quanta_of_fewer_steps() -> None:
    """The clock ends each such quantum with the steps made so far."""
    size = QuantumSize(None, seconds=1.0)
    size.record([100], [0.1], 0.0005)
    assert size.next() == (67,), "of 1 ms"
    for _ in range(60):
        completed = min(*size.next(), 10)  # of 100 ms, within the second
        size.record([completed], [completed * 0.1], 0.0005)
    assert size.next() == (1,)
    assert (size.most_s, QuantumSize(5, seconds=1.0).most_s) == (1.0, None)


def test_quanta_of_unequal_shards_take_the_same_time() -> None:
    """Steps take 10, 7 and 5 ms. The fourth shard has not started and counts as the slowest."""
    taken = [0.01, 0.007, 0.005]
    size = QuantumSize(None, seconds=1.0, in_flight=2, shards=4)
    seconds = np.zeros(3)
    for _ in range(100):
        steps = size.next()
        seconds += np.multiply(steps[:3], taken)
        size.record([*steps[:3], 0], [*np.multiply(steps[:3], taken), 0.0], 0.0002)
    assert steps[0] == steps[3] == 6 and steps[2] == 12, "60 ms each"
    assert seconds[1:] == pytest.approx(seconds[0], rel=0.02), "also where a step is no whole part of a quantum"
    assert max(size.left_s.values()) <= max(taken), "what is left of a quantum is less than a step"


@pytest.mark.parametrize(
    ("seconds", "step_s", "steps"), [(0.25, [0.1, 0.02], (2, 10)), (0.05, [0.1, 0.02], (1, 2)), (0.25, [0.25, 0.2], (1, 1))]
)
def test_the_bound_limits_all_shards_to_the_time_of_the_slowest(seconds: float, step_s: Any, steps: Any) -> None:
    """Steps of 100 and 20 ms: both get 200 of 250 ms. A single step of 100 ms may exceed the bound.

    Time left over by one quantum does not extend the next beyond it.
    """
    size = QuantumSize(None, seconds=2 * seconds, in_flight=2, shards=2)
    for _ in range(20):
        size.record([1, 1], step_s, 0.01)
        assert size.next() == steps


def test_quanta_are_whole_bursts_of_an_engine_whose_short_bursts_are_slow() -> None:
    """A burst takes 25 ms of bookkeeping or 3.5 ms a step, whichever is longer: quanta of few steps stay slow."""
    size = QuantumSize(None, seconds=0.5, in_flight=2, burst=16)
    size.record([2], [0.05], 0.0002)  # while prompts were computed
    made = []
    for _ in range(60):
        (steps,) = size.next()
        lengths = [16] * (steps // 16) + [steps % 16] * (steps % 16 > 0)
        size.record([steps], [sum(max(0.025, 0.0035 * length) for length in lengths)], 0.0002)
        made.append(steps)
    assert set(made[-20:]) <= {16, 32} and size.step_s[0] == pytest.approx(0.0035, rel=0.1)


def test_a_shard_that_ended_early_does_not_count_as_slow() -> None:
    size = QuantumSize(None, seconds=1.0, in_flight=1, shards=2)
    size.record([10, 10], [0.1, 0.1], 0.0002)
    for _ in range(50):
        size.record([10, 0], [0.1, 0.03], 0.0002)
    assert size.next() == (6, 6)
    for _ in range(50):
        size.record([10, 10], [0.0, 0.1], 0.0002)
    assert size.next() == (6, 6), "a time of zero says nothing"
    size.record([0, 0], [0.1, 0.1], 5.0)
    assert size.next() == (6, 6), "nor does what it cost to start one without steps"
