"""`dagrl inspect CONFIG --text` shows the tokens of a run's data, with and without colours."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from dagrl.cli.main import main
from dagrl.cli.text import text_report
from dagrl.config.file import load_config
from dagrl.data.chat import chat_of
from tests.unit.data.published import KINDS, Kind, tokenizer_of

ROOT = Path(__file__).parents[3]
TURNS = [("system", "be brief"), ("user", "7 + 5?\nsay it"), ("assistant", "12"), ("user", "1?"), ("assistant", "n\u00e9")]
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}<{{ m.content }}>{{ eos_token }}\n"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
ENDS = " ends with 2 <eos>."
SFT = """
SFT: chats.jsonl, line 1, 77 tokens, 10 in the loss
template  [│s│y│s│t│e│m│]
data      b│e│ │b│r│i│e│f
template  [│u│s│e│r│]
data      7│ │+│ │5│?│↵│s│a│y│ │i│t
template  [│a│s│s│i│s│t│a│n│t│]
TRAIN+    <
TRAIN     1│2
TRAIN+    >
STOP      <eos>
template  ↵│[│u│s│e│r│]
data      1│?
template  [│a│s│s│i│s│t│a│n│t│]
TRAIN+    <
TRAIN     n│<unk>
TRAIN+    >
STOP      <eos>
template  ↵

SFT: chats.jsonl, line 2, 24 tokens, 4 in the loss
template  [│u│s│e│r│]
data      9│?
template  [│a│s│s│i│s│t│a│n│t│]
TRAIN+    <
TRAIN     9
TRAIN+    >
STOP      <eos>
template  ↵
"""
PROMPTS = """
prompt: chats.jsonl, line 2, 19 tokens, reference 9
template  [│u│s│e│r│]
data      9│?
template  [│a│s│s│i│s│t│a│n│t│]
SAMPLE    ...
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Writes the data; returns the file and overrides of a run on them, in their order."""
    monkeypatch.chdir(tmp_path)
    chat = {"messages": [{"role": role, "content": content} for role, content in TURNS]}
    rows = [chat, {"prompt": "9?", "response": "9"}]
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    template = f"policy.tokenizer.chat_template={json.dumps(TEMPLATE)}"
    data = "data={path: chats.jsonl, val_fraction: 0, shuffle: false}"
    return [str(ROOT / "examples" / "sft_quickstart.yaml"), data, template, "policy.max_total_sequence_length=100"]


def lines(text: str) -> str:
    """Returns a report without spaces at the ends of lines."""
    return "\n".join(line.rstrip() for line in text.splitlines())


def test_kinds_of_tokens_are_told_apart(config: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", *config, "--text"]) == 0
    plain = capsys.readouterr().out
    assert lines(plain).partition("A completion")[2] == f"{ENDS}\n{SFT}".rstrip()
    coloured = text_report(load_config(config[0], config[1:]), 2, Console(force_terminal=True, file=io.StringIO(), width=80))
    assert coloured.count("\x1b[1;31m<eos>") == 3  # STOP is red
    assert lines(re.sub(r"\x1b\[[0-9;]*m", "", coloured)) == lines(plain)


def test_prompts_are_shown_with_what_follows(config: list[str]) -> None:
    words = [*config[1:], "algorithm=grpo", "policy.generation.max_new_tokens=4", "sft.max_num_steps=0"]
    text = text_report(load_config(config[0], words), 2, Console(file=io.StringIO(), width=80))
    assert lines(text).endswith(PROMPTS.rstrip())
    assert "reference n\u00e9" in text and "SFT" not in text


@pytest.mark.parametrize(
    ("template", "trained"),
    [
        (TEMPLATE, ["TRAIN+    <", "TRAIN      │1│2│↵", "TRAIN+    >"]),
        (TEMPLATE.replace("m.content }}>", "m.content | trim }} >"), ["TRAIN+    <", "TRAIN     1│2", "TRAIN+     │>"]),
    ],
)
def test_white_space_is_the_datas_unless_the_template_cuts_it(config: list[str], template: str, trained: list[str]) -> None:
    row = {"messages": [{"role": "user", "content": " 7? "}, {"role": "assistant", "content": " 12\n"}]}
    Path("chats.jsonl").write_text(json.dumps(row))
    words = [*config[1:], f"policy.tokenizer.chat_template={json.dumps(template)}"]
    text = lines(text_report(load_config(config[0], words), 1, Console(file=io.StringIO(), width=80)))
    assert "data       │7│?│\n" in text and "\n".join(trained) in text


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_texts_of_tokens_join_to_the_whole(kind: Kind) -> None:
    """With byte-level tokens, of which several make a character, SentencePiece's spaces, and added tokens."""
    tokenizer = tokenizer_of(kind)
    for text in ("a \u65e5\u672c b", "\U0001f600", "n\u00e9\n\n \u00e9", "   x", "hello and it"):
        turns = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
        ids = tokenizer(tokenizer.apply_chat_template(turns, tokenize=False), add_special_tokens=False).input_ids
        texts = chat_of(tokenizer).encoder.pieces(ids)
        assert len(texts) == len(ids) and "".join(texts) == tokenizer.decode(ids) and "\ufffd" not in "".join(texts)


def test_words_that_the_template_also_writes_are_told_apart(config: list[str]) -> None:
    row = {"messages": [{"role": "user", "content": "user"}, {"role": "assistant", "content": "assistant>"}]}
    Path("chats.jsonl").write_text(json.dumps(row))
    text = lines(text_report(load_config(config[0], config[1:]), 1, Console(file=io.StringIO(), width=80)))
    prompt = "template  [│u│s│e│r│]\ndata      u│s│e│r\ntemplate  [│a│s│s│i│s│t│a│n│t│]\n"
    assert f"{prompt}TRAIN+    <\nTRAIN     a│s│s│i│s│t│a│n│t│>\nTRAIN+    >\n" in text
