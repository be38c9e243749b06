"""The tasks of examples, recipes and standard sets: correct answers, held-out prompts, and how answers are marked."""

import io
import json
import re
import string
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dagrl.config import DataConfig, EvaluationConfig
from dagrl.data import Example
from dagrl.data.examples import with_chat
from dagrl.data.media import MediaProcessor, load_processor
from dagrl.data.tokenization import encode_prompts
from dagrl.errors import ConfigError, DataError
from dagrl.rl.benchmarks import BENCHMARKS, load_sets, option_chosen, rewards_of_sets
from dagrl.rl.rewards import math_answer
from dagrl.rl.rollout.episodes import Episode, Sample
from dagrl.rl.rollout.scoring import reward_texts
from dagrl.rl.tasks import CELL, COLOURS, NUMBERS, SIDE, arithmetic, shapes
from dagrl.run.model import character_tokenizer
from recipes.gemma3_270m import plot
from recipes.gemma3_270m.tasks import PROMPT, final_answer, prepare, stories
from recipes.shapes.make import make

RESULTS = Path(__file__).parents[3] / "dagrl/bench/results"


def operands(example: Example) -> tuple[int, int]:
    a, b = example.prompt.removesuffix("=").split("+")
    return int(a), int(b)


@given(st.integers(0, 5), st.integers(1, 50))
def test_held_out_prompts_are_not_trained_on(seed: int, held_out: int) -> None:
    splits = arithmetic(digits=1, held_out=held_out, seed=seed, demonstrations_per_prompt=2)
    train, validation = ({example.prompt for example in part} for part in (splits.train, splits.validation))
    assert len(validation) == held_out
    assert not train & validation
    assert {example.prompt for example in splits.demonstrations} == train
    assert splits == arithmetic(digits=1, held_out=held_out, seed=seed, demonstrations_per_prompt=2)
    every = {f"{a}+{b}=" for a, b in product(range(10), repeat=2) if a + b < 10}
    assert train | validation == every


def test_references_are_sums_without_carries() -> None:
    splits = arithmetic(digits=2)
    for example in (*splits.train, *splits.validation):
        a, b = operands(example)
        assert example.response == str(a + b) and 10 <= min(a, b) and a + b <= 99
        assert a % 10 + b % 10 == (a + b) % 10  # the last digits add up without a carry
    assert len(splits.train) + len(splits.validation) == 36 * 55  # tens 1..9 and ones 0..9, each adding up to at most 9
    assert any(sum(operands(example)) >= 100 for example in arithmetic(digits=2, carry=True).train)


def test_share_of_right_demonstrations() -> None:
    splits = arithmetic(digits=2, right_share=0.3, demonstrations_per_prompt=10)
    right: Counter[str] = Counter()
    for example in splits.demonstrations:
        a, b = operands(example)
        assert int(example.response) in (a + b, a, b)
        right[example.prompt] += int(example.response) == a + b
    assert set(right.values()) == {3}


def test_arguments_out_of_range() -> None:
    for wrong in ({"digits": 3}, {"held_out": 0}, {"held_out": 1980}, {"right_share": 1.5}):
        with pytest.raises(ValueError, match="expected"):
            arithmetic(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected: at least 1 each"):
        stories(0)


def test_answers_name_what_is_drawn() -> None:
    """Counted in the image: blocks of coloured pixels that touch."""
    from PIL import Image

    splits = shapes(images=40, held_out=20)
    for example in (*splits.train, *splits.validation):
        (medium,) = example.media
        image = Image.open(io.BytesIO(medium.data))
        assert (image.height, image.width) == medium.size
        pixels = {(x, y): image.getpixel((x, y)) for x in range(image.width) for y in range(image.height)}
        left = {place: colour for place, colour in pixels.items() if colour != (255, 255, 255)}
        (colour,) = set(left.values())
        count = 0
        while left:
            count, near = count + 1, [left.popitem()[0]]
            while near:
                x, y = near.pop()
                near += [at for at in ((x - 1, y), (x + 1, y), (x, y - 1), (x, y + 1)) if left.pop(at, None)]
        names = {rgb: name for name, rgb in COLOURS.items()}
        assert example.response == f"{NUMBERS[count - 1]} {names[colour]}"
    seen = {example.media[0].id for example in splits.train}
    assert not seen & {example.media[0].id for example in splits.validation}
    right = {example.media[0].id: example.response for example in splits.train}
    shares = Counter(example.response == right[example.media[0].id] for example in splits.demonstrations)
    assert shares == {True: 80, False: 120}


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_solutions_of_stories_are_right(steps: int) -> None:
    splits = stories(steps, count=200, held_out=50)
    assert splits == stories(steps, count=200, held_out=50) != stories(steps, count=200, held_out=50, seed=1)
    assert not {one.prompt for one in splits.train} & {one.prompt for one in splits.validation}
    for example in (*splits.train, *splits.validation):
        calculations = re.findall(r"=<<([0-9+*/-]+)=(\d+)>>(\d+)", example.response)
        assert len(calculations) == steps
        assert all(eval(formula) == int(result) == int(again) for formula, result, again in calculations)  # noqa: S307
        assert example.response.endswith(f"\n#### {calculations[-1][1]}")
        told = set(re.findall(r"\d+", example.prompt))
        named = {number for formula, *_ in calculations for number in re.findall(r"\d+", formula)}
        results = {result for _, result, _ in calculations}
        assert named <= told | results | {"2", "3", "4", "5"}  # half, triples, a fifth
    assert final_answer([example.prompt], [example.response], [example.response]) == [{"right": 1.0, "format": 1.0}]


def test_a_result_without_a_curve_is_not_drawn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    results = RESULTS / "1x-nvidia-h200/2026-11-29/gemma3_270m_ways.json"
    monkeypatch.setattr("sys.argv", ["plot", str(results), "-o", "unwritten.png"])
    with pytest.raises(SystemExit):
        plot.main()
    assert "gemma3_270m_ways.json has no rows of stories with their held-out rate; expected" in capsys.readouterr().err


def test_short_questions_of_gsm8k_leave_out_those_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.gemma3_270m.tasks.HELD_OUT", 2)
    solutions = ["<<1+1=2>>2 " * count + "\n#### 2" for count in (0, 1, 3, 4, 2, 5)]
    lines = [json.dumps({"question": f"Question {n}?", "answer": answer}) for n, answer in enumerate(solutions)]
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    prepare(tmp_path, tmp_path / "out")
    short = [json.loads(line)["prompt"] for line in (tmp_path / "out" / "short.jsonl").read_text().splitlines()]
    assert short == [PROMPT.format("Question 1?"), PROMPT.format("Question 2?")]
    assert (tmp_path / "out" / "held_out.jsonl").read_text().splitlines() == lines[-2:]


@pytest.mark.parametrize("family", ["idefics3", "gemma3"])
def test_an_image_of_shapes_has_a_token_for_each_cell(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    make(family, tmp_path, seed=0)
    processor = MediaProcessor(load_processor(tmp_path))
    (prompt,) = encode_prompts(shapes(1, 0, demonstrations_per_prompt=1).train, processor.tokenizer, processor)
    assert prompt.media is not None and np.count_nonzero(prompt.media.tokens) == (SIDE // CELL) ** 2
    model, loaded = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loaded.values()), "names are those of published checkpoints"
    assert len(prompt.tokens) <= model.config.get_text_config().max_position_embeddings


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
    for prompt in ("no question", "{question} {other}", "{question", "{0}"):
        with pytest.raises(ValueError, match=r"a text with \{question\}"):
            EvaluationConfig(prompt=prompt)


@pytest.mark.parametrize(
    "prompt, until",
    [
        ("Question: {question}\nAnswer:", "Question:"),
        ("Problem: 1+1?\nAnswer: 2\n\nProblem:\n{question}\nAnswer:", "Problem:"),
        ("{question}\n\n{instruction}", ""),
    ],
)
def test_answers_of_base_models_are_marked_up_to_a_further_question(prompt: str, until: str, tmp_path: Path) -> None:
    sets = tuple(written(tmp_path, name, ROWS[name]) for name in ("gsm8k", "mmlu_pro", "ifeval"))
    examples = load_sets(EvaluationConfig(sets=sets, prompt=prompt))
    tokenizer = character_tokenizer(string.printable, chat_template="{{ messages[0].content }}")
    chat = with_chat(examples[0], DataConfig(apply_chat_template=True))
    prompts = encode_prompts([*examples, chat], tokenizer)
    run_on = " 2+2 = 4. The answer is B.\n\nQuestion: What is 3+3?\nAnswer: 6\n\nProblem: Which?\nAnswer: A"
    prompts, completions, references = reward_texts([Sample(item, Episode(item, 0, 99), run_on) for item in prompts])
    judged = run_on.partition(f"\n{until}")[0] if until else run_on
    assert completions == [judged, judged, run_on, run_on], "instructions are about all, and chat templates end turns"
    assert option_chosen(prompts[1:2], completions[1:2], references[1:2]) == [bool(until)]
    pytest.importorskip("math_verify")
    right = math_answer(prompts[::3], completions[::3], references[::3])
    assert right == [until == "Question:", False]


def test_unknown_sets_and_columns_are_one_error(tmp_path: Path) -> None:
    wrong = written(tmp_path, "gsm8k", {"frage": "2+2?"})
    for sets, error, says in (
        (("gsm9k",), ConfigError, "no set 'gsm9k'; expected: gsm8k, math500"),
        ((wrong,), DataError, "gsm8k.jsonl, line 1 has no column 'question'; found: frage; expected: those of openai"),
        (("gsm8k", wrong), ConfigError, "gsm8k is named twice"),
    ):
        with pytest.raises(error, match=says):
            load_sets(EvaluationConfig(sets=sets))


@pytest.mark.parametrize(
    "name, column, value, message",
    [
        ("ifeval", "key", None, "line 1 has no column 'key'"),
        ("ifeval", "instruction_id_list", None, "line 1 has no column 'instruction_id_list'"),
        ("ifeval", "kwargs", None, "line 1 has no column 'kwargs'"),
        ("ifeval", "kwargs", [{}], "lists of one length; found"),
        ("mmlu_pro", "options", 3, "options, a list of"),
        ("mmlu_pro", "answer", 1, "answer, one of A, B, C; found"),
        ("mmlu_pro", "answer", "D", "answer, one of A, B, C; found"),
        ("gpqa_diamond", "Incorrect Answer 3", None, "no column 'Incorrect Answer 3'"),
        ("gsm8k", "question", "", "column 'question' is empty"),
    ],
)
def test_rows_that_cannot_be_marked_are_one_error(name: str, column: str, value: Any, message: str, tmp_path: Path) -> None:
    row = {key: known for key, known in ROWS[name].items() if key != column} | ({column: value} if value is not None else {})
    with pytest.raises(DataError, match=message):
        load_sets(EvaluationConfig(sets=(written(tmp_path, name, row),)))


@pytest.mark.parametrize(
    "completion, letter",
    [
        ("The answer is (C).", "C"),
        ("A is wrong. So \\boxed{C}", "C"),
        ("\\boxed{A}? No: $\\boxed{\\text{B}}$", "B"),
        ("Answer: **D**", "D"),
        (" J.\n", "J"),
        (" D. 4\n\nQuestion: Next?", "D"),
        ("(B) 4", "B"),
        ("A. 1\nB. 2\nThe answer is B", "B"),
        ("Cats bark", ""),
        ("the answer is that Cats bark", ""),
        ("I think C", ""),
        ("E.g. cats bark.", ""),
        ("I.e. it is 4. The answer is (B).", "B"),
    ],
)
def test_the_last_choice_counts(completion: str, letter: str) -> None:
    assert option_chosen([""] * 10, [completion] * 10, list("ABCDEFGHIJ")) == [float(letter == one) for one in "ABCDEFGHIJ"]
