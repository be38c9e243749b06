"""Copies of tokenizers that share the model. To read or copy a model of 262,000 tokens takes a second, the rest nothing."""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE, Model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def shared_copy(tokenizer: Tokenizer) -> Tokenizer:
    """Returns a copy with the same model, which nothing changes once it is made."""
    return _joined(tokenizer.model, tokenizer, _added(tokenizer), tokenizer.encode_special_tokens)


@contextmanager
def copies_share_models() -> Iterator[None]:
    """Has `copy.deepcopy` make shared copies in the block, as transformers' constructors call it. Nothing may be pickled."""
    copyreg.pickle(Tokenizer, lambda tokenizer: (partial(shared_copy, tokenizer), ()))
    try:
        yield
    finally:
        del copyreg.dispatch_table[Tokenizer]


def packed(tokenizer: PreTrainedTokenizerFast) -> bytes:
    """Returns a pickle of a tokenizer of transformers for `unpacked`."""
    pickled = io.BytesIO()
    _Pickler(pickled).dump(tokenizer)
    return pickled.getvalue()


def unpacked(pickled: bytes, known: Mapping[bytes, Model]) -> PreTrainedTokenizerFast:
    """Returns the tokenizer, with its model of those that are `known` by their own pickles if it is there."""
    return cast("PreTrainedTokenizerFast", _Unpickler(io.BytesIO(pickled), known).load())


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tokenizer):
            return NotImplemented
        others = _joined(BPE(), value, [], False).to_str()  # some parts cannot be pickled alone
        return _unpickled, (value.model, others, _added(value), value.encode_special_tokens)

    def persistent_id(self, value: Any) -> bytes | None:
        return pickle.dumps(value) if isinstance(value, Model) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: io.BytesIO, known: Mapping[bytes, Model]) -> None:
        super().__init__(pickled)
        self._known = known

    def persistent_load(self, model: bytes) -> Any:
        return self._known.get(model) or pickle.loads(model)  # noqa: S301


def _unpickled(model: Model, others: str, *rest: Any) -> Tokenizer:
    return _joined(model, Tokenizer.from_str(others), *rest)


def _joined(model: Model, others: Tokenizer, added: list[AddedToken], encode_special_tokens: bool) -> Tokenizer:
    """Returns a tokenizer of a model, and the other parts of one."""
    made = Tokenizer(model)
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        setattr(made, name, getattr(others, name))
    made.encode_special_tokens = encode_special_tokens  # which no file has
    made.add_tokens(added)
    if others.truncation:
        made.enable_truncation(**others.truncation)
    if others.padding:
        made.enable_padding(**others.padding)
    return made


def _added(tokenizer: Tokenizer) -> list[AddedToken]:
    """Returns the added tokens, by their numbers: those that the model lacks get these again."""
    return [token for _, token in sorted(tokenizer.get_added_tokens_decoder().items())]
