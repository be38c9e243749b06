"""What an environment may answer."""

from __future__ import annotations

import pytest
from tokenizers.normalizers import Replace

from dagrl.config import EnvironmentConfig
from dagrl.environments import EnvironmentRunner, _checked
from dagrl.model_init import character_tokenizer


@pytest.mark.parametrize("answer", ["", "café", None])
def test_texts_and_none_are_answers(answer: str | None) -> None:
    assert _checked(answer) == answer


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (3, "it returned 3; expected: a text, or None"),
        (b"caf\xe9".decode("utf-8", "surrogateescape"), "text that UTF-8 cannot hold: .*surrogates not allowed"),
    ],
)
def test_what_is_no_text_is_refused_before_it_is_tokenized(answer: object, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        _checked(answer)


@pytest.mark.parametrize("text", ["", "12", "123456", "1" * 30, "1" * 10_000], ids=len)
def test_of_a_reply_no_more_is_tokenized_than_shows_whether_it_fits(text: str) -> None:
    """As it is where it fits, and longer than there is room where it does not, however much an environment prints."""
    tokenizer, room = character_tokenizer("0123456789"), 6
    environment = EnvironmentRunner(EnvironmentConfig(function="dagrl.rewards:exact_match"), tokenizer)
    tokens, whole = environment.encode(text, room), tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokens == whole if len(whole) <= room else room < len(tokens) <= 50


def test_a_reply_fits_whose_characters_are_mostly_dropped() -> None:
    tokenizer = character_tokenizer("0123456789")
    tokenizer.backend_tokenizer.normalizer = Replace(" ", "")
    environment = EnvironmentRunner(EnvironmentConfig(function="dagrl.rewards:exact_match"), tokenizer)
    assert environment.encode(" " * 10_000 + "12", 6) == tokenizer("12", add_special_tokens=False)["input_ids"]
