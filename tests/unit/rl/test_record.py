"""Texts of single tokens, where several tokens make one character."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dagrl.rl.rollout.record import TokenTexts


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges: each token is one byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("text", ["x = 1", "größer", "日本", "a😀b", "é😀é"])
def test_texts_join_to_the_whole(text: str, byte_tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = byte_tokenizer.encode(text, add_special_tokens=False)
    found = TokenTexts(byte_tokenizer)(tokens)
    assert len(found) == len(tokens) == len(text.encode()) and "".join(found) == text


def test_each_plain_character_has_its_token(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = byte_tokenizer.encode("a😀b", add_special_tokens=False)
    assert TokenTexts(byte_tokenizer)(tokens) == ["a", "😀", "", "", "", "b"]
