"""The models and the tokenizer that a run starts from: on the Hugging Face Hub, in a directory, or made from a seed."""

from __future__ import annotations

import hashlib
import json
import logging
import pickle
import shutil
from collections.abc import Callable, Mapping
from datetime import date, datetime, time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from dagrl.config import Config, Json, PolicyConfig, RandomInit
from dagrl.config.roles import section_key
from dagrl.config.settings import TOKENIZER_KEY, model_names
from dagrl.data.chat import chat_of
from dagrl.data.hugging_face import cache_advice, is_hub_id
from dagrl.data.media import PROCESSOR_FILES
from dagrl.data.tokenizer_copies import copies_share_models, packed, unpacked
from dagrl.errors import ConfigError, error_line
from dagrl.files import replace_directory
from dagrl.imports import brief_imports

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER = "tokenizer.json"
TEMPLATE = "chat_template.jinja"
CHAT_TEMPLATE_DIR = "additional_chat_templates"
TOKENIZER_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""What is downloaded of a model besides weights."""

OWN_JSON = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "tekken.json",
    "chat_template.*",
)
"""Those JSON files that belong to a tokenizer."""

PROBES = (
    "what is the answer\n to 12 and 34?",
    "  Hello,  World!\r\n\n\tdef f(x):\n        return x[1] + 1.5e-3  ",
    "don't I'LL we've 1234567, 3.14; __init__ <b>",
    "caf\u00e9 e\u0301 \ufb01 \uff11 \u00a0 \u200b \x07 \U0001f600\U0001f469\u200d\U0001f467",
    "\u65e5\u672c\u8a9e\u306e \ud55c\uad6d\uc5b4 \u0627\u0644\u0639\u0631\u0628\u064a\u0629",
)
"""Texts that tell tokenizers apart."""

TOKENIZER_ADVICE = f"save the model's tokenizer there, or name its directory in {TOKENIZER_KEY}"

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
"""Tokens 0 to 3 of a character tokenizer; the characters follow in the order given."""

Apart = Callable[..., Callable[[], Any]]
"""Begins a call, given with its arguments, in another process. Returns what waits for its result. `partial`: in this one."""


def with_local_models(config: Config) -> tuple[Config, dict[str, str]]:
    """Returns the configuration with directories in place of Hub ids, and for each key where it came from.

    A name that is a directory, or cannot be an id, stays as it is. Raises ConfigError if neither the Hub nor the
    cache has the model.
    """
    names = {key: name for key, name in model_names(config).items() if name is not None and is_hub_id(name)}
    directories = {key: _download(name, key) for key, name in names.items()}
    paths = {key: str(directory) for key, directory in directories.items()}
    origins = {key: f"{names[key]} on the Hugging Face Hub, revision {path.name}" for key, path in directories.items()}
    return config.with_keys(paths), origins


def check_directories(config: Config) -> None:
    """Raises ConfigError for a model or tokenizer that is no directory and no Hub id, or for its `config.json`."""
    for key, name in model_names(config).items():
        if name is not None and not is_hub_id(name):
            path = _existing_directory(name, key) / CONFIG
            if path.exists():
                _read_object(path, key)
            elif key != TOKENIZER_KEY:
                raise ConfigError(
                    f"{key}: {path.parent} has no {CONFIG}; expected a Hugging Face checkpoint, such as a run's final_model."
                    " Adapters belong in policy.peft.adapter_path, and dagrl export makes a model of a run's checkpoint"
                )


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
            f"its cache has: {reason}{cache_advice(error)}. Check the id, log in with `hf auth login` for a gated model, or "
            "download it and name its directory"
        ) from error


def character_tokenizer(characters: str, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token per character, which adds no special tokens. Raises ConfigError for repeats."""
    repeated = sorted({character for character in characters if characters.count(character) > 1})
    if not characters or repeated:
        problem = f"{', '.join(map(repr, repeated))} more than once" if repeated else "none"
        raise ConfigError(f"policy.random_init.tokenizer_characters: found {problem}; expected: different characters")
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


@brief_imports()
def load_tokenizer(policy: PolicyConfig, apart: Apart = partial) -> PreTrainedTokenizerFast:
    """Returns the configured tokenizer: from a directory, or made of `tokenizer_characters`.

    To read a directory transformers imports torch, in this process or `apart`. Raises ConfigError if there is none, if it
    has no end-of-sequence token, or if transformers rejects the model's `config.json`.
    """
    init, template = policy.random_init, policy.tokenizer.chat_template
    if policy.tokenizer.name is None and init is not None:
        if init.tokenizer_characters is None:
            raise ConfigError(
                "a model from policy.random_init needs random_init.tokenizer_characters or policy.tokenizer.name"
            )
        return character_tokenizer(init.tokenizer_characters, template)
    own = policy.tokenizer.name is not None
    model = _existing_directory(policy.model_name, "policy.model_name") if own and policy.model_name is not None else None
    key, name = ("policy.tokenizer.name", policy.tokenizer.name) if own else ("policy.model_name", policy.model_name)
    directory = _existing_directory(name, key)
    tokenizer = _read_tokenizer(directory, key, apart, model)
    if template is None:
        return tokenizer
    if tokenizer.chat_template not in (None, template):
        logger.warning(
            "policy.tokenizer.chat_template replaces the chat template of the tokenizer in %s; set it to null to keep that "
            "template",
            directory,
        )
    tokenizer.chat_template = template
    return tokenizer


def _read_tokenizer(directory: Path, key: str, apart: Apart = partial, model: Path | None = None) -> PreTrainedTokenizerFast:
    """Returns the tokenizer of a directory, once transformers has taken the `config.json` of `model`, if there is one."""
    from tokenizers import Tokenizer

    logging.getLogger("transformers.tokenization_utils_tokenizers").addFilter(_concerns_users)
    path = directory / TOKENIZER
    if apart is partial:
        tokenizer = _transformers_tokenizer(directory, key, model)
        file = Tokenizer.from_file(str(path)) if path.exists() else None
    else:
        made = apart(packed, _transformers_tokenizer, directory, key, model)
        from transformers import PreTrainedTokenizerFast  # noqa: F401  # meanwhile: it takes a second without torch

        try:
            file = Tokenizer.from_file(str(path)) if path.exists() else None
            known = {} if file is None else {pickle.dumps(file.model): file.model}
        except Exception:
            made()  # it says more of a malformed file
            raise
        tokenizer = unpacked(made(), known)
    if file is not None:
        tokenizer = _as_the_file_says(tokenizer, file, directory, key)
    if tokenizer.get_vocab().keys() <= tokenizer.get_added_vocab().keys():  # what transformers makes of no files at all
        raise ConfigError(f"{key}: {directory} has no tokenizer, such as tokenizer.json; {TOKENIZER_ADVICE}")
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer in {directory} has no eos_token to end responses; set it in tokenizer_config.json")
    return cast("PreTrainedTokenizerFast", tokenizer)


def _concerns_users(record: logging.LogRecord) -> bool:
    """False for the warning that transformers decodes Llama 3's tokens as they are, although their files say otherwise."""
    return not record.getMessage().startswith("Ignoring clean_up_tokenization_spaces=True for BPE")


def _transformers_tokenizer(directory: Path, key: str, model: Path | None) -> Any:
    if model is not None:
        _check_description(model, "policy.model_name")
    _check_description(directory, key)  # transformers reads it too
    from transformers import AutoTokenizer

    try:
        with copies_share_models():
            return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises anything for malformed files
        for file in (CONFIG, "tokenizer_config.json", "tokenizer.json"):
            if (directory / file).exists():
                _read_object(directory / file, key)
        reason = error_line(error)
        raise ConfigError(
            f"{key}: transformers cannot load a tokenizer from {directory}: {reason}; {TOKENIZER_ADVICE}"
        ) from error


def check_template(policy: PolicyConfig, tokenizer: PreTrainedTokenizerFast) -> None:
    """Raises ConfigError for a chat template that is no valid Jinja, or that writes the same whatever a user says."""
    from jinja2 import TemplateError, TemplateSyntaxError

    own = policy.tokenizer.chat_template is not None
    where = "policy.tokenizer.chat_template" if own else f"the chat template in {policy.tokenizer.name or policy.model_name}"
    contents = ("1 + 1", "2 + 2")
    try:
        one, other = (chat_of(tokenizer).render([{"role": "user", "content": content}], opened=True) for content in contents)
    except TemplateSyntaxError as error:
        raise ConfigError(f"{where} is not valid: {error.message} (line {error.lineno}); correct it") from error
    except (TemplateError, TypeError, LookupError, AttributeError):
        return  # it wants other conversations; errors of the run's own name the example
    if one == other:
        raise ConfigError(
            f"{where} writes {one!r:.60} for both {contents[0]!r} and {contents[1]!r}, so all prompts would be equal; it "
            "must write the content of each of `messages`, as text"
        )


def set_date(tokenizer: PreTrainedTokenizerFast, day: date) -> None:
    """Makes the chat template write this date in place of today's (`strftime_now`)."""
    render = partial(tokenizer.apply_chat_template, strftime_now=datetime.combine(day, time()).strftime)
    tokenizer.apply_chat_template = render


def _as_the_file_says(tokenizer: Any, file: Tokenizer, directory: Path, key: str) -> Any:
    """Returns a tokenizer that reads texts as `tokenizer.json` does, which `file` is.

    transformers makes the class of tokenizer_config.json from the file's vocabulary. That class may treat spaces in its own
    way, and be the wrong one: LlamaTokenizer drops those of the byte-level tokenizers that name it. Raises ConfigError if no
    class of transformers reads the file as it is.
    """
    from transformers import PreTrainedTokenizerFast

    file.no_truncation()
    file.no_padding()
    added = [token.content for token in file.get_added_tokens_decoder().values()]
    texts = [*PROBES, *(f"a {token}\n b{token}c" for token in added[:64])]

    def equal(made: Any) -> bool:
        ids = [encoding.ids for encoding in file.encode_batch(texts, add_special_tokens=False)]
        decoded = file.decode_batch(ids, skip_special_tokens=False)
        return bool(
            made(texts, add_special_tokens=False)["input_ids"] == ids
            and [made.decode(tokens, clean_up_tokenization_spaces=False) for tokens in ids] == decoded
        )

    if equal(tokenizer):
        return tokenizer
    generic = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True, **tokenizer.special_tokens_map)
    if not equal(generic):
        raise ConfigError(
            f"{key}: transformers reads texts otherwise than {directory / TOKENIZER}, as {type(tokenizer).__name__} and as "
            "PreTrainedTokenizerFast; save the tokenizer again with the library that made the file"
        )
    logger.info("%s reads texts otherwise than %s; the file is used", type(tokenizer).__name__, directory / TOKENIZER)
    return generic


def save_tokenizer(policy: PolicyConfig, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Copies the tokenizer's files into the directory of a model, with the run's chat template, which replaces all of the
    tokenizer's. The model's `generation_config.json` gets the tokens that end turns, so that other engines stop there too.

    Files are copied because transformers would write others for some classes. A character tokenizer has none yet.
    """
    source = Path(policy.tokenizer.name or policy.model_name or "")
    if policy.tokenizer.name is None and policy.random_init is not None:
        tokenizer.save_pretrained(directory)
    elif source.resolve() != directory.resolve():
        patterns = (*OWN_JSON, *(pattern for pattern in TOKENIZER_FILES if pattern != "*.json"))
        for file in {file for pattern in patterns for file in directory.glob(pattern)}:
            file.unlink()  # of the model that training began with
        for file in {file for pattern in patterns for file in source.glob(pattern)}:
            shutil.copy2(file, directory)
        shutil.rmtree(directory / CHAT_TEMPLATE_DIR, ignore_errors=True)
        if policy.tokenizer.chat_template is None and (source / CHAT_TEMPLATE_DIR).is_dir():
            shutil.copytree(source / CHAT_TEMPLATE_DIR, directory / CHAT_TEMPLATE_DIR)
    if policy.tokenizer.chat_template is not None:
        (directory / TEMPLATE).write_text(policy.tokenizer.chat_template, encoding="utf-8")
    if tokenizer.chat_template is not None:
        path = directory / GENERATION_CONFIG
        content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        ends = {*end_tokens(content), *chat_of(tokenizer).stops, cast(int, tokenizer.eos_token_id)}
        if ends != set(end_tokens(content)):
            path.write_text(json.dumps({**content, "eos_token_id": sorted(ends)}, indent=2) + "\n", encoding="utf-8")


def end_tokens(content: Mapping[str, Json]) -> list[int]:
    """Returns the `eos_token_id` of a `config.json` or `generation_config.json`: one, several or none."""
    ends = content.get("eos_token_id")
    return [end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)]


def generation_defaults(policy: PolicyConfig) -> dict[str, Json]:
    """Returns the model's `generation_config.json`; empty if it has none."""
    path = Path(policy.model_name or "") / GENERATION_CONFIG
    return _read_object(path, "policy.model_name") if policy.random_init is None and path.exists() else {}


def token_count(tokenizer: PreTrainedTokenizerFast) -> int:
    """Returns the rows that an embedding needs for the tokenizer: its largest token plus one."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def model_description(policy: PolicyConfig, tokens: int) -> dict[str, Json]:
    """Returns the model's `config.json`. A model from a seed gets a `vocab_size` that covers the tokenizer.

    `tokens` is the tokenizer's `token_count`. Raises ConfigError if the embedding of a checkpoint has fewer rows.
    """
    if policy.random_init is not None:
        return _with_language_keys(policy.random_init.hf_config, {"vocab_size": _vocabulary(policy.random_init, tokens)})
    description = _read_object(_existing_directory(policy.model_name, "policy.model_name") / CONFIG, "policy.model_name")
    rows = language_keys(description).get("vocab_size")
    if isinstance(rows, int) and rows < tokens:
        raise ConfigError(
            f"the tokenizer in {policy.tokenizer.name or policy.model_name} has tokens up to {tokens - 1}, but the model in "
            f"{policy.model_name} has rows for 0 to {rows - 1} (vocab_size {rows}); use that model's tokenizer"
        )
    return description


def role_description(config: Config, role: str, hf_config: Mapping[str, Json]) -> Mapping[str, Json]:
    """Returns the `config.json` of a role's model. `hf_config` is the policy's."""
    key = f"{section_key(role)}.model_name"
    name = model_names(config).get(key)
    return hf_config if name is None else _read_object(_existing_directory(name, key) / CONFIG, key)


def check_other_tokenizers(config: Config, ours: Mapping[str, int]) -> None:
    """Raises ConfigError unless transformers takes all models next to the policy, with the tokens of its tokenizer."""
    tokens = max(ours.values(), default=-1) + 1
    for key, name in other_models(config).items():
        directory = _existing_directory(name, key)
        _check_description(directory, key)
        rows = language_keys(_read_object(directory / CONFIG, key)).get("vocab_size")
        if isinstance(rows, int) and rows < tokens:
            raise ConfigError(
                f"{key}: the model in {directory} has rows for {rows} tokens, but the policy's tokenizer has {tokens}; "
                "choose one with the policy's tokenizer"
            )
        if not any((directory / file).exists() for file in (TOKENIZER, "tokenizer_config.json")):
            continue  # weights alone: nothing to compare
        theirs = _read_tokenizer(directory, key).get_vocab()
        if differing := sorted(token for token, number in ours.items() if theirs.get(token) != number):
            raise ConfigError(
                f"{key}: the tokenizer in {directory} has other numbers for {len(differing)} of the policy's {len(ours)} "
                f"tokens, such as {differing[0]!r}, so it would read other texts; choose one with its tokenizer"
            )


def other_models(config: Config) -> dict[str, str]:
    """Returns the directories of models next to the policy, by their keys."""
    own = ("policy.model_name", TOKENIZER_KEY)
    return {key: name for key, name in model_names(config).items() if name is not None and key not in own}


def checkpoint_bytes(policy: PolicyConfig) -> int:
    """Returns the bytes of the checkpoint's safetensors; 0 for a model from a seed.

    Without `consolidated*.safetensors`, in which Mistral's checkpoints have all weights once more.
    """
    files = Path(policy.model_name).glob("*.safetensors") if policy.model_name is not None else ()
    return sum(file.stat().st_size for file in files if not file.name.startswith("consolidated"))


def copy_processor(source: Path, directory: Path) -> None:
    """Copies the files of a processor, if there are any, next to those of the tokenizer, which stay."""
    for file in (source / name for name in PROCESSOR_FILES):
        if file.is_file() and not (directory / file.name).exists():
            shutil.copy2(file, directory)


def check_random_model(init: RandomInit, tokenizer: PreTrainedTokenizerFast) -> None:
    """Raises ConfigError if transformers rejects the keys of the model."""
    make_random_model(init, tokenizer, "meta")


def language_keys(hf_config: Mapping[str, Json]) -> Mapping[str, Json]:
    """Returns the keys of the language model: all of them, or those of its part in a model that takes images."""
    text = hf_config.get("text_config")
    return text if isinstance(text, dict) else hf_config


def _with_language_keys(hf_config: Mapping[str, Json], keys: Mapping[str, Json]) -> dict[str, Json]:
    """Returns the configuration with `keys` of the language model, also in its part if it has one."""
    own = language_keys(hf_config)
    part: dict[str, Json] = {} if own is hf_config else {"text_config": {**own, **keys}}
    return {**hf_config, **keys, **part}


def auto_class(hf_config: Any) -> Any:
    """Returns the class of transformers that makes the model of its configuration, with images if it takes them.

    Of some models with images transformers also has the language model alone; `architectures` says which one it is.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    autos = [AutoModelForCausalLM, AutoModelForImageTextToText]
    known = [auto for auto in autos if type(hf_config) in auto._model_mapping]
    named = [auto for auto in known if auto._model_mapping[type(hf_config)].__name__ in (hf_config.architectures or ())]
    return next(iter([*named, *known]), AutoModelForCausalLM)


def make_random_model(init: RandomInit, tokenizer: PreTrainedTokenizerFast, device: str = "cpu") -> PreTrainedModel:
    """Returns the model in float32 with seeded weights. On device `meta` it has none, which checks the keys quickly.

    Raises ConfigError if transformers rejects them.
    """
    import torch
    from transformers import AutoConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    description = dict(init.hf_config)
    kind = description.pop("model_type", None)
    # Without `pad_token_id`, for which transformers keeps a row of zeros: the policy samples that token as any other.
    tokens = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    tokens["vocab_size"] = _vocabulary(init, token_count(tokenizer))
    try:
        hf_config = AutoConfig.for_model(kind, **_with_language_keys(description, tokens))
        with torch.random.fork_rng(devices=[]), torch.device(device):
            torch.manual_seed(init.seed)
            return cast("PreTrainedModel", auto_class(hf_config).from_config(hf_config, dtype=torch.float32))
    except Exception as error:  # architectures raise anything for bad keys
        raise ConfigError(
            f"policy.random_init.hf_config: transformers cannot make a model of type {kind!r}: {error_line(error)}"
        ) from error


def write_random_model(
    init: RandomInit, tokenizer: PreTrainedTokenizerFast, directory: Path, source: Path | None = None
) -> str:
    """Writes a float32 checkpoint with seeded weights, its configuration and the tokenizer. The bytes are reproducible.

    With the tokenizer's directory as `source`, it gets that one's processor of images too.

    The directory appears complete or not at all, and stays as it is if it has this model. Raises ConfigError if transformers
    does not know the architecture, or if it cannot be written. Returns what it has written, for a log.
    """
    from safetensors import SafetensorError

    vocabulary = json.dumps([sorted(tokenizer.get_vocab().items()), tokenizer.chat_template])
    made = json.dumps({**init.model_dump(mode="json"), "tokenizer": hashlib.sha256(vocabulary.encode()).hexdigest()})
    part, marker = directory.with_name(directory.name + ".part"), "random_init.json"
    if (directory / marker).is_file() and (directory / marker).read_text(encoding="utf-8") == made:
        return ""
    model = make_random_model(init, tokenizer)
    shutil.rmtree(part, ignore_errors=True)
    try:
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        if source is not None:
            copy_processor(source, part)
        (part / marker).write_text(made, encoding="utf-8")
        replace_directory(part, directory)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise ConfigError(
            f"output_dir: cannot write the first model, {model.num_parameters() * 4 / 2**20:.0f} MiB, to {directory}: "
            f"{error_line(error)}. Make room there, or name another directory"
        ) from error
    return f"wrote a model of {model.num_parameters()} parameters from seed {init.seed} to {directory}"


def _read_object(path: Path, key: str) -> dict[str, Json]:
    """Reads the JSON object in a file of a Hugging Face directory."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{key}: {path} cannot be read as a Hugging Face {path.name}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{key}: {path} holds a JSON {type(content).__name__}; expected an object")
    return content


def _vocabulary(init: RandomInit, tokens: int) -> int:
    """Returns the rows of the embedding: `hf_config.vocab_size`, and at least one per token of the tokenizer."""
    rows = language_keys(init.hf_config).get("vocab_size")
    return max(tokens, rows if isinstance(rows, int) else 0)


def _check_description(directory: Path, key: str) -> None:
    """Raises ConfigError if there is a `config.json` that transformers rejects.

    The worker classes check a `model_type` that transformers does not know.
    """
    path = directory / CONFIG
    if not path.exists():
        return
    from transformers import CONFIG_MAPPING, AutoConfig

    if _read_object(path, key).get("model_type") in list(CONFIG_MAPPING):
        try:
            AutoConfig.from_pretrained(directory, local_files_only=True)
        except Exception as error:  # transformers raises a different class for each check
            raise ConfigError(f"{key}: transformers rejects {path}: {error_line(error)}; correct that file") from error


def _existing_directory(name: str | None, key: str) -> Path:
    path = Path(name or "")
    if name is None or not path.is_dir():
        raise ConfigError(
            f"{key}: {name!r} is not a directory (relative to {Path.cwd()}); name a Hugging Face checkpoint, or the id of "
            "one on the Hub, such as Qwen/Qwen3-0.6B"
        )
    return path
