"""Chooses what trains each model: Megatron-Core where it has the model's type, otherwise transformers' model under FSDP2."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

from dagrl.config import Config, Json
from dagrl.config.roles import CRITIC, model_section, section_key
from dagrl.data.hugging_face import is_hub_id
from dagrl.errors import ConfigError
from dagrl.imports import load_attribute, load_class
from dagrl.rl.algorithm import Algorithm
from dagrl.rl.preferences import gives_scores

WORKERS: Mapping[str, Mapping[str, str]] = {
    "megatron": {
        "policy": "dagrl.workers.megatron:MegatronWorker",
        "value": "dagrl.workers.megatron:MegatronValueWorker",
        "teacher": "dagrl.workers.megatron:MegatronTeacherWorker",
    },
    "fsdp": {
        "policy": "dagrl.workers.fsdp:FsdpWorker",
        "value": "dagrl.workers.fsdp:FsdpValueWorker",
        "teacher": "dagrl.workers.fsdp:FsdpTeacherWorker",
    },
}
"""The worker classes of each backend, by the kind of model."""


def choose_backends(config: Config, algorithm: Algorithm) -> Iterator[tuple[str, str, str]]:
    """Yields key, value and reason of `backend` and `worker` of the policy and of models next to it, where they are open.

    Raises ConfigError if both are the user's.
    """
    kinds = {"policy": "value" if gives_scores(algorithm) else "policy"}
    kinds |= {CRITIC: "value"} if algorithm.critic else {}
    kinds |= dict.fromkeys(config.models, "teacher")
    for role, kind in kinds.items():
        chosen = model_section(config, role) or config.policy
        section = role if chosen is config.policy else section_key(role)
        worker, backend = f"{section}.worker", f"{section}.backend"
        if config.is_set(worker):
            named = next((name for name, classes in WORKERS.items() if chosen.worker in classes.values()), None)
            if chosen.backend == "auto" and named is not None:
                yield backend, named, f"{worker} is its class"
            elif chosen.backend not in ("auto", named) and not _inherits(chosen.worker, chosen.backend, worker):
                raise ConfigError(
                    f"{backend} and {worker} are both set; {backend} chooses one of dagrl's own workers. Leave one out, or "
                    "name a class that inherits from the backend's"
                )
            continue
        name: str = chosen.backend
        if name == "auto":
            name, reason = _backend_for(config, section, chosen.model_name)
            yield backend, name, reason
        yield worker, WORKERS[name][kind], f"{backend} is {name}"


def _inherits(path: str, backend: str, key: str) -> bool:
    own, classes = load_class(path, key), WORKERS[backend].values()
    return any(issubclass(own, load_class(one, key)) for one in classes)


def _backend_for(config: Config, section: str, model: str | None) -> tuple[str, str]:
    """Returns the backend of a role's model, and why."""
    known = cast(tuple[str, ...], load_attribute("dagrl.workers.families.decoder:MODEL_TYPES", f"{section}.backend"))
    kind = _model_type(config, model)
    if kind is None:
        return "megatron", "the model's type is not known yet"
    if kind in known:
        return "megatron", f"Megatron trains {kind}"
    return "fsdp", f"Megatron trains {', '.join(known)}, but model_type is {kind}"


def _model_type(config: Config, name: str | None) -> Json:
    """Returns the `model_type` of the model `name`, or without one of the policy's; None if it cannot be read."""
    policy = config.policy
    if name is None and policy.model_name is None:
        return None if policy.random_init is None else policy.random_init.hf_config.get("model_type")
    name = name or str(policy.model_name)
    try:
        if is_hub_id(name):
            from huggingface_hub import snapshot_download

            name = snapshot_download(name, allow_patterns="config.json")  # `hf_hub_download` retries for 23 s without a Hub
        content = json.loads((Path(name) / "config.json").read_text(encoding="utf-8"))
    except Exception:  # `preflight` reads it again, and says what is wrong
        return None
    return content.get("model_type") if isinstance(content, dict) else None
