"""GSM8K for a model that starts from a seed: what SFT imitates, what GRPO completes, and a tokenizer of its words.

    python -m recipes.from_scratch.gsm8k --data DIR -o runs/from_scratch_data      # DIR has train.jsonl and test.jsonl

| file | rows |
|---|---|
| `solutions.jsonl` | whole questions with their solutions, for SFT |
| `calculations.jsonl` | the calculations of these solutions: ` <<48/2=`, `24>>` |
| `calls.jsonl` | these solutions with calls of `recipes/calculator.py`: `<calc>48/2</calc><result>24</result>` |
| `one_left.jsonl`, `two_left.jsonl` | other questions, with the solution up to the last or the last but one result |
| `calls_one_left.jsonl`, `calls_two_left.jsonl` | the same up to the last or the last but one call |
| `test_*.jsonl` | the same of the test questions, and `test_whole.jsonl` without any of the solution |
| `tokenizer/` | byte-level BPE of the solutions, with a token for each digit and each mark of a call |
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from recipes.calculator import CLOSE, OPEN, Calculator

Problem = Mapping[str, str]
Row = dict[str, str]

CALCULATION = re.compile(r"<<([^<>=]+)=([^<>]+)>>")
CALL = re.compile(OPEN)
IMITATED = 5000  # of the 7,473 training questions; GRPO completes the others
WORDS = 4096  # tokens
MARK = "####"
MARKS_OF_CALLS = (OPEN, CLOSE, "<result>", "</result>")


def final_answer(prompts: list[str], completions: list[str], references: list[str]) -> list[dict[str, float]]:
    """A reward: whether the number after `####` is the reference's (`right`), and whether there is one (`format`)."""
    given = [text.rpartition(MARK)[2].strip() if MARK in text else "" for text in completions]
    wanted = [text.rpartition(MARK)[2].strip() for text in references]
    return [{"right": float(a == b), "format": float(bool(a))} for a, b in zip(given, wanted, strict=True)]


def solution(problem: Problem) -> Row:
    """A whole problem. The question is learned too: the model knows no English."""
    return {"prompt": "Question:", "response": f" {problem['question']}\nAnswer: {problem['answer']}"}


def calculations(problem: Problem) -> Iterator[Row]:
    """The calculations that the solution's author marked."""
    for found in CALCULATION.finditer(problem["answer"]):
        yield {"prompt": f" <<{found[1]}=", "response": f"{found[2]}>>"}


def with_calls(problem: Problem) -> Problem:
    """The problem with calls of the calculator and its replies in place of the calculations."""

    def called(found: re.Match[str]) -> str:
        turn = f"{OPEN}{found[1]}{CLOSE}"
        return f"{turn}{Calculator().step(turn)}"

    return {**problem, "answer": CALCULATION.sub(called, problem["answer"])}


def unfinished(problem: Problem, left: int | None) -> Iterator[Row]:
    """The problem with its solution up to a calculation's result, or up to a call, after which `left - 1` follow.

    None: without its solution. Yields nothing for a solution with fewer of them.
    """
    question, answer = f"Question: {problem['question']}\nAnswer: ", problem["answer"]
    results = [found.start(2) for found in CALCULATION.finditer(answer)]
    starts = results or [found.start() for found in CALL.finditer(answer)]
    if left is None:
        yield {"prompt": question.rstrip(), "response": f" {answer}"}
    elif len(starts) >= left:
        cut = starts[-left]
        yield {"prompt": question + answer[:cut], "response": answer[cut:]}


def prepare(data: Path, output: Path) -> None:
    """Writes all files of the module's table into `output`."""
    train, test = _read(data / "train.jsonl"), _read(data / "test.jsonl")
    imitated, rest = train[:IMITATED], train[IMITATED:]
    output.mkdir(parents=True, exist_ok=True)
    for name, problems in (("", imitated), ("test_", test)):
        write_rows(output / f"{name}solutions.jsonl", map(solution, problems))
        write_rows(output / f"{name}calculations.jsonl", (row for problem in problems for row in calculations(problem)))
        write_rows(output / f"{name}calls.jsonl", (solution(with_calls(problem)) for problem in problems))
    for name, problems in (
        ("", rest),
        ("test_", test),
        ("calls_", [*map(with_calls, rest)]),
        ("test_calls_", [*map(with_calls, test)]),
    ):
        for left, word in ((1, "one_left"), (2, "two_left")):
            write_rows(output / f"{name}{word}.jsonl", (row for problem in problems for row in unfinished(problem, left)))
    write_rows(output / "test_whole.jsonl", (row for problem in test for row in unfinished(problem, None)))
    write_tokenizer((f"{row['prompt']}{row['response']}" for row in map(solution, imitated)), output / "tokenizer")


def write_tokenizer(texts: Iterable[str], directory: Path) -> None:
    """Trains a byte-level BPE tokenizer with a token for each digit, as one calculates, and for each mark of a call."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    digits, level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=WORDS - len(MARKS_OF_CALLS),
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(list(MARKS_OF_CALLS))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")  # noqa: S106
    fast.save_pretrained(directory)


def _read(path: Path) -> Sequence[Problem]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Writes a JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="a directory with GSM8K's JSONL files")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="the directory to write")
    options = parser.parse_args()
    prepare(options.data, options.output)
