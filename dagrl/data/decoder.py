"""Decodes many sequences at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SHOWN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = sorted({*range(0x100)} - {*_SHOWN})
BYTES = dict(zip(map(chr, [*_SHOWN, *range(0x100, 0x100 + len(_HIDDEN))]), [*_SHOWN, *_HIDDEN], strict=True))
"""The byte that each character of a byte-level token stands for (`bytes_to_unicode` of GPT-2's `encoder.py`)."""


def decoded(tokenizer: PreTrainedTokenizerFast, sequences: Sequence[npt.NDArray[np.int64]]) -> list[str]:
    """Decodes as `tokenizer.decode(tokens, skip_special_tokens=True)`, by a table where tokens are bytes of their own."""
    if (pieces := _pieces(tokenizer, len(tokenizer))) is not None:
        return [b"".join(pieces.take(tokens, mode="clip").tolist()).decode(errors="replace") for tokens in sequences]
    backend = getattr(tokenizer, "backend_tokenizer", None)  # some tokenizers in Python have none
    if backend is None or tokenizer.clean_up_tokenization_spaces:
        return [cast("str", tokenizer.decode(tokens.tolist(), skip_special_tokens=True)) for tokens in sequences]
    return cast("list[str]", backend.decode_batch([tokens.data for tokens in sequences], skip_special_tokens=True))


@lru_cache(maxsize=8)
def _pieces(tokenizer: PreTrainedTokenizerFast, _: int) -> npt.NDArray[Any] | None:
    """Returns the bytes of each token by id, the last for ids of no token; None if they depend on the tokens around it."""
    from tokenizers import decoders

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or tokenizer.clean_up_tokenization_spaces:
        return None
    if not isinstance(backend.decoder, decoders.ByteLevel | decoders.Fuse):
        return None
    bytes_of = BYTES if isinstance(backend.decoder, decoders.ByteLevel) else {}
    added = backend.get_added_tokens_decoder()
    special = {token.content for token in added.values() if token.special}
    tokens = {number: token for token, number in backend.get_vocab(with_added_tokens=False).items()}
    tokens |= {number: token.content for number, token in added.items()}
    pieces = np.full(max(tokens) + 2, b"", object)
    for number, token in tokens.items():
        if token not in special:
            try:
                pieces[number] = bytes(map(bytes_of.__getitem__, token))
            except KeyError:  # a token with other characters is its own text
                pieces[number] = token.encode()
    return pieces
