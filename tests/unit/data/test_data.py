"""Examples from files, datasets and mixtures, their tokens and loss masks, splits, and a resumable order."""

import csv
import gzip
import importlib.util
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dagrl.config import DataConfig
from dagrl.data import Example, Message, Sampler, load_splits, open_sampler, read_examples, tokenization
from dagrl.data.examples import with_chat
from dagrl.data.hugging_face import has_splits
from dagrl.data.tokenization import Demonstration, Prompt, digest_of, encode_demonstrations, encode_prompts
from dagrl.errors import CheckpointError, ConfigError, DataError, MissingDependencyError
from dagrl.rl.agents.protocol import plain_messages
from dagrl.run.model import character_tokenizer

CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"
OPENING = "{% if add_generation_prompt %}[assistant]{% endif %}"
BODY = "[{{ m.role }}]{{ m.content }}{{ eos_token if m.role == 'assistant' }}"
TEMPLATE = f"{{% for m in messages %}}{BODY}{{% endfor %}}{OPENING}"
QWEN3 = (
    "{% set ns = namespace(last_query=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last_query = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set answer = ('<think></think>' if loop.index0 > ns.last_query else '') + m.content + '.' %}[assistant]{{ answer }}"
    "{% else %}[{{ m.role }}]{{ m.content }}.{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
TURNS = (Message("user", "1+1="), Message("assistant", "2"), Message("user", "and 2+2="), Message("assistant", "4!"))
SUMS = Example("", "4!", TURNS, "line 3")
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
CALL: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
ASKED: list[dict[str, Any]] = [
    {"role": "user", "content": "rain?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "name": None},
    {"role": "tool", "content": "sunny", "tool_call_id": "1", "unknown": {"a": None, "b": [1]}},
    {"role": "assistant", "content": "no", "reasoning_content": "it is sunny"},
]
WITH_TOOLS = (
    "{% if tools %}[tools]{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]"
    "{% if m.role == 'assistant' %}{% if m.reasoning_content %}<{{ m.reasoning_content }}>{% endif %}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{{ eos_token }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
MARKED = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write(path: Path, rows: Sequence[object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(path: Path, rows: Sequence[object], **keys: Any) -> list[Example]:
    """Writes rows and reads the examples in them."""
    return read_examples(write(path, rows), "train", DataConfig(path=str(path), **keys))


def learned(row: Demonstration, template: str | None = None) -> list[str]:
    tokenizer = character_tokenizer(CHARACTERS, template)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], row.loss_mask, [0]])))
    return [tokenizer.decode(row.tokens[start:end]) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def test_prompt_and_response(tmp_path: Path) -> None:
    path, rows = tmp_path / "a.jsonl", [{"q": "1+1=", "a": "2", "more": None}, {"q": "\u00e9", "a": "x"}]
    first, second = read(path, rows, prompt_key="q", response_key="a")
    assert first == Example("1+1=", "2", source=f"{path}, line 1", columns={"q": "1+1=", "a": "2", "more": None})
    tokenizer = character_tokenizer(CHARACTERS)
    row, other = encode_demonstrations([first, second], tokenizer)
    assert (tokenizer.decode(row.tokens), tokenizer.decode(other.tokens)) == ("1+1=2<eos>", "<unk>x<eos>")
    assert learned(row) == ["2<eos>"]
    (prompt,) = encode_prompts([first], tokenizer)
    assert row.tokens[: len(prompt)].tolist() == prompt.tokens.tolist()
    assert (prompt.text, prompt.reference) == ("1+1=", "2")


def test_conversations_and_prompts_of_messages(tmp_path: Path) -> None:
    """As TRL's and verl's rows: SFT learns the response of a prompt alone, which may be messages, too."""
    turns = [("system", "be brief"), ("user", "hi"), ("assistant", "yo"), ("user", "bye")]
    prompt = [{"role": role, "content": text} for role, text in turns]
    answer = {"role": "assistant", "content": "ciao"}
    rows = [{"prompt": prompt, "response": "ciao"}, {"prompt": prompt, "response": [answer]}]
    *examples, whole = read(tmp_path / "a.jsonl", [*rows, {"messages": [*prompt, answer]}])
    tokenizer = character_tokenizer(CHARACTERS, TEMPLATE)
    opened = "[system]be brief[user]hi[assistant]yo<eos>[user]bye[assistant]"
    for example in (whole, *examples):
        (row,), (made,) = encode_demonstrations([example], tokenizer), encode_prompts([example], tokenizer)
        assert tokenizer.decode(row.tokens) == f"{opened}ciao<eos>"
        assert learned(row) == ["yo<eos>", "ciao<eos>"][example is not whole :]
        assert (tokenizer.decode(made.tokens), made.reference) == (opened, "ciao")


@pytest.mark.parametrize(
    ("sent", "same"),
    [
        ({"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}, ("user", "hi")),
        ({"role": "system", "content": ""}, ("system", "")),
        ({"role": "user", "content": []}, ("user", "")),
        ({"role": "developer", "content": "be brief"}, ("system", "be brief")),
        ({"role": "tool", "tool_call_id": "a", "content": ""}, ("tool", "")),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, ("assistant", None)),
        ({"role": "assistant", "content": "", "tool_calls": None}, ("assistant", "")),
        ({"role": "assistant", "content": None, "refusal": "I cannot"}, ("assistant", "I cannot")),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, ("assistant", "no")),
        ({"role": "assistant", "content": "yes", "refusal": None, "function_call": None}, ("assistant", "yes")),
    ],
)
def test_messages_that_openai_takes(sent: dict[str, Any], same: tuple[str, str | None], tmp_path: Path) -> None:
    """Their contents are those that the endpoint of agents gives the chat template, which also writes '' for none."""
    turns = [sent, {"role": "user", "content": "go"}, {"role": "assistant", "content": "yo"}]
    (example,) = read(tmp_path / "a.jsonl", [{"messages": turns}])
    assert (example.messages[0].role, example.messages[0].content) == same
    (plain,) = plain_messages(turns[:1])
    assert (plain["role"], plain["content"]) == (same[0], same[1] or "")


def test_invalid_rows_are_dropped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"prompt": "1", "response": "2"}\n{"prompt": 1}\n  \n\n{"prompt": "3", "response": "4"}\noops\n')
    source = {"path": str(path), "val_fraction": 0}
    for keys in (source, {"mixture": {"a": source}}):
        examples = load_splits(DataConfig.model_validate({"invalid": "drop", **keys})).train
        found = [(example.prompt, example.source) for example in examples]
        assert found == [("1", f"{path}, line 2"), ("3", f"{path}, line 6")]
        assert f"{path}: dropped 2 of 4 examples that are invalid; the first: {path}, line 3: 'prompt' is 1" in caplog.text
        caplog.clear()
    with pytest.raises(DataError, match=r"line 3: 'prompt' is 1"):
        load_splits(DataConfig(path=str(path)))


def test_prompts_alone(tmp_path: Path) -> None:
    """Without `data.response_key`: the prompt of a conversation is all of its messages."""
    messages = [{"role": "user", "content": "hi"}]
    rows, path = [{"prompt": "hi"}, {"prompt": messages}, {"messages": messages, "tools": TOOLS}], tmp_path / "a.jsonl"
    keys: dict[str, Any] = {"response_key": None, "apply_chat_template": True}
    examples = [with_chat(example, DataConfig(**keys)) for example in read(path, rows, **keys)]
    prompts = encode_prompts(examples, character_tokenizer(CHARACTERS, TEMPLATE))
    assert [(prompt.text, prompt.reference) for prompt in prompts] == [("[user]hi[assistant]", "")] * 3
    assert [list(prompt.tools) for prompt in prompts] == [[], [], TOOLS]
    with pytest.raises(DataError, match=r"line 1: 'messages' ends with an assistant turn, but data\.response_key is"):
        read(path, [{"messages": [*messages, {"role": "assistant", "content": "yo"}]}], **keys)
    with pytest.raises(DataError, match=r"no key 'response'; found 'prompt'\. Set data\.response_key .*, or to null if"):
        read(path, rows)


def test_loss_mask_equals_the_mask_of_generation_tags() -> None:
    """Compares with transformers' own mask of the text between generation tags, including the end of the turn."""
    tagged = MARKED.replace("{% endgeneration %}", "{{ eos_token }}{% endgeneration %}")
    tokenizer = character_tokenizer(CHARACTERS, tagged)
    turns = [{"role": message.role, "content": message.content} for message in SUMS.messages]
    wanted = {"return_dict": True, "return_assistant_tokens_mask": True, "add_special_tokens": False}
    expected = tokenizer.apply_chat_template(turns, **wanted)
    assert sum(expected["assistant_masks"]) == len("2") + len("4!") + 2
    untagged = re.sub("{% (end)?generation %}", "", tagged)
    for template in (tagged, untagged):
        (row,) = encode_demonstrations([SUMS], character_tokenizer(CHARACTERS, template))
        assert row.tokens.tolist() == expected["input_ids"]
        assert row.loss_mask.tolist() == expected["assistant_masks"]


@pytest.mark.parametrize("opening", ["", "[{{ m.role }}]"])
def test_empty_generation_tags_mark_nothing(opening: str) -> None:
    template = f"{{% for m in messages %}}{opening}{{% generation %}}{{% endgeneration %}}{{{{ m.content }}}}{{% endfor %}}"
    with pytest.raises(DataError, match=r"line 3: the chat template marks nothing .* data\.assistant_turns=each"):
        encode_demonstrations([SUMS], character_tokenizer(CHARACTERS, template))


def test_turns_of_a_template_that_rewrites_earlier_ones() -> None:
    """Qwen3's template: an answer after the last question opens with an empty thought, earlier ones do not."""
    tokenizer = character_tokenizer(CHARACTERS, QWEN3)
    with pytest.raises(DataError, match=r"renders message 2 differently .* data\.assistant_turns=each or last"):
        encode_demonstrations([SUMS], tokenizer)
    first, last = encode_demonstrations([SUMS], tokenizer, "each")
    assert tokenizer.decode(first.tokens) == "[user]1+1=.[assistant]<think></think>2."
    assert tokenizer.decode(last.tokens) == "[user]1+1=.[assistant]2.[user]and 2+2=.[assistant]<think></think>4!."
    assert learned(first) == ["<think></think>2."]
    assert learned(last) == ["<think></think>4!."]
    (only,) = encode_demonstrations([SUMS], tokenizer, "last")
    assert (only.tokens.tolist(), only.loss_mask.tolist()) == (last.tokens.tolist(), last.loss_mask.tolist())
    (prompt,) = encode_prompts([SUMS], tokenizer)
    assert last.tokens[: len(prompt)].tolist() == prompt.tokens.tolist()
    plain = [Example("1+1=", "2"), SUMS, Example("2+2=", "4")]
    rows = encode_demonstrations(plain, tokenizer, "each")
    assert [learned(row)[0] for row in rows] == ["2<eos>", "<think></think>2.", "<think></think>4!.", "4<eos>"]


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS), None])
def test_tools_and_their_calls_are_rendered(tools: Any, tmp_path: Path) -> None:
    """Compares with transformers' rendering of the same messages."""
    (example,) = read(tmp_path / "a.jsonl", [{"messages": ASKED, "tools": tools}])
    tokenizer = character_tokenizer(CHARACTERS, WITH_TOOLS)
    (row,) = encode_demonstrations([example], tokenizer)
    rendered = tokenizer.apply_chat_template(ASKED, TOOLS if tools else None, tokenize=False)
    assert tokenizer.decode(row.tokens) == rendered
    assert learned(row) == ['{"name": "weather", "arguments": {"city": "Rome"}}<eos>', "<it is sunny>no<eos>"]
    (prompt,) = encode_prompts([example], tokenizer)
    assert prompt.text == rendered.removesuffix("<it is sunny>no<eos>")
    assert prompt.reference == "no"


def test_unused_keys_do_not_change_tokens(tmp_path: Path) -> None:
    """Missing content is not rendered as `None`, and digests depend on tokens only."""
    asked = [{**turn, "thought": "x"} if turn["role"] == "assistant" else turn for turn in ASKED if turn["role"] != "tool"]
    asked = [{name: value for name, value in turn.items() if name != "tool_calls"} for turn in asked if turn["content"]]
    (more,) = read(tmp_path / "a.jsonl", [{"messages": asked, "tools": TOOLS}])
    tokenizer = character_tokenizer(CHARACTERS, TEMPLATE)
    (row,) = encode_demonstrations([more], tokenizer)
    assert tokenizer.decode(row.tokens) == tokenizer.apply_chat_template(asked, tokenize=False)
    without = replace(more, tools=(), messages=tuple(replace(message, more={}) for message in more.messages))
    assert digest_of([row]) == digest_of(encode_demonstrations([without], tokenizer))


@pytest.mark.parametrize("turns", ["all", "each", "last"])
@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
def test_turns_of_weight_0_are_context(template: str, turns: Literal["all", "each", "last"], tmp_path: Path) -> None:
    answers = {"one": 0, "two": 1, "three": None, "four": 0}
    conversation: list[dict[str, Any]] = []
    for answer, weight in answers.items():
        conversation += [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer, "weight": weight}]
    tokenizer = character_tokenizer(CHARACTERS, template)
    rows = encode_demonstrations(read(tmp_path / "a.jsonl", [{"messages": conversation}]), tokenizer, turns)
    expected = {"all": [["two", "three"]], "each": [["two"], ["three"]], "last": [["three"]]}[turns]
    assert [[text.removesuffix("<eos>") for text in learned(row)] for row in rows] == expected
    ignored = read(tmp_path / "b.jsonl", [{"messages": [{**turn, "weight": 0} for turn in conversation]}])
    with pytest.raises(DataError, match=r"b\.jsonl, line 1: every assistant turn .* weight 0.* nothing to learn"):
        encode_demonstrations(ignored, tokenizer, turns)


def test_turns_with_weights_need_marks() -> None:
    messages = tuple(replace(message, learned=message.content == "2") for message in SUMS.messages)
    tokenizer = character_tokenizer(CHARACTERS, MARKED.replace("'assistant' %}{%", "'assistant' and loop.last %}{%"))
    with pytest.raises(DataError, match=r"line 3: the chat template marks nothing of the turns to learn"):
        encode_demonstrations([replace(SUMS, messages=messages)], tokenizer)


def test_an_opening_assistant_turn_is_context() -> None:
    messages = (Message("assistant", "hi"), Message("user", "1+1="), Message("assistant", "2"))
    for template in (TEMPLATE, QWEN3):
        (row,) = encode_demonstrations([Example("", "2", messages)], character_tokenizer(CHARACTERS, template))
        (text,) = learned(row)
        assert text in ("2<eos>", "<think></think>2.")
        assert character_tokenizer(CHARACTERS).decode(row.tokens).startswith("[assistant]hi")


@pytest.mark.parametrize("answer", ["ok", "caf\u00e9", "\u65e5\u672c", "hi \U0001f600", "\u00e9"])
def test_marked_turns_end_with_all_bytes_of_their_last_character(answer: str) -> None:
    tokenizer = byte_tokenizer(MARKED)
    messages = (Message("user", "q \u00e9"), Message("assistant", answer)) * 2
    (row,) = encode_demonstrations([Example("", answer, messages)], tokenizer)
    assert tokenizer.decode(row.tokens[row.loss_mask > 0]) == f"{answer}{answer}<eos>", "the template writes no end"


def byte_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE without merges: one token per byte."""
    bytes_of = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=bytes_of, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **{"eos_token": "<eos>"})
    fast.chat_template = template
    return fast


def test_null_keys_of_dataset_messages_are_removed(tmp_path: Path) -> None:
    """Arrow gives every object the keys of all others, with nulls."""
    datasets = pytest.importorskip("datasets")
    other = {**CALL, "function": {"name": "time", "arguments": {"zone": "CET"}}}
    asked = [ASKED, [*ASKED[:1], {**ASKED[1], "tool_calls": [other]}, *ASKED[2:]]]
    path, tokenizer = str(tmp_path / "asked"), character_tokenizer(CHARACTERS, WITH_TOOLS)
    datasets.Dataset.from_list([{"messages": turns, "tools": TOOLS} for turns in asked]).save_to_disk(path)
    rows = encode_demonstrations(load_splits(DataConfig(path=path, val_fraction=0)).train, tokenizer)
    calls = [json.loads(learned(row)[0].removesuffix("<eos>")) for row in rows]
    assert calls == [CALL["function"], other["function"]]


def test_datasets_on_disk(tmp_path: Path) -> None:
    """Saved splits of conversations, and files with other column names, all written by `datasets`."""
    datasets = pytest.importorskip("datasets")
    pairs = [{"q": f"{n}+1=", "a": str(n + 1), "unused": n} for n in range(12)]
    user, assistant = {"role": "user"}, {"role": "assistant"}
    chats = [{"messages": [{**user, "content": row["q"]}, {**assistant, "content": row["a"]}]} for row in pairs]
    splits = {"train": datasets.Dataset.from_list(chats), "test": datasets.Dataset.from_list(chats[:3])}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    actual = load_splits(DataConfig(path=str(tmp_path / "saved"), val_split="test"))
    assert [example.response for example in actual.train] == [row["a"] for row in pairs]
    assert actual.train[2].messages == (Message("user", "2+1="), Message("assistant", "3")) and len(actual.validation) == 3
    assert actual.train[2].source == f"{tmp_path / 'saved'}, row 2"
    with pytest.raises(DataError, match="has no split 'dev'; found: train, test"):
        load_splits(DataConfig(path=str(tmp_path / "saved"), split="dev"))

    datasets.Dataset.from_list(pairs).to_parquet(str(tmp_path / "pairs.parquet"))
    datasets.Dataset.from_list(pairs).save_to_disk(str(tmp_path / "one"))
    arrow = next((tmp_path / "one").glob("*.arrow"))
    for path in (tmp_path / "pairs.parquet", tmp_path / "one", arrow):
        config = DataConfig(path=str(path), prompt_key="q", response_key="a", val_fraction=0)
        assert [(e.prompt, e.response) for e in load_splits(config).train] == [(row["q"], row["a"]) for row in pairs]
    with pytest.raises(DataError, match=r"one, row 0: no key 'prompt'; found 'q', 'a', 'unused'.*data.messages_key"):
        load_splits(DataConfig(path=str(tmp_path / "one")))
    datasets.Dataset.from_dict({"prompt": [], "response": []}).to_parquet(str(tmp_path / "none.parquet"))
    with pytest.raises(DataError, match=r"the dataset '.*none\.parquet' has no rows"):
        load_splits(DataConfig(path=str(tmp_path / "none.parquet")))
    (tmp_path / "torn.parquet").write_bytes((tmp_path / "pairs.parquet").read_bytes()[:200])
    (tmp_path / "empty").mkdir()
    datasets.Dataset.from_dict({"prompt": [], "response": []}).save_to_disk(str(tmp_path / "no_rows"))
    for path in (tmp_path / "empty", tmp_path / "no_rows", tmp_path / "torn.parquet"):
        with pytest.raises(DataError, match=r"cannot read .* as a Hugging Face dataset"):
            load_splits(DataConfig(path=str(path)))


def test_datasets_of_data_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data files with splits in their names, as on the Hub, and a Hub dataset in the `datasets` cache."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    rows = [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(5)]
    (files := tmp_path / "sums").mkdir()
    parts = {"train-00000-of-00002": rows[:3], "train-00001-of-00002": rows[3:], "test-00000-of-00001": rows[:1]}
    for name, part in parts.items():
        datasets.Dataset.from_list(part).to_parquet(str(files / f"{name}.parquet"))
    actual = load_splits(DataConfig(path=str(files), val_split="test"))
    assert [(e.prompt, e.response) for e in actual.train] == [(row["prompt"], row["response"]) for row in rows]
    assert len(actual.validation) == 1
    (tmp_path / "cache" / "sums").rename(tmp_path / "cache" / "owner___sums")
    assert len(load_splits(DataConfig(path="owner/sums", subset="default", val_fraction=0)).train) == 5
    with pytest.raises(DataError, match=r"cannot read 'unknown/sums' as a Hugging Face dataset, on disk or on the Hub"):
        load_splits(DataConfig(path="unknown/sums"))
    with pytest.raises(DataError, match=r"cannot read the data file 'unknown/sums\.jsonl'"):
        load_splits(DataConfig(path="unknown/sums.jsonl"))
    (files / "more.jsonl").write_text(json.dumps(rows[0]))
    with pytest.raises(DataError, match=r"the data file 'more\.jsonl' is in no split; found train, test, by the names"):
        load_splits(DataConfig(path=str(files)))


@pytest.mark.parametrize("name", ["train.jsonl", "train.jsonl.gz", "train.json", "train.csv", "train.tsv"])
def test_values_of_files_are_as_written(name: str, tmp_path: Path) -> None:
    """Dates, numbers and nulls of a directory's files are those that Python's own readers give for a single one."""
    pytest.importorskip("datasets")
    row = {"prompt": 'a "b"\tc\nd, e', "response": "007", "day": "2024-01-05", "at": "2024-01-05T10:00:00Z", "share": "1.50"}
    rows: list[dict[str, Any]] = [row, {**row, "response": "2024-01-06", "day": ""}]
    if "json" in name:
        rows = [{**one, "level": level, "tags": [{"a": level}]} for one, level in zip(rows, (1, 2.5), strict=True)]
    (tmp_path / "data").mkdir()
    for directory in (tmp_path, tmp_path / "data"):
        with (gzip.open if name.endswith(".gz") else open)(directory / name, "wt", newline="") as file:
            if "json" in name:
                file.write("\n".join(map(json.dumps, rows)) if "jsonl" in name else json.dumps(rows, indent=1))
            else:
                writer = csv.DictWriter(file, list(row), delimiter="\t" if name.endswith("tsv") else ",")
                writer.writeheader()
                writer.writerows(rows)
    for path in (tmp_path / "data", tmp_path / name):
        examples = load_splits(DataConfig(path=str(path), val_fraction=0)).train
        assert [dict(example.columns) for example in examples] == rows
        assert [example.response for example in examples] == ["007", "2024-01-06"]
    if name.endswith(".gz"):
        content, bad = (tmp_path / name).read_bytes(), gzip.compress(b"")[:10] + b"\xff" * 99
        for reason, broken in {"ended before": content[:-9], "Not a gzipped": b"{}", "Error -3": bad}.items():
            (tmp_path / name).write_bytes(broken)
            with pytest.raises(DataError, match=f"cannot read the data file .*{name}.*: .*{reason}"):
                load_splits(DataConfig(path=str(tmp_path / name)))


def test_paths_that_may_have_splits(tmp_path: Path) -> None:
    for name in ("saved", "one", "files"):
        (tmp_path / name).mkdir()
    (tmp_path / "saved" / "dataset_dict.json").touch()
    (tmp_path / "one" / "state.json").touch()
    (tmp_path / "rows.parquet").touch()
    several = [path for path in (*sorted(tmp_path.iterdir()), "owner/name", "rows.jsonl", "none.arrow") if has_splits(path)]
    assert several == [tmp_path / "files", tmp_path / "saved", "owner/name"]
    for path in (tmp_path / "rows.parquet", tmp_path / "one"):
        with pytest.raises(ConfigError, match=r"data\.val_split is 'test'.*data\.val_path"):
            load_splits(DataConfig(path=str(path), val_split="test"))
    with pytest.raises(ConfigError, match=r"data\.val_split is 'test'"):
        load_splits(DataConfig(path=str(tmp_path / "saved"), val_path=str(tmp_path / "rows.parquet"), val_split="test"))


def test_a_missing_datasets_package_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "datasets" else find(name))
    with pytest.raises(MissingDependencyError, match=r"pairs.parquet.*'datasets', which is not .*write .* as JSONL"):
        load_splits(DataConfig(path=str(tmp_path / "pairs.parquet")))


def test_collate() -> None:
    rows = encode_demonstrations([Example("1+1=", "2"), Example("1=", "1")], character_tokenizer(CHARACTERS))
    batch = tokenization.collate(rows)
    assert batch["lengths"].tolist() == [6, 4]
    assert batch["tokens"].shape == batch["loss_mask"].shape == (2, 6)
    assert batch["loss_mask"].tolist() == [[0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 0, 0]]
    assert batch["tokens"][1, 4:].tolist() == [0, 0]


def test_too_long() -> None:
    rows = encode_demonstrations([Example("1" * n, "2", source=f"line {n}") for n in (1, 9, 5)], character_tokenizer("12"))
    with pytest.raises(DataError, match=r"line 9: 11 tokens, .* room for 7 .*; 1 of 3 .* are too long. Raise policy.x, "):
        tokenization.keep_fitting(rows, 7, "error", "the bucket", "policy.x")
    assert [len(row) for row in tokenization.keep_fitting(rows, 7, "drop", "the bucket", "policy.x")] == [3, 7]
    with pytest.raises(DataError, match="3 of 3"):
        tokenization.keep_fitting(rows, 2, "drop", "the bucket", "policy.x")


def test_split_is_seeded_and_disjoint(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": str(n), "response": "x"} for n in range(40)])
    splits = load_splits(DataConfig(path=path, val_fraction=0.25))
    train, validation = ([example.prompt for example in part] for part in (splits.train, splits.validation))
    assert len(validation) == 10
    assert sorted(train + validation, key=int) == [str(n) for n in range(40)]
    assert load_splits(DataConfig(path=path, val_fraction=0.25)) == splits
    assert load_splits(DataConfig(path=path, val_fraction=0.25, seed=1)).validation != splits.validation
    assert load_splits(DataConfig(path=path, val_fraction=0)).validation == ()
    for share, count in ((0.001, 1), (0.04, 2), (0.29, 12)):  # at least one, and rounded
        assert len(load_splits(DataConfig(path=path, val_fraction=share)).validation) == count
    whole = load_splits(DataConfig(path=path, val_path=path))
    assert whole.validation == whole.train


def sampler_of(count: int, **options: Any) -> Sampler:
    return Sampler({"": range(count)}, {"": 1.0}, **options)


@given(st.integers(1, 30), st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(0, 3), st.booleans())
def test_sampler_draws_every_example_once_per_epoch(count: int, takes: list[int], seed: int, shuffle: bool) -> None:
    sampler = sampler_of(count, seed=seed, shuffle=shuffle)
    drawn = [index for number in takes for index in sampler.take(number)]
    assert len(drawn) == sum(takes)
    for start, end in pairwise(range(0, len(drawn) + 1, count)):
        assert sorted(drawn[start:end]) == list(range(count))


@given(st.integers(1, 30), st.integers(0, 70), st.integers(0, 70))
def test_sampler_resumes(count: int, before: int, after: int) -> None:
    sampler = sampler_of(count, seed=3)
    sampler.take(before)
    resumed = sampler_of(count, seed=3)
    resumed.restore(json.loads(json.dumps(sampler.state())))
    assert resumed.take(after) == sampler.take(after)


def test_sampler_shuffles_and_rejects_other_data() -> None:
    sampler = sampler_of(100, seed=1)
    first, second = sampler.take(100), sampler.take(100)
    assert first != second != list(range(100)) != first
    for other in (sampler_of(99, seed=1), sampler_of(100, seed=2), sampler_of(100, seed=1, shuffle=False)):
        with pytest.raises(CheckpointError, match=r"use the same data, data\.mixture, data\.seed, data\.shuffle") as caught:
            other.restore(sampler.state())
        assert "loss masks" not in str(caught.value)
    with pytest.raises(CheckpointError, match=r"'digest': 'one'.*'digest': 'two'.*tokens, loss masks, references or order"):
        sampler_of(100, digest="two").restore(sampler_of(100, digest="one").state())


def test_a_digest_depends_on_what_is_learned() -> None:
    tokenizer = character_tokenizer(CHARACTERS)
    examples = [Example("1+1=", "2", source="a, line 1"), Example("2+2=", "4", source="a, line 2")]
    elsewhere = [replace(example, source="b") for example in examples]
    for encode in (encode_prompts, encode_demonstrations):
        first = digest_of(encode(examples, tokenizer))
        assert digest_of(encode(elsewhere, tokenizer)) == first
        changed = [[replace(examples[0], **change), examples[1]] for change in ({"prompt": "1+2="}, {"response": "3"})]
        for others in (examples[::-1], examples[:1], *changed):
            assert digest_of(encode(others, tokenizer)) != first
    (row,) = encode_demonstrations(examples[:1], tokenizer)
    assert digest_of([replace(row, loss_mask=1 - row.loss_mask)]) != digest_of([row])
    split = [Prompt("", np.array(tokens), "", "") for tokens in ([1, 2], [3])], [Prompt("", np.array([1, 2, 3]), "", "")]
    assert digest_of(split[0]) != digest_of(split[1])
    assert digest_of([replace(split[1][0], reference="\ud800")]) != digest_of(split[1])  # JSON may say so


def write_sums(path: Path, sums: list[str], key: str = "prompt") -> str:
    return write(path, [{key: text, "response": "0"} for text in sums])


def mixture(tmp_path: Path, **more: object) -> DataConfig:
    """Returns a mixture of twenty sums of ones and five of twos, in files with different columns."""
    ones = {"path": write_sums(tmp_path / "ones.jsonl", [f"1+{n}=" for n in range(20)]), "val_fraction": 0.1}
    twos = {"path": write_sums(tmp_path / "twos.jsonl", [f"2+{n}=" for n in range(5)], "q"), "prompt_key": "q"}
    return DataConfig.model_validate({"mixture": {"ones": ones, "twos": {**twos, "val_fraction": 0.2, **more}}})


@given(st.lists(st.tuples(st.floats(0.1, 10.0), st.integers(1, 7)), min_size=1, max_size=5), st.integers(1, 60))
def test_any_stretch_of_draws_has_the_shares(weighed: list[tuple[float, int]], draws: int) -> None:
    names, weights = "abcde"[: len(weighed)], [weight for weight, _ in weighed]
    sources = {name: [10 * place + n for n in range(weighed[place][1])] for place, name in enumerate(names)}
    sampler = Sampler(sources, dict(zip(names, weights, strict=True)), seed=3)
    drawn = sampler.take(draws)
    for name, weight in zip(names, weights, strict=True):
        mine = [index for index in drawn if index in sources[name]]
        assert abs(len(mine) - draws * weight / sum(weights)) <= len(names)
        epochs = [mine[at : at + len(sources[name])] for at in range(0, len(mine), len(sources[name]))]
        assert all(len(set(epoch)) == len(epoch) for epoch in epochs), "each source has epochs of its own"


def test_examples_and_errors_name_their_task_and_validation_takes_turns(tmp_path: Path) -> None:
    splits = load_splits(mixture(tmp_path))
    assert Counter(example.task for example in splits.train) == {"ones": 18, "twos": 4}
    assert [example.task for example in splits.validation] == ["ones", "twos", "ones"]
    assert all(example.prompt.startswith("1" if example.task == "ones" else "2") for example in splits.train)
    assert splits.train[-1].columns["q"] == splits.train[-1].prompt
    with pytest.raises(DataError, match=r"data\.mixture\.twos: .*no key 'prompt'.*data\.prompt_key"):
        load_splits(mixture(tmp_path, prompt_key="prompt"))
    with pytest.raises(ConfigError, match=r"data\.mixture\.twos: data\.path and data\.task: found neither"):
        load_splits(mixture(tmp_path, path=None))


@pytest.mark.parametrize(
    ("weights", "expected"), [({}, {"ones": 18, "twos": 4}), ({"weight": 18.0}, {"ones": 11, "twos": 11})]
)
def test_weights_and_a_resumed_position(tmp_path: Path, weights: dict[str, float], expected: dict[str, int]) -> None:
    """Without a weight a source has that of its examples."""
    config = mixture(tmp_path, **weights)
    rows = encode_prompts(load_splits(config).train, character_tokenizer("0123456789+="))
    sampler = open_sampler(rows, config)
    drawn = sampler.take(22)
    assert Counter(rows[index].task for index in drawn) == expected
    state = json.loads(json.dumps(sampler.state()))
    resumed = open_sampler(rows, config)
    resumed.restore(state)
    assert resumed.take(30) == sampler.take(30)
    with pytest.raises(CheckpointError, match=r"data\.mixture, data\.seed"):
        open_sampler(rows, mixture(tmp_path, weight=1.5)).restore(state)
