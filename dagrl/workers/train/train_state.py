"""Checkpoints of a train worker: the backend's pieces, random generators, and `worker.json`.

    train/
      worker.json                     model, layout, schedule and step counts (`identity.py`)
      .metadata __<rank>_*.distcp     torch's distributed format (`checkpoint.py`)

Imported only where torch is.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dagrl.config import Json
from dagrl.files import write_whole
from dagrl.workers.train.backend import Backend
from dagrl.workers.train.checkpoint import Piece, Saving, load, whole
from dagrl.workers.train.groups import run_on_all_ranks
from dagrl.workers.train.identity import WORKER, read_worker_file


def start_saving(
    directory: str,
    backend: Backend,
    group: ProcessGroup | None,
    rank: int,
    reference: Mapping[str, Tensor] | None,
    identity: Mapping[str, Json],
    *,
    background: bool,
) -> Saving:
    """Starts writing a checkpoint to `directory`, on all ranks of `group` together."""
    steps = backend.model.steps
    head = {
        "format": backend.checkpoint_format,
        "identity": identity,
        "reference": reference is not None,
        "placement": _placement(backend),
        "schedule_steps": steps.taken,
        "steps": backend.model.step_count(),
        "skipped_steps": steps.skipped,
    }

    def write_head() -> None:
        if rank == 0:
            Path(directory).mkdir(parents=True, exist_ok=True)
            write_whole(Path(directory) / WORKER, json.dumps(head, indent=1))

    run_on_all_ranks(group, write_head)
    with torch.no_grad():
        pieces = [*backend.pieces_to_save(reference), *_random_pieces(random_states(), rank)]
    return Saving(directory, pieces, group, background=background)


def load_checkpoint(
    directory: str, backend: Backend, group: ProcessGroup | None, rank: int, identity: Mapping[str, Json]
) -> dict[str, Tensor] | None:
    """Loads a checkpoint on all ranks of `group` together. Returns the reference policy's weights, if any.

    Raises CheckpointError on all ranks if one cannot load its part.
    """
    path = Path(directory)
    head = run_on_all_ranks(group, read_worker_file, path, backend.checkpoint_format, identity, backend.computed)
    reference = None
    if head["reference"]:
        weights = backend.model.weights()
        reference = {name: torch.empty_like(weight.data, device="cpu") for name, weight in weights.items()}
    random = random_states() if head["placement"] == _placement(backend) else {}
    with torch.no_grad():
        load(path, [*backend.pieces_to_load(reference), *_random_pieces(random, rank)], group)
    backend.model.steps.taken = head["schedule_steps"]
    backend.model.steps.skipped = head["skipped_steps"]
    backend.model.set_step_count(head["steps"])
    if "cpu" in random:
        torch.set_rng_state(random["cpu"])
    if "cuda" in random:
        torch.cuda.set_rng_state(random["cuda"])
    return reference


def _placement(backend: Backend) -> dict[str, Json]:
    """Returns what random states depend on."""
    return {**asdict(backend.place.layout), "device": backend.place.device.type}


def random_states() -> dict[str, Tensor]:
    """Returns a copy of the state of this process's random generators."""
    cuda = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    return {"cpu": torch.get_rng_state(), **cuda}


def _random_pieces(states: Mapping[str, Tensor], rank: int) -> Iterator[Piece]:
    for name, state in states.items():
        yield whole(f"random.{rank}.{name}", state)
