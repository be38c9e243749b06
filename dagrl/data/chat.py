"""Conversations as the chat template writes them, and where turns of the policy start and end in them.

The template is looked at once, by rendering short conversations: where a turn ends, which tokens end it, and how it takes
messages (`dagrl.data.messages`). `dagrl.data.replies` joins the turns of a rollout.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, meta

from dagrl.data.decoder import TextDecoder
from dagrl.data.encoder import Encoded, TextEncoder, shared
from dagrl.data.messages import ANSWER, QUESTION, RESULT, THOUGHTS, TOOL, MessageFormat, Messages, exchange

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from dagrl.config import Json

GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""The tags around what transformers' mask of assistant tokens covers, which are its own."""


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


@lru_cache(maxsize=64)
def _chat(tokenizer: PreTrainedTokenizerFast, *_: object) -> Chat:
    return Chat(tokenizer)


def chat_of(tokenizer: PreTrainedTokenizerFast) -> Chat:
    """Returns the tokenizer with its chat template of now, which is looked at once."""
    return _chat(tokenizer, str(tokenizer.chat_template), len(tokenizer), tokenizer.eos_token)


class Chat:
    """A tokenizer and its chat template. See `chat_of`."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, name: str | None = None) -> None:
        """Without the `name` of one of several templates, transformers chooses: that for tools, if there are any."""
        self.tokenizer, self._name = tokenizer, name
        self.encoder, self.decoder = TextEncoder(tokenizer), TextDecoder(tokenizer)
        plain, shown = self._render, partial(self._render, tools=[TOOL])
        self._formats = MessageFormat([plain]), MessageFormat([shown, plain])  # there may be a template for tools alone

    def of(self, tools: Sequence[Json]) -> Chat:
        """Returns the tokenizer with the template of conversations with these tools, which may be one of its own."""
        return self._with_tools if tools else self

    @cached_property
    def _with_tools(self) -> Chat:
        templates = self.tokenizer.chat_template
        has_own = self._name is None and isinstance(templates, dict) and "tool_use" in templates
        return Chat(self.tokenizer, "tool_use") if has_own else self

    def template(self, tools: Sequence[Json]) -> str:
        """Returns the template's text. The tokenizer must have one."""
        return str(self.tokenizer.get_chat_template(self._name, list(tools) or None))

    def variables(self, tools: Sequence[Json]) -> frozenset[str]:
        """Returns the variables of the template, and maybe more of its names."""
        return _variables(self.template(tools))

    def render(self, messages: Messages, tools: Sequence[Json] = (), *, opened: bool, **variables: Any) -> str:
        """Returns the text of a conversation; `opened` opens the assistant's next turn. `variables` are the template's.

        Raises whatever Jinja or the template raises.
        """
        return self._render(self._turns(messages, tools), tools, opened=opened, **variables)

    def renders(
        self,
        messages: Messages,
        tools: Sequence[Json],
        tokens: Sequence[int],
        ids: Callable[[str], Sequence[int]] | None = None,
        **variables: Any,
    ) -> bool:
        """Returns whether the template's text of a conversation, with the next turn open, has these tokens. `ids` gives
        those of a text with images."""
        try:
            text = self.render(messages, tools, opened=True, **variables)
            return [*(ids or self.encoder.ids)(text)] == list(tokens)
        except Exception:  # Jinja's errors, and those that templates raise
            return False

    def marked(self, messages: Messages, tools: Sequence[Json] = (), **variables: Any) -> tuple[str, list[tuple[int, int]]]:
        """Returns the text of a conversation and the parts of it that the template marks as generated."""
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, parts = render_jinja_template(
            conversations=[self._turns(messages, tools)],
            tools=list(tools) or None,
            chat_template=self.template(tools),
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
            **getattr(self.tokenizer.apply_chat_template, "keywords", {}),  # the date of the run
            **variables,
        )
        return texts[0], [*parts[0]]

    @cached_property
    def end(self) -> TurnEnd:
        """How turns end: what the template writes after a turn's text, whether or not the conversation goes on."""
        last, following = (ANSWER + self._tail(turns) for turns in ([], [{"role": "user", "content": QUESTION}]))
        ours, theirs = self.encoder.encode([last, following])
        start = ours.index(len(ANSWER))
        both = shared(ours.ids[start:], theirs.ids[theirs.index(len(ANSWER)) :])
        written, added = _written(last, ours, start, start + both), self.encoder.added
        written = [*takewhile(lambda number: ours.ids[number] not in self.openers, written)] or written
        eos = [place for place, number in enumerate(written, start=1) if ours.ids[number] == self.tokenizer.eos_token_id]
        written = written[: eos[0] if eos else None]  # which generation never passes
        if not written or (ours.ids[written[-1]] not in added and last[ours.start(written[-1] + 1) :].strip()):
            # Nothing ends all turns alike. The last one may have an end of its own (gpt-oss).
            written = [number for number in _written(last, ours, start, len(ours.ids)) if ours.ids[number] in added]
        if not written and (middle := self._middle_end) and (token := self.encoder.ids(middle)[-1]) in added:
            calls, results = self._tail([], calls=1), self._tail([RESULT], calls=1)  # these may follow a call at once
            ends = [] if middle in results.partition(QUESTION)[0] else self.encoder.ids(calls)[-1:]
            return TurnEnd(middle, "", (token, *added.intersection(ends)))
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
    def openers(self) -> frozenset[int]:
        """The added token that conversations begin with, which ends no turn: some templates always open the next one."""
        known = {self.tokenizer.bos_token_id, self.tokenizer.eos_token_id}
        tokens = self.encoder.ids(self._first([{"role": "user", "content": QUESTION}]))
        return self.encoder.added.intersection([token for token in tokens if token not in known][:1])

    @cached_property
    def stops(self) -> tuple[int, ...]:
        """The tokens that end a turn of any of the tokenizer's templates."""
        return tuple(dict.fromkeys([*self.end.tokens, *self._with_tools.end.tokens]))

    @cached_property
    def ends(self) -> frozenset[int]:
        """The tokens that end a turn: the template's and the tokenizer's."""
        return frozenset({*self.stops, self.tokenizer.eos_token_id} - {None})

    def closes(self, token: int) -> bool:
        """Returns whether a stop token ends a turn: it is one of its ends, or a special token that the template does not
        write inside of turns, such as another `eos_token_id` of the model. After others, the end follows (`</tool_call>`).
        """
        special = token in self.encoder.added and self.tokenizer.added_tokens_decoder[token].special
        return token in self.ends or (special and token not in self._shown_tokens)

    @cached_property
    def _shown_tokens(self) -> frozenset[int]:
        """The added tokens that the template writes in conversations with texts, calls and thoughts, before their ends."""
        thoughts = dict.fromkeys(THOUGHTS, ANSWER)
        asked = [[question, turn | more] for question, turn in map(exchange, ([], [("f", None)])) for more in ({}, thoughts)]
        texts = [self._formats[1].shown(turns).rstrip() for turns in asked]
        return self.encoder.added.intersection(token for text in texts for token in self.encoder.ids(text)[:-1])

    @cached_property
    def endings(self) -> list[str]:
        """The texts that end a turn: the template's, and those of its tokens."""
        return [text for text in (self.end.text, *(self.encoder.decode([token]) for token in self.end.tokens)) if text]

    @cached_property
    def token_texts(self) -> tuple[str, ...]:
        """The texts of the added tokens that end a turn."""
        return tuple(self.encoder.decode([token]) for token in self.end.tokens if token in self.encoder.added)

    def last_end(self, text: str) -> int:
        """Returns where the last turn of a text ends. White space after the token that ends generation does not count."""
        text = text.removesuffix(self.end.after)
        return len(text.rstrip() if text.rstrip().endswith(self.token_texts) else text)

    def with_end(self, text: str, place: int) -> int:
        """Returns where a turn ends of which the text ends at `place`: after the end that only turns before others have."""
        ended = not text.startswith(self.end.text, place) or text.endswith(tuple(self.endings), 0, place)
        return place if ended else place + len(self.end.text)

    @cached_property
    def opening_ends(self) -> frozenset[int]:
        """The ends of turns that open what follows: all in TRL's template of GLM, results in Gemma 4's."""
        question = self._first([{"role": "user", "content": QUESTION}]).partition(QUESTION)[0]
        if self.end.tokens and question.rstrip().endswith(self.encoder.decode(self.end.tokens[:1])):
            return frozenset(self.end.tokens)
        of_calls, of_none = self._tail([RESULT, RESULT], calls=2), self._tail([RESULT])
        texts = {token: self.encoder.decode([token]) for token in self.end.tokens[1:]}
        return frozenset(token for token, text in texts.items() if of_calls.count(text) > 1 or text in of_none)

    def stop_before_calls(self, tools: Sequence[Json]) -> str:
        """Returns the end that the template writes before the calls of a turn, with which generation stops (GigaChat 3)."""
        question, call = exchange([("f", None)])
        try:
            prompt, turn = self.render([question], tools, opened=True), self.render([question, call], tools, opened=False)
        except Exception:  # a template without calls, which the policy may write as text
            return ""
        before = self.encoder.ids(turn[shared(prompt, turn) :].partition(ANSWER)[0])
        return next((self.encoder.decode([token]) for token in before if token in self.ends), "")

    def takes_id(self, identity: str) -> bool:
        """Returns whether the template takes a call with this id: Mistral's want nine letters or digits."""
        return self._formats[1].takes_id(identity)

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

    def turn_text(self, turn: Sequence[int], *, special: bool = False) -> str:
        """Returns the text of a sampled turn without its end, and without special tokens unless `special`."""
        turn = turn[:-1] if turn and turn[-1] in self.ends else turn
        return self.without_end(str(self.tokenizer.decode(list(turn), skip_special_tokens=not special)))

    def without_end(self, text: str) -> str:
        """Returns the text of a sampled turn without the template's end, if that is a text and no token."""
        if self.tokenizer.chat_template is None or self.end.tokens or not (end := self.end.text.strip()):
            return text
        content, found, rest = text.rpartition(end)
        return content if found and not rest.strip() else text

    def text_start(
        self, before: Messages, rendered: str, tools: Sequence[Json] = (), after: Messages = (), **variables: Any
    ) -> int:
        """Returns where the text of the assistant turn between `before` and `after` starts in `rendered`."""
        turns = [{"role": "assistant", "content": text} for text in (ANSWER, QUESTION)]
        return shared(rendered, *(self.render([*before, turn, *after], tools, opened=False, **variables) for turn in turns))

    def content_start(
        self, before: Messages, rendered: str, tools: Sequence[Json] = (), after: Messages = (), **variables: Any
    ) -> int:
        """Returns where the turn after `before` starts in `rendered`, if it is opened otherwise than a prompt: where it
        differs from that. If the messages before it are written otherwise too, it starts after the prompt's opening, or else
        with its text.

        Templates of reasoning models open a prompt with a thought, and leave thoughts out of the turns that they render.
        """
        content = self.text_start(before, rendered, tools, after, **variables)
        prompt = self.render(before, tools, opened=True, **variables) if before else rendered[:content]
        opening, content = (self._whole(rendered, place) for place in (shared(rendered, prompt), content))
        if opening >= content:
            return opening
        own = prompt.removeprefix(self.render(before, tools, opened=False, **variables)) if before else ""
        place = rendered.rfind(own, 0, content) + len(own)
        if 0 < len(own) <= place and not (self.ends | self.openers).intersection(self.encoder.ids(rendered[place:content])):
            return place
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

    def _openings(self) -> tuple[int, ...]:
        """Returns the tokens that open what may follow a turn: a question, or the results of calls."""
        found = []
        for turn, calls in (({"role": "user", "content": QUESTION}, 0), (RESULT, 1)):
            last, following = self._tail([], calls=calls), self._tail([turn], calls=calls)
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
        options = {"chat_template": self._name, "tokenize": False, "add_generation_prompt": opened}
        return str(self.tokenizer.apply_chat_template(list(turns), list(tools) or None, **options, **variables))


@lru_cache(maxsize=8)
def _variables(template: str) -> frozenset[str]:
    environment = Environment(autoescape=True, extensions=["jinja2.ext.loopcontrols"])
    return frozenset(meta.find_undeclared_variables(environment.parse(GENERATION.sub("", template))))


def _written(text: str, encoded: Encoded, first: int, end: int) -> list[int]:
    """Returns the tokens from `first` to `end` that are more than white space."""
    return [number for number in range(first, end) if text[encoded.start(number) : encoded.start(number + 1)].strip()]
