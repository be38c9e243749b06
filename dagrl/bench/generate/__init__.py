"""Compares the generation of a GRPO step, in quanta, with `LLM.generate` and vLLM's async engine, on one GPU.

    dagrl bench generate --cases "0.6b 64" "0.6b 256" "0.6b 1024" [--json F]
    dagrl bench generate --cases "4b 256" --sides dagrl dagrl-fp8      weights in FP8

A case is a model and the number of sequences, in groups of 8 with prompts of 120 tokens and completions of `--completion`.
dagrl's side is one generation worker without Ray. Every side runs to its end in each turn and has the GPU alone, with the
same KV cache, attention and number of sequences at once; cases of one model share its engine. The first step of a case does
not count. Ratios are relative to the first side. `--tiny` also runs without a GPU, to try the benchmark.
"""

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from dagrl.bench import harness
from dagrl.bench.harness import Column, Contest, Take, Turn, execute
from dagrl.bench.models import write_with_tokenizer
from dagrl.bench.report import Row
from dagrl.bench.workloads import RolloutCase, rollout_case
from dagrl.cli.numbers import count

KV_SHARE = 0.8
OURS, THEIRS = "dagrl.bench.generate.ours", "dagrl.bench.generate.vllm"
SIDES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "dagrl": (OURS, {"engine": {}}),
    "vllm": (THEIRS, {"asynchronous": False}),
    "vllm-async": (THEIRS, {"asynchronous": True}),
    "dagrl-fp8": (OURS, {"engine": {"precision": "fp8"}}),
}
"""Module and further settings of each side."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    harness.add_arguments(parser)
    cases = ["0.6b 64", "0.6b 256", "0.6b 1024"]
    parser.add_argument("--cases", nargs="+", default=cases, metavar="CASE", help="'MODEL SEQUENCES' each")
    parser.add_argument(
        "--sides", nargs="+", choices=SIDES, default=["dagrl", "vllm", "vllm-async"], help="default: the first three"
    )
    parser.add_argument("--steps", type=count, default=4, help="counted steps of a turn")
    parser.add_argument("--completion", type=count, default=256, help="tokens of a completion")
    parser.add_argument("--tiny", action="store_true", help="a narrow model in float32, also without a GPU")


def run(options: argparse.Namespace) -> None:
    cases = [case_of(text, options) for text in options.cases]
    with tempfile.TemporaryDirectory() as directory:
        contests = []
        for model, some in groupby(cases, lambda case: case.model):
            group = list(some)
            sizes = {case.name: {"tokens": case.sequences * case.completion, "kv_bytes": case.kv_bytes} for case in group}
            contests.append(Contest(f"generation of {model}", sizes, partial(sides, group, options, Path(directory))))
        harness.run(options, contests, [Column("tokens/s", "tokens_per_s", "{:,.0f}")], finish)


def case_of(text: str, options: argparse.Namespace) -> RolloutCase:
    """Returns the case named `text`. Raises ConfigError if it is malformed or unknown."""
    model, _, sequences = text.partition(" ")
    return rollout_case(text, model, sequences, options.completion, micro=1, tiny=options.tiny, kv_share=KV_SHARE)


@contextmanager
def sides(cases: Sequence[RolloutCase], options: argparse.Namespace, directory: Path) -> Iterator[dict[str, Take]]:
    """Yields the turns of the sides of cases of one model."""
    model = write_with_tokenizer(cases[0].shape, directory, cases[0].precision)
    order = {"cases": [asdict(case) for case in cases], "model": str(model), "steps": options.steps}
    yield {
        side: partial(turn, module, order | settings) for side, (module, settings) in SIDES.items() if side in options.sides
    }


def turn(module: str, order: Mapping[str, Any]) -> dict[str, Turn]:
    """Runs a side's process."""
    return {name: Turn(seconds[1:]) for name, seconds in execute(module, order).items()}


def finish(rows: list[Row]) -> list[Row]:
    """Adds the completion tokens per second."""
    return [row | {"tokens_per_s": row["tokens"] / row["median_s"]} for row in rows]
