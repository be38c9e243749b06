"""Tokenizes whole texts, and finds characters among their tokens.

A token may depend on the text around it: SentencePiece puts a space before each piece that is tokenized alone, and byte
pairs merge across pieces. So a text is never put together from tokens of its parts; the parts are found in the whole.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerFast

NEUTRAL = ("\n", "a", "1", ".", "\u4e00")  # contexts of a continuation whose own context would merge with it
AT_ONCE = 512  # texts that are tokenized together


class Encoded:
    """The tokens of a text, and where they begin."""

    def __init__(self, text: str, ids: list[int], encoder: TextEncoder, encoding: Encoding | None = None) -> None:
        """Without an `encoding`, which has offsets, those of the tokens' own texts are used, if these join to the text."""
        self.ids = ids
        self._text, self._encoder, self._encoding = text, encoder, encoding

    @cached_property
    def _offsets(self) -> Sequence[tuple[int, int]]:
        if self._encoding is not None:
            return self._encoding.offsets
        pieces = self._encoder.pieces(self.ids)
        ends = [*accumulate(map(len, pieces))]
        return [*zip([0, *ends], ends, strict=False)] if "".join(pieces) == self._text else []

    @cached_property
    def _starts(self) -> list[int]:
        return [*accumulate((start for start, _ in self._offsets), max)]

    def index(self, place: int) -> int:
        """Returns the number of tokens that begin before the character `place`."""
        return self.cut(place)[0]

    def cut(self, place: int) -> tuple[int, bool]:
        """Returns the number of tokens that begin before the character `place`, and whether they all end there.

        Unigram tokenizers give one offset to all bytes of unknown characters in a row, and some tokenizers give none. Then
        the text up to the place is tokenized alone.
        """
        number = bisect_left(self._starts, place) if self._offsets else 0
        if self._offsets and (number == 0 or self._offsets[number - 1][1] <= place):
            return number, True
        before = self._encoder.ids(self._text[:place])
        same = shared(self.ids, before)
        if same == len(before):
            return same, True
        rest = self._encoder.decode(before[same:]).strip(" ")  # SentencePiece puts a space before each text
        return number if self._offsets else min(same + bool(rest), len(self.ids)), False

    def start(self, number: int) -> int:
        """Returns the character at which a token begins, or the length of the text."""
        if self._offsets:
            return self._starts[number] if number < len(self._starts) else len(self._text)
        return bisect_left(range(len(self._text) + 1), number + 1, key=self.index) - 1


class TextEncoder:
    """Tokenizes as `tokenizer(text, add_special_tokens=False)`."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _backend(self) -> Tokenizer | None:
        """The tokenizer without its post-processor: those of byte-level tokenizers cut spaces from offsets."""
        backend: Tokenizer | None = getattr(
            self._tokenizer, "backend_tokenizer", None
        )  # some tokenizers in Python have none
        if backend is None:
            return None
        from dagrl.data.tokenizer_copies import shared_copy

        own = shared_copy(backend)
        own.post_processor = None
        own.no_truncation()
        own.no_padding()
        return own

    @cached_property
    def added(self) -> frozenset[int]:
        """Ids of the added tokens, at which the tokenizer cuts a text before it does anything else."""
        return frozenset(self._tokenizer.added_tokens_decoder)

    @cached_property
    def before(self) -> list[int]:
        """The special tokens before a plain text. Those after it are left out: a prompt is not at its end."""
        whole: list[int] = self._tokenizer("a")["input_ids"]
        bare = self.ids("a")
        return next((whole[:place] for place in range(len(whole)) if whole[place : place + len(bare)] == bare), [])

    @cached_property
    def longest(self) -> int:
        """Most characters of a token."""
        return max(map(len, self._tokenizer.get_vocab()))

    def ids(self, text: str) -> list[int]:
        """Returns the tokens of a text."""
        if self._backend is not None:
            return list(self._backend.encode(text, add_special_tokens=False).ids)
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of tokens, special ones included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Returns the text that each token adds. That of a character in several tokens is the last one's."""
        texts, first, before = list[str](), 0, ""
        for end in range(1, len(ids) + 1):
            whole = self.decode(ids[first:end])
            if whole.endswith("\ufffd") and end < len(ids):
                texts.append("")
            else:
                texts.append(whole[len(before) :])
                first = max(0, end - 4)  # alone, tokens of SentencePiece have no space before them
                before = self.decode(ids[first:end])
        return texts

    def encode(self, texts: Sequence[str]) -> Iterator[Encoded]:
        """Yields the tokens of each text. Tokenizes in parallel, but few at once, as offsets take much memory."""
        if self._backend is None:
            for text in texts:
                yield Encoded(text, self.ids(text), self)
            return
        for first in range(0, len(texts), AT_ONCE):
            part = list(texts[first : first + AT_ONCE])
            for text, encoding in zip(part, self._backend.encode_batch(part, add_special_tokens=False), strict=True):
                yield Encoded(text, encoding.ids, self, encoding)

    def continuation(self, before: str, text: str) -> list[int]:
        """Returns the tokens of `text` after `before`, whose tokens stay: none has characters of both."""
        for context in (before, *NEUTRAL):
            (encoded,) = self.encode([context + text])
            if context and self.is_cut(encoded, len(context)):
                return encoded.ids[encoded.index(len(context)) :]
        return self.ids(text)

    @cached_property
    def _swallowing(self) -> frozenset[int]:
        """Ids of the added tokens that can absorb adjacent white space. Tokens that are white space themselves are text."""
        tokens = self._tokenizer.added_tokens_decoder.items()
        return frozenset(number for number, token in tokens if token.content.strip() and (token.lstrip or token.rstrip))

    def is_cut(self, encoded: Encoded, place: int) -> bool:
        """Returns whether the tokens are cut at a character: at the edge of one, or of white space that one swallows."""
        number, edge = encoded.cut(place)
        return edge or (number > 0 and encoded.ids[number - 1] in self._swallowing)


def shared(*sequences: Sequence[object]) -> int:
    """Returns the length of the longest common prefix."""
    return sum(1 for _ in takewhile(lambda items: len(set(items)) == 1, zip(*sequences, strict=False)))
