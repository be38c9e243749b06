"""Writes run directories as `dagrl train` does, with chosen numbers: two steps of four samples."""

import json
import math
from pathlib import Path
from typing import Any

from dagrl.telemetry.rollouts import RolloutFiles, table_of

ANSWER = ["Nat", "alia", " sold", " 48", "/2", " =", " 24", "\n", "#### ", "72", "<eos>"]
MARKUP = "<b>not markup</b>"


def make_run(directory: Path, name: str, *, steps: int = 2, drift: float = 0.01) -> Path:
    """Writes the run and returns its directory. In sample 2 the last token but one has a log-ratio of `drift` * step."""
    run = directory / name
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(
        f"name: {name}\nalgorithm: grpo\npolicy: {{model_name: models/qwen}}\nsft: {{max_num_steps: 0}}\n"
        "grpo: {max_num_steps: 8}\n"
    )
    files = RolloutFiles(run / "rollouts", max_bytes=None)
    for step in range(1, steps + 1):
        add_step(run, files, step, drift)
    return run


def add_step(run: Path, files: RolloutFiles, step: int, drift: float) -> None:
    """Writes the rollouts of a step and then its metrics, as a run does."""
    files.write(step, table_of([sample_row(step, place, drift) for place in range(4)]))
    line = {"step": step, "stage": "grpo", "time": 1e9 + 90 * step, "reward/mean": 0.2 * step, "loss": 0.5 / step}
    times = {"timing_s/total": 3.0, "timing_s/generate": 2.0, "timing_s/train_step": 0.5 + step / 10}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**line, **times}) + "\n")


def sample_row(step: int, place: int, drift: float) -> dict[str, Any]:
    """Returns a sample of a question of GSM8K. That of place 3 has a turn of an environment, that of place 1 three
    conversations."""
    count = len(ANSWER)
    logprobs = [-math.log(at + 1) for at in range(count)]
    train = [one + 1e-4 for one in logprobs]
    if place == 2:
        train[-2] += drift * step
    sampled = [not (place == 3 and 2 <= at < 5) for at in range(count)]
    turns = [("policy", 0, count)] if place != 3 else [("policy", 0, 2), ("environment", 2, 5), ("policy", 5, count)]
    about = {"step": step, "split": "train", "dropped": "", "valid": True, "finish_reason": "stop"}
    question = {"group": step, "place": place, "source": "train.jsonl, line 1", "task": "gsm8k", "reference": "72"}
    rewards = {"reward": place / 4, "reward_parts": {"right": place / 4, "format": 0.0}, "advantage": place - 1.5}
    tokens = {"prompt_tokens": [1, 2, 3], "tokens": list(range(10, 10 + count)), "token_texts": ANSWER, "sampled": sampled}
    by_turn = {"policy": 0.5, "environment": None}
    sample = {
        **(about | question | rewards | tokens),
        "prompt": f"How many clips did Natalia sell? {MARKUP}",
        "completion": "".join(ANSWER[:-1]) + f" ({place})",
        "turns": [
            {"role": role, "text": "".join(ANSWER[i:j]), "start": i, "end": j, "reward": by_turn[role]}
            for role, i, j in turns
        ],
        "logprobs": logprobs,
        "train_logprobs": train,
        "reference_logprobs": [one - 0.05 for one in train],
        "entropy": [0.3 * at for at in range(count)],
        "versions": [step - 1 - (at < 5) for at in range(count)],
    }
    conversations = [{**sample, "trained": trained, "prompt": "Another question"} for trained in (True, False)]
    return {**sample, "conversations": conversations if place == 1 else []}
