"""Standard sets of questions by name, and how answers to them are marked: `dagrl evaluate --set` and `evaluation.sets`.

    load_sets(EvaluationConfig(sets=("gsm8k", "math500=math500.jsonl")))

A set comes from the Hub, or from a file or directory with the columns that it has there. Answers of mathematics are marked
by math-verify, and instructions (`ifeval`) by lm-evaluation-harness.
"""

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dagrl.config import DataConfig, EvaluationConfig, Json, RewardConfig, RewardFunctionConfig
from dagrl.data.examples import Example, read_examples
from dagrl.errors import ConfigError, DataError, UserError
from dagrl.imports import IFEVAL

Row = Mapping[str, Json]
LETTERS = "ABCDEFGHIJ"
BOXED = "Reason step by step, and put the final answer in \\boxed{}."
LETTER = "Reason step by step, and put the letter of the right option in \\boxed{}."


@dataclass(frozen=True)
class Benchmark:
    """A set: where it is on the Hub, the texts of a row's question and answer, and what marks a completion."""

    path: str
    question: Callable[[Row], str]
    answer: Callable[[Row], str]
    reward: str = "dagrl.rl.rewards:math_answer"
    instruction: str = BOXED
    split: str = "test"
    subset: str | None = None
    whole: bool = False  # marked with what a base model writes after its answer, as instructions are about all of it


def _column(*names: str) -> Callable[[Row], str]:
    """Returns what reads the first of the columns that a row has: published copies of a set differ in capitals."""

    def text(row: Row) -> str:
        name = next((name for name in names if name in row), names[0])
        if row[name] in (None, ""):
            raise ValueError(f"column {name!r} is empty")
        return str(row[name])

    return text


def _mmlu_options(row: Row) -> list[str]:
    options = row["options"]
    if not isinstance(options, list) or not 0 < len(options) <= len(LETTERS):
        raise ValueError(f"expected: options, a list of 1 to {len(LETTERS)}; found: {options}")
    return [str(option) for option in options]


def _mmlu_question(row: Row) -> str:
    return _with_options(str(row["question"]), _mmlu_options(row))


def _mmlu_answer(row: Row) -> str:
    letters, answer = list(LETTERS[: len(_mmlu_options(row))]), str(row["answer"])
    if answer not in letters:
        raise ValueError(f"expected: answer, one of {', '.join(letters)}; found: {answer}")
    return answer


def _instructions(row: Row) -> str:
    _, names, arguments = row["key"], row["instruction_id_list"], row["kwargs"]
    if not isinstance(names, list) or not isinstance(arguments, list) or len(names) != len(arguments):
        raise ValueError(f"expected: instruction_id_list and kwargs, lists of one length; found: {names}, {arguments}")
    return ", ".join(map(str, names))


def _gpqa_options(row: Row) -> list[str]:
    """Returns the options in an order that depends on the question alone: the right one is the first of the columns."""
    options = [str(row[name]).strip() for name in ("Correct Answer", *(f"Incorrect Answer {n}" for n in (1, 2, 3)))]
    random.Random(str(row["Question"])).shuffle(options)  # noqa: S311  # not cryptography
    return options


def _with_options(question: str, options: list[str]) -> str:
    return "\n".join([question, *(f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False))])


_PROBLEM, _ANSWER = _column("problem", "Problem"), _column("answer", "Answer")
BENCHMARKS: Mapping[str, Benchmark] = {
    "gsm8k": Benchmark("openai/gsm8k", _column("question"), _column("answer"), subset="main"),
    "math500": Benchmark("HuggingFaceH4/MATH-500", _PROBLEM, _ANSWER),
    "aime24": Benchmark("HuggingFaceH4/aime_2024", _PROBLEM, _ANSWER, split="train"),
    "aime25": Benchmark("math-ai/aime25", _PROBLEM, _ANSWER),
    "mmlu_pro": Benchmark("TIGER-Lab/MMLU-Pro", _mmlu_question, _mmlu_answer, "dagrl.rl.benchmarks:option_chosen", LETTER),
    "gpqa_diamond": Benchmark(
        "Idavidrein/gpqa",
        lambda row: _with_options(str(row["Question"]).strip(), _gpqa_options(row)),
        lambda row: LETTERS[_gpqa_options(row).index(str(row["Correct Answer"]).strip())],
        *("dagrl.rl.benchmarks:option_chosen", LETTER, "train", "gpqa_diamond"),  # its only split, and the subset
    ),
    "ifeval": Benchmark(
        *("google/IFEval", _column("prompt"), _instructions, "dagrl.rl.benchmarks:instructions_followed", "", "train"),
        whole=True,
    ),
}


def option_chosen(prompts: list[str], completions: list[str], references: list[str]) -> list[float]:
    """Returns 1 where the completion's last choice of an option is the reference, a letter.

    A choice is a letter in `\\boxed{}`, one after `answer is` or `Answer:`, or one that begins the completion, alone or as
    `B. 4` or `(B) 4`.
    """
    chosen = [[*_LETTER.findall(text), *_CHOICE.findall(text)] for text in completions]
    return [float(letters[-1:] == [wanted]) for letters, wanted in zip(chosen, references, strict=True)]


_CHOICE = re.compile(r"(?:\\boxed\{(?:\\text\w*\{)?|[Aa]nswer(?: is)?:?)[\s*]*\(?([A-J])\b")
_LETTER = re.compile(r"\A\s*\(?([A-J])(?:[.)](?![A-Za-z]\.)|\s*\Z)")  # not `E.g.`


def instructions_followed(
    prompts: list[str], completions: list[str], references: list[str], columns: list[dict[str, Any]]
) -> list[float]:
    """Returns 1 where all of the prompt's verifiable instructions are followed: IFEval's strict accuracy of prompts."""
    from lm_eval.tasks.ifeval.utils import InputExample, test_instruction_following_strict

    tasks = [InputExample(*(row[name] for name in ("key", "instruction_id_list", "prompt", "kwargs"))) for row in columns]
    marked = [test_instruction_following_strict(task, text) for task, text in zip(tasks, completions, strict=True)]
    return [float(result.follow_all_instructions) for result in marked]


instructions_followed.requires = IFEVAL  # type: ignore[attr-defined]  # checked before a run starts


def sources_of(config: EvaluationConfig) -> dict[str, str]:
    """Returns where each set of `evaluation.sets` is read from. Raises ConfigError for an unknown one."""
    sources = {}
    for text in config.sets:
        name, _, path = text.partition("=")
        if name not in BENCHMARKS:
            raise ConfigError(f"evaluation.sets: there is no set {name!r}; expected: {', '.join(BENCHMARKS)}")
        if name in sources:
            raise ConfigError(f"evaluation.sets: {name} is named twice; expected: a set once, from one source")
        sources[name] = path or BENCHMARKS[name].path
    return sources


def load_sets(config: EvaluationConfig) -> list[Example]:
    """Returns the questions of all sets, each with the name of its set as `task`. Raises ConfigError or DataError."""
    examples = []
    for name, path in sources_of(config).items():
        benchmark = BENCHMARKS[name]
        keys = DataConfig(subset=benchmark.subset if path == benchmark.path else None)
        try:
            questions = read_examples(path, benchmark.split, keys, partial(_example, benchmark, config.prompt))
        except UserError as error:
            raise type(error)(f"evaluation.sets: {name}: {error}") from error
        examples += [replace(example, task=name) for example in questions[: config.max_samples]]
    return examples


def _example(benchmark: Benchmark, prompt: str, row: Row, source: str, keys: DataConfig) -> Example:
    try:
        question, answer = benchmark.question(row), benchmark.answer(row)
        text = prompt.format(question=question, instruction=benchmark.instruction).rstrip(" \n")
        before = prompt.format(question="\0", instruction=benchmark.instruction).partition("\0")[0]
        until = "" if benchmark.whole else before.strip().rpartition("\n")[2]
        return Example(text, answer, source=source, columns=row, until=until)
    except KeyError as error:
        found = ", ".join(row)
        raise DataError(f"{source} has no column {error}; found: {found}; expected: those of {benchmark.path}") from error
    except ValueError as error:
        raise DataError(f"{source}: {error}") from error


def rewards_of_sets(config: EvaluationConfig, workers: int | None) -> RewardConfig:
    """Returns what marks the answers: a function for each set."""
    return RewardConfig(
        functions={
            name: RewardFunctionConfig(function=BENCHMARKS[name].reward, tasks=(name,), num_workers=workers)
            for name in sources_of(config)
        },
        max_failed_share=1.0,  # an answer that cannot be marked is a wrong one
    )
