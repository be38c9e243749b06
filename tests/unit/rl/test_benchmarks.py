"""Standard sets: rows with the published columns become prompts and references, and answers are marked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dagrl.config import EvaluationConfig
from dagrl.errors import ConfigError, DataError
from dagrl.rl.benchmarks import BENCHMARKS, load_sets, option_chosen, rewards_of_sets

OPTIONS = {"Correct Answer": "4", "Incorrect Answer 1": "3", "Incorrect Answer 2": "5", "Incorrect Answer 3": "22"}
ROWS = {
    "gsm8k": {"question": "What is 2+2?", "answer": "It is <<2+2=4>>4.\n#### 4"},
    "math500": {"problem": "What is 2+2?", "solution": "It is $\\boxed{4}$.", "answer": "4", "level": 1},
    "aime24": {"problem": "What is 2+2?", "answer": "4"},
    "aime25": {"Problem": "What is 2+2?", "Answer": 4},
    "mmlu_pro": {"question": "What is 2+2?", "options": ["3", "4", "5"], "answer": "B", "answer_index": 1},
    "gpqa_diamond": {"Question": "What is 2+2?", **OPTIONS},
    "ifeval": {"prompt": "What is 2+2?", "key": 1, "instruction_id_list": [], "kwargs": []},
}


def written(tmp_path: Path, name: str, row: object) -> str:
    path = tmp_path / f"{name}.jsonl"
    path.write_text(json.dumps(row) + "\n")
    return f"{name}={path}"


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_row_becomes_a_prompt_and_its_answer(name: str, tmp_path: Path) -> None:
    (example,) = load_sets(EvaluationConfig(sets=(written(tmp_path, name, ROWS[name]),)))
    assert example.prompt.startswith("What is 2+2?") and example.task == name and example.columns == ROWS[name]
    if name in ("mmlu_pro", "gpqa_diamond"):
        lines = dict(line.split(". ", 1) for line in example.prompt.splitlines() if line[1:2] == ".")
        assert lines[example.response] == "4" and len(lines) == (3 if name == "mmlu_pro" else 4)
    elif name != "ifeval":
        assert example.response.endswith("4") and "\\boxed{}" in example.prompt
    assert list(rewards_of_sets(EvaluationConfig(sets=(name,)), 1).functions) == [name]


def test_prompts_may_be_written_as_a_model_knows_them(tmp_path: Path) -> None:
    sets = (written(tmp_path, "gsm8k", ROWS["gsm8k"]), written(tmp_path, "aime24", ROWS["aime24"]))
    examples = load_sets(EvaluationConfig(sets=sets, prompt="Question: {question}\nAnswer:"))
    assert [example.prompt for example in examples] == ["Question: What is 2+2?\nAnswer:"] * 2


def test_unknown_sets_and_columns_are_one_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no set 'gsm9k'; expected: gsm8k, math500"):
        load_sets(EvaluationConfig(sets=("gsm9k",)))
    wrong = written(tmp_path, "gsm8k", {"frage": "2+2?"})
    with pytest.raises(
        DataError, match=r"gsm8k.jsonl, line 1 has no column 'question'; found: frage; expected: those of openai"
    ):
        load_sets(EvaluationConfig(sets=(wrong,)))


@pytest.mark.parametrize("prompt", ["no question", "{question} {other}", "{question", "{0}"])
def test_a_prompt_needs_its_question(prompt: str) -> None:
    with pytest.raises(ValueError, match=r"a text with \{question\}"):
        EvaluationConfig(prompt=prompt)


@pytest.mark.parametrize(
    "completion, letter",
    [
        ("The answer is (C).", "C"),
        ("A is wrong. So \\boxed{C}", "C"),
        ("\\boxed{A}? No: $\\boxed{\\text{B}}$", "B"),
        ("Answer: **D**", "D"),
        (" J.\n", "J"),
        ("the answer is that Cats bark", ""),
        ("I think C", ""),
    ],
)
def test_the_last_choice_counts(completion: str, letter: str) -> None:
    assert option_chosen([""] * 10, [completion] * 10, list("ABCDEFGHIJ")) == [float(letter == one) for one in "ABCDEFGHIJ"]
