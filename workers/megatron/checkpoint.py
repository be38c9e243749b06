"""Checkpoints of a train group: one file a rank with weights, optimizer, schedule and random state, and a manifest.

A checkpoint belongs to the layout it was written at; to go on at another one, export to Hugging Face and start from there.
It is written beside its place and renamed when every rank's file is complete, so a directory of that name is always whole.
Imported only where torch is.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dagrl.config import Json
from dagrl.errors import CheckpointError
from dagrl.layout import ParallelLayout
from workers.megatron.optimizer import Trainer

MANIFEST = "manifest.json"
_FORMAT = "dagrl-megatron-1"
_CHUNK = 1 << 24

Result = TypeVar("Result")


def save_checkpoint(
    directory: str, state: dict[str, Json], payload: dict[str, Any], identity: dict[str, Json], rank: int
) -> None:
    """Write a checkpoint together with all ranks; `identity` says what it can be loaded into."""
    target, partial = Path(directory), Path(f"{directory}.partial")
    written = _gather_objects(_together(lambda: _write_rank(partial, payload, rank)))

    def publish() -> None:
        manifest = {"format": _FORMAT, "identity": identity, "files": dict(written), "state": state}
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=2))
        _replace(partial, target)

    _together(publish if rank == 0 else lambda: None)


def load_checkpoint(directory: str, identity: dict[str, Json], rank: int) -> tuple[dict[str, Any], dict[str, Json]]:
    """This rank's payload and the driver's state; CheckpointError on every rank when one of them cannot read its part."""

    def read() -> tuple[dict[str, Any], dict[str, Json]]:
        manifest = _read_manifest(Path(directory), identity)
        return _read_rank(Path(directory), manifest["files"], rank), manifest["state"]

    return _together(read)


def identity_of(layout: ParallelLayout, precision: str, hf_config: dict[str, Json]) -> dict[str, Json]:
    """What must be equal between the run that wrote a checkpoint and the one that reads it."""
    ignored = {"transformers_version", "torch_dtype", "dtype", "_name_or_path", "use_cache"}
    model = {key: value for key, value in sorted(hf_config.items()) if key not in ignored}
    return {"layout": dict(asdict(layout)), "precision": precision, "model": model}


def collect(trainer: Trainer, reference: dict[str, torch.Tensor] | None) -> dict[str, Any]:
    """Everything that the next step depends on."""
    inner = trainer.inner_optimizers()
    return {
        "model": trainer.model.tensors(),
        "optimizer": [optimizer.state_dict() for optimizer in inner],
        "master": [_parameters(optimizer) for optimizer in inner],
        "scheduler": trainer.scheduler.state_dict(),
        "skipped_steps": trainer.skipped_steps,
        "random": _random_state(),
        "reference": reference,
    }


def restore(trainer: Trainer, payload: dict[str, Any]) -> None:
    """The inverse of `collect`, into the live tensors."""
    for name, tensor in trainer.model.tensors().items():
        tensor.copy_(payload["model"][name])
    for optimizer, state, master in zip(trainer.inner_optimizers(), payload["optimizer"], payload["master"], strict=True):
        optimizer.load_state_dict(state)
        for parameter, saved in zip(_parameters(optimizer), master, strict=True):
            parameter.copy_(saved)
    trainer.scheduler.load_state_dict(payload["scheduler"])
    trainer.skipped_steps = payload["skipped_steps"]
    _set_random_state(payload["random"])


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What the optimizer steps: the weights themselves, or their float32 masters."""
    return [parameter.data for group in optimizer.param_groups for parameter in group["params"]]


def _random_state() -> dict[str, Any]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"cpu": torch.get_rng_state(), "cuda": cuda, "megatron": get_cuda_rng_tracker().get_states()}


def _set_random_state(state: dict[str, Any]) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    torch.set_rng_state(state["cpu"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(state["megatron"])


def _together(action: Callable[[], Result]) -> Result:
    """Run `action` on every rank; when it fails on one, raise its error on all, so that none waits for another."""
    error: Exception | None = None
    try:
        result = action()
    except Exception as raised:
        error = raised
    failed = [message for message in _gather_objects(None if error is None else str(error)) if message is not None]
    if failed:
        raise CheckpointError(failed[0]) from error
    return result


def _gather_objects(value: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def _write_rank(partial: Path, payload: dict[str, Any], rank: int) -> tuple[str, dict[str, int]]:
    partial.mkdir(parents=True, exist_ok=True)
    path = partial / _file_name(rank)
    torch.save(payload, path)
    return path.name, _fingerprint(path)


def _file_name(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


def _fingerprint(path: Path) -> dict[str, int]:
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            checksum = zlib.crc32(chunk, checksum)
    return {"bytes": path.stat().st_size, "crc32": checksum}


def _replace(partial: Path, target: Path) -> None:
    old = Path(f"{target}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    partial.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _read_manifest(target: Path, identity: dict[str, Json]) -> dict[str, Any]:
    path = target / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; expected a directory written by save_checkpoint") from error
    if manifest.get("format") != _FORMAT:
        raise CheckpointError(
            f"{path} has format {manifest.get('format')!r}, expected {_FORMAT!r}; it is not a train checkpoint of dagrl"
        )
    found = manifest["identity"]
    different = [key for key in identity if found.get(key) != identity[key]]
    if different:
        key = different[0]
        raise CheckpointError(
            f"{target} was written with {key} {found.get(key)}, this run has {identity[key]}; resume with the same {key}, "
            "or export the checkpoint to Hugging Face and start from that"
        )
    return manifest


def _read_rank(target: Path, files: dict[str, dict[str, int]], rank: int) -> dict[str, Any]:
    name = _file_name(rank)
    path = target / name
    if name not in files or not path.exists():
        raise CheckpointError(f"{path} is missing; the checkpoint is incomplete, resume from another one")
    found = _fingerprint(path)
    if found != files[name]:
        raise CheckpointError(
            f"{path} has {found}, but its manifest says {files[name]}; the file is damaged, resume from another one"
        )
    payload: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return payload
