"""Replies of an environment: which are valid, and how much of them is tokenized."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers.normalizers import Replace

from dagrl.config import EnvironmentConfig
from dagrl.data.tokenization import Prompt
from dagrl.rl.environments import ENDED, FAILED, EnvironmentRunner, Reply
from dagrl.run.model import character_tokenizer

REPLIES = {
    "empty": "",
    "accent": "café",
    "end": None,
    "number": 3,
    "surrogate": b"caf\xe9".decode("utf-8", "surrogateescape"),
}


def test_replies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts and None are replies. Anything else ends its own sequence as failed."""
    module = f"replies_{tmp_path.name}"
    source = f"REPLIES = {REPLIES!r}\ndef reply(prompt, completion, reference): return REPLIES[completion]\n"
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = EnvironmentConfig(function=f"{module}:reply", batched=False)
    prompts = [Prompt("1", np.array([1]), "", "row 0")] * len(REPLIES)
    with EnvironmentRunner(config, character_tokenizer("0123456789")) as environment:
        found = environment.submit(prompts, list(REPLIES)).result()
    assert found[:3] == [Reply(""), Reply("café"), Reply(None, ENDED)]
    assert [(reply.text, reply.reason) for reply in found[3:]] == [(None, FAILED)] * 2
    assert found[3].failure.startswith("it returned 3; expected: a text, or None")
    assert found[4].failure.startswith("it returned a text that UTF-8 cannot encode: ")


@pytest.mark.parametrize("text", ["", "12", "123456", "1" * 30, "1" * 10_000], ids=len)
def test_long_replies_are_tokenized_only_until_they_exceed_the_room(text: str) -> None:
    tokenizer, room = character_tokenizer("0123456789"), 6
    environment = EnvironmentRunner(EnvironmentConfig(function="dagrl.rl.rewards:exact_match"), tokenizer)
    tokens, whole = environment.encode(text, room), tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokens == whole if len(whole) <= room else room < len(tokens) <= 50


def test_a_long_reply_fits_if_the_tokenizer_drops_most_characters() -> None:
    tokenizer = character_tokenizer("0123456789")
    tokenizer.backend_tokenizer.normalizer = Replace(" ", "")
    environment = EnvironmentRunner(EnvironmentConfig(function="dagrl.rl.rewards:exact_match"), tokenizer)
    assert environment.encode(" " * 10_000 + "12", 6) == tokenizer("12", add_special_tokens=False)["input_ids"]
