"""Trains every text architecture that transformers and the installed vLLM build at tiny size, and compares with plain torch.

    python -m dagrl.bench.train_architectures --json F                     all of them
    python -m dagrl.bench.train_architectures --names Gemma3ForCausalLM    some of them

For each architecture transformers builds a tiny model with random float32 weights. FSDP workers take three SFT steps and two
GRPO steps with it, on two data-parallel ranks and on two tensor-parallel ones, with padded rows and with packed ones where
the model can be packed. Losses and gradient norms must be those of transformers and AdamW in one process, row by row without
padding: to 1e-5, and to one part in 1e4. Each architecture has processes of its own, with a deadline.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dagrl.bench.forked import reason_of, run_forked
from dagrl.bench.tiny_configs import NoTinyConfigError, tiny_model
from dagrl.config import Config
from dagrl.runtime.shapes import Batch
from dagrl.runtime.split import split_rows
from dagrl.runtime.store import reserve_port
from dagrl.runtime.worker import WorkerContext
from dagrl.telemetry.metrics import merge_step_metrics
from dagrl.workers.fsdp import FsdpWorker
from dagrl.workers.train.hf_load import read_hf_config

LAYOUTS: Mapping[str, Mapping[str, int]] = {"dp2": {"data_parallel_size": 2}, "tp2": {"tensor_parallel_size": 2}}
STEPS = ("likelihood",) * 3 + ("policy",) * 2
WIDTH, TEMPERATURE = 22, 0.7
PACKED = {"enabled": True, "train_mb_tokens": 44, "logprob_mb_tokens": 44}


@dataclass(frozen=True)
class TrainRow:
    """One architecture in one layout: whether it trains as plain torch, otherwise the reason."""

    architecture: str
    layout: str
    passed: bool
    reason: str = ""
    loss_difference: float | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--names", nargs="+")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=300.0)
    run(parser.parse_args())


def run(options: argparse.Namespace) -> None:
    """Writes a row for each architecture and layout as soon as it is done."""
    from vllm.model_executor.models import registry

    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    torch.set_num_threads(1)
    rows: list[TrainRow] = []
    for name in options.names or registry._TEXT_GENERATION_MODELS:
        for row in try_architecture(name, options.seconds):
            rows.append(row)
            difference = "" if row.loss_difference is None else f"{row.loss_difference:.1e}"
            what = "passed" if row.passed else "FAILED"
            sys.stdout.write(f"{what} {row.architecture} {row.layout} {difference} {row.reason}\n")
            sys.stdout.flush()
        if options.json:
            text = ",\n".join(json.dumps(asdict(row)) for row in rows)
            options.json.write_text(f"[\n{text}\n]\n")
    sys.stdout.write(f"{sum(row.passed for row in rows)} of {len(rows)} passed\n")


def try_architecture(name: str, seconds: float) -> list[TrainRow]:
    """Returns a row for each layout. A crash or a hang is a reason like any other."""
    with tempfile.TemporaryDirectory() as root:
        reason = run_forked(_train_all, (name, Path(root)), seconds)
        report = Path(root, "rows.json")
        rows = [TrainRow(**row) for row in json.loads(report.read_text())] if report.exists() else []
    done = {row.layout for row in rows}
    return rows + [TrainRow(name, layout, False, reason) for layout in LAYOUTS if layout not in done]


def _train_all(name: str, root: Path) -> None:
    """Writes `rows.json` in `root`, with a row for each layout as soon as it is done."""
    model = root / "model"
    try:
        tiny_model(name, seed=0).float().save_pretrained(model)  # type: ignore[operator]
        truth: Any = plain_steps(model)
    except NoTinyConfigError as error:
        truth = str(error)
    except Exception as error:
        truth = f"transformers: {reason_of(error)}"
    rows: list[TrainRow] = []
    for layout in LAYOUTS:
        rows.append(TrainRow(name, layout, False, truth) if isinstance(truth, str) else _row(name, layout, model, truth))
        (root / "rows.json").write_text(json.dumps([asdict(row) for row in rows]))


def _row(name: str, layout: str, model: Path, truth: Sequence[tuple[float, float]]) -> TrainRow:
    found: list[float] = []
    reason = ""
    for packing in ({}, PACKED):
        config = make_config(model, LAYOUTS[layout], packing)
        if refusal := run_forked(FsdpWorker.check, (config, read_hf_config(model))):  # apart: DTensor keeps its mesh
            if packing and "sequence_packing" in refusal:
                reason = "padded rows alone: layers have a state"
                break
            return TrainRow(name, layout, False, refusal)
        try:
            steps = sharded_steps(config)
        except Exception as error:
            if packing and "see each other" in str(error):  # so do workers when they start
                reason = "padded rows alone: transformers' masks of this class do not tell packed sequences apart"
                break
            return TrainRow(name, layout, False, reason_of(error))
        wrong = [
            f"step {number} has loss {loss:.6f} and norm {norm:.5f}, expected {true_loss:.6f} and {true_norm:.5f}"
            for number, ((loss, norm), (true_loss, true_norm)) in enumerate(zip(steps, truth, strict=True), 1)
            if not (abs(loss - true_loss) < 1e-5 * max(1.0, abs(true_loss)) and abs(norm / true_norm - 1) < 1e-4)
        ]
        if wrong:
            return TrainRow(name, layout, False, f"{'packed' if packing else 'padded'}: {wrong[0]}")
        found.append(max(abs(loss - true_loss) for (loss, _), (true_loss, _) in zip(steps, truth, strict=True)))
    return TrainRow(name, layout, True, reason, max(found))


def make_config(model: Path, layout: Mapping[str, int], packing: Mapping[str, Any]) -> Config:
    """Returns the configuration of a run."""
    policy = {
        "model_name": str(model),
        "backend": "fsdp",
        "fsdp_cfg": dict(layout),
        "train_micro_batch_size": 2,
        "optimizer": {"lr": 1e-3, "adam_eps": 1e-6},
        "generation": {"temperature": TEMPERATURE},
        "sequence_packing": dict(packing),
    }
    loss = {"reference_policy_kl_penalty": 0.0}
    return Config.model_validate({"name": "tiny", "algorithm": "grpo", "data": {}, "policy": policy, "loss_fn": loss})


def make_batch() -> Batch:
    """Returns rows of very different lengths, for both kinds of steps."""
    generator = np.random.default_rng(11)
    lengths = np.array([22, 5, 17, 3, 21, 9, 4, 13], dtype=np.int64)
    inside = np.arange(WIDTH) < lengths[:, None]
    mask = (inside & (np.arange(WIDTH) >= 1)).astype(np.float32)
    shape = len(lengths), WIDTH
    fields: dict[str, Any] = {
        "tokens": generator.integers(8, 250, shape) * inside,
        "lengths": lengths,
        "loss_mask": mask,
        "advantages": generator.normal(size=(len(lengths), 1)).astype(np.float32) * mask,
        "generation_logprobs": generator.normal(-5.5, 0.3, shape).astype(np.float32) * mask,
        "prev_logprobs": generator.normal(-5.5, 0.3, shape).astype(np.float32) * mask,
    }
    return Batch(fields, {"global_valid_tokens": float(mask.sum()), "global_valid_sequences": float(len(lengths))})


def plain_steps(directory: Path) -> list[tuple[float, float]]:
    """Returns loss and gradient norm of each step of transformers' model with AdamW, in one process."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    batch, wanted = make_batch(), make_config(directory, {}, {}).policy.optimizer
    groups = [
        {"params": [one for one in model.parameters() if (one.ndim > 1) is matrices], "weight_decay": decay}
        for matrices, decay in ((True, wanted.weight_decay), (False, 0.0))
    ]
    adam = torch.optim.AdamW(groups, lr=wanted.lr, betas=(wanted.adam_beta1, wanted.adam_beta2), eps=wanted.adam_eps)
    found = []
    for kind in STEPS:
        adam.zero_grad()
        loss = _plain_loss(model, batch, kind)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), wanted.clip_grad)
        adam.step()
        found.append((float(loss), float(norm)))
    return found


def _plain_loss(model: Any, batch: Batch, kind: str) -> Tensor:
    total = torch.zeros(())
    for row, length in enumerate(batch["lengths"].tolist()):
        tokens = torch.tensor(batch["tokens"][row, :length])
        logits = model(tokens[None], use_cache=False).logits[0, :-1].float() / (TEMPERATURE if kind == "policy" else 1.0)
        logprobs = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        if kind == "likelihood":
            total = total - logprobs.sum()
            continue
        before, advantages = (torch.tensor(batch[name][row, 1:length]) for name in ("prev_logprobs", "advantages"))
        ratio = (logprobs - before).exp()
        total = total - torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()
    return total / batch.number("global_valid_tokens")


def sharded_steps(config: Config) -> list[tuple[float, float]]:
    """Returns the same numbers of the steps of FSDP workers, each in a process of its own."""
    size, address = config.policy.train_layout.world_size, f"127.0.0.1:{reserve_port()}"
    with ProcessPoolExecutor(size, mp_context=multiprocessing.get_context("fork")) as pool:
        calls = [pool.submit(_rank_steps, config, address, rank) for rank in range(size)]
        errors = [error for call in calls if (error := call.exception()) is not None]
        if errors:  # peers of a rank that failed have lost a connection
            raise min(errors, key=lambda error: "gloo" in str(error))
        ranks = [call.result() for call in calls]
    merged = [merge_step_metrics(list(parts)).flat() for parts in zip(*ranks, strict=True)]
    return [(step["loss"], step["grad_norm"]) for step in merged]


def _rank_steps(config: Config, address: str, rank: int) -> list[Any]:
    layout, batch = config.policy.train_layout, make_batch()
    worker = FsdpWorker(WorkerContext("train", rank, layout, config.seed, 60.0), config)
    worker.prepare()
    worker.setup(address)
    own = batch.select(split_rows(batch["lengths"], layout.dp)[layout.coordinates(rank).dp])
    return [worker.train_step(own, kind) for kind in STEPS]


if __name__ == "__main__":
    main()
