"""verl's own training steps, both ways: its `TrainingWorker` with FSDP2 on the CPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
from verl.utils import tensordict_utils as tu

from dagrl.bench.verl_steps import VOCABULARY, train, training_batch, training_group
from dagrl.embed.verl import accelerate

pytestmark = pytest.mark.usefixtures("verl_cluster")

WORKERS, STEPS = 2, 3


def trained(group: Any) -> list[Any]:
    """Loss and gradient norm of each step, and at the end the log-probabilities of one more batch."""
    steps = [train(group, training_batch(step)) for step in range(STEPS)]
    inferred = group.infer_batch(training_batch(STEPS)).get()
    return [*steps, tu.get(inferred, "log_probs").values()]


@pytest.fixture
def two_groups(model: str) -> Iterator[list[Any]]:
    groups = [training_group(model, WORKERS) for _ in range(2)]
    yield groups
    for group in groups:
        for actor in group.workers:
            ray.kill(actor)


def test_training_steps_have_equal_losses(two_groups: list[Any]) -> None:
    *theirs, their_logprobs = trained(two_groups[0])
    *ours, our_logprobs = trained(accelerate(two_groups[1]))
    assert ours == theirs
    assert torch.equal(our_logprobs, their_logprobs)
    assert abs(theirs[0][0] - math.log(VOCABULARY)) < 1.0  # a random model
    assert len({loss for loss, _ in theirs}) == STEPS
