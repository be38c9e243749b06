"""Decodes many sequences at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

SPACE = "\u2581"  # in SentencePiece's tokens
REPLACE = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
SENTENCEPIECE = [REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}]
"""SentencePiece's decoders, as transformers has them for Gemma; for Llama 2 and Mistral STRIP follows."""


class TextDecoder:
    """Decodes as `tokenizer.decode(tokens, skip_special_tokens=True)`, by a table where a token has bytes of its own.

    Tokens come into the table when they first occur. Special tokens are those that were special when it was made.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)  # some tokenizers in Python have none
        self._backend: Tokenizer | None = None if backend is None or _removes_spaces(tokenizer) else backend
        added = {} if self._backend is None else self._backend.get_added_tokens_decoder()
        self._special = {number for number, token in added.items() if token.special}
        state = {} if backend is None or backend.decoder is None else json.loads(backend.decoder.__getstate__())
        steps = state.get("decoders")
        self._strips = steps == [*SENTENCEPIECE, STRIP]
        self._kind = "SentencePiece" if self._strips or steps == SENTENCEPIECE else state.get("type")
        self._pieces: npt.NDArray[Any] = np.empty(0, object)  # the bytes of tokens, by id
        self._known = self._parts = np.empty(0, bool)  # tokens in the table, and those that may be a part of a character

    def __call__(self, sequences: Sequence[npt.NDArray[np.int64]]) -> list[str]:
        """Returns the texts of sequences of token ids. Ids that no token has are left out."""
        backend = self._backend
        if backend is None:
            return [cast("str", self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True)) for tokens in sequences]
        if self._kind not in ("ByteLevel", "Fuse", "SentencePiece"):  # a token's text depends on those around it
            return backend.decode_batch([tokens.data for tokens in sequences], skip_special_tokens=True)
        together = np.concatenate([np.empty(0, np.int64), *sequences])
        self._add(backend, together)
        apart, texts = bool(self._parts[together].any()), list[str]()
        for tokens in sequences:
            if apart and self._parts[tokens].any():
                texts.append(backend.decode(tokens.tolist(), skip_special_tokens=True))
            else:
                text = b"".join(self._pieces.take(tokens).tolist()).decode(errors="replace")
                texts.append(text.removeprefix(" ") if self._strips else text)
        return texts

    def _add(self, backend: Tokenizer, tokens: npt.NDArray[np.int64]) -> None:
        """Adds to the table which of these tokens it has not."""
        if (more := int(tokens.max(initial=-1)) + 1 - len(self._pieces)) > 0:
            self._pieces = np.append(self._pieces, np.full(more, b"", object))
            self._known, self._parts = (np.append(flags, np.zeros(more, bool)) for flags in (self._known, self._parts))
        if (unknown := np.unique(tokens[~self._known[tokens]])).size == 0:
            return
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        byte_of = {character: byte for byte, character in bytes_to_unicode().items()} if self._kind == "ByteLevel" else {}
        for number in set(unknown.tolist()) - self._special:
            if (token := backend.id_to_token(number)) is None:
                continue
            own = token.replace(SPACE, " ") if self._kind == "SentencePiece" else token
            all_bytes = byte_of.keys() >= set(token) if byte_of else False  # a token with other characters is its own text
            self._pieces[number] = bytes(map(byte_of.__getitem__, token)) if all_bytes else own.encode()
            self._parts[number] = self._kind == "SentencePiece" and token.startswith("<0x") and token.endswith(">")
        self._known[unknown] = True


def _removes_spaces(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether transformers removes spaces before punctuation. It no longer does for BPE, although Llama 3's asks for it."""
    from tokenizers import models

    insists = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", True)
    return tokenizer.clean_up_tokenization_spaces and (
        insists or not isinstance(tokenizer.backend_tokenizer.model, models.BPE)
    )
