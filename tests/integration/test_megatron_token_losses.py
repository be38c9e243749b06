"""Token losses in parallel layouts and packed: loss and gradients of a Hugging Face model with the formula written apart."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.shapes import Batch
from tests.integration import megatron_reference as reference
from tests.integration.megatron_pool import Group, MegatronPool
from tests.integration.test_megatron_layouts import PACKED, UNCLIPPED, train
from tests.unit.rl import test_losses as formulas

LAYOUTS = {"tp2-packed": (ParallelLayout(tp=2), PACKED), "cp2-packed": (ParallelLayout(cp=2), PACKED)}
NAMES = ("dual clip", "gspo", "cispo", "reinforce", "distill")


@pytest.fixture(scope="module", params=LAYOUTS)
def group(request: pytest.FixtureRequest, pool: MegatronPool) -> Iterator[Group]:
    layout, packing = LAYOUTS[request.param]
    config = reference.make_config(pool.models["qwen3"], train_micro_batch_size=2, **packing, optimizer=UNCLIPPED)
    with pool.group(layout, config) as group:
        yield group


@cache
def expected(model: Path, name: str) -> tuple[float, Any]:
    """Returns the loss and the gradients of one process, over sequences' means."""
    batch, (_, formula) = reference.make_batch(grpo=True), formulas.FORMULAS[name]
    fields = {name: torch.tensor(batch[name]) for name in ("prev_logprobs", "reference_logprobs", "advantages", "loss_mask")}
    rows = fields["loss_mask"].sum(1) > 0

    def loss(logprobs: Tensor, _: Batch) -> Tensor:
        cost = formula(logprobs[rows], {name: field[rows] for name, field in fields.items()})
        return formulas.sequence_mean(cost, fields["loss_mask"][rows])

    config = reference.make_config(model, optimizer=UNCLIPPED)
    run = reference.train_reference(model, batch, config, loss, steps=1)
    return run.losses[0], run.gradients


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_match_one_process(name: str, group: Group, tiny_models: dict[str, Path]) -> None:
    options, _ = formulas.FORMULAS[name]
    batch = reference.make_batch(grpo=True)
    loss, gradients = expected(tiny_models["qwen3"], name)
    keys = {"ratio_clip_c": None, **formulas.CLIP, **formulas.NO_KL, **options, "token_level_loss": False}
    for rank in range(group.layout.world_size):
        group.start(rank, "set_loss", **keys)
    for rank in range(group.layout.world_size):
        group.finish(rank)
    step = train(group, batch, "policy", warmup="whole")  # gradients, but no update
    assert step["loss"] == pytest.approx(loss, abs=2e-6)
    reference.assert_gradients(reference.assemble(group.call("gradients")), gradients, 2e-5)


def test_the_gradients_of_two_losses_are_compared(group: Group, tiny_models: dict[str, Path]) -> None:
    batch, names = reference.make_batch(grpo=True), ("reinforce", "gspo")
    one, two = (flat_gradient(expected(tiny_models["qwen3"], name)[1]) for name in names)
    losses = [{**formulas.CLIP, **formulas.NO_KL, **formulas.FORMULAS[name][0], "token_level_loss": False} for name in names]
    for rank in range(group.layout.world_size):
        group.start(rank, "set_loss", ratio_clip_c=None, **losses[0])
    for rank in range(group.layout.world_size):
        group.finish(rank)
    other = reference.make_config(tiny_models["qwen3"], train_micro_batch_size=2)
    other = other.with_keys({f"loss_fn.{key}": value for key, value in losses[1].items()})
    for ours, theirs, distance in group.call("compare_gradients", [batch], [batch], other):
        found = [ours.shared["grad_norm"], theirs.shared["grad_norm"], distance]
        assert found == pytest.approx([np.linalg.norm(one), np.linalg.norm(two), np.linalg.norm(one - two)], rel=1e-4)


def flat_gradient(gradients: Any) -> Any:
    return np.concatenate([np.ravel(gradients[name]) for name in sorted(gradients)])
