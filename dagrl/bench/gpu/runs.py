"""Tables of training runs: learning, agreement of the engines, speed, and time by phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from dagrl.telemetry.metrics import IDLE, REWARD_MEAN, SPANS, TIMING, TOKENS_PER_SEC_PER_GPU, TRAIN_MFU
from dagrl.telemetry.record import read_metrics

LEARNED = ("run", "SFT loss: first", "last", "GRPO steps", "loss: first", "last", "reward: first", "last")
AGREED = ("KL between engines: median", "largest")
SPEED = ("run", "step s", "tokens/s/GPU", "MFU of train", "idle train", "idle generation", "replay overhead ms")
UNKNOWN = "not recorded"
SETTLED = 2
"""Steps at the start of a run that do not count in its times."""

MetricsLine = Mapping[str, Any]


def run_tables(paths: Sequence[Path]) -> list[str]:
    """Returns Markdown tables: learning, then medians of the steps' times; empty without runs."""
    runs = {path.name.removeprefix("run-").partition(".")[0]: read_metrics(path) for path in paths}
    steps = {name: [line for line in lines if line["stage"] == "grpo" and "loss" in line] for name, lines in runs.items()}
    steps = {name: found for name, found in steps.items() if found}
    if not steps:
        return []
    phases = list(dict.fromkeys(phase for found in steps.values() for phase in _phases(found)))
    learned = [[name, *_learned(runs[name], found)] for name, found in steps.items()]
    speed = [[name, *_speed(found[SETTLED:] or found, phases)] for name, found in steps.items()]
    ms = [f"{phase.removeprefix(TIMING).replace('_', ' ')} ms" for phase in phases]
    return [*_table((*LEARNED, *AGREED), learned), "", *_table((*SPEED, *ms), speed)]


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}", *(f"| {' | '.join(row)} |" for row in rows)]


def _phases(steps: Sequence[MetricsLine]) -> list[str]:
    return [name for step in steps for name in step if name.startswith(TIMING) and name not in SPANS]


def _learned(lines: Sequence[MetricsLine], steps: Sequence[MetricsLine]) -> list[str]:
    """Returns first and last losses and rewards, and the disagreement of the engines."""
    taught = [line for line in lines if line["stage"] == "sft" and "loss" in line]
    kls = [float(step["gen_kl_error"]) for step in steps if step.get("gen_kl_error") is not None]
    return [
        *(_ends(taught, "loss") if taught else ("", "")),
        str(len(steps)),
        *_ends(steps, "loss"),
        *_ends(steps, REWARD_MEAN),
        *((f"{median(kls):.1e}", f"{max(kls):.1e}") if kls else (UNKNOWN, UNKNOWN)),
    ]


def _ends(steps: Sequence[MetricsLine], name: str) -> tuple[str, str]:
    """Returns the first and last value of a metric. Runs that lack it, old or without a step, have none."""
    found = [float(step[name]) for step in steps if step.get(name) is not None]
    return (f"{found[0]:.4f}", f"{found[-1]:.4f}") if found else (UNKNOWN, UNKNOWN)


def _speed(steps: Sequence[MetricsLine], phases: Sequence[str]) -> list[str]:
    """Returns medians over steps; empty where no step has a value."""
    return [
        _median(steps, TIMING + "total", "{:.3f}"),
        _median(steps, TOKENS_PER_SEC_PER_GPU, "{:,.0f}"),
        *(_median(steps, name, "{:.0%}") for name in (TRAIN_MFU, IDLE + "train", IDLE + "generation")),
        *(_median(steps, name, "{:.1f}", 1e3) for name in ("replay_overhead_s", *phases)),
    ]


def _median(steps: Sequence[MetricsLine], name: str, text: str, times: float = 1.0) -> str:
    found = [float(step[name]) for step in steps if step.get(name) is not None]
    return text.format(times * median(found)) if found else ""
