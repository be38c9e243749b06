"""Microbatches against their batch, packing against its definition, and segments under context parallelism."""

from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from dagrl.errors import DataError
from dagrl.rl.routed_experts import RoutedLayers
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.shapes import Batch
from dagrl.workers.train.microbatches import Microbatch, RoutedModel, make_segments, split_batch, warmup_batches
from dagrl.workers.train.row_plans import ParallelRank, SplitRule, largest, pack, prefix_groups, row_widths, spread

WIDTH = 24
RULES = {
    "rows": SplitRule(False, 2, 48),
    "packed": SplitRule(True, 2, 48),
    "runs of rows": SplitRule(False, 2, 48, by_row=True),
    "runs of packed rows": SplitRule(True, 2, 48, by_row=True),
}


def make_batch(lengths: list[int]) -> Batch:
    """Returns a batch whose tokens all differ, and whose fields identify the token they belong to."""
    rows = np.arange(len(lengths))[:, None]
    positions = np.arange(WIDTH)[None, :]
    inside = positions < np.array(lengths)[:, None]
    tokens = (1 + rows * WIDTH + positions) * inside
    mask = (inside & (positions > 0) & ((tokens + rows) % 3 > 0)).astype(np.float32)
    fields = {"tokens": tokens, "lengths": np.array(lengths), "loss_mask": mask, "advantages": tokens.astype(np.float32)}
    return Batch(fields)


def place(cp: int = 1, rank: int = 0, tp: int = 1, pp: int = 1, vpp: int = 1) -> ParallelRank:
    layout = ParallelLayout(cp=cp, tp=tp, pp=pp, vpp=vpp)
    return ParallelRank(layout, layout.coordinates(rank * tp), None, None, torch.device("cpu"))


@pytest.mark.parametrize("kind", sorted(RULES))
def test_the_output_layer_gets_the_tokens_of_the_loss_mask_alone(kind: str) -> None:
    batch = make_batch([0, 5, WIDTH, 1, 11])
    for item in split_batch(batch, RULES[kind], place()).items:
        inside = item.data["loss_mask"].flatten().nonzero().flatten()
        assert item.scored is not None and item.scored.tolist() == (inside.tolist() or [0])
    nothing = batch.with_fields(loss_mask=np.zeros_like(batch["loss_mask"]))
    for masked, expected in ((True, [[0]]), (False, [None])):
        cut = split_batch(nothing, SplitRule(False, 9, 0), place(), masked=masked)
        assert [None if item.scored is None else item.scored.tolist() for item in cut.items] == expected


def attended(microbatch: Microbatch) -> list[list[int]]:
    """Returns the tokens that each token of a microbatch sees, by its segments (single worker)."""
    flat = microbatch.tokens.flatten().tolist()
    if microbatch.segments is None:
        width = microbatch.tokens.shape[1]
        return [flat[index // width * width : index + 1] for index in range(len(flat))]
    seen: list[list[int]] = []
    starts = list(accumulate(microbatch.segments.query_lengths, initial=0))
    for segment, (start, stop) in enumerate(pairwise(starts)):
        head = microbatch.segments.heads[segment] if microbatch.segments.heads else -1
        before = flat[starts[head] : starts[head + 1]] if head >= 0 else []
        seen += [before + flat[start : place + 1] for place in range(start, stop)]
    assert starts[-1] == len(flat)
    return seen


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(0, WIDTH), min_size=1, max_size=9),
    st.sampled_from(sorted(RULES)),
    st.sampled_from([(1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 2, 2), (4, 2, 1, 1)]),
)
def test_every_token_is_trained_once(lengths: list[int], kind: str, sizes: tuple[int, int, int, int]) -> None:
    cp, tp, pp, vpp = sizes
    batch = make_batch(lengths)
    found: list[int] = []
    for rank in range(cp):
        cut = split_batch(batch, RULES[kind], place(cp, rank, tp, pp, vpp))
        assert len(cut.items) % (pp if vpp > 1 else 1) == 0
        assert cut.processed == sum(item.tokens.numel() for item in cut.items)
        if cp == 1:
            values = cut.assemble([item.labels.float() for item in cut.items])
            np.testing.assert_array_equal(values.numpy(), batch["tokens"] * (np.arange(WIDTH) > 0))
        for item in cut.items:
            assert item.tokens.shape[1] % tp == 0
            if RULES[kind].by_row and cp > 1:
                assert item.row_positions is not None
                assert torch.equal(item.row_positions.chunk(cp, 1)[rank], item.positions)
                assert item.segments is None or sum(item.segments.query_lengths) == item.row_positions.numel()
            targets = item.targets.flatten()
            real = targets < batch.rows * WIDTH
            found += targets[real].tolist()
            label = torch.from_numpy(batch["tokens"]).flatten()[targets[real]]
            assert torch.equal(item.labels.flatten()[real], label)
            assert torch.equal(item.tokens.flatten()[real], label - 1)  # the token before it
            assert torch.equal(item.positions.flatten()[real], (label - 2) % WIDTH)
            assert torch.equal(item.data["advantages"].flatten()[real], label.float())
            inside = torch.from_numpy(batch["loss_mask"]).flatten()[targets[real]]
            assert torch.equal(item.data["loss_mask"].flatten()[real], inside)
            assert not item.data["loss_mask"].flatten()[~real].any()
            assert item.data["sequence_ids"].flatten()[real].tolist() == (targets[real] // WIDTH).tolist()
            assert (item.labels.flatten()[~real] == 0).all()
            if cp == 1:
                seen = [tokens for tokens, inside in zip(attended(item), real.tolist(), strict=True) if inside]
                own = item.tokens.flatten()[real].tolist()
                assert seen == [[*range(1 + (token - 1) // WIDTH * WIDTH, token + 1)] for token in own], "its own sequence"
    expected = [row * WIDTH + at for row, length in enumerate(lengths) for at in range(1, length)]
    assert sorted(found) == expected


@pytest.mark.parametrize(
    ("rows", "limit", "pp", "shape", "count"),
    [
        *((4, 8, 1, 4, 1), (10, 8, 1, 5, 2), (16, 8, 1, 8, 2), (9, 4, 1, 3, 3)),
        *((4, 4, 2, 2, 2), (1, 4, 2, 1, 2), (5, 2, 2, 2, 4)),
    ],
)
def test_microbatches_of_rows_are_equal_with_minimal_padding(rows: int, limit: int, pp: int, shape: int, count: int) -> None:
    """With `pp` 2 the schedule is interleaved and needs an even number."""
    cut = split_batch(make_batch([WIDTH] * rows), replace(RULES["rows"], rows=limit), place(pp=pp, vpp=pp))
    assert [item.tokens.shape for item in cut.items] == [(shape, WIDTH)] * count
    assert shape <= limit and cut.processed - cut.filled < count * WIDTH


GROUP = st.tuples(st.integers(1, WIDTH - 1), st.lists(st.integers(0, WIDTH), min_size=1, max_size=5))
GROUPS = st.lists(GROUP, min_size=1, max_size=4)


@settings(max_examples=30, deadline=None)
@given(GROUPS, st.booleans(), st.sampled_from([(1, 1, 1), (2, 1, 1), (1, 2, 2)]))
def test_shared_prefixes_keep_labels(groups: list[tuple[int, list[int]]], masked: bool, sizes: tuple[int, int, int]) -> None:
    """Each group has a prompt and completions. Without a mask, as for log-probabilities, completions may share more."""
    tp, pp, vpp = sizes
    prompts = [prompt for prompt, completions in groups for _ in completions]
    lengths = [min(WIDTH, prompt + more) for prompt, completions in groups for more in completions]
    batch = make_batch(lengths)
    places, first = np.arange(WIDTH), 0
    tokens = batch["tokens"].copy()
    for prompt, completions in groups:
        tokens[first : first + len(completions), :prompt] = tokens[first, :prompt]
        first += len(completions)
    mask = ((places >= np.array(prompts)[:, None]) & (places < np.array(lengths)[:, None])).astype(np.float32)
    batch = batch.with_fields(tokens=tokens, loss_mask=mask, row_ids=np.arange(len(lengths)))
    if not masked:
        batch = Batch({name: array for name, array in batch.fields.items() if name != "loss_mask"})
    cut = split_batch(batch, replace(RULES["packed"], least_shared=0.0), place(tp=tp, pp=pp, vpp=vpp))
    scored: list[int] = []
    for item in cut.items:
        for index, seen in enumerate(attended(item)):
            target, position = int(item.targets.flatten()[index]), int(item.positions.flatten()[index])
            if target == batch.rows * WIDTH:
                continue
            row, label = divmod(target, WIDTH)
            assert label == position + 1 and seen == tokens[row, :label].tolist()
            assert int(item.labels.flatten()[index]) == tokens[row, label]
            if masked and mask[row, label]:
                scored.append(target)
                assert int(item.data["sequence_ids"].flatten()[index]) == row
        if masked:
            assert item.scored is not None and len(item.scored) == max(1, int(item.data["loss_mask"].sum()))
    if masked:
        assert sorted(scored) == np.flatnonzero(mask * (places > 0)).tolist()
    assert cut.filled == sum(lengths) - sum(cut.saved)
    values = cut.assemble([item.labels.float() for item in cut.items])
    expected = np.where((places > 0) & (places < np.array(lengths)[:, None]), tokens, 0)
    np.testing.assert_array_equal(values.numpy(), expected)


def test_the_samples_of_a_prompt_share_all_but_its_last_token() -> None:
    batch = make_batch([20, 16, 18, 9, 20])
    tokens = batch["tokens"].copy()
    tokens[1:4, :12], tokens[:, :4] = tokens[1, :12], 7  # a template of four tokens begins all prompts
    mask = np.zeros_like(batch["loss_mask"])
    mask[:, 12:] = 1
    batch = batch.with_fields(tokens=tokens, loss_mask=mask)
    whole = replace(RULES["packed"], tokens=96, least_shared=0.0)
    groups = [(group.rows, group.shared) for group in prefix_groups(batch, 0.0)]
    assert groups == [((0,), 0), ((1, 2, 3), 8), ((4,), 0)], "the row of 9 tokens ends before its completion"
    assert split_batch(batch, whole, place()).filled == 83 - 16
    for rule in (replace(whole, least_shared=0.2), replace(whole, least_shared=None)):
        assert split_batch(batch, rule, place()).filled == 83


@pytest.mark.parametrize(("budget", "saved"), [(24, 0), (48, 14), (96, 21)])
def test_long_samples_share_a_prompt_where_two_fit(budget: int, saved: int) -> None:
    """Four rows of 24 tokens begin with the same eight, of which seven can be shared."""
    batch, rule = make_batch([WIDTH] * 4), replace(RULES["packed"], tokens=budget, least_shared=0.0)
    tokens, mask = batch["tokens"].copy(), np.tile(np.arange(WIDTH) >= 8, (4, 1)).astype(np.float32)
    tokens[:, :8] = tokens[0, :8]
    assert split_batch(batch.with_fields(tokens=tokens, loss_mask=mask), rule, place()).saved.sum() == saved


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("kind", RULES)
def test_padding_repeats_the_batchs_own_tokens_evenly(kind: str, cp: int) -> None:
    lengths = [3, 24, 0, 5, 2, 7]
    batch, own = make_batch(lengths), sum(lengths)
    for rank in range(cp):
        items = split_batch(batch, RULES[kind], place(cp, rank), model=RoutedModel(200, RoutedLayers(2, 4, 2))).items
        tokens = torch.cat([item.tokens.flatten() for item in items])
        counts = np.bincount(tokens.numpy(), minlength=len(lengths) * WIDTH + 1)
        real = (batch["tokens"] > 0) & (np.arange(WIDTH) < batch["lengths"][:, None])
        found = counts[batch["tokens"][real]]
        assert len(found) == own and found.sum() == len(tokens), "no other ids"
        assert found.max() - found.min() <= (1 if cp == 1 else 2)  # this worker has a part of the sequences


def test_an_empty_batch_is_padded_with_the_vocabulary() -> None:
    assert not split_batch(make_batch([0, 0]), RULES["rows"], place()).items[0].tokens.any()  # of a model without experts
    (item,) = split_batch(make_batch([0, 0]), RULES["rows"], place(), model=RoutedModel(20, RoutedLayers(2, 4, 2))).items
    assert np.bincount(item.tokens.flatten().numpy()).tolist() == [3] * 8 + [2] * 12  # 48 tokens
    assert not item.data["loss_mask"].any()


def test_microbatches_of_rows_leave_out_padding_rows() -> None:
    """They are the equal microbatches of the full bucket, whose shape is warm."""
    whole = split_batch(make_batch([WIDTH] * 8), RULES["rows"], place())
    part = split_batch(make_batch([3, 24, 17, 9, 1, 0, 0, 0]), RULES["rows"], place())
    assert part.shape == whole.shape
    assert [len(cut.items) for cut in (whole, part)] == [-(-rows // whole.shape[0]) for rows in (8, 5)]


def test_packed_microbatches_have_few_widths_and_a_warm_up_covers_all() -> None:
    full, part, rule = make_batch([WIDTH] * 8), make_batch([WIDTH] * 4), RULES["packed"]
    widths: set[int] = set()
    order = [split_batch(batch, rule, place()).shape[1] for batch in warmup_batches(full, rule, place(), widths)]
    seen = set(order)
    assert order[:-1] == sorted(seen, reverse=True), "the largest first"
    assert seen == widths == {6, 12, 18, 24, 30, 36, 42, 48}
    assert list(warmup_batches(part, rule, place(), widths)) == [part], "a smaller bucket has no others"
    generator = np.random.default_rng(0)
    for _ in range(20):
        lengths = generator.integers(0, WIDTH + 1, 8).tolist()
        assert split_batch(make_batch(lengths), RULES["packed"], place()).shape[1] in seen
    assert list(warmup_batches(full, RULES["rows"], place(), set())) == [full]


@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (2, 1), (4, 1), (2, 2), (3, 2), (4, 3), (8, 2)])
@pytest.mark.parametrize("kind", RULES)
def test_a_warm_up_runs_the_microbatches_that_fill_a_pipeline(kind: str, pp: int, vpp: int) -> None:
    """The first stage runs `filling` passes over a chunk before the first backward pass, as Megatron's schedules do."""
    whole = split_batch(make_batch([WIDTH] * 64), RULES[kind], place(pp=pp, vpp=vpp))
    few = whole.for_warmup()
    filling = 2 * (pp - 1) + (vpp - 1) * pp if vpp > 1 else pp - 1
    assert filling + 2 <= vpp * len(few.items) <= 2 * vpp * (pp + 1) < vpp * len(whole.items)
    assert vpp == 1 or len(few.items) % pp == 0
    assert few.items == (*whole.items[: len(few.items) - 1], whole.items[-1])
    assert few.assemble([item.labels for item in few.items]).shape == (64, WIDTH)
    assert few.for_warmup() == few


def test_a_warm_up_has_rows_with_and_without_a_shared_prefix() -> None:
    full, rule = make_batch([WIDTH] * 8), replace(RULES["packed"], least_shared=0.0)
    full = full.with_fields(tokens=np.ones_like(full["tokens"]))  # as `empty_batch`
    cuts = [split_batch(batch, rule, place(), masked=False) for batch in warmup_batches(full, rule, place(), set())]
    assert [bool(len(cut.saved)) for cut in cuts[:-1]] == [*[False] * (len(cuts) - 2), True]
    assert {cut.shape[1] for cut in cuts[:-2]} == {6, 12, 18, 24, 30, 36, 42, 48}


LENGTHS = st.lists(st.integers(1, 120), min_size=1, max_size=60)


@settings(max_examples=30, deadline=None)
@given(LENGTHS, st.integers(120, 400), st.integers(0, 5))
def test_every_sequence_is_packed_once_within_the_budget(lengths: list[int], budget: int, more: int) -> None:
    bins = pack(lengths, budget)
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    assert largest(lengths, bins) <= budget
    assert len(bins) <= 2 * sum(lengths) / budget + 1  # all but one of the microbatches are more than half full
    even = spread(lengths, bins, len(bins) + more, budget)
    assert len(even) == len(bins) + more
    assert sorted(row for rows in even for row in rows) == list(range(len(lengths)))
    assert largest(lengths, even) <= largest(lengths, bins)


def test_long_tails_waste_little() -> None:
    lengths = np.random.default_rng(0).lognormal(5, 1, 512).clip(8, 4096).astype(int).tolist()
    assert sum(lengths) / (4096 * len(pack(lengths, 4096))) > 0.95


def test_spread_microbatches_are_even() -> None:
    lengths = [60, 50, 40, 30, 20, 10]
    assert largest(lengths, spread(lengths, pack(lengths, 110), 2, 110)) == 110
    assert largest(lengths, spread(lengths, pack(lengths, 110), 3, 110)) == 70
    assert spread([5], [[0]], 3, 8).count([]) == 2


def test_widths_are_eighths_of_the_budget() -> None:
    assert row_widths(SplitRule(True, 1, 4096), ParallelLayout(tp=8)) == (512, 1024, 1536, 2048, 2560, 3072, 3584, 4096)
    assert row_widths(SplitRule(True, 1, 20), ParallelLayout(tp=8)) == (8, 16, 24)


def test_a_sequence_longer_than_the_budget_is_an_error() -> None:
    with pytest.raises(DataError, match=r"a sequence of 130 tokens does not fit a microbatch of 120; raise .*mb_tokens"):
        pack([10, 130], 120)


CPU = torch.device("cpu")
SIZES = [2, 3, 4]


def held(length: int, size: int, rank: int) -> list[list[int]]:
    """Positions of a worker's two chunks of a sequence (`get_batch_on_this_cp_rank` in Megatron)."""
    chunks = torch.arange(length).view(2 * size, -1)
    return [chunks[rank].tolist(), chunks[2 * size - 1 - rank].tolist()]


def rows_of(size: int) -> list[list[int]]:
    """Returns two rows of equal length with several sequences each, of multiples of `2 size`."""
    return [[2 * size * chunk for chunk in row] for row in ([3, 1, 5], [2, 7])]


def tokens_of(rows: list[list[int]], size: int, rank: int) -> list[tuple[int, int, int]]:
    """Returns (row, sequence, position) of a worker's tokens in order."""
    return [
        (row, number, position)
        for row, sequences in enumerate(rows)
        for number, length in enumerate(sequences)
        for chunk in held(length, size, rank)
        for position in chunk
    ]


@pytest.mark.parametrize(("size", "rank"), [(size, rank) for size in SIZES for rank in range(size)])
def test_a_segment_has_all_keys_of_its_sequence_up_to_its_last_query(size: int, rank: int) -> None:
    rows = rows_of(size)
    segments = make_segments(rows, size, rank, CPU)
    assert segments.key_order is not None
    gathered = [token for other in range(size) for token in tokens_of(rows, size, other)]
    keys = [gathered[place] for place in segments.key_order.tolist()]
    queries = tokens_of(rows, size, rank)
    assert len(segments.query_lengths) == len(segments.key_lengths) == 2 * sum(map(len, rows))
    for mine, seen in zip(parts(segments.query_starts, queries), parts(segments.key_starts, keys), strict=True):
        row, number, last = mine[-1]
        assert seen == [(row, number, position) for position in range(last + 1)]
        assert mine == seen[-len(mine) :]
    assert (segments.longest_query, segments.longest_key) == (max(segments.query_lengths), max(segments.key_lengths))
    assert segments.query_starts.tolist() == list(accumulate(segments.query_lengths, initial=0))
    assert segments.key_starts.tolist() == list(accumulate(segments.key_lengths, initial=0))


def parts(starts: Tensor, tokens: list[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    assert (starts[0], starts[-1], starts.dtype) == (0, len(tokens), torch.int32)
    return [tokens[start:stop] for start, stop in pairwise(starts.tolist())]


@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=6))
def test_queries_after_a_prefix_see_its_keys_and_others_none(groups: list[list[int]]) -> None:
    """The first segment of each group is the prefix of the others."""
    lengths = [length for group in groups for length in group]
    firsts = list(accumulate((len(group) for group in groups), initial=0))
    heads = [first if place else -1 for first, group in zip(firsts, groups, strict=False) for place in range(len(group))]
    segments = make_segments([lengths], 1, 0, CPU, heads)
    starts = list(accumulate(lengths, initial=0))
    expected = [range(starts[head], starts[head + 1]) if head >= 0 else range(0) for head in heads]
    assert segments.heads == (tuple(heads) if max(heads) >= 0 else ())
    if segments.prefixes is None:
        assert max(heads) < 0
        return
    of_queries, of_keys = segments.prefixes.query_starts, segments.prefixes.key_starts
    seen = [
        range(*keys)
        for queries, keys in zip(pairwise(of_queries.tolist()), pairwise(of_keys.tolist()), strict=True)
        for _ in range(*queries)
    ]
    wanted = [keys for length, keys in zip(lengths, expected, strict=True) for _ in range(length)]
    assert list(map(list, seen)) == list(map(list, wanted))
    assert segments.prefixes.key_starts[-1] == len(seen) == sum(lengths)
