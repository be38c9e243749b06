"""Microbatches against their batch: every token occurs once, with its own label, fields and position."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from dagrl.rl.routed_experts import RoutedLayers
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.shapes import Batch
from dagrl.workers.train.microbatches import Microbatch, RoutedModel, split_batch, warmup_batches
from dagrl.workers.train.row_plans import ParallelRank, SplitRule, prefix_groups

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
            assert torch.equal(
                item.data["loss_mask"].flatten()[real], torch.from_numpy(batch["loss_mask"]).flatten()[targets[real]]
            )
            assert not item.data["loss_mask"].flatten()[~real].any()
            counts = torch.from_numpy(batch["loss_mask"].sum(1))[targets[real] // WIDTH]
            assert torch.equal(item.data["sequence_tokens"].flatten()[real], counts)
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
        (4, 8, 1, 4, 1),
        (10, 8, 1, 5, 2),
        (16, 8, 1, 8, 2),
        (9, 4, 1, 3, 3),
        (4, 4, 2, 2, 2),
        (1, 4, 2, 1, 2),
        (5, 2, 2, 2, 4),
    ],
)
def test_microbatches_of_rows_are_equal_with_minimal_padding(rows: int, limit: int, pp: int, shape: int, count: int) -> None:
    """With `pp` 2 the schedule is interleaved and needs an even number."""
    cut = split_batch(make_batch([WIDTH] * rows), replace(RULES["rows"], rows=limit), place(pp=pp, vpp=pp))
    assert [item.tokens.shape for item in cut.items] == [(shape, WIDTH)] * count
    assert shape <= limit and cut.processed - cut.filled < count * WIDTH


GROUPS = st.lists(
    st.tuples(st.integers(1, WIDTH - 1), st.lists(st.integers(0, WIDTH), min_size=1, max_size=5)), min_size=1, max_size=4
)


@settings(max_examples=30, deadline=None)
@given(GROUPS, st.booleans(), st.sampled_from([(1, 1, 1), (2, 1, 1), (1, 2, 2)]))
def test_shared_prefixes_change_neither_labels_nor_attention(
    groups: list[tuple[int, list[int]]], masked: bool, sizes: tuple[int, int, int]
) -> None:
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
