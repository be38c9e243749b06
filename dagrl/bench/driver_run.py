"""What the driver costs in whole GRPO steps of a real run, with simulated workers; two checkouts in turn.

    python -m dagrl.bench.driver_run --samples 128,1024 --json F [--against before=DIR] [--rounds N] [--steps N]

The loop, scheduler, graphs, refit, reward process and files are those of `dagrl train`; prompts have 120 tokens, completions
256. An engine makes all tokens of a quantum at once and then sleeps, and an optimizer step sleeps for 0.3 s.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from dagrl.bench.report import Row, add_outputs, report_rows
from dagrl.config.file import load_config
from dagrl.data import Example, Splits
from dagrl.rl.generation import FinishedRequest, Generated, RequestProgress, pack_generated, quantum_seconds, quantum_steps
from dagrl.rl.rewards import RewardRunner
from dagrl.run.loops import grpo, grpo_step
from dagrl.run.plans import grpo_plans
from dagrl.run.start import open_session
from dagrl.runtime.shapes import Batch
from dagrl.runtime.worker import in_warmup
from dagrl.telemetry.record import read_metrics
from tests.integration.unigram_workers import SIZE, UnigramGenerator

PROMPT, COMPLETION, GROUP = 120, 256, 8
STEP_S = 0.003
SKIPPED = 2
"""Steps that do not count: imports, memory and caches settle in them."""
COUNTED = ("thread_cpu_s", "process_cpu_s", "wall_s", "overhead_s")


def prompts(count: int = 512, train_s: float = 0.0, engine_step_s: float = 0.0) -> Splits:
    """Prompts of `PROMPT` characters; the other arguments are read by the workers."""
    examples = tuple(Example(f"{number:0{PROMPT - 1}d}=", "", source=f"number {number}") for number in range(count))
    return Splits(examples, examples, examples[:1])


class QuickGenerator(UnigramGenerator):
    """Draws the tokens of a request when it ends, and sleeps for the rest of its engine steps."""

    def generate(self, batch: Batch) -> Generated:
        """See the class."""
        if in_warmup():
            return pack_generated([], [], 0)
        started = time.perf_counter()
        rows = zip(*(batch[name].tolist() for name in ("request_ids", "max_new_tokens", "lengths")), strict=True)
        for request, limit, length in rows:
            if length:
                self.running[request] = {"left": limit}
        most = int(min(quantum_seconds(batch) / STEP_S, quantum_steps(batch, self.context.coordinates.dp)))
        steps = min(max(most, 1), max((one["left"] for one in self.running.values()), default=0))
        finished, table = [], self._log_table()
        for request, one in list(self.running.items()):
            one["left"] -= steps
            if one["left"] <= 0:
                tokens = np.random.default_rng(request).integers(2, SIZE - 1, COMPLETION)
                columns = tokens.tolist(), table[tokens].tolist(), [self.version] * COMPLETION
                finished.append(FinishedRequest(request, *columns, "length"))
                del self.running[request]
        made = pack_generated(finished, map(RequestProgress, self.running), steps)
        time.sleep(max(0.0, steps * STEP_S - (time.perf_counter() - started)))
        return made


def steps_of(samples: int, steps: int) -> dict[str, list[float]]:
    """Runs the loop; returns each of `COUNTED` by step."""
    marks: list[tuple[float, ...]] = []

    def counted(*arguments: Any) -> None:
        grpo_step.finish_step(*arguments)
        marks.append((time.thread_time(), time.process_time(), time.perf_counter()))

    with patch.object(grpo, "finish_step", counted), tempfile.TemporaryDirectory() as directory:
        config = load_config(
            Path(__file__).with_name("step_simulated.yaml"),
            [
                f"output_dir={directory}",
                "policy.generation.worker=dagrl.bench.driver_run:QuickGenerator",
                f"policy.generation.forced_lengths={{median: {COMPLETION}, sigma: 0}}",
                f"policy.generation.vllm_cfg={{data_parallel_size: 1, max_num_seqs: {samples}}}",
                f"policy.generation.max_new_tokens={COMPLETION}",
                f"policy.max_total_sequence_length={PROMPT + COMPLETION}",
                f"policy.train_global_batch_size={samples}",
                f"grpo={{num_prompts_per_step: {samples // GROUP}, num_generations_per_prompt: {GROUP}, val_period: 0}}",
                f"grpo.max_num_steps={steps + SKIPPED + 1}",  # the last one validates
                "data.task=dagrl.bench.driver_run:prompts",
                f"data.task_args={{train_s: 0.3, engine_step_s: {STEP_S}}}",
                "logger.trace_enabled=true",
            ],
        )
        with open_session(config, grpo_plans) as session, RewardRunner(config.reward) as reward:
            grpo.train_grpo(session, reward)
            metrics = read_metrics(session.recorder.paths.metrics)
    spent = np.diff(np.asarray(marks[SKIPPED - 1 : -1]), axis=0).T.tolist()
    overhead = [float(line["perf/step_overhead_s"] or 0.0) for line in metrics[SKIPPED:-1]]
    return dict(zip(COUNTED, [*spent, overhead], strict=True))


def measure(trees: dict[str, Path], sizes: Sequence[int], rounds: int, steps: int) -> list[Row]:
    """Runs each checkout in turn, each time in a process of its own; returns a row per checkout and size.

    Medians and quartiles over steps, in seconds: processor time of the main thread and of the whole driver, the step, and
    the part of it in which no worker computed (`perf/step_overhead_s`).
    """
    found: dict[tuple[str, int], dict[str, list[float]]] = {}
    for _, samples, (name, tree) in product(range(rounds), sizes, trees.items()):
        command = [sys.executable, "-m", "dagrl.bench.driver_run", "--samples", str(samples), "--steps", str(steps), "--raw"]
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        made = subprocess.run(command, env=environment, cwd=tree, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603
        joined = found.setdefault((name, samples), defaultdict(list))
        for key, values in json.loads(made.stdout.splitlines()[-1]).items():
            joined[key] += values
    return [
        {"tree": name, "samples": samples, "steps": len(columns["wall_s"])}
        | {key: np.percentile(columns[key], [25, 50, 75]).tolist() for key in COUNTED}
        for (name, samples), columns in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", default="128,1024", help="samples of a step, e.g. 128,1024")
    parser.add_argument("--steps", type=int, default=8, help="counted steps of a run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each checkout and size")
    parser.add_argument("--against", metavar="NAME=DIR", help="another checkout, measured in turn")
    add_outputs(parser, plot=False)
    parser.add_argument("--raw", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = [int(size) for size in options.samples.split(",")]
    if options.raw:
        print(json.dumps(steps_of(sizes[0], options.steps)))
        return
    name, _, tree = (options.against or "").partition("=")
    trees = {**({name: Path(tree).absolute()} if tree else {}), "here": Path(__file__).resolve().parents[1]}
    report_rows(options, [measure(trees, sizes, options.rounds, options.steps)], lambda rows: print(*rows, sep="\n"))


if __name__ == "__main__":
    main()
