"""dagrl's side of GRPO in `bench peers`: the synchronous loop, colocated on one GPU."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from dagrl.bench.peers.case import GROUP, PeerCase
from dagrl.bench.turns import Told, serve, take_turns
from dagrl.config import Config

if TYPE_CHECKING:
    from dagrl.run.session import Session

PACKED = 1024
"""Fewest tokens of a packed row for each sequence of the other side's microbatches, which are padded."""

TOTAL = "timing_s/total"
KL = "gen_kl_error"

IN_FP8: Mapping[str, Mapping[str, str]] = {
    "": {},
    "fp8": {"precision": "fp8"},
    "kv": {"kv_cache_dtype": "fp8"},
    "fp8-kv": {"precision": "fp8", "kv_cache_dtype": "fp8"},
}
"""Keys of the engines, by variant."""


def side_config(case: PeerCase, model: Path, output: Path, variant: str = "") -> Config:
    """Returns the configuration of the run: one optimizer step per batch, no penalty, completions of equal length."""
    tokens = case.prompt + case.completion + 8
    packed = max(PACKED, tokens) * case.micro
    values: dict[str, Any] = {
        "name": "peers",
        "algorithm": "grpo",
        "output_dir": str(output),
        "policy": {
            "model_name": str(model),
            "precision": case.precision,
            "train_global_batch_size": case.sequences,
            "train_micro_batch_size": min(case.micro, case.sequences),
            "max_total_sequence_length": tokens,
            "sequence_packing": {"enabled": True, "train_mb_tokens": packed, "logprob_mb_tokens": 2 * packed},
            "generation": {
                "max_new_tokens": case.completion,
                "forced_lengths": {"median": case.completion, "sigma": 0.0},
                # What is free during warm-up depends on the other side, if it is there.
                "colocated": {"enabled": case.kind == "grpo", "exchange": "never" if case.together else "auto"},
                "vllm_cfg": {
                    "max_num_seqs": case.slots,
                    "enforce_eager": case.tiny,
                    "max_model_len": tokens,
                    "gpu_memory_utilization": 0.1,  # of no effect with a given cache, but this much must be free
                    "kv_cache_memory_bytes": case.kv_bytes,
                    **IN_FP8[variant],
                },
            },
        },
        "grpo": {
            "num_prompts_per_step": case.sequences // GROUP,
            "num_generations_per_prompt": GROUP,
            "max_num_steps": 1,
            "val_period": 0,
            "val_at_start": False,
        },
        "loss_fn": {"reference_policy_kl_penalty": 0.0, "force_on_policy_ratio": True},
        "data": {
            "task": "dagrl.bench.gpu.task:prompts",
            "task_args": {"count": 16 * case.sequences // GROUP, "characters": case.prompt},
        },
        "reward": {"function": "dagrl.bench.gpu.task:alternating"},
        "checkpointing": {"enabled": False, "export_hf": False},
        "logger": {"tensorboard_enabled": False, "plot_enabled": False, "trace_enabled": False, "log_level": "INFO"},
    }
    return Config.model_validate(values)


def of_case(session: Session, case: PeerCase) -> Session:
    """Returns the session with the batch of a case, which is at most that of its warm-up, and nothing to validate on."""
    config = session.config
    grpo = config.grpo.model_copy(update={"num_prompts_per_step": case.sequences // GROUP})
    policy = config.policy.model_copy(update={"train_global_batch_size": case.sequences})
    config = config.model_copy(update={"grpo": grpo, "policy": policy})
    return replace(session, config=config, inputs=replace(session.inputs, validation_prompts=[]))


def work(told: Told) -> None:
    """Opens a session and takes turns of the synchronous loop."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    logging.getLogger("dagrl").setLevel(logging.INFO)  # among others, the parts of the start
    from dagrl.bench.step import Metrics, Variant, begin_again
    from dagrl.rl.rewards import RewardRunner
    from dagrl.run.loops.grpo import train_grpo
    from dagrl.run.plans import grpo_plans
    from dagrl.run.start import open_session
    from dagrl.telemetry.record import read_metrics

    with tempfile.TemporaryDirectory() as directory:
        config = side_config(told.order.largest, told.order.model, Path(directory), told.order.variant)
        with open_session(config, grpo_plans) as session, RewardRunner(session.config.reward) as reward:

            def take(case: PeerCase, steps: int) -> list[float]:
                sized = of_case(session, case)
                asked = begin_again(sized, sized.config, Variant("sync", enabled=False), None, steps)
                session.replays.close_step(tokens=0)
                train_grpo(asked, reward)
                session.checkpoints.parts.clear()
                session.train.call("offload", ())  # gives the memory that no tensor uses to the other side
                metrics: Sequence[Metrics] = read_metrics(session.recorder.paths.metrics)[-steps:]
                if found := [float(step[KL]) for step in metrics if KL in step]:
                    told.notes[KL] = median(found)
                return [float(step[TOTAL]) for step in metrics]

            take_turns(told, take)


if __name__ == "__main__":
    serve(work)
