"""Conversations as the chat template writes them, and what joins the turns of a rollout.

The template is looked at once, by rendering short conversations: where a turn of the policy ends, which tokens end it, and
how it takes messages (`dagrl.data.messages`). `Chat.reply` returns the tokens that the template writes after a turn that was
sampled; the sampled tokens stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from dagrl.data.encoder import Encoded, TextEncoder, shared
from dagrl.data.messages import ANSWER, CALL_ID, QUESTION, TOOL, MessageFormat, Messages, exchange

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from dagrl.config import Json


@dataclass(frozen=True)
class TurnEnd:
    """The end of a turn of the policy: the `text` that the template writes, and the tokens of which one ends generation.

    `after` is what the template adds after the end. `text` is empty if the next turn's opening ends a turn, as GLM's does;
    some templates write it only once others follow (Apriel).
    `tokens` is empty if no single token ends a turn.
    """

    text: str
    after: str
    tokens: tuple[int, ...]


@lru_cache(maxsize=8)
def _chat(tokenizer: PreTrainedTokenizerFast, *_: object) -> Chat:
    return Chat(tokenizer)


def chat_of(tokenizer: PreTrainedTokenizerFast) -> Chat:
    """Returns the tokenizer with its chat template of now, which is looked at once."""
    return _chat(tokenizer, str(tokenizer.chat_template), len(tokenizer), tokenizer.eos_token)


class Chat:
    """A tokenizer and its chat template. See `chat_of`."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.encoder = TextEncoder(tokenizer)
        plain, shown = self._render, partial(self._render, tools=[TOOL])
        self._formats = MessageFormat([plain]), MessageFormat([shown, plain])  # there may be a template for tools alone

    def render(self, messages: Messages, tools: Sequence[Json] = (), *, opened: bool, **variables: Any) -> str:
        """Returns the text of a conversation; `opened` opens the assistant's next turn. `variables` are the template's.

        Raises whatever Jinja or the template raises.
        """
        return self._render(self._turns(messages, tools), tools, opened=opened, **variables)

    def renders(self, messages: Messages, tools: Sequence[Json], tokens: Sequence[int], **variables: Any) -> bool:
        """Returns whether the template's text of a conversation, with the next turn open, has these tokens."""
        try:
            return self.encoder.ids(self.render(messages, tools, opened=True, **variables)) == list(tokens)
        except Exception:  # Jinja's errors, and those that templates raise
            return False

    def marked(self, messages: Messages, tools: Sequence[Json] = (), **variables: Any) -> tuple[str, list[tuple[int, int]]]:
        """Returns the text of a conversation and the parts of it that the template marks as generated."""
        from transformers.utils.chat_template_utils import render_jinja_template

        shown = list(tools) or None
        texts, parts = render_jinja_template(
            conversations=[self._turns(messages, tools)],
            tools=shown,
            chat_template=self.tokenizer.get_chat_template(None, shown),
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
            **getattr(self.tokenizer.apply_chat_template, "keywords", {}),  # the date of the run
            **variables,
        )
        return texts[0], [(start, end) for start, end in parts[0] if start < end]

    @cached_property
    def end(self) -> TurnEnd:
        """How turns end: what the template writes after a turn's text, whether or not the conversation goes on."""
        last, following = (ANSWER + self._tail(turns) for turns in ([], [{"role": "user", "content": QUESTION}]))
        ours, theirs = self.encoder.encode([last, following])
        start = ours.index(len(ANSWER))
        both = shared(ours.ids[start:], theirs.ids[theirs.index(len(ANSWER)) :])
        written, added = _written(last, ours, start, start + both), self.encoder.added
        written = [*takewhile(lambda number: ours.ids[number] not in self._openers, written)] or written
        eos = [place for place, number in enumerate(written, start=1) if ours.ids[number] == self.tokenizer.eos_token_id]
        written = written[: eos[0] if eos else None]  # which generation never passes
        if not written or (ours.ids[written[-1]] not in added and last[ours.start(written[-1] + 1) :].strip()):
            # Nothing ends all turns alike. The last one may have an end of its own (gpt-oss).
            written = [number for number in _written(last, ours, start, len(ours.ids)) if ours.ids[number] in added]
        if not written and (middle := self._middle_end) and (token := self.encoder.ids(middle)[-1]) in added:
            return TurnEnd(middle, "", (token,))
        if not written:
            return TurnEnd("", last[len(ANSWER) :] if last[len(ANSWER) :].strip() else "", self._openings())
        place = ours.start(written[-1] + 1)
        token, text, after = ours.ids[written[-1]], last[len(ANSWER) : place], last[place:]
        alone = len(written) == 1 and ours.index(ours.start(written[0])) == written[0]
        tokens = [token] if alone or token in added else []
        calls = (self._tail([], calls=2) or self._tail([], calls=1)).removesuffix(after).rstrip()
        tokens += [end for end in self.encoder.ids(calls)[-1:] if end in added]
        return TurnEnd(text, after, tuple(dict.fromkeys(tokens)))

    @cached_property
    def _middle_end(self) -> str:
        """What the template writes between a turn and a question besides that which also opens the first question."""
        question = [{"role": "user", "content": QUESTION}]
        following, first = (text.partition(QUESTION)[0] for text in (self._tail(question), self._first(question)))
        (encoded,) = self.encoder.encode([following])
        return following[: encoded.start(encoded.index(len(following) - shared(following[::-1], first[::-1])))]

    def _first(self, messages: Messages) -> str:
        """Returns the text of a conversation, with tools if it takes none without; empty if the template rejects it."""
        return self._formats[0].shown(messages) or self._formats[1].shown(messages)

    @cached_property
    def _openers(self) -> frozenset[int]:
        """The added token that conversations begin with, which ends no turn: some templates always open the next one."""
        known = {self.tokenizer.bos_token_id, self.tokenizer.eos_token_id}
        tokens = self.encoder.ids(self._first([{"role": "user", "content": QUESTION}]))
        return self.encoder.added.intersection([token for token in tokens if token not in known][:1])

    @cached_property
    def ends(self) -> frozenset[int]:
        """The tokens that end a turn: the template's and the tokenizer's."""
        return frozenset({*self.end.tokens, self.tokenizer.eos_token_id} - {None})

    @cached_property
    def endings(self) -> list[str]:
        """The texts that end a turn: the template's, and those of its tokens."""
        return [text for text in (self.end.text, *(self.encoder.decode([token]) for token in self.end.tokens)) if text]

    @cached_property
    def _end_tokens(self) -> tuple[str, ...]:
        """The texts of the added tokens that end a turn."""
        return tuple(self.encoder.decode([token]) for token in self.end.tokens if token in self.encoder.added)

    def last_end(self, text: str) -> int:
        """Returns where the last turn of a text ends. White space after a token that ends generation is no part of it."""
        text = text.removesuffix(self.end.after)
        return len(text.rstrip() if text.rstrip().endswith(self._end_tokens) else text)

    def with_end(self, text: str, place: int) -> int:
        """Returns where a turn ends of which the text ends at `place`: after the end that only turns before others have."""
        ended = not text.startswith(self.end.text, place) or text.endswith(tuple(self.endings), 0, place)
        return place if ended else place + len(self.end.text)

    @cached_property
    def _openings_of_results(self) -> frozenset[int]:
        """The ends of turns with calls that open a result (Gemma 4): they precede each result, or one without a call."""
        result = {"role": "tool", "name": "f", "tool_call_id": CALL_ID, "content": QUESTION}
        of_calls, of_none = self._tail([result, result], calls=2), self._tail([result])
        texts = {token: self.encoder.decode([token]) for token in self.end.tokens[1:]}
        return frozenset(token for token, text in texts.items() if of_calls.count(text) > 1 or text in of_none)

    def is_end(self, text: str) -> bool:
        """Returns whether the template ends turns with a text."""
        return text == self.end.text or self.ends.issuperset(self.encoder.ids(text))

    def missing_end(self, text: str, ids: Sequence[int], *, called: bool) -> list[int]:
        """Returns the token that ends generation after a turn at the end of a text, if the template has written none.

        That is the token that opens what follows a turn, or a `called` tool (GLM), or the tokenizer's own. `ids` are the
        tokens of the text.
        """
        last = next((token for token in reversed(ids) if self.encoder.decode([token]).strip()), None)
        if last in self.ends or (self.end.text and (text.endswith(self.end.text) or not self.end.tokens)):
            return []
        ends = self.end.tokens or (int(self.tokenizer.eos_token_id),)
        return [ends[-1 if called and not self.end.text else 0]]

    def turn_text(self, turn: Sequence[int]) -> str:
        """Returns the text of a sampled turn, without special tokens and without its end, which may be none of them."""
        ended = bool(turn) and turn[-1] in self.ends
        return self.without_end(str(self.tokenizer.decode(list(turn[:-1] if ended else turn), skip_special_tokens=True)))

    def without_end(self, text: str) -> str:
        """Returns the text of a sampled turn without the template's end, if that is a text and no token."""
        if self.tokenizer.chat_template is None or self.end.tokens or not (end := self.end.text.strip()):
            return text
        content, found, rest = text.rpartition(end)
        return content if found and not rest.strip() else text

    def content_start(
        self, before: Messages, rendered: str, tools: Sequence[Json] = (), after: Messages = (), **variables: Any
    ) -> int:
        """Returns where the turn after `before` starts in `rendered`, if it is opened otherwise than a prompt: where it
        differs from that, or with its text, if the messages before it are also written otherwise.

        Templates of reasoning models open a prompt with a thought, and leave thoughts out of the turns that they render.
        """
        turns = [{"role": "assistant", "content": text} for text in (ANSWER, QUESTION)]
        content = shared(
            rendered, *(self.render([*before, turn, *after], tools, opened=False, **variables) for turn in turns)
        )
        prompt = self.render(before, tools, opened=True, **variables) if before else rendered[:content]
        opening, content = (self._whole(rendered, place) for place in (shared(rendered, prompt), content))
        if opening >= content:
            return opening
        between = rendered[opening:content]
        texts = [token for token in self.encoder.ids(between) if token not in self.encoder.added]
        return content if self.encoder.decode(texts).strip() or prompt.endswith(between) else opening

    def _whole(self, text: str, place: int) -> int:
        """Returns the place, or where the token or the tag starts that it is inside of; a space before it is a word's."""
        place = len(text[:place].rstrip(" "))
        first = max(0, place - 2 * self.encoder.longest)
        (encoded,) = self.encoder.encode([text[first : place + self.encoder.longest]])
        number = encoded.index(place - first)
        if not self.encoder.is_cut(encoded, place - first):
            return first + encoded.start(number - 1)
        tag = re.search(r"[<\[][^<>\[\]\s]*\Z", text[first:place])
        return place if tag is None or encoded.ids[number - 1] in self.encoder.added else first + tag.start()

    def reply_text(self, messages: Messages, tools: Sequence[Json] = (), **variables: Any) -> str:
        """Returns what the template writes after the end of a turn: `messages`, and the opening of the next turn."""
        text, _, place = self._joint(messages, tools, variables)
        return text[place:]

    def reply(
        self,
        turn: Sequence[int],
        stops: frozenset[int],
        messages: Messages,
        tools: Sequence[Json],
        most: int,
        **variables: Any,
    ) -> list[int]:
        """Returns the tokens after a sampled turn: its end, `messages`, and the opening of the next turn. If they are more
        than `most`, some may be left out. A turn that one of `stops`, of the template's or the tokenizer's ends ended gets
        no second end.

        Tokenizing takes a second and 400 MB per megabyte of text, and a reply may be all the output of a program.
        """
        text, end, after = self._joint(messages, tools, variables)
        closed = bool(turn) and turn[-1] in stops | self.ends
        text = text[: after + len(self.end.after) + (most + 1) * self.encoder.longest]
        (encoded,) = self.encoder.encode([text])
        place = after if closed else self._written(turn, encoded, text, end, after)
        if self.encoder.is_cut(encoded, place):
            tokens = encoded.ids[encoded.index(place) :]
        else:
            tokens = self.encoder.continuation(text[:place], text[place:])
        opened = closed and (not self.end.text or turn[-1] in self._openings_of_results)
        return tokens[1:] if opened and tokens[:1] == list(turn[-1:]) else tokens  # what follows ended it

    def _written(self, turn: Sequence[int], encoded: Encoded, text: str, end: int, after: int) -> int:
        """Returns where in `text` the template goes on after a turn that a string ended, maybe in the template's own end.

        Texts are compared: the tokenizer may spell the end otherwise than the policy did. Added tokens are sampled whole.
        """
        written = text[end : after + len(self.end.after)]
        sampled = self.encoder.decode(turn[-4 * len(written) - 4 :])
        for count in range(len(written), 0, -1):
            number, edge = encoded.cut(end + count)
            if sampled.endswith(written[:count]) and (edge or encoded.ids[number - 1] not in self.encoder.added):
                return end + count
        return end

    def text_reply(self, turn: Sequence[int], text: str, most: int) -> list[int]:
        """Returns the tokens of a plain text after a sampled turn. If they are more than `most`, some may be left out."""
        before = str(self.tokenizer.decode(list(turn[-4:])))
        enough = (most + 1) * self.encoder.longest
        if len(text) > enough and len(first := self.encoder.continuation(before, text[:enough])) > most:
            return first
        return self.encoder.continuation(before, text)  # also if the prefix has few: a tokenizer may drop characters

    def _joint(self, messages: Messages, tools: Sequence[Json], variables: Mapping[str, Any]) -> tuple[str, int, int]:
        """Returns a conversation with `messages` after a turn, and where the end of that turn starts and ends."""
        results = [(str(turn.get("name") or "f"), turn.get("tool_call_id")) for turn in messages if turn["role"] == "tool"]
        for calls in (results, results[:1], []):  # a template may take one call of a turn, or none; a policy may make more
            before = exchange(calls)
            try:
                alone = self.render(before, tools, opened=False, **variables)
                whole = self.render([*before, *messages], tools, opened=True, **variables)
                break
            except Exception:
                if not calls:
                    raise
        answers = alone.count(ANSWER)
        ended = self._to_end(alone.rpartition(ANSWER)[2])
        start = len(ANSWER.join([*whole.split(ANSWER)[:answers], ""])) if answers else 0
        if whole.startswith(ended, start):
            after = start + len(ended)
        else:
            asked = [*before, {**messages[0], "content": QUESTION}, *messages[1:]]  # which no end has
            content = self.render(asked, tools, opened=True, **variables).find(QUESTION, start)
            after = self._kept_end(whole[start : content if content >= 0 else None], ended)
            if after < 0:
                return whole, *self._other_end(whole, start, content, ended)
            after += start
        after = self.with_end(whole, after)
        text = next((text for text in self.endings if whole.endswith(text, start, after)), "")
        end = after - len(text)
        return whole, end, end if self._openings_of_results.intersection(self.encoder.ids(text)) else after

    def _to_end(self, text: str) -> str:
        """Returns the rest of a last turn up to its end."""
        text = text.removesuffix(self.end.after)
        places = [place + len(end) for end in self._end_tokens if (place := text.find(end)) >= 0]
        return text[: min(places)] if places else text

    def _kept_end(self, text: str, ended: str) -> int:
        """Returns where the end of `ended` ends in `text`, or -1: what precedes it may be other text (Apriel's calls).

        The longest part counts, of whole words and of an added token that it ends with.
        """
        last = self.encoder.ids(ended)[-1:]
        least = len(self.encoder.decode(last)) if self.encoder.added.issuperset(last) else 1
        for first in range(max(0, len(ended) - least + 1)):
            part = ended[first:]
            if re.match(r"\W*\w", part) and not re.match(r"\w\w", ended[max(0, first - 1) :]) and part in text:
                return text.index(part) + len(part)
        return -1

    def _other_end(self, whole: str, start: int, content: int, ended: str) -> tuple[int, int]:
        """Returns where a turn ends whose end is another one if others follow: as many tokens, or fewer before those that
        open the next turn.
        """
        (encoded,) = self.encoder.encode([whole[: start + (len(ended) + 1) * self.encoder.longest]])
        number, own = encoded.index(start), self.encoder.ids(ended)
        ends = encoded.ids[number : number + len(own)]
        same = shared(ends, own)
        kept = len([*takewhile(lambda token: token not in self._openers, ends)])
        others = [token for token in own[same:] if self.encoder.decode([token]).strip()]
        if kept > same and not self.encoder.added.issuperset(others):
            raise ValueError(
                f"it ends a turn with {ended!r}, and writes that otherwise if others follow, where no end was found; use "
                "one that writes turns alike (policy.tokenizer.chat_template)"
            )
        end, after = (encoded.start(number + count) for count in (min(same, kept), kept))
        opened = content < 0 or whole[after : max(content, after)].strip()
        return end, after if opened else end

    def _openings(self) -> tuple[int, ...]:
        """Returns the tokens that open what may follow a turn: a question, or the results of calls."""
        found = []
        for role, calls in (("user", 0), ("tool", 1)):
            last = self._tail([], calls=calls)
            following = self._tail([{"role": role, "content": QUESTION, "tool_call_id": CALL_ID}], calls=calls)
            if following.startswith(last):
                found += self.encoder.continuation(ANSWER + last, following.removeprefix(last))[:1]
        return tuple(dict.fromkeys(token for token in found if token in self.encoder.added))

    def _tail(self, messages: Messages, *, calls: int = 0) -> str:
        """Returns what follows the text of a turn, or that of its last call: `messages`, or the end of the conversation."""
        for tools in ((), [TOOL]):
            with suppress(Exception):  # a template without tools, for tools alone, or for one turn
                text = self.render([*exchange([("f", None)] * calls), *messages], tools, opened=bool(messages))
                return text.rpartition(ANSWER)[2] if ANSWER in text else ""
        return ""

    def _turns(self, messages: Messages, tools: Sequence[Json]) -> list[dict[str, Any]]:
        return self._formats[bool(tools)].turns(messages)

    def _render(self, turns: Messages, tools: Sequence[Json] = (), *, opened: bool = False, **variables: Any) -> str:
        template = self.tokenizer.apply_chat_template
        return str(template(list(turns), list(tools) or None, tokenize=False, add_generation_prompt=opened, **variables))


def _written(text: str, encoded: Encoded, first: int, end: int) -> list[int]:
    """Returns the tokens from `first` to `end` that are more than white space."""
    return [number for number in range(first, end) if text[encoded.start(number) : encoded.start(number + 1)].strip()]
