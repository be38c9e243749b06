"""The manifest of a train checkpoint: the model's identity, and every file with size and CRC-32.

It is written last and read first. A checkpoint loads into the same model at the same precision, in any layout. Pure; needs
neither torch nor Megatron.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dagrl.config import Json, PolicyConfig
from dagrl.errors import CheckpointError, ConfigError
from dagrl.workers.megatron.architecture import read_architecture

MANIFEST = "manifest.json"
FORMAT = "dagrl-megatron-2"
_READ_BYTES = 1 << 24
_OBJECTS = ("identity", "identity.model", "state", "layout", "files")
_FIELDS = {**dict.fromkeys(_OBJECTS, dict), "identity.precision": str, "reference": bool}
_JSON_TYPES = {dict: "an object", bool: "true or false", str: "text"}


def identity_of(policy: PolicyConfig, hf_config: Mapping[str, Json]) -> dict[str, Json]:
    """Returns what `read_manifest` compares between the writing and the reading run."""
    peft = policy.megatron_cfg.peft
    adapters = peft.model_dump(mode="json", exclude={"enabled", "adapter_path", "refit"}) if peft.enabled else None
    return {"precision": policy.precision, "adapters": adapters, "model": dict(sorted(hf_config.items()))}


def fingerprint(path: Path) -> dict[str, int]:
    """Returns size and CRC-32 of a file."""
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return {"bytes": path.stat().st_size, "crc32": checksum}


def read_manifest(directory: Path, identity: Mapping[str, Json]) -> dict[str, Any]:
    """Returns the manifest of a checkpoint that a run of this `identity` can load.

    Raises CheckpointError if it cannot be read or has another format, precision or model. Models are equal if they compute
    the same (`Architecture.computed`), however `config.json` expresses it.
    """
    path = directory / MANIFEST
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; expected a directory written by save_checkpoint") from error
    manifest = _well_formed(path, content)
    _check_same(directory, manifest["identity"], identity)
    return manifest


def _well_formed(path: Path, content: object) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path} holds a JSON {type(content).__name__}; expected an object of format {FORMAT!r}, as save_checkpoint "
            "writes it. Resume from another checkpoint"
        )
    if content.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {content.get('format')!r}, expected {FORMAT!r}; it is not a checkpoint of this dagrl version"
        )
    for field, kind in _FIELDS.items():
        parent, _, name = field.rpartition(".")
        held = content[parent] if parent else content
        if not isinstance(held.get(name), kind):
            found = f"{field} = {held[name]!r:.60}" if name in held else f"no {field}"
            raise CheckpointError(
                f"{path} has {found}, expected {_JSON_TYPES[kind]}; it is damaged; resume from another checkpoint"
            )
    return content


def _check_same(directory: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    if found["precision"] != wanted["precision"]:
        raise _other(directory, "precision", f"{found['precision']}, this run has {wanted['precision']}")
    if found.get("adapters") != wanted["adapters"]:
        here = wanted["adapters"] or "none"
        raise _other(directory, "LoRA adapters", f"{found.get('adapters') or 'none'}, this run has {here}")
    saved, mine = _computed(directory, found["model"]), read_architecture(wanted["model"]).computed
    keys = [key for key in {**saved, **mine} if saved.get(key) != mine.get(key)]
    if keys:
        differences = (f"{key} = {saved.get(key)} (this run: {mine.get(key)})" for key in keys)
        raise _other(directory, "model", ", ".join(differences))


def _other(directory: Path, what: str, difference: str) -> CheckpointError:
    return CheckpointError(
        f"{directory} was written with {what} {difference}; resume with the same {what}, "
        "or export the checkpoint to Hugging Face format and start from that"
    )


def _computed(directory: Path, hf_config: Mapping[str, Json]) -> dict[str, Json]:
    try:
        return read_architecture(hf_config).computed
    except ConfigError as error:
        raise CheckpointError(
            f"{directory} was written with a model that this version does not train: {error}; "
            "resume with the version that wrote it"
        ) from error
