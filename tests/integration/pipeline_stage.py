"""The example's pipeline stage, made to record its order and gradients and to fail; and one process to compare with."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from dagrl.examples.pipeline import ModelConfig, TorchStage, loss_of, make_layers
from dagrl.runtime.shapes import Batch
from dagrl.runtime.worker import in_warmup
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


def train_in_one_process(
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
