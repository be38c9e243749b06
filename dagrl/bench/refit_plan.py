"""Measures refit planning: `dagrl inspect --phase refit` of full-size models, in seconds and memory, without weights.

    dagrl bench refit_plan --json F                              all mappings of `refit_mappings.py`
    dagrl bench refit_plan --mappings 235b dsv3 --rounds 5

Every round is a separate process that does everything the command does: imports, phase graphs and their drawing,
descriptions of all ranks, the plan and its summary. Mappings take turns. The report has the median and the slowest round:
wall time (`wall_s`), processor time (`cpu_s`, which stays comparable while other jobs run), the peak memory of any round,
and `load`, the median load average including the benchmark.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from dagrl.bench.refit_mappings import TABLE, RefitMapping
from dagrl.bench.report import Row, add_outputs, count, print_rows, report_rows
from dagrl.errors import ConfigError, RunError

_LIMIT_S = 300.0
_TITLE = re.compile(r"refit of ([\d,.]+) MB from (\d+) to (\d+) ranks, (\d+) buckets")


@dataclass(frozen=True)
class InspectRun:
    """One process: wall and processor seconds, peak memory, and the plan's figures from its output."""

    wall_s: float
    cpu_s: float
    peak_bytes: int
    plan: tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_outputs(parser, plot=False)
    parser.add_argument("--mappings", nargs="*", default=[""], help="name prefixes of mappings: 4b 30b 235b dsv3")
    parser.add_argument("--rounds", type=count, default=3, help="processes per mapping")


def run(options: argparse.Namespace) -> None:
    cases = [case for case in TABLE if str(case).startswith(tuple(options.mappings))]
    if not cases or options.rounds < 1:
        raise ConfigError(
            f"--mappings {' '.join(options.mappings)} --rounds {options.rounds} match no mapping; mappings: "
            f"{', '.join(map(str, TABLE))}"
        )
    rounds: dict[str, list[InspectRun]] = {str(case): [] for case in cases}
    loads: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(options.rounds):
            for case in cases:
                rounds[str(case)].append(_inspect(case, Path(directory)))
                loads.append(os.getloadavg()[0])
    report_rows(options, [[_row(case, rounds[str(case)], median(loads)) for case in cases]], _print)


def configuration(case: RefitMapping) -> dict[str, Any]:
    """Returns the run configuration of a mapping, as in a configuration file."""
    train = case.train
    megatron = {
        "data_parallel_size": train.dp,
        "tensor_model_parallel_size": train.tp,
        "pipeline_model_parallel_size": train.pp,
        "expert_model_parallel_size": train.ep,
        "expert_tensor_parallel_size": train.etp,
        "num_layers_in_first_pipeline_stage": train.first_stage_layers,
        "num_layers_in_last_pipeline_stage": train.last_stage_layers,
    }
    vllm = {"tensor_parallel_size": case.tp, "data_parallel_size": case.dp, "precision": "fp8" if case.fp8 else None}
    policy = {
        "worker": "dagrl.bench.refit_mappings:PlannedWorker",
        "precision": "bfloat16",
        "random_init": {"tokenizer_characters": "0123456789+=", "hf_config": case.model},
        "megatron_cfg": megatron,
        "generation": {"vllm_cfg": vllm},
    }
    return {"name": str(case), "algorithm": "grpo", "policy": policy, "data": {"task": "dagrl.rl.tasks:arithmetic"}}


def _inspect(case: RefitMapping, directory: Path) -> InspectRun:
    """Runs the command once in its own process. Raises RunError if it fails or does not end."""
    config, output = directory / f"{case}.yaml", directory / "output"
    config.write_text(yaml.safe_dump(configuration(case)))
    words = ["inspect", str(config), "--phase", "refit", "-o", str(directory / "refit.mmd")]
    program = f"import sys; from dagrl.cli.main import main; sys.exit(main({words!r}))"
    start = time.perf_counter()
    with output.open("w") as file:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=file, stderr=subprocess.STDOUT)  # noqa: S603
    late = threading.Timer(_LIMIT_S, process.kill)
    late.start()
    _, status, used = os.wait4(process.pid, 0)  # what `subprocess` hides: the resources of this process alone
    late.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    wall, text = time.perf_counter() - start, output.read_text()
    title = _TITLE.search(text)
    if process.returncode or title is None:
        raise RunError(f"dagrl inspect of {case} ended with {process.returncode}, or printed no plan: {text[-2000:]}")
    return InspectRun(wall, used.ru_utime + used.ru_stime, 1024 * used.ru_maxrss, title.groups())


def _row(case: RefitMapping, rounds: Sequence[InspectRun], load: float) -> Row:
    megabytes, sources, destinations, buckets = rounds[0].plan
    return {
        "mapping": str(case),
        "train_ranks": int(sources),
        "generation_ranks": int(destinations),
        "gigabytes": round(float(megabytes.replace(",", "")) / 1e3, 1),
        "buckets": int(buckets),
        "wall_s": round(median(one.wall_s for one in rounds), 2),
        "wall_max_s": round(max(one.wall_s for one in rounds), 2),
        "cpu_s": round(median(one.cpu_s for one in rounds), 2),
        "cpu_max_s": round(max(one.cpu_s for one in rounds), 2),
        "peak_gib": round(max(one.peak_bytes for one in rounds) / 2**30, 3),
        "n": len(rounds),
        "load": round(load, 1),
    }


def _print(rows: Sequence[Row]) -> None:
    title = "dagrl inspect --phase refit: seconds (median, slowest), memory at the peak"
    print_rows(list(rows[0]), (list(row.values()) for row in rows), title)
