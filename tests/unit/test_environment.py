"""What an environment may answer."""

from __future__ import annotations

import pytest

from dagrl.environments import _checked


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
