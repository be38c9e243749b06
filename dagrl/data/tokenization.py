"""Turns examples into tokens: prompts to generate from, and sequences whose responses carry the loss.

Prompts and responses are tokenized separately, so that a prompt has the same tokens in training and in generation. A plain
response ends with the end-of-sequence token; in a conversation the chat template decides where an assistant turn ends. Some
templates render a turn differently once others follow (Qwen3's adds an empty thought before the last answer only). Then no
single row has every turn as generated, and `data.assistant_turns` decides what is learned.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from dagrl.data.examples import Example, Message
from dagrl.errors import ConfigError, DataError
from dagrl.runtime.shapes import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from dagrl.config import Json

logger = logging.getLogger(__name__)

Row = TypeVar("Row", "Prompt", "Demonstration", "Preference")
Turns = Literal["all", "each", "last"]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # required by transformers' mask of assistant tokens


@dataclass(frozen=True)
class Prompt:
    """Tokens to generate from, and what the reward gets: the reference, the conversation, and the columns of the example.

    `tools` are those that the chat template showed.
    """

    text: str
    tokens: npt.NDArray[np.int64]  # [prompt]
    reference: str
    source: str
    messages: Sequence[Mapping[str, Json]] = ()
    columns: Mapping[str, Json] = field(default_factory=dict)
    task: str = ""
    tools: Sequence[Json] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    def content(self) -> tuple[bytes, ...]:
        """Returns everything that a step learns from."""
        parts = [part for part in (self.columns, self.task) if part]  # JSON has no images, for example: their type counts
        more = [json.dumps(part, default=lambda value: type(value).__name__).encode() for part in parts]
        return self.tokens.tobytes(), self.reference.encode(errors="surrogatepass"), *more


@dataclass(frozen=True)
class Demonstration:
    """A whole sequence. `loss_mask` is 1 on the tokens of responses and 0 elsewhere, token aligned."""

    tokens: npt.NDArray[np.int64]  # [sequence]
    loss_mask: npt.NDArray[np.float32]  # [sequence]
    source: str
    task: str = ""

    def __len__(self) -> int:
        return len(self.tokens)

    def content(self) -> tuple[bytes, ...]:
        """Returns everything that a step learns from."""
        return self.tokens.tobytes(), self.loss_mask.tobytes(), *([self.task.encode()] if self.task else [])


@dataclass(frozen=True)
class Preference:
    """Two answers to a prompt, as whole sequences."""

    chosen: Demonstration
    rejected: Demonstration
    source: str
    task: str = ""

    def __len__(self) -> int:
        return max(len(self.chosen), len(self.rejected))

    def content(self) -> tuple[bytes, ...]:
        """Returns everything that a step learns from."""
        return *self.chosen.content(), *self.rejected.content()


def encode_prompts(examples: Sequence[Example], tokenizer: PreTrainedTokenizerFast) -> list[Prompt]:
    """Returns one prompt per example. A conversation loses its last turn, and the template opens the assistant's."""
    plain = [example for example in examples if not example.messages]
    chats = [example for example in examples if example.messages]
    openings = [_render(_turns(example.messages[:-1]), tokenizer, example, opened=True) for example in chats]
    of_plain = iter(_tokens(tokenizer, [example.prompt for example in plain], plain, special=True))
    of_chats = iter(zip(openings, _tokens(tokenizer, openings, chats, special=False), strict=True))
    prompts = []
    for example in examples:
        text, ids = next(of_chats) if example.messages else (example.prompt, next(of_plain))
        messages = _turns(example.messages[:-1])
        fields = (example.response, example.source, messages, example.columns, example.task, example.tools)
        prompts.append(Prompt(text, np.array(ids, np.int64), *fields))
    return prompts


def with_opening(prompt: Prompt, opening: str | Sequence[Mapping[str, Json]], tokenizer: PreTrainedTokenizerFast) -> Prompt:
    """Returns the prompt with another text or other messages in place of its own, rendered and tokenized in the same way.

    A text is the whole of a plain prompt, or the user's turn of a conversation. System turns of the prompt stay in front,
    unless `opening` begins with one. Raises DataError for what the chat template or the tokenizer rejects.
    """
    if isinstance(opening, str) and not prompt.messages:
        (ids,) = _tokens(tokenizer, [opening], [prompt], special=True)
        return replace(prompt, text=opening, tokens=np.array(ids, np.int64))
    messages = [{"role": "user", "content": opening}] if isinstance(opening, str) else [dict(turn) for turn in opening]
    if not messages:
        raise DataError(f"{prompt.source}: found no messages; expected: at least one")
    if messages[0].get("role") != "system":
        messages = [*(dict(turn) for turn in prompt.messages if turn["role"] == "system"), *messages]
    text = _render(messages, tokenizer, prompt, opened=True)
    (ids,) = _tokens(tokenizer, [text], [prompt], special=False)
    return replace(prompt, text=text, tokens=np.array(ids, np.int64), messages=messages)


def encode_demonstrations(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerFast, assistant_turns: Turns = "all"
) -> list[Demonstration]:
    """Returns the sequences of each example, in order: one, or for a conversation those of `assistant_turns`."""
    plain = [example for example in examples if not example.messages]
    prompts = iter(_tokens(tokenizer, [example.prompt for example in plain], plain, special=True))
    responses = iter(_tokens(tokenizer, [example.response for example in plain], plain, special=False))
    eos = [tokenizer.eos_token_id]
    rows: list[Demonstration] = []
    for example in examples:
        if example.messages:
            sequences = _encode_conversation(example, tokenizer, assistant_turns)
        else:
            sequences = [_demonstration([(next(prompts), False), (next(responses) + eos, True)], example.source)]
        rows += [replace(row, task=example.task) for row in sequences]
    return rows


def encode_preferences(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerFast, *, scored: bool = False
) -> list[Preference]:
    """Returns a pair of sequences for each example. Of a conversation, the last turn is the answer.

    The loss mask is 1 on the answer. If the answers are `scored`, it is 1 on one more token at the end instead: the value of
    a token is that of the tokens before it, here of the whole sequence.
    """
    for example in examples:
        if example.rejected is None:
            raise DataError(f"{example.source} has one answer; expected: a preference, whose `rejected` is another example")
    sides = [
        encode_demonstrations(side, tokenizer, "last")
        for side in (examples, [example.rejected for example in examples if example.rejected is not None])
    ]
    if scored:
        sides = [[_scored(row) for row in side] for side in sides]
    pairs = zip(examples, *sides, strict=True)
    return [Preference(chosen, rejected, example.source, example.task) for example, chosen, rejected in pairs]


def _scored(row: Demonstration) -> Demonstration:
    mask = np.zeros(len(row) + 1, np.float32)
    mask[-1] = 1.0
    return replace(row, tokens=np.append(row.tokens, row.tokens[-1]), loss_mask=mask)


def digest_of(rows: Sequence[Row]) -> str:
    """Returns a digest of rows in their order, by content and not by source. Takes a second per gigabyte."""
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        for part in row.content():
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()


def collate(rows: Sequence[Demonstration]) -> Batch:
    """Returns a batch of whole sequences: `tokens` and `loss_mask` [n, longest], `lengths` [n]."""
    lengths = np.array([len(row) for row in rows], np.int64)
    tokens = np.zeros((len(rows), int(lengths.max())), np.int64)
    loss_mask = np.zeros(tokens.shape, np.float32)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row.tokens
        loss_mask[index, : len(row)] = row.loss_mask
    return Batch({"tokens": tokens, "lengths": lengths, "loss_mask": loss_mask})


def collate_pairs(pairs: Sequence[Preference]) -> Batch:
    """Returns a batch of both answers of each pair: rows 2i and 2i + 1 are the chosen and the rejected answer of pair i."""
    return collate([answer for pair in pairs for answer in (pair.chosen, pair.rejected)])


def keep_fitting(rows: Sequence[Row], room: int, too_long: Literal["error", "drop"], limit: str, key: str) -> list[Row]:
    """Returns the rows of at most `room` tokens. Longer ones are an error, or dropped.

    `limit` describes where the room comes from, `key` is the key that raises it. Raises DataError that names the longest
    row, also if no row is left.
    """
    fitting = [row for row in rows if len(row) <= room]
    dropped = len(rows) - len(fitting)
    if dropped and (too_long == "error" or not fitting):
        longest = max(rows, key=len)
        advice = "shorten the data, or set data.too_long=drop" if fitting else "or shorten the data"
        raise DataError(
            f"{longest.source}: {len(longest)} tokens, but there is room for {room} ({limit}); {dropped} of {len(rows)} "
            f"sequences are too long. Raise {key}, {advice}"
        )
    if dropped:
        logger.warning("dropped %d of %d sequences with more than %d tokens", dropped, len(rows), room)
    return fitting


def _encode_conversation(example: Example, tokenizer: PreTrainedTokenizerFast, turns: Turns) -> list[Demonstration]:
    """Puts the loss on all assistant turns in one row, on each in its own row, or on the last only.

    Turns that are not learned are context, and so is an assistant turn that opens the conversation, unless the template
    marks it.
    """
    if turns == "all" and _GENERATION.search(str(tokenizer.chat_template)):
        return [_encode_marked(example, tokenizer)]
    ends = [count for count, message in _assistant_turns(example) if message.learned and count > 1]
    if not ends:
        raise _nothing_to_learn(example)
    if turns == "all":
        return [_encode_turns(example, tokenizer, ends)]
    return [_encode_turns(example, tokenizer, [end]) for end in (ends if turns == "each" else ends[-1:])]


def _assistant_turns(example: Example) -> list[tuple[int, Message]]:
    """Returns each assistant turn with the number of messages up to it."""
    return [(count, message) for count, message in enumerate(example.messages, start=1) if message.role == "assistant"]


def _nothing_to_learn(example: Example) -> DataError:
    return DataError(
        f"{example.source}: every assistant turn that answers something has weight 0, so there is nothing to learn; set a "
        "weight to 1, or remove the example"
    )


def _encode_marked(example: Example, tokenizer: PreTrainedTokenizerFast) -> Demonstration:
    """Puts the loss on what the chat template marks as generated."""
    _render(_turns(example.messages), tokenizer, example, opened=False)  # reports errors of the template
    try:
        encoded = tokenizer.apply_chat_template(
            _turns(example.messages),
            tools=list(example.tools) or None,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"return_offsets_mapping": True},
        )
    except OverflowError:  # transformers fails on an empty block at the start of the text
        encoded = {"assistant_masks": []}
    mask = encoded["assistant_masks"]
    if not any(mask[1:]):
        raise DataError(
            f"{example.source}: the chat template marks nothing of the conversation as generated; set "
            "data.assistant_turns=each, or fix its {% generation %} blocks (policy.tokenizer.chat_template)"
        )
    mask = _without_unlearned(_whole_characters(mask, encoded["offset_mapping"]), example)
    marked = zip(encoded["input_ids"], mask, strict=True)
    return _demonstration([([token], learned) for token, learned in marked], example.source)


def _whole_characters(mask: Sequence[int], offsets: Sequence[tuple[int, int]]) -> list[bool]:
    """Marks every token of a marked character. transformers marks the first; byte-level tokenizers may have several."""
    whole = [bool(marked) for marked in mask]
    for index in range(1, len(whole)):
        whole[index] |= whole[index - 1] and offsets[index][0] < offsets[index - 1][1]
    return whole


def _without_unlearned(mask: list[bool], example: Example) -> list[bool]:
    """Removes turns that are not learned from the mask. Each turn must be one contiguous part of it."""
    learned = [message.learned for _, message in _assistant_turns(example)]
    if all(learned):
        return mask
    if not any(learned):
        raise _nothing_to_learn(example)
    starts = (marked and not before for marked, before in zip(mask, [False, *mask], strict=False))
    spans = list(accumulate(starts))  # number of the marked part of each token, from 1
    if spans[-1] != len(learned):
        raise DataError(
            f"{example.source}: cannot tell which turns have weight 0: the chat template marks {spans[-1]} parts as "
            f"generated, but the conversation has {len(learned)} assistant turns; set data.assistant_turns=each"
        )
    return [marked and learned[span - 1] for marked, span in zip(mask, spans, strict=True)]


def _encode_turns(example: Example, tokenizer: PreTrainedTokenizerFast, ends: Sequence[int]) -> Demonstration:
    """Encodes the conversation up to the last of `ends`, with loss on the text that each turn ending there adds."""
    pieces: list[tuple[str, bool]] = []
    done = ""
    for end in ends:
        for text, learned in (
            (_render(_turns(example.messages[: end - 1]), tokenizer, example, opened=True), False),
            (_render(_turns(example.messages[:end]), tokenizer, example, opened=False), True),
        ):
            if not text.startswith(done):
                raise DataError(
                    f"{example.source}: the chat template renders earlier turns differently once later ones follow, so one "
                    "row cannot teach all; set data.assistant_turns=each or last, or use a template that only appends or "
                    "has {% generation %} blocks (policy.tokenizer.chat_template)"
                )
            pieces.append((text[len(done) :], learned))
            done = text
    encoded = _tokens(tokenizer, [text for text, _ in pieces], [example] * len(pieces), special=False)
    return _demonstration([(ids, learned) for ids, (_, learned) in zip(encoded, pieces, strict=True)], example.source)


def _render(
    turns: Sequence[Mapping[str, Json]], tokenizer: PreTrainedTokenizerFast, example: Example | Prompt, *, opened: bool
) -> str:
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"{example.source} is a conversation, but the tokenizer has no chat template; set policy.tokenizer.chat_template"
        )
    try:
        tools = list(example.tools) or None
        return str(tokenizer.apply_chat_template(list(turns), tools, tokenize=False, add_generation_prompt=opened))
    except Exception as error:  # Jinja's errors, and those that templates raise
        raise DataError(f"{example.source}: the chat template rejects the conversation: {error}") from error


def _turns(messages: Sequence[Message]) -> list[dict[str, Json]]:
    """Converts messages for templates. Omits missing content, which some templates would render as `None`."""
    return [
        {"role": message.role, **({} if message.content is None else {"content": message.content}), **message.more}
        for message in messages
    ]


def _tokens(
    tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], examples: Sequence[Example | Prompt], *, special: bool
) -> list[list[int]]:
    """Returns the token ids of each text. `special` adds special tokens, which chat templates write themselves."""
    if not texts:
        return []
    encoded: list[list[int]] = tokenizer(list(texts), add_special_tokens=special, return_attention_mask=False)["input_ids"]
    for ids, example in zip(encoded, examples, strict=True):
        if not ids:
            raise DataError(f"{example.source}: the tokenizer returns no tokens for a text; remove the example")
    return encoded


def _demonstration(pieces: Sequence[tuple[list[int], bool]], source: str) -> Demonstration:
    tokens = np.concatenate([np.array(ids, np.int64) for ids, _ in pieces])
    loss_mask = np.concatenate([np.full(len(ids), learned, np.float32) for ids, learned in pieces])
    loss_mask[0] = 0.0  # the first token cannot be predicted
    return Demonstration(tokens, loss_mask, source)
