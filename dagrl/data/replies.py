"""What joins the turns of a rollout: the template's own text, as tokens after those that were sampled, which stay.

The conversation is rendered with short texts in place of what the policy wrote, and the end of the last turn is looked for
there: a template may write a turn otherwise once others follow.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dagrl.data.chat import Chat
from dagrl.data.encoder import Encoded, shared
from dagrl.data.messages import ANSWER, QUESTION, Messages, exchange, with_answers

if TYPE_CHECKING:
    from dagrl.config import Json
    from dagrl.data.media import MediaProcessor, Medium

Images = tuple["MediaProcessor", Sequence["Medium"]]


def reply_row(
    chat: Chat,
    turn: Sequence[int],
    stops: frozenset[int],
    messages: Messages,
    tools: Sequence[Json],
    most: int,
    before: Messages = (),
    images: Images | None = None,
    /,
    **variables: Any,
) -> tuple[list[int], npt.NDArray[np.int64]]:
    """Returns the tokens after a sampled turn: its end, `messages` (or none), and the opening of the next turn. If they are
    more than `most`, some may be left out. A turn that one of the template's or the tokenizer's ends ended gets no second
    end, and neither does one that ended with one of `stops`, if that closes turns (`Chat.closes`).

    `before` is the conversation whose last message is the turn. What the assistant wrote in it does not count, except the
    names of calls. Tokenizing takes a second and 400 MB per megabyte, and a reply may be all the output of a program.

    `images`: for models that take them, the processor and the images of `messages`. Also returns which tokens stand for
    them (`dagrl.data.media.RowMedia`).
    """
    chat, last = chat.of(tools), turn[-1] if turn else None
    joint = _joint(chat, before or exchange([]), messages, tools, variables, called=last in chat.end.tokens[1:])
    expanded = None
    if images is not None:
        processor, media = images
        expanded = processor.expand(joint.text, media, "the reply")
        joint = _Joint(expanded.text, expanded.moved(joint.end), expanded.moved(joint.after))
    closed = last in chat.ends or (last in stops and chat.closes(last))
    text = joint.text[: joint.after + len(chat.end.after) + (most + 1) * chat.encoder.longest]
    (encoded,) = chat.encoder.encode([text])
    place = joint.after if closed else _written(chat, turn, encoded, text, joint)
    if not closed and last in stops & chat.encoder.added and (inside := chat.encoder.decode([last])) in text[: joint.end]:
        place = text.rindex(inside, 0, joint.end) + len(inside)  # the template's text goes on there
    if chat.encoder.is_cut(encoded, place):
        tokens = encoded.ids[encoded.index(place) :]
    else:
        tokens = chat.encoder.continuation(text[:place], text[place:])
    opened = closed and (not chat.end.text or last in chat.opening_ends)
    tokens = tokens[1:] if opened and tokens[:1] == [last] else tokens  # what follows ended it
    standing = np.zeros(len(tokens), np.int64)
    if expanded is not None and media and len(text) == len(joint.text):
        whole = processor.tokens(encoded, expanded, media).tokens
        standing = np.pad(whole, (len(tokens), 0))[-len(tokens) :]  # the last tokens of both are the same
    return tokens, standing


def reply_text(chat: Chat, messages: Messages, tools: Sequence[Json] = (), **variables: Any) -> str:
    """Returns what the template writes after the end of a turn: `messages`, and the opening of the next turn."""
    joint = _joint(chat.of(tools), exchange([]), messages, tools, variables, called=False)
    return joint.text[joint.after :]


def text_tokens(chat: Chat, turn: Sequence[int], text: str, most: int) -> list[int]:
    """Returns the tokens of a plain text after a sampled turn. If they are more than `most`, some may be left out."""
    before = str(chat.tokenizer.decode(list(turn[-4:])))
    enough = (most + 1) * chat.encoder.longest
    if len(text) > enough and len(first := chat.encoder.continuation(before, text[:enough])) > most:
        return first
    return chat.encoder.continuation(before, text)  # also if the prefix has few: a tokenizer may drop characters


@dataclass(frozen=True)
class _Joint:
    """A conversation from the text of a turn on, and where the end of that turn starts (`end`) and ends (`after`)."""

    text: str
    end: int
    after: int


def _joint(
    chat: Chat, before: Messages, messages: Messages, tools: Sequence[Json], variables: Mapping[str, Any], called: bool
) -> _Joint:
    """Renders `before`, which the turn ends, and `messages`. `called`: the turn calls a tool."""

    def render(more: Messages, *, opened: bool = True) -> str:
        return chat.render([*turns, *more], tools, opened=opened, **variables)

    for most in (len(before) + len(messages), 1, 0):  # calls of a turn: a template may take one, or none
        turns = with_answers(before, messages, most, called=called)
        try:
            alone, whole = render([], opened=False), render(messages)
            break
        except Exception:
            if not most:
                raise
    place = len(ANSWER.join([*whole.split(ANSWER)[: alone.count(ANSWER)], ""])) if ANSWER in alone else 0
    first = max(0, place - len(ANSWER))
    text, start = whole[first:], place - first
    ended = _up_to_end(chat, alone.rpartition(ANSWER)[2])
    if text.startswith(ended, start):
        after = start + len(ended)
    else:
        asked = [{**turn, "content": QUESTION} for turn in messages[:1]]  # no end has it
        content = render([*asked, *messages[1:]])[first:].find(QUESTION, start) if asked else -1
        after = _kept_end(chat, text, start, content if content >= 0 else len(text), ended)
        if after < 0:
            return _other_end(chat, text, start, content, ended)
    after = chat.with_end(text, after)
    written = next((end for end in chat.endings if text.endswith(end, start, after)), "")
    end = after - len(written)
    return _Joint(text, end, end if chat.opening_ends.intersection(chat.encoder.ids(written)) else after)


def _up_to_end(chat: Chat, text: str) -> str:
    """Returns the rest of a last turn up to its end."""
    text = text.removesuffix(chat.end.after)
    places = [place + len(end) for end in chat.token_texts if (place := text.find(end)) >= 0]
    return text[: min(places)] if places else text


def _kept_end(chat: Chat, text: str, start: int, stop: int, ended: str) -> int:
    """Returns where the end of `ended` ends between two places, or -1: what precedes it may be other text (Apriel's calls).

    The longest part counts, of whole words and of an added token that it ends with.
    """
    last = chat.encoder.ids(ended)[-1:]
    least = len(chat.encoder.decode(last)) if chat.encoder.added.issuperset(last) else 1
    for first in range(max(0, len(ended) - least + 1)):
        part = ended[first:]
        if re.match(r"\W*\w", part) and not re.match(r"\w\w", ended[max(0, first - 1) :]):
            if (place := text.find(part, start, stop)) >= 0:
                return place + len(part)
    return -1


def _other_end(chat: Chat, text: str, start: int, content: int, ended: str) -> _Joint:
    """Finds an end that is another one if others follow: as many tokens, or fewer before those that open the next turn."""
    (encoded,) = chat.encoder.encode([text[: start + (len(ended) + 1) * chat.encoder.longest]])
    number, own = encoded.index(start), chat.encoder.ids(ended)
    ends = encoded.ids[number : number + len(own)]
    same = shared(ends, own)
    kept = len([*takewhile(lambda token: token not in chat.openers, ends)])
    others = [token for token in own[same:] if chat.encoder.decode([token]).strip()]
    if kept > same and not chat.encoder.added.issuperset(others):
        raise ValueError(
            f"it ends a turn with {ended!r}, and writes that otherwise if others follow, where no end was found; use one "
            "that writes turns alike (policy.tokenizer.chat_template)"
        )
    end, after = (encoded.start(number + count) for count in (min(same, kept), kept))
    opened = content < 0 or text[after : max(content, after)].strip()
    return _Joint(text, end, after if opened else end)


def _written(chat: Chat, turn: Sequence[int], encoded: Encoded, text: str, joint: _Joint) -> int:
    """Returns where the template goes on after a turn that a string ended, maybe in the template's own end.

    Texts are compared: the tokenizer may spell the end otherwise than the policy did. Added tokens are sampled whole.
    """
    written = text[joint.end : joint.after + len(chat.end.after)]
    sampled = chat.encoder.decode(turn[-4 * len(written) - 4 :])
    for count in range(len(written), 0, -1):
        number, edge = encoded.cut(joint.end + count)
        if sampled.endswith(written[:count]) and (edge or encoded.ids[number - 1] not in chat.encoder.added):
            return joint.end + count
    return joint.end
