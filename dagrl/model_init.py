"""Makes what a run without a checkpoint starts from: a character tokenizer, and a Hugging Face model from a seed."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, cast

from dagrl.config import Json, PolicyConfig, RandomInit
from dagrl.errors import ConfigError
from dagrl.files import replace_directory

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

CONFIG = "config.json"

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
"""Tokens 0 to 3 of a character tokenizer; the characters follow in the order given."""


def character_tokenizer(characters: str, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer with one token a character, which adds no special tokens. Raises ConfigError for none or repeats."""
    repeated = sorted({character for character in characters if characters.count(character) > 1})
    if not characters or repeated:
        found = f"{', '.join(map(repr, repeated))} more than once" if repeated else "none"
        raise ConfigError(f"policy.random_init.tokenizer_characters: found {found}; expected: different characters")
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate((*SPECIAL_TOKENS, *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))  # noqa: S106  # a token of text
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    names = {f"{token.strip('<>')}_token": token for token in SPECIAL_TOKENS}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **names)
    fast.chat_template = chat_template
    return fast


def load_tokenizer(policy: PolicyConfig) -> PreTrainedTokenizerFast:
    """The tokenizer that the configuration names: a directory's, or one made of `tokenizer_characters`.

    Raises ConfigError when there is none, or when it has no end-of-sequence token.
    """
    init, given = policy.random_init, policy.tokenizer.chat_template
    if policy.tokenizer.name is None and init is not None:
        if init.tokenizer_characters is None:
            raise ConfigError(
                "a model from policy.random_init needs random_init.tokenizer_characters or policy.tokenizer.name"
            )
        return character_tokenizer(init.tokenizer_characters, given)
    own = policy.tokenizer.name is not None
    key, name = ("policy.tokenizer.name", policy.tokenizer.name) if own else ("policy.model_name", policy.model_name)
    directory = _existing_directory(name, key)
    tokenizer = _read_tokenizer(directory, key)
    if given is None:
        return tokenizer
    if tokenizer.chat_template not in (None, given):
        logger.warning(
            "policy.tokenizer.chat_template replaces the chat template that the tokenizer in %s has; set it to null to "
            "keep that one",
            directory,
        )
    tokenizer.chat_template = given
    return tokenizer


def _read_tokenizer(directory: Path, key: str) -> PreTrainedTokenizerFast:
    if (directory / CONFIG).exists():
        _read_description(directory, key)  # transformers looks at it too
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # whatever the code for the files' content stumbles over
        for file in (CONFIG, "tokenizer_config.json", "tokenizer.json"):
            if (directory / file).exists():
                _read_object(directory / file, key)
        reason = _reason(error)
        raise ConfigError(f"{key}: there is no tokenizer that transformers can load in {directory}: {reason}") from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer in {directory} has no eos_token; responses could not end")
    return cast("PreTrainedTokenizerFast", tokenizer)


def token_count(tokenizer: PreTrainedTokenizerFast) -> int:
    """Rows that an embedding needs for it: one more than its largest token."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def model_description(policy: PolicyConfig, tokens: int) -> dict[str, Json]:
    """The content of the model's `config.json`; for a model from a seed, with a `vocab_size` that holds the tokenizer's.

    `tokens` is the tokenizer's `token_count`. Raises ConfigError when the embedding of a checkpoint has fewer rows.
    """
    if policy.random_init is not None:
        return {**policy.random_init.hf_config, "vocab_size": _vocabulary(policy.random_init, tokens)}
    description = _read_description(_existing_directory(policy.model_name, "policy.model_name"), "policy.model_name")
    rows = description.get("vocab_size")
    if isinstance(rows, int) and rows < tokens:
        raise ConfigError(
            f"the tokenizer of {policy.tokenizer.name or policy.model_name} has tokens up to {tokens - 1}, but the model of "
            f"{policy.model_name} has rows for 0 to {rows - 1} (vocab_size {rows}); use the tokenizer of that model"
        )
    return description


def prepare_model(policy: PolicyConfig, tokenizer: PreTrainedTokenizerFast, directory: Path) -> Path:
    """The directory to load the model from: `policy.model_name`, or `directory` filled by `write_random_model`."""
    if policy.random_init is None:
        return _existing_directory(policy.model_name, "policy.model_name")
    write_random_model(policy.random_init, tokenizer, directory)
    return directory


def make_random_model(init: RandomInit, tokenizer: PreTrainedTokenizerFast, device: str = "cpu") -> PreTrainedModel:
    """The model in float32 with seeded weights; on device `meta` without any, to see soon whether it can be made.

    Raises ConfigError for what transformers refuses.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    description = dict(init.hf_config)
    kind = description.pop("model_type", None)
    tokens = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": tokenizer.bos_token_id}
    tokens |= {"eos_token_id": tokenizer.eos_token_id, "vocab_size": _vocabulary(init, token_count(tokenizer))}
    try:
        hf_config = AutoConfig.for_model(kind, **{**description, **tokens})
        with torch.random.fork_rng(devices=[]), torch.device(device):
            torch.manual_seed(init.seed)
            return cast("PreTrainedModel", AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32))
    except Exception as error:  # of whatever the architecture's code does with its keys
        raise ConfigError(
            f"policy.random_init.hf_config: transformers cannot make a model of type {kind!r}: {_reason(error)}"
        ) from error


def write_random_model(init: RandomInit, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write a float32 checkpoint with seeded weights, its configuration and the tokenizer; the same bytes every time.

    The directory appears whole or not at all. Raises ConfigError when transformers does not know the architecture.
    """
    model = make_random_model(init, tokenizer)
    part = directory.with_name(directory.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    replace_directory(part, directory)
    logger.info("made a model of %d parameters from seed %d in %s", model.num_parameters(), init.seed, directory)


def _read_object(path: Path, key: str) -> dict[str, Json]:
    """The JSON object in a file of a Hugging Face directory."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{key}: {path} cannot be read as a Hugging Face {path.name}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{key}: {path} holds a JSON {type(content).__name__}; expected an object, as Hugging Face writes it"
        )
    return content


def _vocabulary(init: RandomInit, tokens: int) -> int:
    """Rows of the embedding: those of `hf_config.vocab_size`, and at least one a token of the tokenizer."""
    wanted = init.hf_config.get("vocab_size")
    return max(tokens, wanted if isinstance(wanted, int) else 0)


def _read_description(directory: Path, key: str) -> dict[str, Json]:
    """A checkpoint's `config.json`. Raises ConfigError when there is none, or one that transformers refuses.

    Of a `model_type` that transformers does not know it is for the worker classes to say what they need.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    path = directory / CONFIG
    description = _read_object(path, key)
    if description.get("model_type") in list(CONFIG_MAPPING):
        try:
            AutoConfig.from_pretrained(directory, local_files_only=True)
        except Exception as error:  # transformers has a class of errors for each way to check a key
            raise ConfigError(f"{key}: transformers refuses {path}: {_reason(error)}; mend that file") from error
    return description


def _reason(error: Exception) -> str:
    """On one line: errors of transformers' checks have several."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _existing_directory(name: str | None, key: str) -> Path:
    path = Path(name or "")
    if name is None or not path.is_dir():
        raise ConfigError(
            f"{key}: there is no directory {name!r} (looked from {Path.cwd()}); give a Hugging Face checkpoint"
        )
    return path
