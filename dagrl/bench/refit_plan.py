"""Measures refit planning: `dagrl inspect --phase refit` of full-size models, in seconds and memory, without weights.

Every turn is a process that does everything the command does: imports, phase graphs and their drawing, descriptions of all
ranks, the plan and its summary. Rows have its processor time (`cpu_s`, which stays comparable while other jobs run), the
peak of its memory, and the plan's figures.
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
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from dagrl.bench import harness
from dagrl.bench.harness import Column, Contest, Take, Turn, process_environment
from dagrl.bench.refit_mappings import TABLE, RefitMapping
from dagrl.errors import ConfigError, RunError

_LIMIT_S = 300.0
_TITLE = re.compile(r"refit of ([\d,.]+) MB from (\d+) to (\d+) ranks, (\d+) buckets")
COLUMNS = (
    Column("CPU s", "cpu_s", "{:.2f}"),
    Column("peak GiB", "peak_gib", "{:.2f}"),
    Column("buckets", "buckets", "{:.0f}"),
)


def run(options: argparse.Namespace) -> None:
    """Measures the mappings whose names begin with one of `options.cases`."""
    cases = [case for case in TABLE if str(case).startswith(tuple(options.cases or [""]))]
    if not cases:
        raise ConfigError(f"--cases {' '.join(options.cases)}: no mapping; choose from {', '.join(map(str, TABLE))}")
    contests = []
    for case in cases:
        sizes = {str(case): {"train_ranks": case.train.world_size, "generation_ranks": case.tp * case.dp}}
        contests.append(Contest(str(case), sizes, partial(sides, case)))
    harness.run(options, contests, COLUMNS)


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


@contextmanager
def sides(case: RefitMapping) -> Iterator[dict[str, Take]]:
    """Yields the one side."""
    yield {"dagrl inspect": partial(inspect, case)}


def inspect(case: RefitMapping) -> dict[str, Turn]:
    """Runs the command once in its own process. Raises RunError if it fails or does not end."""
    with tempfile.TemporaryDirectory() as root:
        config, output = Path(root, "config.yaml"), Path(root, "output")
        config.write_text(yaml.safe_dump(configuration(case)))
        words = ["inspect", str(config), "--phase", "refit", "-o", str(Path(root, "refit.mmd"))]
        start = time.perf_counter()
        with output.open("w") as file:
            process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", "dagrl.cli.main", *words], stdout=file, stderr=file, env=process_environment()
            )
        late = threading.Timer(_LIMIT_S, process.kill)
        late.start()
        _, status, used = os.wait4(process.pid, 0)  # what `subprocess` hides: the resources of this process alone
        late.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds, text = time.perf_counter() - start, output.read_text()
    title = _TITLE.search(text)
    if process.returncode or title is None:
        raise RunError(f"dagrl inspect of {case} ended with {process.returncode}, or printed no plan: {text[-2000:]}")
    facts = {"cpu_s": used.ru_utime + used.ru_stime, "peak_gib": used.ru_maxrss / 2**20, "buckets": int(title[4])}
    return {str(case): Turn([seconds], facts | {"gigabytes": float(title[1].replace(",", "")) / 1e3})}
