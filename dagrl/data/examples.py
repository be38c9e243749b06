"""Reads and splits examples from JSONL files, Hugging Face datasets or a task.

A line of a file is `{"prompt": ..., "response": ...}` (keys: `data.prompt_key`, `data.response_key`), with text or messages,
or `{"messages": [{"role": ..., "content": ...}, ...]}`, both with optional `tools` and `chat_template_kwargs`; for
preferences it is `{"prompt": ..., "chosen": ..., "rejected": ...}` (`preference_of`), or of a single answer `{"prompt": ...,
"response": ..., "label": true}` (`judged_of`). Rows of a dataset (`dagrl.data.hugging_face`) have the same columns. Further
keys of a message (`tool_calls`, `reasoning_content`) are passed to the chat template. An assistant turn with `weight` 0 is
not learned. Errors name the file and the line or row.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from itertools import chain, starmap, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import numpy as np

from dagrl.data.hugging_face import CSV, has_splits, plain_files, read_rows
from dagrl.data.media import IMAGE, Medium, Part, column_images, is_image, is_stored, parts_of, read_images
from dagrl.data.messages import content_of
from dagrl.errors import ConfigError, DataError, UserError
from dagrl.imports import check_arguments, load_callable, require_package, running

if TYPE_CHECKING:
    from dagrl.config import DataConfig, Json

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Made = TypeVar("Made")


@dataclass(frozen=True)
class Message:
    """One turn of a conversation. `more` holds further keys for the chat template.

    A turn with `tool_calls` may have no content. One with images has parts, and its `media` (`dagrl.data.media`). SFT learns
    the assistant turns that are `learned`.
    """

    role: str
    content: str | tuple[Part, ...] | None
    more: Mapping[str, Json] = field(default_factory=dict)
    learned: bool = True
    media: tuple[Medium, ...] = ()


@dataclass(frozen=True)
class Example:
    """A prompt and the response to learn (SFT) or to compare with (GRPO). `source` names its file and line, or row.

    A conversation has `messages`, which end with an assistant turn. Its `prompt` is empty and its `response` is the content
    of that turn. `tools` and `variables` are passed to the chat template. `columns` are all columns of its row, for
    rewards; `task` is its name in `data.mixture`. `rejected` is the same with the worse answer, for preferences; `label`
    says whether a single answer is desirable. Rewards get completions of a plain `prompt` up to a line that begins with
    `until`, if there is one.
    """

    prompt: str
    response: str
    messages: tuple[Message, ...] = ()
    source: str = ""
    tools: Sequence[Json] = ()
    columns: Mapping[str, Json] = field(default_factory=dict)
    task: str = ""
    variables: Mapping[str, Json] = field(default_factory=dict)
    rejected: Example | None = None
    label: bool | None = None
    until: str = ""

    @property
    def media(self) -> tuple[Medium, ...]:
        """The media of all messages, in their order."""
        return tuple(medium for message in self.messages for medium in message.media)


Parse = Callable[[Mapping[str, "Json"], str, "DataConfig"], Example]
"""Makes an example of a row: its columns, its source, and the keys of the columns."""


@dataclass(frozen=True)
class Splits:
    """`demonstrations` are for SFT, `train` is for GRPO, and `validation` is held out from both."""

    demonstrations: tuple[Example, ...]
    train: tuple[Example, ...]
    validation: tuple[Example, ...]


def load_splits(config: DataConfig, parse: Parse | None = None) -> Splits:
    """Loads the examples of `data.path`, `data.task` or `data.mixture`. Raises DataError or ConfigError.

    `parse` makes an example of a row of a file or dataset: `demonstration_of` by default, or `preference_of`.
    """
    if config.mixture:
        return _load_mixture(config, parse)
    if (config.path is None) == (config.task is None):
        raise ConfigError(f"data.path and data.task: found {'neither' if config.path is None else 'both'}; set one of them")
    splits = _load_task(config) if config.task is not None else _load_files(config, parse)
    if not splits.demonstrations or not splits.train:
        raise DataError(f"data.task {config.task!r} returned no examples to train on; check data.task_args")
    return splits


def _load_mixture(config: DataConfig, parse: Parse | None) -> Splits:
    """Loads all sources one after the other. Validation takes turns, as a run uses only the first of its examples."""
    if config.path is not None or config.task is not None:
        raise ConfigError("data.mixture is set, and so is data.path or data.task; move the latter into data.mixture")
    sources = []
    for name, source in config.mixture.items():
        own = {key: getattr(source, key) for key in source.model_fields_set - {"weight"}}
        try:
            splits = load_splits(type(config)(**own, seed=config.seed, invalid=config.invalid, images=config.images), parse)
        except UserError as error:
            raise type(error)(f"data.mixture.{name}: {error}") from error
        parts = (splits.demonstrations, splits.train, splits.validation)
        sources.append([[replace(example, task=name) for example in part] for part in parts])
    demonstrations, train, validation = zip(*sources, strict=True)
    turns = chain.from_iterable(zip_longest(*validation))
    held_out = tuple(example for example in turns if example is not None)
    return Splits(tuple(chain(*demonstrations)), tuple(chain(*train)), held_out)


def with_chat(example: Example, config: DataConfig) -> Example:
    """Turns a plain example into a conversation and adds the system prompt, as the configuration says."""
    messages = example.messages
    if not messages and config.apply_chat_template:
        messages = (Message("user", example.prompt), Message("assistant", example.response))
    if messages and config.system_prompt is not None and messages[0].role != "system":
        messages = (Message("system", config.system_prompt), *messages)
    if example.variables and not messages:
        raise DataError(
            f"{example.source} has 'chat_template_kwargs', but is a plain prompt, which no chat template shows; remove "
            "them, or set data.apply_chat_template=true"
        )
    rejected = None if example.rejected is None else with_chat(example.rejected, config)
    return replace(example, prompt="" if messages else example.prompt, messages=messages, rejected=rejected)


def with_tools(example: Example, schemas: Sequence[Json]) -> Example:
    """Adds the environment's tools to those that the chat template shows. Raises ConfigError for a plain prompt."""
    if not example.messages:
        raise ConfigError(
            f"{example.source} is a plain prompt, but only a chat template can show environment.tools; set "
            "data.apply_chat_template=true (and policy.tokenizer.chat_template, if the tokenizer has none)"
        )
    return replace(example, tools=(*example.tools, *schemas))


def read_examples(path: str | Path, split: str, config: DataConfig, parse: Parse | None = None) -> list[Example]:
    """Reads a file, or a split of a dataset. Raises DataError that names the line or row, or as `data.invalid` says."""
    make = parse or demonstration_of
    rows = _rows(path, split, config.subset)
    examples = keep_valid(rows, lambda row: make(_object(*row), row[1], config), config.invalid, str(path))
    if not examples:
        raise DataError(f"the dataset {str(path)!r} has no rows")
    return with_images(examples, Path(path) if Path(path).is_dir() else Path(path).parent, config, str(path))


def first_row(path: str | Path) -> Mapping[str, Json]:
    """Returns the first row of a file, or of the `train` split of a dataset; nothing if it has none. Raises DataError."""
    return next((_object(*row) for row in _rows(path, "train", first=True)), {})


def _rows(
    path: str | Path, split: str, subset: str | None = None, *, first: bool = False
) -> Iterable[tuple[bytes | Json, str]]:
    """Returns each row, and its source; with `first` at least the first one."""
    files = plain_files(path, split, subset)
    if files is None:
        return ((dict(row), source) for source, row in read_rows(path, split, subset, first=first))
    return chain.from_iterable(starmap(_rows_of, files))


def with_images(examples: Sequence[Example], folder: Path, config: DataConfig, source: str) -> list[Example]:
    """Reads the images of examples, several at once. Paths are relative to `folder`. Raises DataError, as `keep_valid`."""
    if config.image_key is not None and not any(config.image_key in example.columns for example in examples):
        raise DataError(
            f"{source}: no row has an image in {config.image_key!r} (data.image_key); the columns are "
            f"{', '.join(examples[0].columns)}"
        )
    if not any(_may_have_images(example, config) for example in examples):
        if unseen := next((name for name, value in examples[0].columns.items() if is_stored(value)), None):
            logger.warning("%s has images in %r that the model does not see; set data.image_key=%s", source, unseen, unseen)
        return list(examples)
    require_package("PIL", f"{source} has images, which")
    with ThreadPoolExecutor() as pool:
        read = [pool.submit(_with_images, example, example.columns, folder, config) for example in examples]
        return keep_valid(read, lambda one: one.result(), config.invalid, source)


def _may_have_images(example: Example, config: DataConfig) -> bool:
    column = config.image_key is not None and example.columns.get(config.image_key) is not None
    rejected = example.rejected is not None and _may_have_images(example.rejected, config)
    return column or rejected or any(isinstance(message.content, tuple) for message in example.messages)


def _with_images(example: Example, columns: Mapping[str, Json], folder: Path, config: DataConfig) -> Example:
    """Returns an example with its images read: those of its messages, and of `columns`."""
    images = (
        column_images(columns.get(config.image_key), f"{example.source}: {config.image_key!r}") if config.image_key else []
    )
    messages = example.messages or (Message("user", example.prompt), Message("assistant", example.response))
    if images and not any(isinstance(message.content, tuple) for message in messages):
        first = next((number for number, message in enumerate(messages) if message.role == "user"), None)
        if first is None:
            raise DataError(f"{example.source} has images in {config.image_key!r}, but no user turn to put them in")
        content = (*[IMAGE] * len(images), {"type": "text", "text": messages[first].content or ""})
        messages = (*messages[:first], replace(messages[first], content=content), *messages[first + 1 :])
    column, turns = iter(images), []
    for number, message in enumerate(messages, start=1):
        if isinstance(message.content, tuple):
            where = f"{example.source}: message {number}"
            content, media = read_images(message.content, column, folder, config.images, where)
            message = replace(message, content=content, media=media)
        turns.append(message)
    if left := len([*column]):
        raise DataError(
            f"{example.source} has {left} more images in {config.image_key!r} than parts for them in its messages; add or "
            "remove some"
        )
    if example.rejected is not None:
        example = replace(example, rejected=_with_images(example.rejected, columns, folder, config))
    if any(message.media for message in turns):  # which only a conversation can have
        example = replace(example, prompt="", messages=tuple(turns))
    return example


def keep_valid(
    items: Iterable[Item], make: Callable[[Item], Made], invalid: Literal["error", "drop"], source: str
) -> list[Made]:
    """Returns what is made of each item. With `drop`, those for which `make` raises DataError are left out, and counted."""
    made, errors = [], []
    for item in items:
        try:
            made.append(make(item))
        except DataError as error:
            if invalid == "error":
                raise
            errors.append(error)
    if errors and not made:
        raise DataError(f"{source}: all {len(errors)} examples are invalid; the first error: {errors[0]}")
    if errors:
        total = len(errors) + len(made)
        logger.warning(
            "%s: dropped %d of %d examples that are invalid; the first: %s", source, len(errors), total, errors[0]
        )
    return made


def _rows_of(path: Path, name: str) -> Iterator[tuple[bytes | Json, str]]:
    """Yields each row of a file and its source: lines of JSON as bytes, and the objects of a JSON list or a CSV file."""
    kinds = set(Path(name).suffixes)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            first = next(filter(bytes.strip, file), None)
            if first is None:
                raise DataError(f"the data file {name!r} is empty; expected: one JSON object per line")
            file.seek(0)
            if kinds & {*CSV}:
                yield from _csv_rows(file, name, "\t" if ".tsv" in kinds else ",")
            elif ".json" in kinds and first.lstrip().startswith(b"["):
                items = cast("list[Json]", _parsed(file.read(), name))
                yield from ((item, f"{name}, item {number}") for number, item in enumerate(items, start=1))
            else:
                lines = enumerate(file, start=1)
                yield from ((line.rstrip(b"\n"), f"{name}, line {number}") for number, line in lines if line.strip())
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"cannot read the data file {name!r} (in {Path.cwd()}): {reason}") from error


def _csv_rows(file: gzip.GzipFile | io.BufferedReader, name: str, delimiter: str) -> Iterator[tuple[Json, str]]:
    """Yields rows whose values are text, as CSV has no other types."""
    try:
        reader = csv.DictReader(io.TextIOWrapper(file, "utf-8-sig", newline=""), delimiter=delimiter, strict=True)
        for row in reader:
            if None in row or None in row.values():
                columns = ", ".join(reader.fieldnames or ())
                raise DataError(f"{name}, line {reader.line_num}: expected: the columns of line 1, {columns}")
            yield cast("Json", row), f"{name}, line {reader.line_num}"
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"cannot read {name!r} as CSV: {error}") from error


def _load_files(config: DataConfig, parse: Parse | None) -> Splits:
    path = cast(str, config.path)
    _check_split_names(config, path)
    examples = read_examples(path, config.split, config, parse)
    if config.val_path is not None or config.val_split is not None:
        validation = read_examples(config.val_path or path, config.val_split or config.split, config, parse)
    else:
        examples, validation = _hold_out(examples, config)
    return Splits(tuple(examples), tuple(examples), tuple(validation))


def _check_split_names(config: DataConfig, path: str) -> None:
    """Raises ConfigError for a split or subset of data without any, as it would silently change nothing."""
    held_out = config.val_path or path
    everywhere = [path] if config.val_path is None else [path, config.val_path]
    named = (
        ("val_split", config.val_split, [held_out], "set data.val_path to a file for validation, or leave it out"),
        ("split", config.split if config.split != type(config)().split else None, everywhere, "leave it out"),
        ("subset", config.subset, everywhere, "leave it out"),
    )
    for key, name, paths, advice in named:
        if name is not None and not any(map(has_splits, paths)):
            raise ConfigError(
                f"data.{key} is {name!r}, but {' and '.join(map(repr, paths))} has no splits or subsets (JSONL and single "
                f"files have none); {advice}"
            )


def _hold_out(examples: list[Example], config: DataConfig) -> tuple[list[Example], list[Example]]:
    """Splits off a seeded `val_fraction` of the examples for validation: at least one, unless the fraction is 0."""
    count = max(1, round(len(examples) * config.val_fraction)) if config.val_fraction else 0
    if count >= len(examples):
        raise DataError(
            f"{config.path} has {len(examples)} example(s), but data.val_fraction {config.val_fraction} holds out {count}; "
            "add examples, or set data.val_path or data.val_fraction=0"
        )
    order = np.random.default_rng(config.seed).permutation(len(examples)).tolist()
    remaining, held_out = ([examples[index] for index in sorted(part)] for part in (order[count:], order[:count]))
    return remaining, held_out


def _load_task(config: DataConfig) -> Splits:
    assert config.task is not None
    task = load_callable(config.task, "data.task")
    check_arguments(task, config.task_args, config.task, "data.task_args")
    with running(config.task, "data.task"):
        try:
            splits = task(**config.task_args)
        except ValueError as error:  # invalid arguments
            raise ConfigError(f"data.task {config.task} with {config.task_args}: {error}") from error
    if not isinstance(splits, Splits):
        raise ConfigError(f"data.task {config.task} returned {type(splits).__name__}; expected: dagrl.data.Splits")
    _check_made(splits, config)
    return splits


def _check_made(splits: Splits, config: DataConfig) -> None:
    """Raises ConfigError or DataError unless a task's splits contain examples, and these valid text."""
    for split in fields(splits):
        examples: object = getattr(splits, split.name)
        if not isinstance(examples, tuple | list):
            raise ConfigError(
                f"data.task {config.task}: Splits.{split.name} is {examples!r:.60}; expected: a tuple of dagrl.data.Example"
            )
        for number, example in enumerate(examples):
            where = f"data.task {config.task}: Splits.{split.name}[{number}]"
            if not isinstance(example, Example):
                raise ConfigError(f"{where} is {example!r:.60}; expected: a dagrl.data.Example")
            for part, text in (("prompt", example.prompt), ("response", example.response)):
                _require_text(text, f"{where}: {part!r}")
            for turn, message in enumerate(example.messages, start=1):
                if not isinstance(message, Message):
                    raise ConfigError(f"{where}: message {turn} is {message!r:.60}; expected: a dagrl.data.Message")
                _require_text(message.role, f"{where}: message {turn}: 'role'")
                if message.media:
                    images = [part for part in message.content or () if isinstance(part, Mapping) and is_image(part)]
                    if len(images) != len(message.media):
                        raise DataError(f"{where}: message {turn} has {len(images)} parts for {len(message.media)} images")
                elif message.content is not None or not message.more.get("tool_calls"):
                    _require_text(message.content, f"{where}: message {turn}: 'content'")


def _object(row: bytes | Json, source: str) -> Mapping[str, Json]:
    content = _parsed(row, source) if isinstance(row, bytes) else row
    if not isinstance(content, dict):
        raise DataError(f"{source}: found a JSON {type(content).__name__}; expected: an object")
    return content


def _parsed(text: bytes, source: str) -> Json:
    try:
        return cast("Json", json.loads(text))
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested too deeply
        shown = text[:60].decode(errors="replace")
        raise DataError(f"{source}: not valid JSON ({error}); found {shown!r}") from error


def demonstration_of(content: Mapping[str, Json], source: str, config: DataConfig) -> Example:
    """Returns the example of a row with a prompt and a response, or with messages.

    The prompt and the response may be messages, too; then SFT learns the response alone. Without `data.response_key` the
    response is empty.
    """
    if config.response_key is None:
        example = _prompt_alone(content, source, config)
    elif config.messages_key in content:
        example = _conversation(content[config.messages_key], source, config.messages_key)
    else:
        example = _answer_of(content, config.response_key, "data.response_key", source, config)
    return replace(example, columns=content, **_shown(content, source))


def preference_of(content: Mapping[str, Json], source: str, config: DataConfig) -> Example:
    """Returns the example of a row with a prompt, a chosen and a rejected answer, each text or messages.

    Answers that are messages may contain the prompt; without a prompt they must.
    """
    answers = [
        _answer_of(content, key, option, source, config)
        for key, option in ((config.chosen_key, "data.chosen_key"), (config.rejected_key, "data.rejected_key"))
    ]
    shown = _shown(content, source)
    return replace(answers[0], columns=content, rejected=replace(answers[1], **shown), **shown)


def judged_of(content: Mapping[str, Json], source: str, config: DataConfig) -> Example:
    """Returns the example of a row with a prompt, one answer, and a label that says whether it is desirable."""
    if config.response_key is None:
        raise DataError(f"{source}: data.response_key is null; expected: the column of the answers")
    if config.chosen_key in content and config.response_key not in content:
        raise DataError(
            f"{source} has a pair, {config.chosen_key!r} and {config.rejected_key!r}, but the algorithm learns from single "
            "answers (`unpaired`); expected: a row for each answer, with data.response_key and data.label_key"
        )
    answer = _answer_of(content, config.response_key, "data.response_key", source, config)
    label = content.get(config.label_key)
    if (desirable := _LABELS.get(str(label).lower())) is None:
        raise DataError(
            f"{source}: {config.label_key!r} is {label!r:.60}; expected: true or false. Set data.label_key to the column "
            "that says whether the answer is desirable"
        )
    return replace(answer, columns=content, label=desirable, **_shown(content, source))


_LABELS = {"true": True, "1": True, "false": False, "0": False}


def with_other_answers(examples: Sequence[Example], seed: int) -> list[Example]:
    """Returns the examples, each with the answer of another one to its prompt as `rejected`, to estimate the KL by."""
    if missing := next((example for example in examples if example.label is None), None):
        raise DataError(f"{missing.source} has no label; expected: dagrl.data.Example(..., label=True), or False")
    order = np.random.default_rng(seed).permutation(len(examples))
    paired = list(examples)
    for place, other in zip(order, np.roll(order, 1), strict=True):
        example, answer = examples[place], examples[other]
        last = answer.messages[-1] if answer.messages else Message("assistant", answer.response)
        messages = (*example.messages[:-1], last) if example.messages else ()
        paired[place] = replace(example, rejected=replace(example, response=answer.response, messages=messages))
    return paired


def _prompt_alone(content: Mapping[str, Json], source: str, config: DataConfig) -> Example:
    key = config.messages_key if config.messages_key in content else config.prompt_key
    turns = content.get(key)
    if not isinstance(turns, list):
        return Example(_text(content, key, "data.prompt_key", source), "", source=source)
    messages = _messages(turns, source, key)
    if messages[-1].role == "assistant":
        raise DataError(
            f"{source}: {key!r} ends with an assistant turn, but data.response_key is null; expected: a prompt. Remove the "
            "turn, or data.response_key"
        )
    return Example("", "", (*messages, Message("assistant", "")), source)


def _answer_of(content: Mapping[str, Json], key: str, option: str, source: str, config: DataConfig) -> Example:
    prompt, answer = content.get(config.prompt_key), content.get(key)
    if not isinstance(answer, list):
        if not isinstance(prompt, list):
            prompt = _text(content, config.prompt_key, "data.prompt_key", source)
        text = _text(content, key, option, source)
        if isinstance(prompt, str):
            return Example(prompt, text, source=source)
        answer = [{"role": "assistant", "content": text}]
    first = answer[0] if answer else None
    whole = not isinstance(first, dict) or first.get("role") != "assistant"
    before: list[Json] = [] if whole or prompt is None else _prompt_messages(prompt, f"{source}: {config.prompt_key!r}")
    return _conversation([*before, *answer], source, key)


def _prompt_messages(prompt: Json, what: str) -> list[Json]:
    if not isinstance(prompt, list):
        return [{"role": "user", "content": _require_text(prompt, what)}]
    return [{**turn, "weight": 0} if isinstance(turn, dict) and turn.get("role") == "assistant" else turn for turn in prompt]


def _text(content: Mapping[str, Json], key: str, option: str, source: str) -> str:
    if key not in content:
        keys = ", ".join(map(repr, content)) or "nothing"
        instead = {
            "data.prompt_key": ", or data.messages_key to that of conversations",
            "data.response_key": ", or to null if neither SFT nor a reward needs it",
        }.get(option, "")
        raise DataError(f"{source}: no key {key!r}; found {keys}. Set {option} to the key of the file{instead}")
    text = _require_text(content[key], f"{source}: {key!r}")
    if not text.strip():
        raise DataError(f"{source}: {key!r} is empty; expected: text")
    return text


def _require_text(text: object, what: str) -> str:
    """Returns text that UTF-8 can encode. JSON and Python also allow halves of surrogate pairs."""
    if not isinstance(text, str):
        raise DataError(f"{what} is {text!r:.60}; expected: text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise DataError(
            f"{what} has half of a surrogate pair, {half}, at character {error.start}; expected: text that UTF-8 can "
            "encode. Fix the character, or remove the example"
        ) from error
    return text


def _conversation(turns: Json, source: str, key: str) -> Example:
    messages = _messages(turns, source, key)
    if messages[-1].role != "assistant" or len(messages) < 2:
        roles = ", ".join(message.role for message in messages)
        raise DataError(
            f"{source}: {key!r} has the roles {roles}; expected: a conversation that ends with an assistant turn"
        )
    return Example("", cast("str | None", messages[-1].content) or "", messages, source)


def _messages(turns: Json, source: str, key: str) -> tuple[Message, ...]:
    if not isinstance(turns, list) or not turns:
        raise DataError(f"{source}: {key!r} is {turns!r:.60}; expected: a list of messages with 'role' and 'content'")
    return tuple(_message(turn, f"{source}: message {number} of {key!r}") for number, turn in enumerate(turns, start=1))


def _message(turn: Json, source: str) -> Message:
    """Reads a message of OpenAI's format, in which contents may be empty or a list of texts."""
    if not isinstance(turn, dict):
        raise DataError(f"{source} is {turn!r:.60}; expected: an object with 'role' and 'content'")
    role, weight = turn.get("role"), turn.get("weight")
    known = ("role", "content", "refusal", "weight")
    more = {key: value for key, value in turn.items() if key not in known and value is not None}
    if "function_call" in more or role == "function":
        raise DataError(f"{source} has 'function_call' or the role 'function'; expected: 'tool_calls' and the role 'tool'")
    calls = more.get("tool_calls")
    calls = calls if isinstance(calls, list) else []
    if any(isinstance(call, dict) and call.get("type", "function") != "function" for call in calls):
        raise DataError(f"{source} calls a tool that is no function; expected: 'tool_calls' of the type 'function'")
    content = content_of(turn)
    if isinstance(content, list) and role != "assistant":
        content = parts_of(content, source)
    silent = content is None and bool(more.get("tool_calls"))
    if not isinstance(role, str) or not role or not (silent or isinstance(content, str | tuple)):
        raise DataError(
            f"{source} is {turn!r:.80}; expected: text in 'role', and text or a list of parts in 'content', which may be "
            "missing if there are 'tool_calls'; parts are texts, or images where the turn is not the assistant's"
        )
    if role == "assistant" and weight not in (None, 0, 1):
        raise DataError(f"{source} has the weight {weight!r:.60}; expected: 1, or 0 for a turn that is not learned")
    _require_text(role, f"{source}: 'role'")
    for text in [content] if isinstance(content, str) else [part["text"] for part in content or () if not is_image(part)]:
        _require_text(text, f"{source}: 'content'")
    _require_all_text(more, source)
    return Message("system" if role == "developer" else role, content, more, weight != 0)


def _shown(content: Mapping[str, Json], source: str) -> dict[str, Any]:
    """Returns what a row shows to the chat template besides messages. Tables have null where a row lacks a variable."""
    variables = content.get("chat_template_kwargs") or {}
    if not isinstance(variables, dict):
        raise DataError(f"{source}: 'chat_template_kwargs' is {variables!r:.60}; expected: an object of template variables")
    given = {name: value for name, value in variables.items() if value is not None}
    return {"tools": _tools(content.get("tools"), source), "variables": given}


def _tools(tools: Json, source: str) -> tuple[Json, ...]:
    """Parses tools: a list, or its JSON text, as in tables whose rows have different tools."""
    if isinstance(tools, str):
        try:
            tools = cast("Json", json.loads(tools))
        except ValueError as error:
            raise DataError(
                f"{source}: 'tools' is {tools!r:.60}, which is not valid JSON ({error}); expected: a list"
            ) from error
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise DataError(f"{source}: 'tools' is {tools!r:.60}; expected: a list of objects")
    _require_all_text(tools, f"{source}: 'tools'")
    return tuple(tools or ())


def _require_all_text(value: object, what: str) -> None:
    """Applies `_require_text` to all text in `value`."""
    _require_text(json.dumps(value, ensure_ascii=False, default=str), what)
