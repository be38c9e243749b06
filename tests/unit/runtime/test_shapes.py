"""Batches, buckets and splits: any rows come back as they were sent, and shards get equal shares."""

import warnings
from collections import defaultdict
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, strategies as st

from dagrl.errors import DataError, LayoutError
from dagrl.runtime.layout import Coordinates, ParallelLayout
from dagrl.runtime.shapes import Batch, Bucket, Field, choose_bucket, empty_batch, pad_rows, padding_share
from dagrl.runtime.split import Split, split_rows

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=60)
BUCKETS = st.lists(st.builds(Bucket, st.integers(1, 64), st.integers(1, 64)), min_size=1, max_size=6)


def ragged(lengths: list[int], width: int | None = None) -> Batch:
    """Rows whose entries are all different, zeros past each row's length."""
    width = max(lengths) if width is None else width
    tokens = np.zeros((len(lengths), width), np.int64)
    for row, length in enumerate(lengths):
        tokens[row, :length] = 1 + 100 * row + np.arange(length)
    logprobs = -tokens.astype(np.float32)
    ids = np.arange(len(lengths)) * 7
    return Batch({"tokens": tokens, "logprobs": logprobs, "ids": ids, "lengths": np.array(lengths)}, {"lr": 0.1})


def assert_equal(ours: Batch, theirs: Batch) -> None:
    assert ours.fields.keys() == theirs.fields.keys()
    assert ours.scalars == theirs.scalars
    for name in ours.fields:
        np.testing.assert_array_equal(ours[name], theirs[name], strict=True)


# Padding and selecting.


def padded_to(bucket: Bucket, batch: Batch) -> Batch:
    return Batch({name: pad_rows(array, bucket) for name, array in batch.fields.items()}, batch.scalars)


@given(LENGTHS, st.integers(0, 9), st.integers(0, 9))
def test_padding_adds_zeros_right_and_below_and_nothing_else(lengths: list[int], rows: int, tokens: int) -> None:
    batch = ragged(lengths)
    bucket = Bucket(len(lengths) + rows, max(lengths) + tokens)
    padded = padded_to(bucket, batch)
    assert (padded.rows, padded.tokens) == (bucket.sequences, bucket.tokens)
    for name, array in batch.fields.items():
        assert padded[name].dtype == array.dtype
        inside = tuple(slice(size) for size in array.shape)
        np.testing.assert_array_equal(padded[name][inside], array)
        assert np.count_nonzero(padded[name]) == np.count_nonzero(array)
    assert padded.scalars == batch.scalars


@given(LENGTHS, st.randoms(use_true_random=False))
def test_selecting_every_row_in_any_order_and_back(lengths: list[int], random: object) -> None:
    batch = ragged(lengths)
    order = list(range(len(lengths)))
    random.shuffle(order)  # type: ignore[attr-defined]
    shuffled = batch.select(order)
    assert shuffled["ids"].tolist() == [7 * row for row in order]
    assert_equal(shuffled.select(np.argsort(order)), batch)
    assert batch.select([]).rows == 0


def test_batches_of_unequal_fields_are_refused() -> None:
    with pytest.raises(DataError, match=r"a batch needs the field 'lengths' \[rows\]; found \['tokens'\]"):
        Batch({"tokens": np.zeros((2, 3))})
    with pytest.raises(DataError, match="field 'tokens' has 3 rows, but 'lengths' has 2"):
        Batch({"tokens": np.zeros((3, 3)), "lengths": np.zeros(2)})
    with pytest.raises(DataError, match=r"'states' has 3 dimensions; fields are numpy arrays \[rows\] or \[rows, tokens\]"):
        Batch({"states": np.zeros((2, 3, 4)), "lengths": np.zeros(2)})
    with pytest.raises(DataError, match="'lengths' has 0 dimensions"):
        Batch({"lengths": np.array(3)})
    with pytest.raises(DataError, match="'lengths' has the type list"):
        Batch({"lengths": [1, 2]})  # type: ignore[dict-item]
    with pytest.raises(DataError, match=r"a batch has no field 'token'; it has lengths, tokens\. .* `inputs`"):
        Batch({"lengths": np.zeros(2), "tokens": np.zeros((2, 3))})["token"]


def test_fields_and_scalars_are_added_to_a_copy() -> None:
    batch = ragged([1, 2])
    more = batch.with_fields(mask=np.ones(2)).with_scalars(step=3)
    assert (set(more.fields) - set(batch.fields), more.scalars) == ({"mask"}, {"lr": 0.1, "step": 3})
    assert "step" not in batch.scalars


def test_warmup_batches_are_full() -> None:
    spec = {"tokens": Field("int64"), "ids": Field("int32", "row"), "lengths": Field("int64", "row")}
    batch = empty_batch(spec, Bucket(3, 5), {"lr": 1.0})
    found = {name: (array.shape, str(array.dtype)) for name, array in batch.fields.items()}
    assert found == {"tokens": ((3, 5), "int64"), "ids": ((3,), "int32"), "lengths": ((3,), "int64")}
    assert batch["lengths"].tolist() == [5, 5, 5]
    assert batch.scalars == {"lr": 1.0}
    assert set(batch["tokens"].flat) == {1}


@pytest.mark.parametrize("token_ids", [1, 2, 300, 151_936])
def test_tokens_of_warmup_batches_are_spread_over_the_vocabulary(token_ids: int) -> None:
    spec = {"tokens": Field("int32"), "lengths": Field("int64", "row")}
    tokens, again = (empty_batch(spec, Bucket(64, 300), token_ids=token_ids)["tokens"] for _ in range(2))
    np.testing.assert_array_equal(tokens, again)
    assert (tokens.shape, tokens.dtype.name) == ((64, 300), "int32")
    assert tokens.min() >= 0 and tokens.max() < token_ids
    counts = np.unique(tokens, return_counts=True)[1]
    assert len(counts) >= 0.9 * min(token_ids, tokens.size), "nearly all ids, or nearly all tokens different"
    assert counts.max() <= 2 * max(tokens.size / token_ids, 4)


# Choosing a bucket.


@given(BUCKETS, st.integers(0, 64), st.integers(0, 64))
def test_the_chosen_bucket_fits_and_none_that_fits_is_smaller(buckets: list[Bucket], rows: int, tokens: int) -> None:
    fitting = [bucket for bucket in buckets if bucket.sequences >= rows and bucket.tokens >= tokens]
    if not fitting:
        words = (
            rf"no bucket holds {rows} rows of {tokens} tokens on one shard; the largest is .* larger one, Scheduler\.add\("
        )
        with pytest.raises(DataError, match=words):
            choose_bucket(buckets, rows, tokens)
        return
    chosen = choose_bucket(buckets, rows, tokens)
    assert chosen in fitting
    assert chosen.sequences * chosen.tokens == min(bucket.sequences * bucket.tokens for bucket in fitting)
    assert chosen == choose_bucket(list(reversed(buckets)), rows, tokens)


# Splitting over shards.


@given(LENGTHS, st.integers(1, 8), st.integers(1, 6))
def test_every_row_is_on_one_shard_and_shards_get_equal_counts(lengths: list[int], shards: int, together: int) -> None:
    parts = split_rows(np.array(lengths), shards, together)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(lengths)))
    assert all(part.tolist() == sorted(part.tolist()) for part in parts)
    counts = [len(part) for part in parts]
    assert len(counts) == shards
    assert max(counts) - min(counts) <= 1


@given(st.lists(st.integers(0, 40), min_size=1, max_size=60), st.integers(1, 8))
def test_shards_differ_by_at_most_the_longest_row(lengths: list[int], shards: int) -> None:
    lengths += [0] * (-len(lengths) % shards)  # with a row more, a shard may have one row's tokens more
    tokens = [int(np.array(lengths)[part].sum()) for part in split_rows(np.array(lengths), shards)]
    assert max(tokens) - min(tokens) <= max(lengths)


@pytest.mark.parametrize(
    ("rows", "shards", "together", "kept"), [(64, 2, 8, 8), (64, 4, 8, 4), (12, 3, 8, 2), (10, 4, 2, 1)]
)
def test_groups_stay_together_in_parts_that_can_be_balanced(rows: int, shards: int, together: int, kept: int) -> None:
    parts = split_rows(np.random.default_rng(0).integers(1, 513, rows), shards, together)
    shard_of = np.zeros(rows, int)
    for shard, part in enumerate(parts):
        shard_of[part] = shard
    neighbours = shard_of.reshape(-1, kept)
    assert (neighbours == neighbours[:, :1]).all()


def test_many_random_rows_are_balanced_within_a_percent() -> None:
    lengths = np.random.default_rng(0).integers(1, 513, 512)
    tokens = [int(lengths[part].sum()) for part in split_rows(lengths, 8)]
    assert max(tokens) <= 1.01 * sum(tokens) / 8


@given(LENGTHS, st.integers(1, 6), st.integers(0, 3), st.integers(0, 5), st.integers(0, 5))
def test_split_pad_and_restore_give_rows_back(lengths: list[int], shards: int, rows: int, tokens: int, spare: int) -> None:
    """Columns past the bucket are cut for the replay. The result holds every token."""
    batch, longest = ragged(lengths, width=max(lengths) + spare), max(lengths)
    parts = split_rows(batch["lengths"].astype(np.int64), shards)
    bucket = Bucket(max(len(part) for part in parts) + rows, longest + tokens)
    split = Split(tuple(parts), bucket, batch.tokens)
    shares = [split.share(batch, shard) for shard in range(shards)]
    for share, part in zip(shares, parts, strict=True):
        assert_equal(share, padded_to(bucket, ragged(lengths).select(part)))
    assert_equal(split.restore(shares), ragged(lengths, width=longest + min(tokens, spare)))


def test_padding_share_counts_every_slot() -> None:
    lengths: npt.NDArray[np.int64] = np.array([4, 2, 2])
    assert padding_share(lengths, Bucket(2, 4), shards=2) == pytest.approx(0.5)
    assert padding_share(np.array([4, 4]), Bucket(2, 4), shards=1) == 0.0


@given(st.lists(st.integers(0, 40), min_size=1, max_size=40))
def test_of_as_many_rows_as_shards_the_longest_goes_first(lengths: list[int]) -> None:
    longest_first = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    assert [part.tolist() for part in split_rows(np.array(lengths), len(lengths))] == [[row] for row in longest_first]


# Layouts against Megatron-Core's `RankGenerator`: the place of every rank in its groups, for any sizes.


with suppress(ImportError), warnings.catch_warnings():  # here, as 0.19 starts a process on its first import
    warnings.simplefilter("ignore")
    import megatron.core.parallel_state  # noqa: F401

ORDER = "tp-cp-ep-dp-pp"  # the default of megatron.core.parallel_state.initialize_model_parallel


@st.composite
def layouts(draw: st.DrawFn) -> ParallelLayout:
    dp, pp, tp, cp = draw(st.tuples(*[st.integers(1, 4)] * 4))
    stage = dp * tp * cp
    etp = draw(st.none() | st.sampled_from([size for size in range(1, stage + 1) if stage % size == 0]))
    per_expert = stage // (tp if etp is None else etp)
    ep = draw(st.sampled_from([size for size in range(1, per_expert + 1) if per_expert % size == 0]))
    vpp = draw(st.sampled_from([1, 2, 3])) if pp > 1 else 1
    return ParallelLayout(dp=dp, pp=pp, tp=tp, cp=cp, ep=ep, etp=etp, vpp=vpp)


def rank_generator(**sizes: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = pytest.importorskip("megatron.core.parallel_state")
    return state.RankGenerator(**sizes, order=ORDER)


def dense_generator(layout: ParallelLayout) -> Any:
    """As `initialize_model_parallel` makes it for dense weights."""
    return rank_generator(tp=layout.tp, ep=1, dp=layout.dp, pp=layout.pp, cp=layout.cp)


def expert_generator(layout: ParallelLayout) -> Any:
    """As `initialize_model_parallel` makes it for experts: no context parallelism, data parallel with what is left."""
    etp = layout.tp if layout.etp is None else layout.etp
    edp = layout.world_size // (etp * layout.ep * layout.pp)
    return rank_generator(tp=etp, ep=layout.ep, dp=edp, pp=layout.pp, cp=1)


@given(layouts())
def test_a_coordinate_is_the_position_in_megatrons_group(layout: ParallelLayout) -> None:
    megatron, experts = dense_generator(layout), expert_generator(layout)
    assert megatron.world_size == layout.world_size
    found: dict[int, dict[str, int]] = defaultdict(dict)
    dense, of_experts = {name: name for name in ("tp", "cp", "dp", "pp")}, {"tp": "etp", "ep": "ep", "dp": "edp"}
    for generator, names in ((megatron, dense), (experts, of_experts)):
        for token, name in names.items():
            for group in generator.get_ranks(token):
                for position, rank in enumerate(group):
                    found[rank][name] = position
    for rank in range(layout.world_size):
        assert layout.coordinates(rank) == Coordinates(**found[rank])
    assert all(layout.rank(**{name: at[name] for name in dense}) == rank for rank, at in found.items())


@given(layouts())
def test_a_shard_is_megatrons_model_parallel_group_stage_by_stage(layout: ParallelLayout) -> None:
    shards = [layout.shard(dp) for dp in range(layout.dp)]
    assert sorted(map(sorted, shards)) == sorted(dense_generator(layout).get_ranks("tp-cp-pp"))
    for dp, shard in enumerate(shards):
        assert len(shard) == layout.shard_size
        assert all(layout.coordinates(rank).dp == dp for rank in shard)
        stages = [layout.coordinates(rank).pp for rank in shard]
        assert stages == sorted(stages)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"dp": 0}, "dp is 0"),
        ({"tp": -1}, "tp is -1"),
        ({"etp": 0}, "etp is 0"),
        ({"tp": 2, "dp": 2, "ep": 3}, "etp 2 x ep 3 does not divide the 4 workers"),
        ({"tp": 2, "etp": 4}, "etp 4 x ep 1 does not divide the 2 workers"),
        ({"vpp": 2}, "vpp is 2 but pp is 1"),
    ],
)
def test_sizes_that_do_not_fit_are_named(sizes: dict[str, int], words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        ParallelLayout(**sizes)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_is_refused(rank: int) -> None:
    with pytest.raises(LayoutError, match=f"rank {rank} is outside a layout of 4 workers"):
        ParallelLayout(dp=2, tp=2).coordinates(rank)


def test_description_names_the_sizes_that_matter() -> None:
    assert ParallelLayout().describe() == "single"
    assert ParallelLayout(dp=2, pp=2, tp=2, vpp=2).describe() == "dp2 pp2 tp2 vpp2"
    assert ParallelLayout(dp=2, tp=2, ep=2, etp=1).describe() == "dp2 tp2 ep2 etp1"
