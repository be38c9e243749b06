"""dagrl's side of SFT in `bench peers`: replays of `demonstration_step`, with a batch sent and the metrics read in each."""

from __future__ import annotations

from pathlib import Path

from dagrl.bench.peers.case import PeerCase
from dagrl.bench.train_inputs import one_gpu_config, train_batch
from dagrl.bench.train_rivals import DagrlSteps
from dagrl.bench.turns import Told, serve, take_turns
from dagrl.config import Config
from dagrl.runtime.layout import ParallelLayout

MICROBATCH = 8
RECORDED = ("0.6b",)
"""Models whose launches take as long as their kernels, so that CUDA graphs of microbatches help."""


def side_config(case: PeerCase, model: Path) -> Config:
    """Returns the configuration of one Megatron worker."""
    policy = {
        "precision": case.precision,
        "train_global_batch_size": case.sequences,
        "train_micro_batch_size": min(MICROBATCH, case.sequences),
        "megatron_cfg": {"optimizer": {"lr": 1e-5}, "cuda_graphs": case.model in RECORDED and not case.tiny},
    }
    return one_gpu_config(model, case.length, policy)


def work(told: Told) -> None:
    """Builds the worker and takes turns."""
    case = told.order.largest
    batch = train_batch(case.sequences, case.length, vocabulary=int(str(case.shape.config["vocab_size"])))
    with DagrlSteps(1) as ours:
        ours.begin(ParallelLayout(), side_config(case, told.order.model), batch)
        ours.ready()

        def take(_: PeerCase, steps: int) -> list[float]:
            seconds = ours.take(steps)
            ours.group.call("offload", ())  # gives the memory that no tensor uses to the other side
            return seconds

        take_turns(told, take)
        ours.end()


if __name__ == "__main__":
    serve(work)
