"""Models by their id on the Hugging Face Hub: downloads them into the cache, or finds them there."""

from __future__ import annotations

import logging
from pathlib import Path

from dagrl.config import Config
from dagrl.config.settings import TOKENIZER_KEY, model_names
from dagrl.data.hugging_face import is_hub_id
from dagrl.errors import ConfigError

logger = logging.getLogger(__name__)

TOKENIZER_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")


def with_local_models(config: Config) -> tuple[Config, dict[str, str]]:
    """Returns the configuration with directories in place of Hub ids, and for each key where it came from.

    A name that is a directory, or cannot be an id, stays as it is. Raises ConfigError if neither the Hub nor the
    cache has the model.
    """
    names = {key: name for key, name in model_names(config).items() if name is not None and is_hub_id(name)}
    found = {key: _download(name, key) for key, name in names.items()}
    directories = {key: str(directory) for key, directory in found.items()}
    origins = {key: f"{names[key]} on the Hugging Face Hub, revision {path.name}" for key, path in found.items()}
    return config.with_keys(directories), origins


def _download(name: str, key: str) -> Path:
    """Returns the directory of the newest revision, or without a connection of the one in the cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    logger.info("looking for %s %s on the Hugging Face Hub and in its cache", key, name)
    patterns = [*TOKENIZER_FILES, *(() if key == TOKENIZER_KEY else ("*.safetensors",))]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(
            f"{key}: {name!r} is neither a directory (relative to {Path.cwd()}) nor a model that the Hugging Face Hub or "
            f"its cache has: {reason}. Check the id, log in with `hf auth login` for a gated model, or "
            "download it and name its directory"
        ) from error
