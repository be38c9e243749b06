"""Turns examples into tokens: prompts to generate from, and sequences whose responses carry the loss.

A row has the tokens of its whole text, and the loss is on those that a turn adds to its prompt (`dagrl.data.encoder`). A
plain response ends with the end-of-sequence token; in a conversation the chat template decides where an assistant turn
ends. Some templates render a turn differently once others follow (Qwen3's adds an empty thought before the last answer
only). Then no single row has every turn as generated, and `data.assistant_turns` decides what is learned.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from dagrl.data.chat import GENERATION, Chat, chat_of
from dagrl.data.encoder import Encoded
from dagrl.data.examples import Example, Message
from dagrl.data.media import IMAGE, MEDIA, Expanded, MediaProcessor, Medium, RowMedia
from dagrl.data.messages import THOUGHTS
from dagrl.errors import ConfigError, DataError
from dagrl.runtime.shapes import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from dagrl.config import Json

logger = logging.getLogger(__name__)

Row = TypeVar("Row", "Prompt", "Demonstration", "Preference")
Turns = Literal["all", "each", "last"]

DIFFERENCES = {
    "opened": "the chat template writes the start of a turn otherwise in its prompt, with a thought that it leaves out "
    "later, or a system prompt that it moves; there the loss begins where the turn differs from it, or with the turn's text",
    "joined": "the tokenizer joins the end of a prompt and the start of a turn in one token, such as two newlines, which "
    "generation does not; there the loss begins after it",
    "left out": "the chat template leaves out texts of turns that are learned, such as thoughts",
    "stopped": "the chat template writes an end of turns inside of one, such as before its calls; there generation stops",
    "empty": "nothing is learned: the chat template writes no more of the turns to learn than their prompts have",
}
"""How rows may differ from what is generated; see `warn_of_differences`."""


@dataclass(frozen=True)
class Prompt:
    """Tokens to generate from, and what the reward gets: the reference, the conversation, and the columns of the example.

    `tools` are those that the chat template showed, and `variables` are further ones of the template. The reward gets a
    completion up to a line that begins with `until`, if there is one.
    """

    text: str
    tokens: npt.NDArray[np.int64]  # [prompt]
    reference: str
    source: str
    messages: Sequence[Mapping[str, Json]] = ()
    columns: Mapping[str, Json] = field(default_factory=dict)
    task: str = ""
    tools: Sequence[Json] = ()
    media: RowMedia | None = None
    variables: Mapping[str, Json] = field(default_factory=dict)
    until: str = ""

    def __len__(self) -> int:
        return len(self.tokens)

    def content(self) -> tuple[bytes, ...]:
        """Returns everything that a step learns from."""
        parts = [part for part in (self.columns, self.task) if part]  # JSON has no images, for example: their type counts
        more = [json.dumps(part, default=lambda value: type(value).__name__).encode() for part in parts]
        return self.tokens.tobytes(), self.reference.encode(errors="surrogatepass"), *more, *_content(self.media)


@dataclass(frozen=True)
class Demonstration:
    """A whole sequence. `loss_mask` is 1 on the tokens of responses and 0 elsewhere, token aligned.

    `differences` are keys of `DIFFERENCES`.
    """

    tokens: npt.NDArray[np.int64]  # [sequence]
    loss_mask: npt.NDArray[np.float32]  # [sequence]
    source: str
    task: str = ""
    media: RowMedia | None = None
    differences: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return len(self.tokens)

    def content(self) -> tuple[bytes, ...]:
        """Returns everything that a step learns from."""
        task = [self.task.encode()] if self.task else []
        return self.tokens.tobytes(), self.loss_mask.tobytes(), *task, *_content(self.media)


@dataclass(frozen=True)
class Preference:
    """Two answers to a prompt, as whole sequences. With a `label`, only the first is judged: whether it is desirable."""

    chosen: Demonstration
    rejected: Demonstration
    source: str
    task: str = ""
    label: bool | None = None

    def __len__(self) -> int:
        return max(len(self.chosen), len(self.rejected))

    def content(self) -> tuple[bytes, ...]:
        """Returns everything that a step learns from."""
        label = [] if self.label is None else [bytes([self.label])]
        return *self.chosen.content(), *self.rejected.content(), *label


def _content(media: RowMedia | None) -> list[bytes]:
    """Returns the ids of a row's media, which are digests of their files."""
    return [] if media is None else [media.tokens.tobytes()]


def encode_prompts(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerFast, processor: MediaProcessor | None = None
) -> list[Prompt]:
    """Returns one prompt per example. A conversation loses its last turn, and the template opens the assistant's.

    A model that takes images has a `processor`, whose tokens its conversations get.
    """
    chat = chat_of(tokenizer)
    texts = [
        _expanded(
            _render(chat, turns_of(example.messages[:-1]), example, opened=True) if example.messages else example.prompt,
            example,
            example.messages[:-1],
            processor,
        )
        for example in examples
    ]
    prompts = []
    for example, text, encoded in zip(examples, texts, chat.encoder.encode([text.text for text in texts]), strict=True):
        messages = turns_of(example.messages[:-1])
        fields = (example.response, example.source, messages, example.columns, example.task, example.tools)
        before = _before(chat, text.text, example, processor)
        tokens = _prompt_tokens(encoded.ids, example, before)
        media = _row_media(encoded, text, example.messages[:-1], processor)
        media = None if media is None else media.padded(len(before), 0)
        until = "" if example.messages else example.until  # a chat template ends turns by itself
        prompts.append(Prompt(text.text, tokens, *fields, media, example.variables, until))
    return prompts


def _expanded(text: str, example: Example, messages: Sequence[Message], processor: MediaProcessor | None) -> Expanded:
    """Returns the text of these messages of an example, with what stands for their media."""
    media = _media(messages)
    if processor is not None and example.messages:
        return processor.expand(text, media, example.source)
    if media:
        raise ConfigError(
            f"{example.source} has images, but the model has no processor for them; choose one that takes images"
        )
    return Expanded(text, (), ())


def _media(messages: Sequence[Message]) -> list[Medium]:
    return [medium for message in messages for medium in message.media]


def _row_media(
    encoded: Encoded, text: Expanded, messages: Sequence[Message], processor: MediaProcessor | None
) -> RowMedia | None:
    media = _media(messages)
    return processor.tokens(encoded, text, media) if processor is not None and media else None


def _before(chat: Chat, text: str, example: Example, processor: MediaProcessor | None) -> list[int]:
    """Returns the special tokens before a text: those of a plain one, or what a processor adds to a conversation."""
    if not example.messages:
        return chat.encoder.before
    return [] if processor is None else processor.before(text, chat.encoder)


def with_opening(
    prompt: Prompt,
    opening: str | Sequence[Mapping[str, Json]],
    tokenizer: PreTrainedTokenizerFast,
    images: tuple[MediaProcessor, Sequence[Medium]] | None = None,
) -> Prompt:
    """Returns the prompt with another text or other messages in place of its own, rendered and tokenized in the same way.

    A text is the whole of a plain prompt, or the user's turn of a conversation. System turns of the prompt stay in front,
    unless `opening` begins with one. `images`: for models that take them, the processor and those of `opening`. Raises
    DataError for what the chat template or the tokenizer rejects.
    """
    chat, (processor, media) = chat_of(tokenizer), images or (None, ())
    if isinstance(opening, str) and not prompt.messages:
        tokens = _prompt_tokens(chat.encoder.ids(opening), prompt, chat.encoder.before)
        return replace(prompt, text=opening, tokens=tokens, media=None)
    messages = [{"role": "user", "content": opening}] if isinstance(opening, str) else [dict(turn) for turn in opening]
    if not messages:
        raise DataError(f"{prompt.source}: found no messages; expected: at least one")
    if messages[0].get("role") != "system":
        kept = [dict(turn) for turn in prompt.messages if turn["role"] == "system"]
        own = prompt.media.items if prompt.media is not None else ()  # those of system turns come first
        parts = [part for turn in kept if isinstance(turn["content"], list) for part in turn["content"]]
        media = [*own[: parts.count(dict(IMAGE))], *media]
        messages = [*kept, *messages]
    text, row = _render(chat, messages, prompt, opened=True), None
    if processor is None:
        ids = chat.encoder.ids(text)
    else:
        text, ids, row = processor.row(text, media, chat.encoder, prompt.source)
    return replace(prompt, text=text, tokens=_prompt_tokens(ids, prompt, []), messages=messages, media=row)


def encode_demonstrations(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerFast,
    assistant_turns: Turns = "all",
    processor: MediaProcessor | None = None,
) -> list[Demonstration]:
    """Returns the sequences of each example, in order: one, or for a conversation those of `assistant_turns`.

    A model that takes images has a `processor`, whose tokens its conversations get.
    """
    chat = chat_of(tokenizer)
    wholes = [whole for example in examples for whole in _wholes(example, chat.of(example.tools), assistant_turns)]
    texts = [_expanded(whole.text, whole.example, whole.messages, processor) for whole in wholes]
    if processor is not None:
        wholes = [
            replace(whole, text=text.text, learned=[(text.moved(start), text.moved(end)) for start, end in whole.learned])
            for whole, text in zip(wholes, texts, strict=True)
        ]
    prompts = chat.encoder.encode(["" if whole.example.messages else whole.example.prompt for whole in wholes])
    rows = []
    for whole, text, encoded, prompt in zip(
        wholes, texts, chat.encoder.encode([text.text for text in texts]), prompts, strict=True
    ):
        row = _demonstration(whole, encoded, prompt.ids, chat.of(whole.example.tools))
        if whole.example.messages:
            if processor is not None:
                media = _row_media(encoded, text, whole.messages, processor)
                row = _with_media(row, media, processor.before(whole.text, chat.encoder))
            found = {
                "joined": not all(chat.encoder.is_cut(encoded, start) for start, _ in whole.learned),
                "stopped": _stops_inside(row, chat.ends),
                "empty": not row.loss_mask.any(),
            }
            row = replace(row, differences=whole.differences.union(name for name, differs in found.items() if differs))
        rows.append(row)
    return rows


def warn_of_differences(rows: Sequence[Demonstration]) -> None:
    """Warns of each way in which some rows differ from what is generated, and names the first of them."""
    for difference, meaning in DIFFERENCES.items():
        if sources := [row.source for row in rows if difference in row.differences]:
            logger.warning("%s and %d other conversations: %s", sources[0], len(sources) - 1, meaning)


def _stops_inside(row: Demonstration, ends: frozenset[int]) -> bool:
    """Returns whether a learned part has a token that ends turns, and learned ones after it."""
    learned = row.loss_mask > 0
    inside = row.tokens[:-1][learned[:-1] & learned[1:]]
    return any((inside == end).any() for end in ends)


def _with_media(row: Demonstration, media: RowMedia | None, before: Sequence[int]) -> Demonstration:
    """Adds a row's media, and the special tokens `before` it."""
    tokens, mask = np.array([*before, *row.tokens], np.int64), np.pad(row.loss_mask, (len(before), 0))
    if media is not None:
        media = media.padded(len(before), len(row) - len(media.tokens))
    return replace(row, tokens=tokens, loss_mask=mask, media=media)


def encode_preferences(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerFast,
    *,
    scored: bool = False,
    processor: MediaProcessor | None = None,
) -> list[Preference]:
    """Returns a pair of sequences for each example. Of a conversation, the last turn is the answer.

    The loss mask is 1 on the answer. If the answers are `scored`, it is 1 on one more token at the end instead: the value of
    a token is that of the tokens before it, here of the whole sequence.
    """
    for example in examples:
        if example.rejected is None:
            raise DataError(f"{example.source} has one answer; expected: a preference, whose `rejected` is another example")
    sides = [
        encode_demonstrations(side, tokenizer, "last", processor)
        for side in (examples, [example.rejected for example in examples if example.rejected is not None])
    ]
    if scored:
        sides = [[_scored(row) for row in side] for side in sides]
    pairs = zip(examples, *sides, strict=True)
    return [Preference(chosen, rejected, example.source, example.task, example.label) for example, chosen, rejected in pairs]


def _scored(row: Demonstration) -> Demonstration:
    mask = np.zeros(len(row) + 1, np.float32)
    mask[-1] = 1.0
    media = None if row.media is None else row.media.padded(0, 1)
    return replace(row, tokens=np.append(row.tokens, row.tokens[-1]), loss_mask=mask, media=media)


def digest_of(rows: Sequence[Row]) -> str:
    """Returns a digest of rows in their order, by content and not by source. Takes a second per gigabyte."""
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        for part in row.content():
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()


def collate(rows: Sequence[Demonstration], *, media: bool = False) -> Batch:
    """Returns a batch of whole sequences: `tokens` and `loss_mask` [n, longest], `lengths` [n].

    With `media`, also that field [n, longest], in which rows without images are 0.
    """
    lengths = np.array([len(row) for row in rows], np.int64)
    tokens = np.zeros((len(rows), int(lengths.max())), np.int64)
    ids, loss_mask = np.zeros(tokens.shape, np.int64), np.zeros(tokens.shape, np.float32)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row.tokens
        loss_mask[index, : len(row)] = row.loss_mask
        if row.media is not None:
            ids[index, : len(row)] = row.media.tokens
    return Batch({"tokens": tokens, "lengths": lengths, "loss_mask": loss_mask, **({MEDIA: ids} if media else {})})


def collate_pairs(pairs: Sequence[Preference], *, media: bool = False) -> Batch:
    """Returns a batch of both answers of each pair: rows 2i and 2i + 1 are the chosen and the rejected answer of pair i."""
    return collate([answer for pair in pairs for answer in (pair.chosen, pair.rejected)], media=media)


def labels_of(pairs: Sequence[Preference]) -> npt.NDArray[np.float64] | None:
    """Returns 1 for each pair whose first answer is desirable, 0 for the others [pairs]; None without labels."""
    labels = [pair.label for pair in pairs if pair.label is not None]
    return np.array(labels, np.float64) if labels else None


def keep_fitting(rows: Sequence[Row], room: int, too_long: Literal["error", "drop"], limit: str, key: str) -> list[Row]:
    """Returns the rows of at most `room` tokens. Longer ones are an error, or dropped.

    `limit` describes where the room comes from, `key` is the key that raises it. Raises DataError that names the longest
    row, also if no row is left.
    """
    fitting = [row for row in rows if len(row) <= room]
    dropped = len(rows) - len(fitting)
    if dropped and (too_long == "error" or not fitting):
        longest = max(rows, key=len)
        answer = longest.chosen if isinstance(longest, Preference) else longest
        advice = "shorten the data, or set data.too_long=drop" if fitting else "or shorten the data"
        seen = 0 if answer.media is None else np.count_nonzero(answer.media.tokens)
        of_images = f" ({seen} of images; data.images.max_pixels makes them fewer)" if seen else ""
        raise DataError(
            f"{longest.source}: {len(longest)} tokens{of_images}, but there is room for {room} ({limit}); {dropped} of "
            f"{len(rows)} sequences are too long. Raise {key}, {advice}"
        )
    if dropped:
        logger.warning("dropped %d of %d sequences with more than %d tokens", dropped, len(rows), room)
    return fitting


@dataclass(frozen=True)
class _Whole:
    """The text of a row and the parts of it that carry the loss.

    It has the example's first `count` messages, or all. `calls`: its last turn calls tools. `differences`: keys of
    `DIFFERENCES`.
    """

    example: Example
    text: str
    learned: Sequence[tuple[int, int]]
    calls: bool = False
    differences: frozenset[str] = frozenset()
    count: int | None = None

    @property
    def messages(self) -> Sequence[Message]:
        """The messages of the row."""
        return self.example.messages[: self.count]


def _wholes(example: Example, chat: Chat, turns: Turns) -> list[_Whole]:
    """Puts the loss on a plain response, or on all assistant turns in one row, on each in its own row, or on the last only.

    Turns that are not learned are context, and so is an assistant turn that opens the conversation, unless the template
    marks it.
    """
    if not example.messages:
        text = example.prompt + example.response
        return [_Whole(example, text, [(len(example.prompt), len(text))])]
    if turns == "all" and chat.tokenizer.chat_template and GENERATION.search(chat.template(example.tools)):
        return [_marked(example, chat)]
    ends = [count for count, message in _assistant_turns(example) if message.learned and count > 1]
    if not ends:
        raise _nothing_to_learn(example)
    if turns == "all":
        return [_unmarked(example, chat, ends)]
    return [_unmarked(example, chat, [end]) for end in (ends if turns == "each" else ends[-1:])]


def _assistant_turns(example: Example) -> list[tuple[int, Message]]:
    """Returns each assistant turn with the number of messages up to it."""
    return [(count, message) for count, message in enumerate(example.messages, start=1) if message.role == "assistant"]


def _calls(message: Message) -> bool:
    return bool(message.more.get("tool_calls"))


def _nothing_to_learn(example: Example) -> DataError:
    return DataError(
        f"{example.source}: every assistant turn that answers something has weight 0, so there is nothing to learn; set a "
        "weight to 1, or remove the example"
    )


def _marked(example: Example, chat: Chat) -> _Whole:
    """Puts the loss on what the chat template marks as generated, as far as generation samples it."""
    if not any(message.learned for _, message in _assistant_turns(example)):
        raise _nothing_to_learn(example)
    messages = turns_of(example.messages)
    _render(chat, messages, example, opened=False)  # reports errors of the template
    whole, parts = chat.marked(messages, example.tools, **example.variables)
    place, learned, differences = 0, list[tuple[int, int]](), frozenset[str]()
    for count, message in _assistant_turns(example):
        turn = _turn(chat, example, count)
        if whole.startswith(turn.text[: turn.end]):
            sampled = [(max(start, turn.start), min(end, turn.end)) for start, end in parts]
            sampled = [
                (start, end)
                for start, end in sampled
                if start < end or (start == end < turn.end and chat.is_end(whole[end : turn.end]))  # an empty turn
            ]
            if sampled and chat.is_end(whole[sampled[-1][1] : turn.end]):  # outside of the marks
                sampled[-1] = (sampled[-1][0], turn.end)
        else:
            following = _following(chat, example, count, whole, [part for part in parts if place <= part[0]])
            sampled = [] if following is None else [_rewritten(chat, example, count, turn, whole, *following)]
        place = sampled[-1][1] if sampled else place
        if message.learned:
            learned += sampled
            differences |= turn.differences
    if not any(end > 1 for _, end in learned):
        raise DataError(
            f"{example.source}: the chat template marks nothing of the turns to learn as generated; set "
            "data.assistant_turns=each, or fix its {% generation %} blocks (policy.tokenizer.chat_template)"
        )
    return _Whole(example, whole, learned, _calls(example.messages[-1]), differences)


def _following(
    chat: Chat, example: Example, count: int, whole: str, parts: Sequence[tuple[int, int]]
) -> tuple[int, int] | None:
    """Returns which of the marked `parts` of `whole` is the turn that ends with message `count`, written otherwise there.

    That is the first that is not empty, unless the next turn's text is in it: then the template leaves nothing of this one.
    """
    following = next((part for part in parts if part[0] < part[1]), None)
    number = next((number for number, _ in _assistant_turns(example) if number > count), None)
    if following in (None, parts[0]) or number is None or _calls(example.messages[number - 1]):
        return following
    messages = turns_of(example.messages)
    start = chat.text_start(messages[: number - 1], whole, example.tools, messages[number:], **example.variables)
    return parts[0] if start < following[1] else following


def _rewritten(chat: Chat, example: Example, count: int, turn: _Turn, whole: str, start: int, end: int) -> tuple[int, int]:
    """Returns what generation samples of a marked part of `whole` that is a turn as the template writes it before others.

    `turn` ends with message `count`.
    """
    messages = turns_of(example.messages)
    own = chat.marked(messages[:count], example.tools, **example.variables)[1]
    inside = [part for part in own if part[0] < turn.end and turn.start < part[1] > part[0]] or [(turn.start, turn.end)]
    before, after = turn.text[inside[0][0] : turn.start], turn.text[turn.end : inside[-1][1]]
    content = turn.text[max(turn.start, inside[0][0]) : turn.end].removesuffix(chat.end.text)
    if whole.startswith(before, start):
        start += len(before)
    else:  # opened otherwise than the prompt
        try:
            found = chat.content_start(messages[: count - 1], whole, example.tools, messages[count:], **example.variables)
            start = max(start, min(found, end))
        except Exception:
            if not _calls(example.messages[count - 1]):
                raise  # results may not follow a text in place of calls
    if whole.startswith(content, start):
        end = start + len(content)
    elif whole.endswith(after, start, end):
        end -= len(after)
    return start, end + max((len(ending) for ending in chat.endings if whole.startswith(ending, end)), default=0)


def _unmarked(example: Example, chat: Chat, ends: Sequence[int]) -> _Whole:
    """Puts the loss on the turns that end with messages `ends`: each from the end of its prompt to the end of the turn."""
    turns = [_turn(chat, example, end) for end in ends]
    whole = turns[-1].text
    for end, turn in zip(ends, turns, strict=True):
        if not whole.startswith(turn.text[: turn.end]):
            raise DataError(
                f"{example.source}: the chat template renders message {end} differently once later ones follow, so one row "
                "cannot teach all turns; set data.assistant_turns=each or last, or use a template that only appends or has "
                "{% generation %} blocks (policy.tokenizer.chat_template)"
            )
    learned = [(turn.start, chat.with_end(whole, turn.end)) for turn in turns]
    differences = frozenset(chain.from_iterable(turn.differences for turn in turns))
    return _Whole(example, whole, learned, _calls(example.messages[ends[-1] - 1]), differences, ends[-1])


@dataclass(frozen=True)
class _Turn:
    """The text of a conversation, and the part of it that generation samples for its last turn."""

    text: str
    start: int
    end: int
    differences: frozenset[str]


def _turn(chat: Chat, example: Example, count: int) -> _Turn:
    """Finds the assistant turn that ends with message `count`."""
    before, message = turns_of(example.messages[: count - 1]), example.messages[count - 1]
    text = _render(chat, turns_of(example.messages[:count]), example, opened=False)
    end = chat.last_end(text)
    prompt = _render(chat, before, example, opened=True) if before else None
    alike = prompt is not None and text.startswith(prompt)
    if prompt and alike:
        start = len(prompt)
    else:
        start = chat.content_start(before, text[:end], example.tools, (), **example.variables)
    differences = set() if alike or prompt is None else {"opened"}
    texts = [part for part in (message.content, *map(message.more.get, THOUGHTS)) if isinstance(part, str)]
    if not all(part.strip() in text or "".join(part.split()) in "".join(text.split()) for part in texts):
        differences.add("left out")
    return _Turn(text, start, end, frozenset(differences))


def _render(chat: Chat, turns: Sequence[Mapping[str, Json]], example: Example | Prompt, *, opened: bool) -> str:
    if chat.tokenizer.chat_template is None:
        raise ConfigError(
            f"{example.source} is a conversation, but the tokenizer has no chat template; set policy.tokenizer.chat_template"
        )
    try:
        unused = [name for name in example.variables if name not in chat.variables(example.tools)]
        text = chat.render(turns, example.tools, opened=opened, **example.variables)
    except Exception as error:  # Jinja's errors, and those that templates raise
        raise DataError(f"{example.source}: the chat template rejects the conversation: {error}") from error
    if unused:
        raise DataError(f"{example.source}: 'chat_template_kwargs' has {unused}, which the chat template does not use")
    return text


def turns_of(messages: Sequence[Message]) -> list[dict[str, Json]]:
    """Converts messages for templates. Omits missing content, which some templates would render as `None`."""
    return [
        {"role": message.role, **({} if message.content is None else {"content": _parts(message.content)}), **message.more}
        for message in messages
    ]


def _parts(content: str | Sequence[Mapping[str, Json]]) -> Json:
    return content if isinstance(content, str) else [dict(part) for part in content]


def _prompt_tokens(ids: list[int], example: Example | Prompt, before: Sequence[int]) -> npt.NDArray[np.int64]:
    """Returns the tokens of a prompt, with the special tokens `before` it."""
    if not ids:
        raise _no_tokens(example)
    return np.array([*before, *ids], np.int64)


def _no_tokens(example: Example | Prompt) -> DataError:
    return DataError(f"{example.source}: the tokenizer returns no tokens for a text; remove the example")


def _demonstration(whole: _Whole, encoded: Encoded, prompt: list[int], chat: Chat) -> Demonstration:
    """`prompt`: the tokens of a plain example's."""
    example, ids = whole.example, encoded.ids
    if not example.messages:
        return _plain_demonstration(example, encoded, prompt, chat)
    if not ids:
        raise _no_tokens(example)
    mask = np.zeros(len(ids), np.float32)
    for start, end in whole.learned:
        last = encoded.index(end)
        if not chat.end.text and last < len(ids) and ids[last] in chat.end.tokens:  # the next turn's opening ends it
            last += 1
        mask[encoded.index(start) : last] = 1.0
    mask[0] = 0.0  # the first token cannot be predicted
    if whole.learned[-1][1] == len(whole.text):
        ending = chat.missing_end(whole.text, ids, called=whole.calls)
        ids, mask = [*ids, *ending], np.append(mask, np.ones(len(ending), np.float32))
    return Demonstration(np.array(ids, np.int64), mask, example.source, example.task)


def _plain_demonstration(example: Example, encoded: Encoded, prompt: list[int], chat: Chat) -> Demonstration:
    """Keeps the tokens of the prompt, from which generation continues, even if those of the whole text differ there."""
    if encoded.ids[: len(prompt)] == prompt:
        response = encoded.ids[len(prompt) :]
    else:
        response = chat.encoder.continuation(example.prompt, example.response)
    if not prompt or not response:
        raise _no_tokens(example)
    before = [*chat.encoder.before, *prompt]
    tokens = np.array([*before, *response, chat.tokenizer.eos_token_id], np.int64)
    mask = np.zeros(len(tokens), np.float32)
    mask[len(before) :] = 1.0
    return Demonstration(tokens, mask, example.source, example.task)
