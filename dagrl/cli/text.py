"""`dagrl inspect CONFIG --text [N]` shows the first N examples of a run as the tokens that it trains on, or continues.

Runs of tokens of one kind are a line with its name, in its colour:

    template  <|im_start|>│user│↵            written by the chat template, or added by the tokenizer
    data      What│ is│ 7│ +│ 5│?            from the data; not in the loss
    TRAIN     12                             from the data, in the loss
    TRAIN+    <think>│↵│</think>│↵           written by the template, in the loss
    STOP      <|im_end|>                     in the loss, and ends a completion
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import TYPE_CHECKING, Any

from dagrl.config import Config, Json
from dagrl.data import Example, open_sampler
from dagrl.data.chat import chat_of
from dagrl.data.encoder import shared
from dagrl.data.examples import Message
from dagrl.data.messages import THOUGHTS, with_parsed_arguments
from dagrl.data.tokenization import Demonstration, Prompt, Row, turns_of
from dagrl.run.preflight import Inputs, read_data

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

STYLES = {"template": "dim", "data": "", "TRAIN": "green", "TRAIN+": "yellow", "STOP": "bold red", "SAMPLE": "green"}
MEANINGS = {
    "template": "written by the chat template or the tokenizer, not in the loss",
    "data": "from the data, not in the loss",
    "TRAIN": "from the data, in the loss",
    "TRAIN+": "written by the chat template, in the loss",
    "STOP": "in the loss, and ends a completion",
    "SAMPLE": "what the policy writes, in the loss",
}
MARK = "\ue000"
"""Replaces texts of the data, one after the other, to see where the template writes them. It has no meaning in Unicode."""

AFTER = 2  # most tokens of a row after the template's text: an end that it does not write, and one whose value is learned
MOST = 200  # tokens of a line of which all are shown; of a longer one the first and the last half of as many
FOLDED = 8  # fewest equal tokens in a row of which one is shown, with their number


def text_report(config: Config, count: int, console: Console) -> str:
    """Returns the first `count` examples that each stage of the run draws, in their order, in the console's colours.

    Raises UserError for what a run would reject of the data, the tokenizer or the chat template.
    """
    from rich.text import Text

    inputs, examples = read_data(config)
    by_source: dict[str, list[Example]] = {}  # a task may give several the same
    for example in examples:
        by_source.setdefault(example.source, []).append(example)
    generation = inputs.config.policy.generation
    view = _View(inputs, {*chat_of(inputs.tokenizer).ends, *(generation.stop_token_ids if generation else ())})
    ends = ", ".join(f"{token} {view.text(token)}" for token in sorted(view.stops))
    parts: list[RenderableType] = [Text.assemble(*((f"{kind}: {MEANINGS[kind]}\n", STYLES[kind]) for kind in MEANINGS))]
    parts.append(Text(f"A completion ends with {ends}." + (f" The date is {view.day}." if view.day else "")))
    for row in _first(inputs.demonstrations, inputs.config, count):
        parts += view.sequence("SFT", row, by_source.get(row.source, ()))
    for pair in _first(inputs.preferences, inputs.config, count):
        both = by_source.get(pair.source, ())
        parts += view.sequence("chosen", pair.chosen, both)
        parts += view.sequence("rejected", pair.rejected, [one.rejected for one in both if one.rejected is not None])
    for prompt in _first(inputs.prompts, inputs.config, count):
        parts += view.prompt(prompt, by_source.get(prompt.source, ()))
    with console.capture() as capture:
        console.print(*parts, sep="\n")
    return capture.get()


def _first(rows: Sequence[Row], config: Config, count: int) -> list[Row]:
    return [rows[index] for index in open_sampler(rows, config.data).take(min(count, len(rows)))] if rows else []


class _View:
    """Shows rows as tables of two columns: the kind of some tokens, and these. `stops` are those that end a completion."""

    def __init__(self, inputs: Inputs, stops: set[int]) -> None:
        self.stops, self.day = stops, inputs.config.policy.tokenizer.date
        self._tokenizer, self._chat, self._processor = inputs.tokenizer, chat_of(inputs.tokenizer), inputs.processor
        self._pieces, self._decode = self._chat.encoder.pieces, self._chat.encoder.decode
        self._special = set(inputs.tokenizer.all_special_ids) | {*inputs.tokenizer.get_added_vocab().values()}

    def text(self, token: int) -> str:
        """Returns the text of a token alone."""
        return _shown(self._decode([token]))

    def sequence(self, name: str, row: Demonstration, examples: Sequence[Example]) -> list[RenderableType]:
        """Shows a whole sequence."""
        tokens, learned = row.tokens.tolist(), row.loss_mask > 0
        given = self._given(tokens, examples)
        kinds = [self._kind(*item) for item in zip(tokens, learned.tolist(), given, strict=True)]
        return self._table(f"{name}: {row.source}, {len(tokens)} tokens, {int(learned.sum())} in the loss", tokens, kinds)

    def prompt(self, prompt: Prompt, examples: Sequence[Example]) -> list[RenderableType]:
        """Shows what is sampled from, and the reference."""
        tokens = prompt.tokens.tolist()
        kinds = ["data" if given else "template" for given in self._given(tokens, examples, opened=True)]
        reference = f", reference {_shown(prompt.reference)[:MOST]}" if prompt.reference else ""
        title = f"prompt: {prompt.source}, {len(tokens)} tokens{reference}"
        return self._table(title, tokens, kinds, ("SAMPLE", "..."))

    def _kind(self, token: int, learned: bool, given: bool) -> str:
        if learned:
            return "STOP" if token in self.stops else "TRAIN" if given else "TRAIN+"
        return "data" if given else "template"

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
            part = _folded(pieces[start : (start := start + len(list(run)))])
            if (hidden := len(part) - MOST) > 0:
                part = [*part[: MOST // 2], f" ... {hidden} tokens ... ", *part[-MOST // 2 :]]
            text = Text()
            for number, piece in enumerate(part):
                text.append("\u2502" if number else "", "dim").append(_shown(piece), STYLES[kind])
            table.add_row(Text(kind, STYLES[kind]), text)
        for kind, content in after:
            table.add_row(Text(kind, STYLES[kind]), Text(content, STYLES[kind]))
        return [Text(f"\n{title}", "bold underline"), table]

    def _given(self, tokens: Sequence[int], examples: Sequence[Example], *, opened: bool = False) -> list[bool]:
        """Returns which tokens have text of the data: those of the first of `examples` that has these tokens.

        Other tokens are the template's. `opened`: the last message is left out, and the template opens its turn.
        """
        if examples and not examples[0].messages:
            edges = self._special - {self._tokenizer.unk_token_id}
            return [token not in edges for token in tokens]
        for example in examples:
            count = len(example.messages)
            for last in [count - 1] if opened else range(count, 0, -1):  # a row may have the first turns alone
                if given := self._given_by(tokens, example, example.messages[:last], opened):
                    return given
        return [False] * len(tokens)

    def _given_by(self, tokens: Sequence[int], example: Example, messages: Sequence[Message], opened: bool) -> list[bool]:
        """Returns the same for some messages: the template's text changes there with one of them. Empty for other tokens."""
        chat, media = self._chat.of(example.tools), [medium for message in messages for medium in message.media]
        turns = [_plain_turn(turn) for turn in turns_of(messages)]

        def shown() -> str:
            text = chat.render(turns, example.tools, opened=opened, **example.variables)
            return text if self._processor is None else self._processor.expand(text, media, example.source).text

        (encoded,) = chat.encoder.encode([text := shown()])
        more = len(tokens) - len(encoded.ids)  # special tokens before, an end that the template does not write
        starts = range(max(0, more - AFTER), more + 1)
        first = next((at for at in starts if tokens[at : at + len(encoded.ids)] == encoded.ids), None)
        if first is None:
            return []
        given = [False] * len(tokens)
        for holder, key in [slot for turn in turns for slot in _slots(turn)]:
            kept, holder[key] = holder[key], MARK
            with suppress(Exception):  # a template that takes only some texts
                other = shown()
                start = shared(text, other)
                end = len(text) - shared(text[start:][::-1], other[start:][::-1])
                (number, edge), past = encoded.cut(start), encoded.index(end)
                given[first + number - (not edge) : first + past] = [True] * (past - number + (not edge))
            holder[key] = kept
        return given


def _folded(pieces: Sequence[str]) -> list[str]:
    """Returns the pieces, with one and a count for many equal ones, such as those of an image."""
    runs = [[*run] for _, run in groupby(pieces)]
    return [piece for run in runs for piece in ([f"{run[0]} \u00d7 {len(run)}"] if len(run) >= FOLDED else run)]


def _plain_turn(turn: Mapping[str, Json]) -> dict[str, Any]:
    """Returns a copy of a message with parsed arguments of calls."""
    copied: dict[str, Any] = copy.deepcopy(dict(turn))
    if isinstance(calls := copied.get("tool_calls"), list):
        copied["tool_calls"] = [*map(with_parsed_arguments, calls)]
    return copied


def _slots(turn: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yields where a message has texts, and values of arguments: each an object or a list, and the key."""
    content = turn.get("content")
    if isinstance(content, list):
        yield from ((part, "text") for part in content if part.get("text"))
    yield from ((turn, key) for key in ("content", *THOUGHTS) if isinstance(turn.get(key), str) and turn[key])
    for call in turn.get("tool_calls") or ():
        yield from _leaves(call.get("function", call), "arguments")


def _leaves(holder: Any, key: Any) -> Iterator[tuple[Any, Any]]:
    value = holder[key]
    if isinstance(value, dict | list) and value:
        for inner in value if isinstance(value, dict) else range(len(value)):
            yield from _leaves(value, inner)
    else:
        yield holder, key


def _shown(text: str) -> str:
    """Makes white space visible."""
    return text.replace("\n", "\u21b5").replace("\t", "\u21e5").replace("\r", "\u240d")
