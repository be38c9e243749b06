"""Copies of tokenizers that share the model. To read or copy a model of 262,000 tokens takes a second, the rest nothing."""

from __future__ import annotations

import copyreg
import io
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


def packed(make: Callable[..., object], *arguments: object) -> bytes:
    """Returns a pickle of the tokenizer of transformers that `make` returns, for `unpacked`."""
    pickled = io.BytesIO()
    _Pickler(pickled).dump(make(*arguments))
    return pickled.getvalue()


def unpacked(pickled: bytes, known: Mapping[bytes, Model]) -> Any:
    """Returns the tokenizer, with its model of those that are `known` by their own pickles if it is there."""
    unpickler = _Unpickler(io.BytesIO(pickled))
    unpickler.known = known
    return unpickler.load()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tokenizer):
            return NotImplemented
        others = shared_copy(value, BPE()).to_str()  # some parts cannot be pickled alone
        return _unpickled, (value.model, others, value.encode_special_tokens)

    def persistent_id(self, value: Any) -> bytes | None:
        return pickle.dumps(value) if isinstance(value, Model) else None


class _Unpickler(pickle.Unpickler):
    known: Mapping[bytes, Model]

    def persistent_load(self, model: bytes) -> Any:
        return self.known.get(model) or pickle.loads(model)  # noqa: S301


def _unpickled(model: Model, others: str, encode_special_tokens: bool) -> Tokenizer:
    parts = Tokenizer.from_str(others)
    parts.encode_special_tokens = encode_special_tokens
    return shared_copy(parts, model)
