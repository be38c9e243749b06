"""Texts of answers: ended before a stop string, and given out piece by piece while tokens arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

BROKEN = "\N{REPLACEMENT CHARACTER}"


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """Returns the text before the first stop string in it."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(places)] if places else text


def begun_stop(text: str, stops: Sequence[str]) -> int:
    """Returns how many of the last characters may begin a stop string."""
    sizes = (size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
    return max(sizes, default=0)


class TextStream:
    """The text of tokens that arrive one after the other.

    What may still change is kept back: a character without its last bytes, the beginning of a stop string, and with `hold`
    everything.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str], *, hold: bool = False) -> None:
        self._decode, self._stops, self._hold = decode, stops, hold
        self.tokens: list[int] = []
        self.sent = ""

    def more(self, tokens: Iterable[int]) -> str:
        """Adds tokens; returns the text that is certain now and was not before."""
        self.tokens += tokens
        if self._hold:
            return ""
        text = cut_at_stop(self._decode(self.tokens).rstrip(BROKEN), self._stops)
        certain = text[: len(text) - begun_stop(text, self._stops)]
        if not certain.startswith(self.sent):
            return ""
        new = certain[len(self.sent) :]
        self.sent = certain
        return new
