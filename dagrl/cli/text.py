"""`dagrl inspect CONFIG --text [N]` shows the first N examples of a run as the tokens that it trains on, or continues.

Runs of tokens of one kind are a line with its name, in its colour:

    template  <|im_start|>│user│↵            written by the chat template, or added by the tokenizer
    data      What│ is│ 7│ +│ 5│?            from the data; not in the loss
    TRAIN     12                             from the data, in the loss
    TRAIN+    <think>│↵│</think>│↵           written by the template, in the loss
    STOP      <|im_end|>                     in the loss, and ends a completion
    after     ↵                              added by the chat template after the end of a turn; not in the loss
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

from dagrl.config import Config
from dagrl.data import Example, open_sampler
from dagrl.data.chat import Chat, chat_of
from dagrl.data.messages import ANSWER, QUESTION, THOUGHTS, with_parsed_arguments
from dagrl.data.tokenization import Demonstration, Prompt, Row
from dagrl.errors import ConfigError
from dagrl.run.preflight import Inputs, read_data

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

STYLES = {
    "template": "dim",
    "data": "",
    "TRAIN": "green",
    "TRAIN+": "yellow",
    "STOP": "bold red",
    "after": "dim",
    "SAMPLE": "green",
}
MEANINGS = {
    "template": "written by the chat template or the tokenizer, not in the loss",
    "data": "from the data, not in the loss",
    "TRAIN": "from the data, in the loss",
    "TRAIN+": "written by the chat template, in the loss",
    "STOP": "in the loss, and ends a completion",
    "after": "added by the chat template after the end of a turn, not in the loss",
    "SAMPLE": "what the policy writes, in the loss",
}
MOST = 200
"""Tokens of a line of which all are shown; of a longer one the first and the last half of as many."""


def text_report(config: Config, count: int, console: Console) -> str:
    """Returns the first `count` examples that each stage of the run draws, in their order, in the console's colours.

    Raises UserError for what a run would reject of the data, the tokenizer or the chat template.
    """
    from rich.text import Text

    if count < 1:
        raise ConfigError(f"--text {count}: expected: 1 or more examples")
    inputs, examples = read_data(config)
    by_source = {example.source: example for example in examples}
    view = _View(inputs, stop_tokens(inputs))
    ends = ", ".join(f"{token} {view.text(token)}" for token in sorted(view.stops))
    parts: list[RenderableType] = [Text.assemble(*((f"{kind}: {MEANINGS[kind]}\n", STYLES[kind]) for kind in MEANINGS))]
    parts.append(Text(f"A completion ends with {ends}." + (f" The date is {view.day}." if view.day else "")))
    for row in _first(inputs.demonstrations, inputs.config, count):
        parts += view.sequence("SFT", row, by_source.get(row.source))
    for pair in _first(inputs.preferences, inputs.config, count):
        example = by_source.get(pair.source)
        parts += view.sequence("chosen", pair.chosen, example)
        parts += view.sequence("rejected", pair.rejected, example and example.rejected)
    for prompt in _first(inputs.prompts, inputs.config, count):
        parts += view.prompt(prompt, by_source.get(prompt.source))
    with console.capture() as capture:
        console.print(*parts, sep="\n")
    return capture.get()


def stop_tokens(inputs: Inputs) -> set[int]:
    """Returns the tokens that end a completion."""
    generation = inputs.config.policy.generation
    return {*chat_of(inputs.tokenizer).ends, *(generation.stop_token_ids if generation else ())}


def _first(rows: Sequence[Row], config: Config, count: int) -> list[Row]:
    return [rows[index] for index in open_sampler(rows, config.data).take(min(count, len(rows)))] if rows else []


class _View:
    """Shows rows as tables of two columns: the kind of some tokens, and these."""

    def __init__(self, inputs: Inputs, stops: set[int]) -> None:
        self.stops, self.day = stops, inputs.config.policy.tokenizer.date
        self._tokenizer, self._chat = inputs.tokenizer, chat_of(inputs.tokenizer)
        self._pieces, self._decode = self._chat.encoder.pieces, self._chat.encoder.decode
        self._special = set(inputs.tokenizer.all_special_ids) | {*inputs.tokenizer.get_added_vocab().values()}

    def text(self, token: int) -> str:
        """Returns the text of a token alone."""
        return _shown(self._decode([token]))

    def sequence(self, name: str, row: Demonstration, example: Example | None) -> list[RenderableType]:
        """Shows a whole sequence."""
        tokens, learned = row.tokens.tolist(), row.loss_mask > 0
        given = self._given(tokens, _contents(example, self._chat))
        kinds = [self._kind(*item) for item in zip(tokens, learned.tolist(), given, strict=True)]
        if example is not None and example.messages:
            kinds = self._with_after(tokens, learned.tolist(), kinds, self._chat.of(example.tools).end.after)
        return self._table(f"{name}: {row.source}, {len(tokens)} tokens, {int(learned.sum())} in the loss", tokens, kinds)

    def prompt(self, prompt: Prompt, example: Example | None) -> list[RenderableType]:
        """Shows what is sampled from, and the reference."""
        tokens = prompt.tokens.tolist()
        kinds = ["data" if given else "template" for given in self._given(tokens, _contents(example, self._chat)[:-1])]
        reference = f", reference {_shown(prompt.reference)[:MOST]}" if prompt.reference else ""
        title = f"prompt: {prompt.source}, {len(tokens)} tokens{reference}"
        return self._table(title, tokens, kinds, ("SAMPLE", "..."))

    def _kind(self, token: int, learned: bool, given: bool) -> str:
        if learned:
            return "STOP" if token in self.stops else "TRAIN" if given else "TRAIN+"
        return "data" if given else "template"

    def _with_after(self, tokens: Sequence[int], learned: Sequence[bool], kinds: Sequence[str], after: str) -> list[str]:
        """Finds the tokens after a turn that have the text `after`, which the template adds there."""
        kinds, left = list(kinds), ""
        for number, piece in enumerate(self._pieces(tokens)):
            left = after if learned[number] else left
            text = piece.lstrip(" ")  # SentencePiece puts spaces before tokens
            if kinds[number] == "template" and piece and left and left.startswith(text):
                kinds[number], left = "after", left.removeprefix(text)
            elif not learned[number]:
                left = ""
        return kinds

    def _table(
        self, title: str, tokens: Sequence[int], kinds: Sequence[str], *after: tuple[str, str]
    ) -> list[RenderableType]:
        from rich.table import Table
        from rich.text import Text

        table, pieces = Table.grid(padding=(0, 2)), self._pieces(tokens)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        start = 0
        for kind, run in groupby(kinds):
            part = pieces[start : (start := start + len(list(run)))]
            if (hidden := len(part) - MOST) > 0:
                part = [*part[: MOST // 2], f" ... {hidden} tokens ... ", *part[-MOST // 2 :]]
            text = Text()
            for number, piece in enumerate(part):
                text.append("\u2502" if number else "", "dim").append(_shown(piece), STYLES[kind])
            table.add_row(Text(kind, STYLES[kind]), text)
        for kind, content in after:
            table.add_row(Text(kind, STYLES[kind]), Text(content, STYLES[kind]))
        return [Text(f"\n{title}", "bold underline"), table]

    def _given(self, tokens: Sequence[int], contents: Sequence[str]) -> list[bool]:
        """Returns which tokens have text of the data: `contents`, found in their order."""
        pieces = self._pieces(tokens)
        ends = list(accumulate(map(len, pieces)))
        starts = [end - len(piece) for end, piece in zip(ends, pieces, strict=True)]
        special = self._special - {self._tokenizer.unk_token_id}
        plain = (" " * len(piece) if token in special else piece for token, piece in zip(tokens, pieces, strict=True))
        text, given, place, known = "".join(plain), [False] * len(tokens), 0, set(starts)
        for content in contents:
            read = self._decode(self._chat.encoder.ids(content))
            for candidate in dict.fromkeys((content, read)):  # a tokenizer may normalize text, or not know characters
                if (found := _find(text, candidate.strip(), place, known)) >= 0:
                    place = found + len(candidate.strip())
                    left, right = _edges(content)
                    found -= len(left) if text.endswith(left, 0, found) else 0
                    place += len(right) if text.startswith(right, place) else 0
                    inside = (start < place and end > found for start, end in zip(starts, ends, strict=True))
                    given = [old or new for old, new in zip(given, inside, strict=True)]
                    break
        return given


def _contents(example: Example | None, chat: Chat) -> list[str]:
    """Returns the texts of an example as a template writes them, in order; the last one is the answer."""
    if example is None:
        return []
    if not example.messages:
        return [example.prompt, example.response]
    texts = list[str]()
    for message in example.messages:
        parts = message.content if isinstance(message.content, tuple) else [{"text": message.content}]
        texts += [text.strip() if isinstance(text := message.more.get(key), str) else "" for key in THOUGHTS]
        texts += [_written(text, message.role, chat) if isinstance(text := part.get("text"), str) else "" for part in parts]
        calls = message.more.get("tool_calls")
        texts += _strings([with_parsed_arguments(call) for call in calls] if isinstance(calls, list) else None)
    return texts


@lru_cache(maxsize=8)
def _cut_edges(chat: Chat, role: str) -> tuple[bool, bool]:
    """Returns whether the template cuts white space from the start and from the end of contents."""
    turns = [{"role": "user", "content": QUESTION}]
    place = int(role not in ("system", "user"))
    try:
        plain, *padded = (
            chat.render([*turns[:place], {"role": role, "content": text}, *turns[place:]], opened=False)
            for text in (ANSWER, f" {ANSWER}", f"{ANSWER} ")
        )
    except Exception:  # a template without such turns alone
        return False, False
    return plain == padded[0], plain == padded[1]


def _written(text: str, role: str, chat: Chat) -> str:
    left, right = _cut_edges(chat, role)
    text = text.lstrip() if left else text
    return text.rstrip() if right else text


def _edges(text: str) -> tuple[str, str]:
    """Returns the white space at the start and at the end of a text."""
    return text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]


def _strings(calls: object) -> list[str]:
    """Returns the texts in the arguments of tool calls."""
    if isinstance(calls, list):
        return [text for item in calls for text in _strings(item)]
    if isinstance(calls, dict):
        return [text for key, item in calls.items() if key not in ("id", "type", "name") for text in _strings(item)]
    return [calls] if isinstance(calls, str) else []


def _find(text: str, content: str, place: int, starts: set[int]) -> int:
    """Returns where a content starts in `text`, at the start of a token or after its space; -1 if nowhere."""
    while content and (place := text.find(content, place)) >= 0:
        if place in starts or (place - 1 in starts and text[place - 1].isspace()):
            return place
        place += 1
    return -1


def _shown(text: str) -> str:
    """Makes white space visible."""
    return text.replace("\n", "\u21b5").replace("\t", "\u21e5").replace("\r", "\u240d")
