"""What a Megatron worker's checkpoint holds: pieces of the train state, random generators, and `worker.json`.

    train/
      worker.json                     model identity, layout, schedule and step counts
      .metadata __<rank>_*.distcp     torch's distributed format (`dagrl.workers.train.checkpoint`)

Imported only where Megatron is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dagrl.config import Json
from dagrl.files import write_whole
from dagrl.workers.megatron.identity import FORMAT, WORKER, read_worker_file
from dagrl.workers.megatron.sharding import pieces_to_load, pieces_to_save, set_step_count, step_count
from dagrl.workers.megatron.trainer import Trainer
from dagrl.workers.train.checkpoint import Piece, Saving, load, whole
from dagrl.workers.train.groups import run_on_all_ranks


def start_saving(
    directory: str,
    trainer: Trainer,
    reference: Mapping[str, Tensor] | None,
    identity: Mapping[str, Json],
    group: ProcessGroup,
    *,
    background: bool,
) -> Saving:
    """Starts writing a checkpoint to `directory`, on all ranks together. Ranks wait for each other in `group`."""
    head = {
        "format": FORMAT,
        "identity": identity,
        "reference": reference is not None,
        "placement": _placement(trainer),
        "schedule_steps": trainer.steps.taken,
        "steps": step_count(trainer),
        "skipped_steps": trainer.steps.skipped,
    }
    run_on_all_ranks(group, lambda: _write_head(Path(directory), head) if dist.get_rank() == 0 else None)
    with torch.no_grad():
        pieces = [*pieces_to_save(trainer, reference), *_random_pieces(random_state())]
    return Saving(directory, pieces, group, background=background)


def _write_head(directory: Path, head: Mapping[str, object]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    write_whole(directory / WORKER, json.dumps(head, indent=1))


def load_checkpoint(
    directory: str, trainer: Trainer, identity: Mapping[str, Json], group: ProcessGroup
) -> dict[str, Tensor] | None:
    """Loads a checkpoint on all ranks together. Returns the reference policy's weights, if any.

    Raises CheckpointError on all ranks if one cannot load its part.
    """
    path = Path(directory)
    head = run_on_all_ranks(group, read_worker_file, path, identity)
    reference = None
    if head["reference"]:
        reference = {name: torch.empty_like(tensor, device="cpu") for name, tensor in trainer.model.tensors().items()}
    random = random_state() if head["placement"] == _placement(trainer) else None
    with torch.no_grad():
        pieces = [*pieces_to_load(trainer, reference), *(_random_pieces(random) if random is not None else ())]
    load(path, pieces, group)
    trainer.steps.taken = head["schedule_steps"]
    set_step_count(trainer, head["steps"])
    trainer.steps.skipped = head["skipped_steps"]
    if random is not None:
        _set_random_state(random)
    return reference


def _placement(trainer: Trainer) -> dict[str, Json]:
    """Returns what random states depend on."""
    return {**asdict(trainer.layout), "device": "cuda" if torch.cuda.is_available() else "cpu"}


def random_state() -> dict[str, Any]:
    """Returns a copy of the state of this process's random generators."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    tracked = {name: state.clone() for name, state in get_cuda_rng_tracker().get_states().items()}
    return {"cpu": torch.get_rng_state(), "cuda": cuda, "megatron": tracked}


def _random_pieces(state: Mapping[str, Any]) -> Iterator[Piece]:
    states = {"cpu": state["cpu"], "cuda": state["cuda"], **state["megatron"]}
    for name, content in states.items():
        if content is not None:
            yield whole(f"random.{dist.get_rank()}.{name}", content)


def _set_random_state(state: Mapping[str, Any]) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    torch.set_rng_state(state["cpu"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(state["megatron"])
