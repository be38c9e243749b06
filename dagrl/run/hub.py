"""Models by their id on the Hugging Face Hub: downloads them into the cache, or finds them there."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from dagrl.config import Config
from dagrl.config.roles import own_section
from dagrl.config.settings import model_roles
from dagrl.errors import ConfigError

logger = logging.getLogger(__name__)

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")

TOKENIZER_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
MODEL_FILES = (*TOKENIZER_FILES, "*.safetensors")


def with_local_models(config: Config) -> tuple[Config, dict[str, str]]:
    """Returns the configuration with directories in place of Hub ids, and for each key where it came from.

    A name that is a directory, or cannot be an id, stays as it is. Raises ConfigError if neither the Hub nor the
    cache has the model.
    """
    policy, origins = config.policy, dict[str, str]()
    if policy.model_name is not None and is_hub_id(policy.model_name):
        key = "policy.model_name"
        directory, origins[key] = _download(policy.model_name, MODEL_FILES, key)
        policy = policy.model_copy(update={"model_name": str(directory)})
    if policy.reference_model_name is not None and is_hub_id(policy.reference_model_name):
        key = "policy.reference_model_name"
        directory, origins[key] = _download(policy.reference_model_name, MODEL_FILES, key)
        policy = policy.model_copy(update={"reference_model_name": str(directory)})
    sections: dict[str, object] = {}
    for role in model_roles(config):
        section, key = own_section(config, role), f"{role}.model_name"
        if section is not None and section.model_name is not None and is_hub_id(section.model_name):
            directory, origins[key] = _download(section.model_name, MODEL_FILES, key)
            sections[role] = section.model_copy(update={"model_name": str(directory)})
    if policy.tokenizer.name is not None and is_hub_id(policy.tokenizer.name):
        key = "policy.tokenizer.name"
        directory, origins[key] = _download(policy.tokenizer.name, TOKENIZER_FILES, key)
        policy = policy.model_copy(update={"tokenizer": policy.tokenizer.model_copy(update={"name": str(directory)})})
    return config.model_copy(update={"policy": policy, **sections}), origins


def is_hub_id(name: str) -> bool:
    """Whether the name is `owner/name`, and not a path that exists."""
    return HUB_ID.fullmatch(name) is not None and not Path(name).exists()


def _download(name: str, patterns: tuple[str, ...], key: str) -> tuple[Path, str]:
    """Returns the directory of the newest revision, and what to say of it. Without a connection, of the one in the cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    logger.info("looking for %s %s on the Hugging Face Hub and in its cache", key, name)
    try:
        directory = Path(snapshot_download(name, allow_patterns=list(patterns)))
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(
            f"{key}: {name!r} is neither a directory (relative to {Path.cwd()}) nor a model that the Hugging Face Hub or "
            f"its cache has: {reason}. Check the id, log in with `hf auth login` for a gated model, or "
            "download it and name its directory"
        ) from error
    return directory, f"{name} on the Hugging Face Hub, revision {directory.name}"
