"""Losses in parallel layouts and packed, against Hugging Face with formulas written apart."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dagrl.runtime.shapes import Batch
from tests.integration import megatron_reference as reference
from tests.integration.train_cases import UNCLIPPED, gradients_of, megatron, train
from tests.integration.train_pool import Group, WorkerPool
from tests.unit.rl import test_losses as formulas

NAMES = ("dual clip", "gspo", "cispo", "reinforce", "distill")


@pytest.fixture(scope="module", params=[{"tp": 2}, {"cp": 2}], ids=["tp2-packed", "cp2-packed"])
def group(request: pytest.FixtureRequest, pool: WorkerPool) -> Iterator[Group]:
    with megatron("qwen3", packed=True, **request.param).group(pool, optimizer=UNCLIPPED) as group:
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


def loss_keys(name: str) -> dict[str, Any]:
    options, _ = formulas.FORMULAS[name]
    return {"ratio_clip_c": None, **formulas.CLIP, **formulas.NO_KL, **options, "token_level_loss": False}


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_match_one_process(name: str, group: Group, tiny_models: dict[str, Path]) -> None:
    loss, gradients = expected(tiny_models["qwen3"], name)
    group.call("set_loss", loss_keys(name))
    step = train(group, reference.make_batch(grpo=True), "policy", warmup="whole")  # gradients, but no update
    assert step["loss"] == pytest.approx(loss, abs=2e-6)
    reference.assert_gradients(gradients_of(group), gradients, 2e-5)


def test_the_gradients_of_two_losses_are_compared(group: Group, tiny_models: dict[str, Path]) -> None:
    batch, names, model = reference.make_batch(grpo=True), ("reinforce", "gspo"), tiny_models["qwen3"]
    one, two = (flat_gradient(expected(model, name)[1]) for name in names)
    group.call("set_loss", loss_keys(names[0]))
    other = reference.make_config(model).with_keys({f"loss_fn.{key}": value for key, value in loss_keys(names[1]).items()})
    for ours, theirs, distance in group.call("compare_gradients", [batch], [batch], other):
        found = [ours.shared["grad_norm"], theirs.shared["grad_norm"], distance]
        assert found == pytest.approx([np.linalg.norm(one), np.linalg.norm(two), np.linalg.norm(one - two)], rel=1e-4)


def flat_gradient(gradients: Any) -> Any:
    return np.concatenate([np.ravel(gradients[name]) for name in sorted(gradients)])
