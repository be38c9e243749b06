"""Standard sets of questions by name, and how answers to them are marked: `dagrl evaluate --set` and `evaluation.sets`.

    load_sets(EvaluationConfig(sets=("gsm8k", "math500=math500.jsonl")))

A set comes from the Hub, or from a file or directory with the columns that it has there. Answers are marked by math-verify.
For other sets, give the exported model to lm-evaluation-harness.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from dagrl.config import DataConfig, EvaluationConfig, Json, RewardConfig, RewardFunctionConfig
from dagrl.data.examples import Example, read_examples
from dagrl.errors import ConfigError, DataError, UserError

Row = Mapping[str, Json]
MARKED_BY = "dagrl.rl.rewards:math_answer"
INSTRUCTION = "Reason step by step, and put the final answer in \\boxed{}."


@dataclass(frozen=True)
class Benchmark:
    """Where a set is on the Hub, and the columns of questions and answers. Published copies differ in capitals."""

    path: str
    question: tuple[str, ...]
    answer: tuple[str, ...] = ("answer", "Answer")
    split: str = "test"
    subset: str | None = None


PROBLEM = ("problem", "Problem")
BENCHMARKS: Mapping[str, Benchmark] = {
    "gsm8k": Benchmark("openai/gsm8k", ("question",), subset="main"),
    "math500": Benchmark("HuggingFaceH4/MATH-500", PROBLEM),
    "aime24": Benchmark("HuggingFaceH4/aime_2024", PROBLEM, split="train"),
    "aime25": Benchmark("math-ai/aime25", PROBLEM),
}


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
    question, answer = (_column(row, names, benchmark, source) for names in (benchmark.question, benchmark.answer))
    text = prompt.format(question=question, instruction=INSTRUCTION).rstrip(" \n")
    before = prompt.format(question="\0", instruction=INSTRUCTION).partition("\0")[0]
    return Example(text, answer, source=source, columns=row, until=before.strip().rpartition("\n")[2])


def _column(row: Row, names: Sequence[str], benchmark: Benchmark, source: str) -> str:
    """Returns the text of the first of the columns that a row has."""
    name = next((name for name in names if name in row), None)
    if name is None:
        found = ", ".join(row)
        raise DataError(f"{source} has no column {names[0]!r}; found: {found}; expected: those of {benchmark.path}")
    if row[name] in (None, ""):
        raise DataError(f"{source}: column {name!r} is empty")
    return str(row[name])


def rewards_of_sets(config: EvaluationConfig, workers: int | None) -> RewardConfig:
    """Returns what marks the answers: a function for each set."""
    return RewardConfig(
        functions={
            name: RewardFunctionConfig(function=MARKED_BY, tasks=(name,), num_workers=workers) for name in sources_of(config)
        },
        max_failed_share=1.0,  # an answer that cannot be marked is a wrong one
    )
