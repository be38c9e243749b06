"""`worker.json` of a train checkpoint: which model it is of, and the counters of its steps. Needs no torch.

A checkpoint loads into the same model at the same precision, in any layout. The manifest of the whole checkpoint has the
checksum of the file.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dagrl.config import Json, PolicyConfig
from dagrl.errors import CheckpointError, ConfigError

WORKER = "worker.json"

Computed = Callable[[Mapping[str, Json]], Mapping[str, Json]]
"""Returns the settings that affect the computation, given a `config.json`; equal for models that compute the same."""


def identity_of(policy: PolicyConfig, hf_config: Mapping[str, Json]) -> dict[str, Json]:
    """Returns the settings that `read_worker_file` compares between the writing and the reading run."""
    peft = policy.peft
    adapters = peft.model_dump(mode="json", exclude={"enabled", "adapter_path", "refit"}) if peft.enabled else None
    return {"precision": policy.precision, "adapters": adapters, "model": dict(sorted(hf_config.items()))}


def read_worker_file(directory: Path, file_format: str, identity: Mapping[str, Json], computed: Computed) -> dict[str, Any]:
    """Returns `worker.json` of a checkpoint that a run of this `identity` can load.

    Raises CheckpointError if it cannot be read or has another format, precision or model. Models are equal if they compute
    the same, however `config.json` expresses it.
    """
    path = directory / WORKER
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"cannot read {path}: {error}; expected a directory written by save_checkpoint. Resume from another checkpoint"
        ) from error
    if not isinstance(content, dict) or content.get("format") != file_format:
        actual = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise CheckpointError(
            f"{path} has format {actual!r}, expected {file_format!r}; it is of another version or train worker; to "
            "change that, start from an export to Hugging Face (checkpointing.export_hf)"
        )
    _check_same(directory, content["identity"], identity, computed)
    return content


def _check_same(directory: Path, saved_identity: Mapping[str, Any], identity: Mapping[str, Any], computed: Computed) -> None:
    if saved_identity["precision"] != identity["precision"]:
        raise _other(directory, "precision", f"{saved_identity['precision']}, this run has {identity['precision']}")
    if saved_identity.get("adapters") != identity["adapters"]:
        adapters = saved_identity.get("adapters") or "none"
        raise _other(directory, "LoRA adapters", f"{adapters}, this run has {identity['adapters'] or 'none'}")
    try:
        saved = computed(saved_identity["model"])
    except ConfigError as error:
        raise CheckpointError(
            f"{directory} was written with a model that this version does not train: {error}; "
            "resume with the version that wrote it"
        ) from error
    mine = computed(identity["model"])
    keys = [key for key in {**saved, **mine} if saved.get(key) != mine.get(key)]
    if keys:
        differences = (f"{key} = {saved.get(key)} (this run: {mine.get(key)})" for key in keys)
        raise _other(directory, "model", ", ".join(differences))


def _other(directory: Path, what: str, difference: str) -> CheckpointError:
    return CheckpointError(
        f"{directory} was written with {what} {difference}; resume with the same {what}, "
        "or export the checkpoint to Hugging Face format and start from that"
    )
