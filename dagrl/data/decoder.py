"""Decodes many sequences at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast


def decoded(tokenizer: PreTrainedTokenizerFast, sequences: Sequence[npt.NDArray[np.int64]]) -> list[str]:
    """Decodes as `tokenizer.decode(tokens, skip_special_tokens=True)`, by a table where tokens are bytes of their own."""
    from tokenizers import decoders

    backend = getattr(tokenizer, "backend_tokenizer", None)  # some tokenizers in Python have none
    if backend is None or _removes_spaces(tokenizer):
        return [cast("str", tokenizer.decode(tokens.tolist(), skip_special_tokens=True)) for tokens in sequences]
    if not isinstance(backend.decoder, decoders.ByteLevel | decoders.Fuse):  # a token's text depends on those around it
        return cast("list[str]", backend.decode_batch([tokens.data for tokens in sequences], skip_special_tokens=True))
    added = tuple((number, token.content, token.special) for number, token in backend.get_added_tokens_decoder().items())
    pieces = _pieces(backend, added, isinstance(backend.decoder, decoders.ByteLevel))
    return [b"".join(pieces.take(tokens, mode="clip").tolist()).decode(errors="replace") for tokens in sequences]


def _removes_spaces(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether transformers removes spaces before punctuation. It no longer does for BPE, although Llama 3's asks for it."""
    from tokenizers import models

    insists = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", True)
    return tokenizer.clean_up_tokenization_spaces and (
        insists or not isinstance(tokenizer.backend_tokenizer.model, models.BPE)
    )


@lru_cache(maxsize=2)  # a run has one tokenizer; a table takes about 100 bytes a token
def _pieces(backend: Tokenizer, added: tuple[tuple[int, str, bool], ...], byte_level: bool) -> npt.NDArray[Any]:
    """Returns the bytes of each token by id, none for special tokens, and last those of ids that no token has: none.

    `added`: ids and contents of added tokens, and whether they are special, which may change between calls.
    """
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    bytes_of = {character: byte for byte, character in bytes_to_unicode().items()} if byte_level else {}
    special = {token for _, token, is_special in added if is_special}
    tokens = {number: token for token, number in backend.get_vocab(with_added_tokens=False).items()}
    tokens |= {number: token for number, token, _ in added}
    pieces = np.full(max(tokens) + 2, b"", object)
    for number, token in tokens.items():
        if token not in special:
            try:
                pieces[number] = bytes(map(bytes_of.__getitem__, token))
            except KeyError:  # a token with other characters is its own text
                pieces[number] = token.encode()
    return pieces
