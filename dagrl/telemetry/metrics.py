"""Metric names, and how the parts that workers report are merged into the metrics of a step.

Names are those of metrics.jsonl and the trackers, NeMo-RL's where it has them. Metrics of a loss keep their names.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

REWARD = "reward/"  # prefix: means of a step's samples by part, `parts/<part>`, and by task, `tasks/<task>`
REWARD_MEAN = "reward/mean"  # of a step's samples, unshaped
EQUAL_GROUPS = "reward/equal_groups"  # share of a step's groups whose valid rewards are all equal
KL = "policy/kl"  # to the reference policy, per token
ENTROPY = "policy/entropy"  # nats per token
CLIP_RATIO = "policy/clip_ratio"  # share of tokens whose probability ratio was clipped
ACCURACY = "preference/accuracy"  # share of pairs whose chosen answer has the higher reward or score
ENVIRONMENT_FAILURES = "environment/failures"  # samples of a step for which the environment failed
VALIDATION = "validation/"  # prefix of metrics of held-out data, which only some steps have
EVALUATION = "evaluation/"  # prefix: right greedy answers to standard sets, and the interval `_low` to `_high` of 95 %
STALENESS = "staleness/"  # prefix: policy versions between a token and the step that trains on it
DROPPED = "dropped/"  # prefix: groups dropped since the run began, by reason

# Time
TIMING = "timing_s/"  # prefix: seconds of a phase in the step; `timing_s/total` is the step's wall time
UPDATE = TIMING + "update"  # from the end of training until generation has the weights, including the refit
UPDATE_PAUSE = TIMING + "update_pause"  # how long a refit stopped generation; `timing_s/refit` starts at its request
EXPOSED = TIMING + "exposed_generation"  # how long training waited for generation
SPANS = frozenset({TIMING + "total", EXPOSED, UPDATE, UPDATE_PAUSE})  # not phases: these contain phases
IDLE = "idle/"  # prefix: share of the step, 0 to 1, in which the workers of a role ran no phase
STEP_OVERHEAD = "perf/step_overhead_s"  # part of the wall time in which no replay on the critical path was computing
REFIT_BYTES = "perf/refit_bytes"  # what the generation workers received in the step's refit
QUANTUM_OVERHEAD = "perf/quantum_overhead"  # share of the time of quanta in which no engine ran

# Tokens
VALID_TOKENS = "valid_tokens"  # tokens in the loss
FILLED_TOKENS = "filled_tokens"  # tokens of the batch, without those that were shared
SAVED_TOKENS = "saved_tokens"  # tokens of the batch that were not computed, as sequences share a prefix
PROCESSED_TOKENS = "processed_tokens"  # tokens that the model processed, including padding
MICROBATCH_PADDING = "microbatch_padding_share"  # padding among the processed tokens; `padding_share` is of the sent batch
SHARED_PREFIXES = "shared_prefix_share"  # share of the batch's tokens that were not computed, as sequences share a prefix
TOKENS_PER_SEC = "perf/tokens_per_sec"  # prompt and completion tokens of the step per second
TOKENS_PER_SEC_PER_GPU = "perf/tokens_per_sec_per_gpu"  # per GPU of the run, or per worker without GPUs

MEASURED = (TIMING, IDLE, "perf/", "time", "replay_overhead_s")  # prefixes of what depends on the machine, not on the data

# Experts of a model that has them, as means over its layers
LOAD_BALANCING_LOSS = "moe/load_balancing_loss"  # without its coefficient; 1 if balanced; only if it is on
ROUTER_ENTROPY = "moe/router_entropy"  # nats, of the router's probabilities, per token
BUSIEST_EXPERT = "moe/max_load"  # tokens of the busiest expert in the step over the mean of all experts
BUSIEST_EXPERT_OF_WORST_LAYER = "moe/max_load_of_worst_layer"  # the largest of the layers
UNUSED_EXPERTS = "moe/unused_experts"  # share of the experts without a token in the step
REPLAYED_TOKENS = "moe/replayed_tokens"  # share of the tokens whose experts were those of generation
REPLAYED_AGREEMENT = "moe/replayed_agreement"  # share of the replayed experts that the router chose too

# Optimizer steps
GRAD_NORM = "grad_norm"  # before clipping; the largest of several optimizer steps
SKIPPED_STEPS = "skipped_steps"  # optimizer steps of the run skipped because the gradient was zero or not finite
MASKED_MINIBATCHES = "masked_minibatches"  # minibatches of a step skipped because they have no token in the loss

# What train workers report of a step, and `StepMetrics.flat` turns into the metrics below
TRAIN_TFLOP = "train_tflop"  # model TFLOPs
TRAIN_TOKENS = "train_tokens"
TRAIN_RANKS = "train_ranks"  # number of train workers
PEAK_TFLOPS = "peak_tflops"  # peak TFLOP/s of a GPU, if known
TRAIN_SECONDS = "perf/train_seconds"  # of an optimizer step, on the slowest worker

TRAIN_TOKENS_PER_SEC = "perf/policy_training_tokens_per_sec"
TRAIN_TOKENS_PER_SEC_PER_GPU = "perf/policy_training_tokens_per_sec_per_gpu"
TRAIN_TFLOPS_PER_GPU = "perf/train_tflops_per_gpu"
TRAIN_MFU = "perf/train_fp_utilization"  # model FLOPs utilization, 0 to 1, if the peak is known
PEAK_MEMORY = "perf/peak_memory_gib"  # largest of the train workers, since they started
RANK = "perf/rank_"  # prefix of each worker's own: `perf/rank_3/train_seconds`, `perf/rank_3/peak_memory_gib`

COUNTS = frozenset(  # other `sums` are means
    {VALID_TOKENS, FILLED_TOKENS, SAVED_TOKENS, PROCESSED_TOKENS, TRAIN_TFLOP, TRAIN_TOKENS}
)


def is_measured(name: str) -> bool:
    """Whether a metric measures time or memory: it differs between two executions of the same step."""
    return name.startswith(MEASURED)


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of a step from one or more workers.

    `sums` add up over workers (token counts, and losses already divided by the global token count), `maxima` keep the
    largest, and `shared` are equal on every worker that reports them (learning rate, gradient norm).
    """

    sums: Mapping[str, float] = field(default_factory=dict)
    maxima: Mapping[str, float] = field(default_factory=dict)
    shared: Mapping[str, float] = field(default_factory=dict)

    def flat(self) -> dict[str, float]:
        """Returns all metrics in one dictionary, with throughput and the padding of microbatches."""
        metrics = {**self.sums, **self.maxima, **self.shared}
        if TRAIN_SECONDS in metrics:
            tokens, tflop, ranks = (metrics.pop(name) for name in (TRAIN_TOKENS, TRAIN_TFLOP, TRAIN_RANKS))
            seconds, peak = metrics[TRAIN_SECONDS], metrics.pop(PEAK_TFLOPS, None)
            metrics[TRAIN_TOKENS_PER_SEC] = tokens / seconds
            metrics[TRAIN_TOKENS_PER_SEC_PER_GPU] = tokens / seconds / ranks
            metrics[TRAIN_TFLOPS_PER_GPU] = tflop / seconds / ranks
            if peak is not None:
                metrics[TRAIN_MFU] = metrics[TRAIN_TFLOPS_PER_GPU] / peak
        if PROCESSED_TOKENS in metrics:
            filled, saved = metrics.pop(FILLED_TOKENS), metrics.pop(SAVED_TOKENS)
            metrics[MICROBATCH_PADDING] = 1.0 - filled / metrics.pop(PROCESSED_TOKENS)
            metrics[SHARED_PREFIXES] = saved / max(filled + saved, 1.0)
        return metrics


def merge_step_metrics(parts: Iterable[StepMetrics]) -> StepMetrics:
    """Merges metrics of several workers; associative, so that a tree can join them."""
    sums: dict[str, float] = {}
    maxima: dict[str, float] = {}
    shared: dict[str, float] = {}
    for part in parts:
        for name, value in part.sums.items():
            sums[name] = sums.get(name, 0.0) + value
        for name, value in part.maxima.items():
            maxima[name] = float(np.maximum(maxima.get(name, value), value))  # keeps NaN
        shared.update(part.shared)
    return StepMetrics(sums, maxima, shared)


def join_optimizer_steps(parts: Sequence[StepMetrics]) -> StepMetrics:
    """Merges metrics of the optimizer steps of one batch.

    Means are weighted by the tokens in the loss; counts and seconds add up. Of maxima and gradient norms the largest counts,
    of other shared metrics (the learning rate) the last.
    """
    if len(parts) == 1:
        return parts[0]
    tokens = np.array([part.sums.get(VALID_TOKENS, 1.0) for part in parts])
    ones, shares = np.ones(len(parts)), tokens / tokens.sum()
    table = {name: np.array([part.sums[name] for part in parts]) for name in parts[0].sums}
    sums = {name: float(values @ (ones if name in COUNTS else shares)) for name, values in table.items()}
    maxima = {
        name: float(np.sum(values) if name.endswith("train_seconds") else np.max(values))
        for name, values in ((name, [part.maxima[name] for part in parts]) for name in parts[0].maxima)
    }
    norms = [part.shared[GRAD_NORM] for part in parts if GRAD_NORM in part.shared]
    return StepMetrics(sums, maxima, {**parts[-1].shared, **({GRAD_NORM: float(np.max(norms))} if norms else {})})
