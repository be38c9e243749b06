"""A model of plain torch modules, split into pipeline stages that the phase graph schedules (graphs/pipeline.py).

    python examples/pipeline.py         # on the CPU
    python examples/pipeline.py --gpus  # on two GPUs, over NCCL

Two workers hold half of the layers each and know nothing of other stages. Activations and gradients are arguments and
results of their methods, the graph's edges carry them, and the calls come in 1F1B order.
"""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass

import numpy as np
import ray
import torch
from torch import Tensor, nn

from dagrl import (
    Batch,
    Bucket,
    ParallelLayout,
    Resources,
    Scheduler,
    SchedulerOptions,
    WorkerContext,
    WorkerGroup,
    in_warmup,
)
from dagrl.graphs.pipeline import pipeline_phase, split_microbatches
from dagrl.telemetry.metrics import StepMetrics, merge_step_metrics


@dataclass(frozen=True)
class ModelConfig:
    """A small language model and how it is trained."""

    blocks: int = 4
    width: int = 32
    vocabulary: int = 64
    dtype: str = "float32"
    device: str = "cpu"
    learning_rate: float = 1e-2
    max_grad_norm: float = 1.0


class Block(nn.Module):
    """Mixes each token with the mean of the tokens before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(2 * width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # [batch, seq, width]
        normed = self.norm(x)
        past = normed.cumsum(dim=1) / torch.ones_like(normed).cumsum(dim=1)
        return x + self.down(nn.functional.gelu(self.up(torch.cat([normed, past], dim=-1))))


def make_layers(config: ModelConfig, seed: int) -> list[nn.Module]:
    """Returns all layers of the model, equal for equal seeds."""
    torch.manual_seed(seed)
    blocks = [Block(config.width) for _ in range(config.blocks)]
    layers = [nn.Embedding(config.vocabulary, config.width), *blocks, nn.Linear(config.width, config.vocabulary)]
    return [layer.to(config.device, getattr(torch, config.dtype)) for layer in layers]


def loss_of(logits: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    """Sum of the negative log-likelihoods of the unmasked tokens. `logits` [batch, seq, vocabulary]."""
    losses = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
    return (losses * mask[:, 1:]).sum()


class TorchStage:
    """One pipeline stage: a `dagrl.graphs.pipeline.PipelineWorker` over plain torch modules."""

    def __init__(self, context: WorkerContext, config: ModelConfig) -> None:
        self.stage, self.stages = context.coordinates.pp, context.layout.pp
        self.context, self.config = context, config

    def setup(self, address: str) -> None:
        layers = make_layers(self.config, self.context.seed)
        share = slice(*(len(layers) * stage // self.stages for stage in (self.stage, self.stage + 1)))
        self.layers = nn.Sequential(*layers[share])
        self.optimizer = torch.optim.AdamW(self.layers.parameters(), lr=self.config.learning_rate)

    def start_step(self, batch: Batch, microbatches: int) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.microbatches = split_microbatches(batch, microbatches)
        self.held: dict[int, tuple[Tensor, Tensor]] = {}  # input and output of the forwards without a backward so far
        self.loss = 0.0

    def forward(self, activations: Tensor | None, microbatch: int) -> Tensor | None:
        rows = self.microbatches[microbatch]
        tokens = torch.as_tensor(rows["tokens"], device=self.config.device)
        x = tokens if activations is None else activations.detach().requires_grad_()
        y = self.layers(x)
        if self.stage < self.stages - 1:
            self.held[microbatch] = x, y
            return y.detach()
        mask = torch.as_tensor(rows["loss_mask"], device=self.config.device)
        loss = loss_of(y, tokens, mask) / rows.number("global_valid_tokens")
        self.held[microbatch] = x, loss
        self.loss += loss.item()
        return None

    def backward(self, gradients: Tensor | None, microbatch: int) -> Tensor | None:
        x, y = self.held.pop(microbatch)
        y.backward(gradients)
        return x.grad

    def finish_gradients(self, over: list[None]) -> StepMetrics:
        gradients = [parameter.grad for parameter in self.layers.parameters() if parameter.grad is not None]
        return StepMetrics(sums={"squared_norm": sum(float(gradient.square().sum()) for gradient in gradients)})

    def optimizer_step(self, total: StepMetrics) -> StepMetrics:
        norm = total.sums["squared_norm"] ** 0.5
        for parameter in self.layers.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(min(1.0, self.config.max_grad_norm / (norm + 1e-6)))
        if not in_warmup():
            self.optimizer.step()
        return StepMetrics(sums={"loss": self.loss}, shared={"grad_norm": norm})

    def merge_metrics(self, parts: list[StepMetrics]) -> StepMetrics:
        return merge_step_metrics(parts)


def count_up(rows: int, length: int, vocabulary: int, seed: int) -> Batch:
    """Rows that count up from a random token; a few steps learn it."""
    first = np.random.default_rng(seed).integers(0, vocabulary, (rows, 1))
    tokens = (first + np.arange(length)) % vocabulary
    fields = {"tokens": tokens, "lengths": np.full(rows, length), "loss_mask": np.ones((rows, length), np.float32)}
    return Batch(fields, {"global_valid_tokens": float(rows * (length - 1))})


def main() -> None:
    """Trains for twenty steps on two workers."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--gpus", action="store_true", help="run each stage on a GPU and send activations over NCCL")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    config = ModelConfig(device="cuda" if given.gpus else "cpu")
    step = pipeline_phase(microbatches=4, transport="nccl" if given.gpus else "shm")
    ray.init("local", num_cpus=2)
    resources = Resources(num_gpus=int(given.gpus))
    group = WorkerGroup.create("train", TorchStage, ParallelLayout(dp=1, pp=2), config, resources=resources)
    with Scheduler([group], SchedulerOptions(fallback="error")) as scheduler:
        scheduler.add(step, buckets=[Bucket(8, 16)], scalars={"global_valid_tokens": 120.0})
        scheduler.compile()
        scheduler.warmup()
        for number in range(20):
            (metrics,) = scheduler.replay(step, count_up(8, 16, config.vocabulary, number)).result()
            logging.info("step %2d  %s", number, metrics.flat())
    group.shutdown(5.0)


if __name__ == "__main__":
    main()
