"""Reads what the page shows of a run from its `metrics.jsonl` and `rollouts/`, also while the run writes them."""

import json
import math
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from dagrl.errors import ConfigError
from dagrl.telemetry.rollouts import OTHER, STEP, read_rollouts, rollout_files

Summary = dict[str, Any]

SNIPPET = 200  # characters of a prompt or completion in the table of samples

MEDIUM = re.compile("[0-9a-f]{16}")

PLACEHOLDERS = re.compile(r"(<[^<>\s]+>|\[[A-Z_]+\])(?:\s?\1){7,}")
"""The tokens of an image in a text: hundreds of equal ones."""

WORST = 20  # samples of a step that may be among the outliers of the run

SECTIONS: Mapping[str, tuple[str, ...]] = {"sft": ("sft",), "dpo": ("preference",), "reward_model": ("preference",)}
"""The sections with the numbers of steps, by algorithm; the others have an optional stage `sft` before `grpo`."""

SHOWN = (
    *("split", "dropped", "group", "place", "source", "task"),
    *("reward", "reward_parts", "advantage", "valid", "failure", "finish_reason"),
)
TEXTS = ("prompt", "completion", "reference")
TOKENS = ("sampled", "logprobs", "train_logprobs", "versions")


class RunView:
    """Reads one run. Files of rollouts never change once they are there, except when a resumed run repeats their steps."""

    def __init__(self, directory: Path) -> None:
        """Raises ConfigError if the directory is not a run's."""
        if not (directory / "config.yaml").is_file():
            raise ConfigError(
                f"{directory} is not the directory of a run: it has no config.yaml; name one, such as runs/my_run"
            )
        self.directory, self._rollouts = directory, directory / "rollouts"
        self._summaries: dict[Path, tuple[int, list[Summary]]] = {}
        self._lock = threading.Lock()
        try:
            self.about()
        except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{directory / 'config.yaml'} is not what a run saves ({error!r}); put it back, or name another run"
            ) from error

    def about(self) -> Summary:
        """Returns the run's name, algorithm, model and number of steps."""
        config = yaml.safe_load((self.directory / "config.yaml").read_text(encoding="utf-8"))
        generates = ":" not in config["algorithm"] or config["policy"].get("generation") is not None
        stages = SECTIONS.get(config["algorithm"], ("sft", "grpo") if generates else ("sft",))
        steps = sum((config.get(stage) or {}).get("max_num_steps") or 0 for stage in stages)
        return {
            "name": config["name"],
            "algorithm": config["algorithm"],
            "model": config["policy"].get("model_name"),
            "directory": str(self.directory.absolute()),
            "total_steps": steps,
        }

    def metrics(self, after: int = 0) -> Summary:
        """Returns the lines of `metrics.jsonl` from byte `after` on, and where the next ones begin.

        `after` 0 is returned with all lines if the file became shorter, because a resumed run dropped some.
        """
        path = self.directory / "metrics.jsonl"
        if not path.exists():
            return {"after": 0, "next": 0, "lines": []}
        after = after if after <= path.stat().st_size else 0
        with path.open("rb") as file:
            file.seek(after)
            whole = file.read().rpartition(b"\n")[0]
        lines = [json.loads(line) for line in whole.splitlines()]
        return {"after": after, "next": after + (len(whole) + 1 if whole else 0), "lines": lines}

    def steps(self) -> list[Summary]:
        """Returns each step that has rollouts, with the mean reward and largest KL of what it trained on."""
        steps = {step for kind in (STEP, OTHER) for step in rollout_files(self._rollouts, kind)}
        return [_step_summary(step, self.samples(step)) for step in sorted(steps)]

    def samples(self, step: int) -> list[Summary]:
        """Returns a line for each sample of a step: those trained on, then others. Raises KeyError if it has no rollouts."""
        lines = [line for path in self._files(step) for line in self._samples(path)]
        return [{**line, "row": number} for number, line in enumerate(lines)]

    def outliers(self) -> list[Summary]:
        """Returns the samples of the run whose KL between engine and trainer is largest."""
        every = [sample for path in rollout_files(self._rollouts).values() for sample in _worst(self._samples(path))]
        return _worst(every)

    def sample(self, step: int, row: int) -> Summary:
        """Returns everything about one sample. Raises KeyError or IndexError if there is none."""
        at = row
        for path in self._files(step):
            count = len(self._samples(path))
            if at < count:
                found = read_rollouts(path)[at]
                return {**found, "prompt": folded(found["prompt"]), "row": row}
            at -= count
        raise IndexError(f"row {row} of step {step}")

    def medium(self, name: str) -> bytes:
        """Returns the file of an image. Raises KeyError for what is no such name, and FileNotFoundError without the file."""
        if not MEDIUM.fullmatch(name):
            raise KeyError(name)
        return (self.directory / "media" / name).read_bytes()

    def _files(self, step: int) -> list[Path]:
        """Returns the files of a step. Raises KeyError if there are none."""
        paths = [files[step] for kind in (STEP, OTHER) if step in (files := rollout_files(self._rollouts, kind))]
        if not paths:
            raise KeyError(step)
        return paths

    def _samples(self, path: Path) -> list[Summary]:
        written = path.stat().st_mtime_ns
        with self._lock:
            if self._summaries.get(path, (0, []))[0] != written:
                rows = read_rollouts(path, ["step", *SHOWN, *TEXTS, *TOKENS])
                self._summaries[path] = written, [_sample_summary(row, number) for number, row in enumerate(rows)]
            return self._summaries[path][1]


def folded(text: str) -> str:
    """Returns a text with one placeholder and a count for the tokens of each image."""
    return PLACEHOLDERS.sub(lambda run: f"{run[1]} \u00d7 {run[0].count(run[1])}", text)


def to_json(data: object) -> str:
    """Returns strict JSON: numbers that are not finite become null."""
    try:
        return json.dumps(data, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(_finite(data), separators=(",", ":"), allow_nan=False)


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {name: _finite(value) for name, value in data.items()}
    if isinstance(data, list):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def token_kl(logprobs: npt.ArrayLike, train_logprobs: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Returns the k3 estimate [tokens] of KL(engine || trainer) from log-probabilities of sampled tokens.

    Source: Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html.
    """
    difference = np.asarray(train_logprobs, np.float64) - np.asarray(logprobs, np.float64)
    return np.expm1(difference) - difference


def _sample_summary(row: Summary, number: int) -> Summary:
    sampled = np.array(row["sampled"], bool)
    return {
        "step": row["step"],
        "row": number,
        **{name: row[name] for name in SHOWN},
        **{name: folded(row[name])[:SNIPPET] for name in TEXTS},
        "tokens": int(sampled.sum()),
        "versions": len({version for version, policy in zip(row["versions"], sampled, strict=True) if policy}),
        "kl": _largest_kl(row, sampled),
    }


def _largest_kl(row: Summary, sampled: npt.NDArray[np.bool_]) -> float | None:
    if row["train_logprobs"] is None or not sampled.any():
        return None
    return float(token_kl(np.array(row["logprobs"])[sampled], np.array(row["train_logprobs"])[sampled]).max())


def _worst(samples: list[Summary]) -> list[Summary]:
    return sorted((sample for sample in samples if sample["kl"] is not None), key=lambda sample: -sample["kl"])[:WORST]


def _step_summary(step: int, samples: list[Summary]) -> Summary:
    valid = [sample["reward"] for sample in samples if sample["valid"] and sample["split"] == "train"]
    return {
        "step": step,
        "samples": len(samples),
        "reward": sum(valid) / len(valid) if valid else None,
        "kl": max((sample["kl"] for sample in samples if sample["kl"] is not None), default=None),
    }
