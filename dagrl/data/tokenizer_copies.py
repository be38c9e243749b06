"""Copies of tokenizers that share the model. To read or copy a model of 262,000 tokens takes a second, the rest nothing."""

from __future__ import annotations

import copyreg
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE, Model


def shared_copy(tokenizer: Tokenizer, model: Model | None = None) -> Tokenizer:
    """Returns a copy with the same model, which nothing changes once it is made, or with another one of the same tokens."""
    copied = Tokenizer(tokenizer.model if model is None else model)
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder", "encode_special_tokens"):
        setattr(copied, name, getattr(tokenizer, name))
    # in the order of their numbers, which those that the model lacks get again
    copied.add_tokens([token for _, token in sorted(tokenizer.get_added_tokens_decoder().items())])
    if tokenizer.truncation:
        copied.enable_truncation(**tokenizer.truncation)
    if tokenizer.padding:
        copied.enable_padding(**tokenizer.padding)
    return copied


@contextmanager
def copies_share_models() -> Iterator[None]:
    """Has `copy.deepcopy` make shared copies in the block, as transformers' constructors call it. Nothing may be pickled."""
    copyreg.pickle(Tokenizer, lambda tokenizer: (partial(shared_copy, tokenizer), ()))
    try:
        yield
    finally:
        del copyreg.dispatch_table[Tokenizer]


def packed(make: Callable[..., Any], *arguments: object) -> tuple[Any, bytes]:
    """Returns the tokenizer of transformers that `make` returns without its model, and that pickled, for `unpacked`."""
    tokenizer = make(*arguments)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return tokenizer, b""
    tokenizer._tokenizer = shared_copy(backend, BPE())
    return tokenizer, pickle.dumps(backend.model)


def unpacked(sent: tuple[Any, bytes], known: Mapping[bytes, Model]) -> Any:
    """Returns the whole tokenizer. Its model is one of those that are `known` by their own pickles, or made again."""
    tokenizer, model = sent
    if model:
        whole = known.get(model) or pickle.loads(model)  # noqa: S301
        tokenizer._tokenizer = shared_copy(tokenizer.backend_tokenizer, whole)
    return tokenizer
