"""The example's pipeline stage, made to record its order and gradients and to fail; and one process to compare with."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dagrl.examples.pipeline import ModelConfig, TorchStage, loss_of, make_layers
from dagrl.graphs.pipeline import one_forward_one_backward
from dagrl.runtime.phase import Phase
from dagrl.runtime.schedule import Scheduler
from dagrl.runtime.shapes import Batch
from dagrl.runtime.worker import in_warmup
from dagrl.runtime.worker_group import WorkerGroup
from dagrl.telemetry.metrics import StepMetrics

MODEL = ModelConfig(blocks=3, width=8, vocabulary=16, dtype="float64")


class RecordedStage(TorchStage):
    """Scalars of the batch, `fail_stage` and `fail_microbatch`, say where a forward raises."""

    def start_step(self, batch: Batch, microbatches: int) -> None:
        super().start_step(batch, microbatches)
        self.order: list[tuple[str, int]] = []
        self.most_held = 0

    def forward(self, activations: Tensor | None, microbatch: int) -> Tensor | None:
        self.order.append(("forward", microbatch))
        scalars = self.microbatches[microbatch].scalars
        if (self.stage, microbatch) == (scalars.get("fail_stage"), scalars.get("fail_microbatch")):
            raise ValueError("this stage was told to raise")
        given = super().forward(activations, microbatch)
        self.most_held = max(self.most_held, len(self.held))
        return given

    def backward(self, gradients: Tensor | None, microbatch: int) -> Tensor | None:
        self.order.append(("backward", microbatch))
        return super().backward(gradients, microbatch)

    def optimizer_step(self, total: StepMetrics) -> StepMetrics:
        self.gradients = gradients_of(self.layers, clip=None)
        if not in_warmup():
            self.order.append(("optimizer_step", 0))
        return super().optimizer_step(total)

    def restart(self) -> None:
        self.setup("")

    def recorded(self) -> tuple[list[tuple[str, int]], int, list[np.ndarray], list[np.ndarray]]:
        """Order of the last step's calls, most activations held in it, its gradients, and the weights now."""
        return self.order, self.most_held, self.gradients, weights_of(self.layers)


def gradients_of(layers: nn.Module, clip: float | None) -> list[np.ndarray]:
    """Gradients of all parameters, copied; `clip`: after clipping to this norm."""
    if clip is not None:
        nn.utils.clip_grad_norm_(layers.parameters(), clip)
    return [parameter.grad.cpu().numpy().copy() for parameter in layers.parameters() if parameter.grad is not None]


def weights_of(layers: nn.Module) -> list[np.ndarray]:
    return [parameter.detach().cpu().numpy().copy() for parameter in layers.parameters()]


def ragged_batch(rows: int, length: int, seed: int, **scalars: int) -> Batch:
    """Rows of random tokens and lengths; the loss skips the padding."""
    random = np.random.default_rng(seed)
    lengths = random.integers(2, length + 1, rows)
    fields = {
        "tokens": random.integers(0, MODEL.vocabulary, (rows, length)),
        "lengths": lengths,
        "loss_mask": (np.arange(length) < lengths[:, None]).astype(np.float32),
    }
    return Batch(fields, {"global_valid_tokens": float((lengths - 1).sum()), **scalars})


def train_alone(
    batches: Sequence[Batch], config: ModelConfig = MODEL, seed: int = 0
) -> tuple[list[float], list[list[np.ndarray]], list[np.ndarray]]:
    """Losses and gradients (before clipping) of each step on the whole batch at once, and the weights at the end."""
    layers = nn.Sequential(*make_layers(config, seed))
    optimizer = torch.optim.AdamW(layers.parameters(), lr=config.learning_rate)
    losses, gradients = [], []
    for batch in batches:
        tokens, mask = (torch.tensor(batch[name]) for name in ("tokens", "loss_mask"))
        loss = loss_of(layers(tokens), tokens, mask) / batch.number("global_valid_tokens")
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        gradients.append(gradients_of(layers, clip=None))
        gradients_of(layers, clip=config.max_grad_norm)
        optimizer.step()
    return losses, gradients, weights_of(layers)


def check_steps(
    scheduler: Scheduler, step: Phase, group: WorkerGroup, batches: Sequence[Batch], config: ModelConfig = MODEL
) -> None:
    """Trains from the start on `batches`, and compares with one process on the CPU."""
    group.call("restart")
    losses, gradients, weights = train_alone(batches, config)
    for batch, loss, expected in zip(batches, losses, gradients, strict=True):
        (metrics,) = scheduler.replay(step, batch).result()
        assert metrics.sums["loss"] == pytest.approx(loss, rel=1e-6)
        norm = np.sqrt(sum(np.square(gradient).sum() for gradient in expected))
        assert metrics.shared["grad_norm"] == pytest.approx(norm, rel=1e-6)
        found = [gradient for _, _, stage, _ in group.call("recorded") for gradient in stage]
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-9)
    for one, other in zip([w for *_, stage in group.call("recorded") for w in stage], weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-9 if config is MODEL else 1e-7)


def check_order(scheduler: Scheduler, step: Phase, group: WorkerGroup, batch: Batch, microbatches: int) -> None:
    """Checks that workers run in the order of their nodes, and hold few activations."""
    scheduler.replay(step, batch).result()
    stages = group.layout.pp
    for stage, (order, most_held, _, _) in enumerate(group.call("recorded")):
        assert order == [*one_forward_one_backward(stage, stages, microbatches), ("optimizer_step", 0)]
        assert most_held == min(stages - stage, microbatches)
