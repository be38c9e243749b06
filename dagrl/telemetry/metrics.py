"""Metrics of a step: how the parts that workers report become one number each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

# Names in metrics.jsonl, TensorBoard and the plot, NeMo-RL's where it has them: `loss` and the losses' own as they are, and
REWARD_MEAN = "reward/mean"  # of a step's samples, as the reward function gave it
KL = "policy/kl"  # to the reference policy, per token
ENTROPY = "policy/entropy"  # nats per token
ENVIRONMENT_FAILURES = "environment/failures"  # of a step's samples, those that the environment failed for
CLIP_RATIO = "policy/clip_ratio"  # share of tokens whose ratio PPO's clip cut
TOKENS_PER_SEC = "perf/tokens_per_sec"  # of prompts and completions trained on
TOKENS_PER_SEC_PER_GPU = "perf/tokens_per_sec_per_gpu"  # by the run's GPUs; by its workers on a machine without
# with a prefix:
TIMING = "timing_s/"  # seconds of a phase in the step; `timing_s/total` is the step's wall time
IDLE = "idle/"  # share of the step, 0 to 1, in which the workers of a role ran no phase
STALENESS = "staleness/"  # policy versions between a token and the step that trains on it
DROPPED = "dropped/"  # groups given up since the run began, by reason
UPDATE = TIMING + "update"  # from the end of training until generation has the weights: what ran there, and the refit
UPDATE_PAUSE = TIMING + "update_pause"  # generation stood still for a refit; `timing_s/refit` counts from the asking
STEP_OVERHEAD = "perf/step_overhead_s"  # of the step's wall time, that in which no replay was computing on its longest path
QUANTUM_OVERHEAD = "perf/quantum_overhead"  # share of the time of quanta in which no engine ran
EXPOSED = TIMING + "exposed_generation"  # time in which training waited for generation, 0 where it did not
SPANS = frozenset({TIMING + "total", EXPOSED, UPDATE, UPDATE_PAUSE})  # no phases: they contain some
FILLED_TOKENS = "filled_tokens"  # tokens of the batch among
PROCESSED_TOKENS = "processed_tokens"  # those that the model was given, padding included
MICROBATCH_PADDING = "microbatch_padding_share"  # share of those that is padding; `padding_share` is of the batch as sent
TRAIN_SECONDS = "perf/train_seconds"  # of an optimizer step and what came early, on the slowest worker; from it and
TRAIN_TFLOP = "train_tflop"  # the model's FLOPs by Megatron's formula (`workers.megatron.flops`), in 10^12,
TRAIN_TOKENS = "train_tokens"  # tokens,
TRAIN_RANKS = "train_ranks"  # train workers
PEAK_TFLOPS = "peak_tflops"  # and what a GPU can do at most, in 10^12 FLOP/s, come
TRAIN_TOKENS_PER_SEC = "perf/policy_training_tokens_per_sec"
TRAIN_TOKENS_PER_SEC_PER_GPU = "perf/policy_training_tokens_per_sec_per_gpu"
TRAIN_TFLOPS_PER_GPU = "perf/train_tflops_per_gpu"
TRAIN_MFU = "perf/train_fp_utilization"  # model FLOPs utilization, 0 to 1; only where the peak is known
PEAK_MEMORY = "perf/peak_memory_gib"  # of the train worker that held most, since it started; each worker's own below
RANK = "perf/rank_"  # of each: `perf/rank_3/train_seconds`, `perf/rank_3/peak_memory_gib`, and of its own tokens and FLOPs
RANK_TOKENS_PER_SEC = "policy_training_tokens_per_sec"  # after `perf/rank_3/`, by its own seconds
RANK_TFLOPS = "train_tflops"
RANK_MFU = "train_fp_utilization"
VALID_TOKENS = "valid_tokens"  # in the loss
MASKED_MINIBATCHES = "masked_minibatches"  # of a step, left out because no token of theirs is in the loss
GRAD_NORM = "grad_norm"  # before clipping; of several optimizer steps the largest
COUNTS = frozenset({VALID_TOKENS, FILLED_TOKENS, PROCESSED_TOKENS, TRAIN_TFLOP, TRAIN_TOKENS})  # the other `sums` are means
SKIPPED_STEPS = "skipped_steps"  # of the run so far, left out for a gradient of zero, or not finite
VALIDATION = "validation/"  # measured on held-out data, on some steps only


@dataclass(frozen=True)
class StepMetrics:
    """What one or more workers report of a step.

    `sums` add up over workers (a loss already divided by the global token count, token counts), `maxima` keep the largest,
    `shared` are equal on every worker that reports them (learning rate, gradient norm).
    """

    sums: Mapping[str, float] = field(default_factory=dict)
    maxima: Mapping[str, float] = field(default_factory=dict)
    shared: Mapping[str, float] = field(default_factory=dict)

    def flat(self) -> dict[str, float]:
        """All metrics in one dictionary; of the tokens of microbatches, the share that is padding, and throughput."""
        metrics = {**self.sums, **self.maxima, **self.shared}
        if TRAIN_SECONDS in metrics:
            metrics |= throughput(metrics)
        if PROCESSED_TOKENS in metrics:
            metrics[MICROBATCH_PADDING] = 1.0 - metrics.pop(FILLED_TOKENS) / metrics.pop(PROCESSED_TOKENS)
        return metrics


def throughput(metrics: dict[str, float]) -> dict[str, float]:
    """Figures of a train step, of all workers and of each, from what they reported; takes out of `metrics` what that was."""
    tokens, tflop, ranks = (metrics.pop(name) for name in (TRAIN_TOKENS, TRAIN_TFLOP, TRAIN_RANKS))
    seconds, peak = metrics[TRAIN_SECONDS], metrics.pop(PEAK_TFLOPS, None)
    figures = {
        TRAIN_TOKENS_PER_SEC: tokens / seconds,
        TRAIN_TOKENS_PER_SEC_PER_GPU: tokens / seconds / ranks,
        TRAIN_TFLOPS_PER_GPU: tflop / seconds / ranks,
    }
    if peak is not None:
        figures[TRAIN_MFU] = figures[TRAIN_TFLOPS_PER_GPU] / peak
    ranks_seconds = [name for name in metrics if name.startswith(RANK) and name.endswith("/train_seconds")]
    for name in ranks_seconds:
        figures |= _of_rank(name.removesuffix("train_seconds"), metrics, peak)
    return figures


def _of_rank(prefix: str, metrics: dict[str, float], peak: float | None) -> dict[str, float]:
    tokens, tflop = (metrics.pop(prefix + name) for name in (TRAIN_TOKENS, TRAIN_TFLOP))
    seconds = metrics[prefix + "train_seconds"]
    figures = {prefix + RANK_TOKENS_PER_SEC: tokens / seconds, prefix + RANK_TFLOPS: tflop / seconds}
    return figures if peak is None else {**figures, prefix + RANK_MFU: tflop / seconds / peak}


def merge_step_metrics(parts: Iterable[StepMetrics]) -> StepMetrics:
    """One `StepMetrics` from many; associative, so that it can be joined in a tree."""
    sums: dict[str, float] = {}
    maxima: dict[str, float] = {}
    shared: dict[str, float] = {}
    for part in parts:
        for name, value in part.sums.items():
            sums[name] = sums.get(name, 0.0) + value
        for name, value in part.maxima.items():
            maxima[name] = float(np.maximum(maxima.get(name, value), value))  # of NaN too
        shared.update(part.shared)
    return StepMetrics(sums, maxima, shared)


def join_optimizer_steps(parts: Sequence[StepMetrics]) -> StepMetrics:
    """One `StepMetrics` of the optimizer steps that a batch was trained on in.

    Means are weighted by the tokens in the loss, counts and seconds add up; of maxima and gradient norms the largest stays,
    of what else is shared (the learning rate) the last.
    """
    if len(parts) == 1:
        return parts[0]
    tokens = np.array([part.sums.get(VALID_TOKENS, 1.0) for part in parts])
    ones, shares = np.ones(len(parts)), tokens / tokens.sum()
    table = {name: np.array([part.sums[name] for part in parts]) for name in parts[0].sums}
    sums = {name: float(values @ (ones if _is_count(name) else shares)) for name, values in table.items()}
    maxima = {
        name: float(np.sum(values) if name.endswith("train_seconds") else np.max(values))
        for name, values in ((name, [part.maxima[name] for part in parts]) for name in parts[0].maxima)
    }
    norms = [part.shared[GRAD_NORM] for part in parts if GRAD_NORM in part.shared]
    return StepMetrics(sums, maxima, {**parts[-1].shared, **({GRAD_NORM: float(np.max(norms))} if norms else {})})


def _is_count(name: str) -> bool:
    """Also of a single worker: `perf/rank_3/train_tokens`."""
    return name in COUNTS or (name.startswith(RANK) and name.rpartition("/")[2] in COUNTS)
