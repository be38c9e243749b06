"""ModuleWorker, the base of train workers of a user's own."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from dagrl.config import Config
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.shapes import Batch
from dagrl.runtime.worker import WorkerContext
from dagrl.telemetry.metrics import StepMetrics
from dagrl.workers.train.module_worker import ModuleWorker


class Experts(ModuleWorker):
    """A model of two experts, of which this rank's sequences use the first alone; a third is frozen."""

    def _shares(self, batch: Batch, loss: str) -> Iterator[tuple[Tensor, StepMetrics]]:
        yield self.model[0](torch.ones(1, 2)).sum(), StepMetrics()  # type: ignore[index]


def test_ranks_sum_the_same_gradients_whatever_experts_they_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise one rank would wait for a sum that another does not take part in."""
    summed: list[Tensor] = []
    monkeypatch.setattr("torch.distributed.all_reduce", lambda gradient: summed.append(gradient.clone()))
    config = Config.model_validate({"name": "x", "data": {}, "algorithm": "sft", "policy": {}})
    worker = Experts(WorkerContext("train", 0, ParallelLayout()), config)
    worker.model = torch.nn.Sequential(*(torch.nn.Linear(2, 1, bias=False) for _ in range(3)))
    worker.model[2].requires_grad_(False)
    worker.optimizer = torch.optim.SGD(worker.model.parameters())
    worker.train_step(Batch({"lengths": np.ones(1, np.int64)}, {"lr": 0.1}), "likelihood")
    assert [gradient.tolist() for gradient in summed] == [[[1.0, 1.0]], [[0.0, 0.0]]]
