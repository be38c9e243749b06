"""Predicts the seconds of a run's step, by phase: `dagrl inspect CONFIG --time GPU`.

A phase of train workers is a sequence of microbatches, each as long as its kernels, or as their launches where these take
longer. Kernels are counted by what limits them: matrix products and attention by FLOPs; norms, activations, rotations and
sums over the vocabulary by the bytes that they move. An engine step reads weights and KV cache once, and with many sequences
its products take longer than reading the weights.

`GPUS` has the limits of GPUs. The shares of them that kernels reach are of an H200, in bfloat16, and taken for every GPU;
`tests/unit/run/test_step_time.py` has the runs to which they were fitted, and those that check them.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from dagrl.config import Config, Json, PolicyConfig
from dagrl.config.plan import RunPlan
from dagrl.config.roles import GENERATION
from dagrl.config.run import PHASES
from dagrl.config.settings import (
    bucket_widths,
    generation_config,
    generation_dtype,
    least_shared,
    phase_path,
    samples_per_step,
    sends_adapters,
)
from dagrl.run.memory import GIB, OURS, Decoder, RoleMemory, is_scalar, role_model, saved_bytes, state_bytes
from dagrl.run.plans import load_phase, run_plans


@dataclass(frozen=True)
class GpuRates:
    """FLOP/s of dense products in bfloat16; bytes a second of memory, to another GPU of the host by NCCL, and to the host
    by PCIe; bytes of memory."""

    flops: float
    memory: float
    link: float
    host: float
    capacity: float


GPUS = {
    "H200": GpuRates(989e12, 4.8e12, 365e9, 45e9, 139.8 * GIB),
    "H100": GpuRates(989e12, 3.35e12, 365e9, 45e9, 79.6 * GIB),  # SXM, by its data sheet alone
}

PRODUCTS = 0.72  # share of the FLOPs that matrix products reach

# Share that attention reaches in endless sequences, and the length that reaches half of it: FlashAttention 2 in packed rows
# with less work than this (`cudnn_attention.LEAST_WORK`), cuDNN otherwise.
FLASH, CUDNN = (0.27, 850), (0.455, 700)
LEAST_WORK = 1 << 36

# Bytes that a training step's other kernels move: for each byte saved for the backward pass, for each logit, for each weight
# by a microbatch, which adds to its gradient, and by the optimizer.
TRAFFIC, LOGIT_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 7.1, 14.5, 8, 55

LAUNCH_S = 4.5e-3  # to launch a layer's kernels for a microbatch, forward and backward, from Python
WAITING = 0.2  # share of a phase from which on launches on other hosts would make another time
PHASE_S = 0.012  # of a phase, in which rows are split and copied, and metrics read


@dataclass(frozen=True)
class EngineRates:
    """Seconds of a layer with any batch, bytes moved to sample from a logit, share of the memory's rate at which KV caches
    are read, and seconds to begin and end a request."""

    layer_s: float
    sampled_bytes: float
    cache: float
    request_s: float


ENGINE = EngineRates(36e-6, 59, 1.03, 0.2e-3)  # more than the memory's rate, as samples of a prompt share its cache
PLAIN_ENGINE = EngineRates(51e-6, 160, 0.98, 0.7e-3)  # with vLLM's own attention and scores

REFIT_S, COPIES = 0.002, 3  # of a refit without its bytes; how often a GPU's memory moves those that stay on it

# Seconds in which no phase runs: of a step that reads data, of one that generates, and of each sample, which is decoded,
# scored and made into a batch.
STEP_S, GRPO_STEP_S, SAMPLE_S = 0.005, 0.03, 0.19e-3

NOT_COUNTED = ("evaluate", "keep_columns", "logprob_inference_prep", "training_prep")  # not in every step, or short


@dataclass(frozen=True)
class Rows:
    """A batch: the tokens of each sequence, how many of all have a label in the loss, and, of each sequence, how many were
    generated. `saved` is the part that packed rows do not compute, as they share prompts."""

    lengths: Sequence[float]
    scored: float
    completions: Sequence[float] = ()
    saved: float = 0.0

    @property
    def tokens(self) -> float:
        return sum(self.lengths)

    def take(self, count: int) -> Rows:
        """Returns `count` of the sequences, in equal steps."""
        lengths = [self.lengths[index * len(self.lengths) // count] for index in range(count)]
        return replace(self, lengths=lengths, scored=self.scored * sum(lengths) / self.tokens)


@dataclass(frozen=True)
class PhaseTime:
    """Seconds of a phase, by part. `about` says what it works on. With reasons in `unknown` it is no prediction."""

    phase: str
    parts: Mapping[str, float]
    about: str = ""
    unknown: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def generated_rows(config: Config, prompts: Sequence[float], mean: float | None = None) -> Rows:
    """Returns a step's samples of prompts with these tokens.

    Completions are as `forced_lengths` has them, or have the `mean`, as if each token was the last one with the same
    probability, or else are as long as they may be. Their order is random.
    """
    generation, group, count = generation_config(config), config.grpo.num_generations_per_prompt, samples_per_step(config)
    points, forced = [(index + 0.5) / count for index in range(count)], generation.forced_lengths
    completions = [float(generation.max_new_tokens)] * count
    if mean is not None:
        completions = [-mean * math.log(point) for point in points]
    elif forced is not None:
        completions = [forced.median * math.exp(forced.sigma * NormalDist().inv_cdf(point)) for point in points]
    random.Random(0).shuffle(completions)  # noqa: S311  # not cryptography
    completions = [min(generation.max_new_tokens, max(1, round(length))) for length in completions]
    whole = [prompts[number // group % len(prompts)] for number in range(count)]
    shared, least = sum(whole) * (1 - 1 / group) / (sum(whole) + sum(completions)), least_shared(config.policy)
    saved = 0.0 if least is None or shared < least else shared
    return Rows([sum(pair) for pair in zip(whole, completions, strict=True)], sum(completions), completions, saved)


def split_rows(policy: PolicyConfig, rows: Rows, *, trains: bool) -> tuple[int, float]:
    """Returns the number of microbatches of a shard's rows, and the tokens of each with padding (`row_plans.py`)."""
    count = len(rows.lengths)
    if policy.sequence_packing.enabled:
        tokens, budget = rows.tokens * (1 - rows.saved), policy.microbatch_tokens("train" if trains else "logprob")
        mean, eighth = tokens / count, budget / 8
        number = math.ceil(tokens / min(budget, max(1, budget // mean) * mean))
        return number, min(budget, eighth * math.ceil(tokens / number / eighth))
    number = math.ceil(count / (policy.train_micro_batch_size if trains else policy.logprob_batch_size))
    widths = bucket_widths(policy)
    return number, math.ceil(count / number) * next((one for one in widths if one >= max(rows.lengths)), widths[-1])


def active_weights(model: Decoder) -> float:
    """Returns the weights of the layers that a token passes."""
    return model.dense_weights + model.expert_weights * model.chosen / max(1, model.experts)


def train_time(
    policy: PolicyConfig, model: Decoder, gpu: GpuRates, rows: Rows, weights: float = 0.0, *, trains: bool = True
) -> tuple[dict[str, float], str]:
    """Returns the seconds of a phase over a shard's rows, by part, and its microbatches in words.

    `trains`: an optimizer step, otherwise log-probabilities alone. `weights`: their number, 0 if unknown.
    """
    layout, fsdp, megatron = policy.train_layout, policy.backend == "fsdp", policy.megatron_cfg
    count, width = split_rows(policy, rows, trains=trains)
    recomputes = policy.fsdp_cfg.activation_checkpointing if fsdp else megatron.activation_checkpointing
    passes = (3 if recomputes in (False, "none") else 4) if trains else 1
    attended = 3 if trains and recomputes in ("selective", "offloaded") else passes  # its results are kept
    split, tokens = layout.tp * layout.pp, count * width / layout.cp
    logits = model.vocabulary / layout.tp * rows.scored / layout.cp
    products = 2 * passes * tokens * active_weights(model) / split + 2 * (3 if trains else 1) * logits * model.hidden
    alone = not policy.sequence_packing.enabled or 2 * rows.tokens / len(rows.lengths) > width  # a sequence for each row
    large = width / layout.cp * model.queries / layout.tp * max(rows.lengths) >= LEAST_WORK
    share, half = CUDNN if alone or (large and not (policy.deterministic or rows.saved)) else FLASH
    pairs = sum(length * (length + half) / 2 for length in rows.lengths)  # over the part of the share that is reached
    moved = TRAFFIC * passes / 3 * saved_bytes(policy, model) * tokens / layout.pp + LOGIT_BYTES * logits
    own = ((weights or model.weights) - model.expert_weights * (1 - 1 / layout.ep)) / split
    seconds = {
        "matrix products": products / (PRODUCTS * gpu.flops),
        "attention": 4 * attended * model.layers * model.queries * pairs / (split * layout.cp * share * gpu.flops),
        "other kernels": moved / gpu.memory,
        "sums of gradients": GRADIENT_BYTES * count * own / gpu.memory if trains else 0.0,
        "collectives": _sent_bytes(policy, model, tokens, max(1, passes - 1), own if trains else 0.0) / gpu.link,
    }
    seconds["pipeline bubble"] = (layout.pp - 1) / (count * layout.vpp) * sum(seconds.values())
    launches = 0.0 if megatron.cuda_graphs and not fsdp else LAUNCH_S * passes / 3 * count * model.layers / layout.pp
    seconds["waiting for launches"] = max(0.0, launches - sum(seconds.values()))
    if trains:
        ranks = layout.dp * layout.cp if fsdp or megatron.use_distributed_optimizer else 1
        seconds["optimizer"] = OPTIMIZER_BYTES * own / ranks / gpu.memory
    parts = {name: value for name, value in seconds.items() if value} | {"begin and end": PHASE_S}
    return parts, f"{count} microbatch{'es' if count > 1 else ''} of {width:,.0f} tokens"


def _sent_bytes(policy: PolicyConfig, model: Decoder, tokens: float, ways: int, trained: float) -> float:
    """Returns the bytes that a rank sends in a phase of `tokens` tokens, which pass its layers `ways` times, forward or
    backward, by ring algorithms. `trained`: weights that it trains."""
    layout, ranks = policy.train_layout, policy.train_layout.dp * policy.train_layout.cp
    states = 2 * tokens * model.hidden / layout.pp
    sent = 4 * ways * model.layers * states * (layout.tp - 1) / layout.tp  # two sums
    keys = model.keys / (layout.tp * layout.pp)
    sent += 4 * ways * model.layers * tokens * keys * (layout.cp - 1)  # keys and values of the others
    sent += 2 * ways * model.sparse * model.chosen * states * (layout.ep - 1) / layout.ep  # to experts and back
    return sent + 6 * trained * (ranks - 1) / ranks  # float32 gradients, and weights


def generate_time(config: Config, model: Decoder, gpu: GpuRates, rows: Rows) -> tuple[dict[str, float], str, float]:
    """Returns the seconds in which an engine generates its share of a batch, by part, this share in words, and the bytes of
    KV cache of all that runs at once, on each GPU.

    With updates in flight an engine works on as many batches at once as the largest age: a batch has their time over this.
    """
    asynchronous = config.grpo.async_grpo
    batches = max(1, asynchronous.max_age_steps) if asynchronous.in_flight_weight_updates else 1
    engine, lengths = generation_config(config).vllm_cfg, rows.completions[:: generation_config(config).vllm_cfg.layout.dp]
    tp, width, active = engine.layout.tp, 4 if generation_dtype(config) == "float32" else 2, active_weights(model)
    prompt = (rows.tokens - sum(rows.completions)) / len(rows.completions)
    rates = PLAIN_ENGINE if config.policy.deterministic else ENGINE
    running, waiting = list[tuple[float, float]](), list(reversed(lengths)) * batches  # the last and the first step of each
    now = decoding = most = 0.0
    group = config.grpo.num_generations_per_prompt  # samples that share the cache of their prompt
    while waiting or running:  # where a sequence ends, another begins
        while waiting and len(running) < engine.max_num_seqs:
            heapq.heappush(running, (now + waiting.pop(), now))
        count, steps = len(running), running[0][0] - now
        context = prompt + now + steps / 2 - sum(begin for _, begin in running) / count
        touched = 1 - (1 - model.chosen / model.experts) ** count if model.experts else 0.0  # share of the experts
        read = width * (model.dense_weights + touched * model.expert_weights + model.embedding) / gpu.memory
        cache = 2 * width * model.layers * model.keys * context / rates.cache
        each = (cache + rates.sampled_bytes * model.vocabulary) / gpu.memory
        products = max(read, 2 * count * (active + model.embedding) / (PRODUCTS * gpu.flops))
        decoding += steps * (rates.layer_s * model.layers + (products + count * each) / tp)
        most = max(most, math.ceil(count / group) * prompt + count * (context + steps / 2 - prompt))
        now = running[0][0]
        while running and running[0][0] <= now:
            heapq.heappop(running)
    prefill = 2 * active * len(lengths) / group * prompt / tp / (PRODUCTS * gpu.flops)
    parts = {"decoding": decoding / batches, "prompts": prefill, "requests": rates.request_s * len(lengths)}
    tokens, steps = sum(lengths) / len(lengths), now / batches
    about = f"{len(lengths)} completions of {tokens:,.0f} tokens in {steps:,.0f} engine steps"
    return parts, about, most * 2 * width * model.layers * model.keys / tp


def refit_time(config: Config, plan: RunPlan, model: Decoder, gpu: GpuRates, weights: float) -> dict[str, float]:
    """Returns the seconds in which each generation rank receives its weights, from its own GPU or from others."""
    engine = generation_config(config).vllm_cfg
    width = 1 if engine.precision == "fp8" else 4 if generation_dtype(config) == "float32" else 2
    received = 0.0 if sends_adapters(config) else width * (weights or model.weights) / engine.layout.tp
    alone = plan.colocated and plan.layouts[GENERATION].world_size == 1
    return {"weights": received / (gpu.memory / COPIES if alone else gpu.link), "begin and end": REFIT_S}


def run_times(
    config: Config, plan: RunPlan, hf: Mapping[str, Json], gpu: GpuRates, rows: Rows, memory: Sequence[RoleMemory] = ()
) -> list[PhaseTime]:
    """Returns the seconds of each phase of a step over `rows`, and of what is in between. `memory`: that of the roles."""
    times, names = list[PhaseTime](), [phase.name for phase in run_plans(config, plan)]
    cache, needed = next((role.parts["KV cache"] for role in memory if role.role == GENERATION), math.inf), 0.0
    for phase in sorted(names, key=lambda name: (name != "generate") + name.endswith("_step") + 2 * (name == "refit")):
        if phase in NOT_COUNTED or (plan.generates and phase == "demonstration_step"):
            continue
        role = GENERATION if phase in ("generate", "refit") else load_phase(config, phase).roles[0]
        policy, model, weights = role_model(config, role, hf)
        if phase == "generate":
            parts, about, needed = generate_time(config, model, gpu, rows)
        elif phase == "refit":
            parts, about = refit_time(config, plan, model, gpu, weights), ""
        else:
            trains = phase.endswith("_step")
            size = policy.train_global_batch_size * (2 if phase == "preference_step" else 1)
            steps = math.ceil(len(rows.lengths) / size) if trains else 1
            own = rows.take(math.ceil(len(rows.lengths) / (steps * policy.train_layout.dp)))
            own = replace(own, scored=0.0 if is_scalar(plan, role) else own.scored if trains else own.tokens)
            parts, about = train_time(policy, model, gpu, own, weights, trains=trains)
            parts = {name: steps * seconds for name, seconds in parts.items()}
            about = f"{steps} x {about}" if steps > 1 else about
            copied = policy.reference_weights == "host" and not policy.peft.enabled  # there and back, in both directions
            if phase.startswith("reference") and copied:
                parts["weights to the GPU"] = 4 * state_bytes(policy, model, weights).get("weights", 0.0) / gpu.host
        waits = parts.get("waiting for launches", 0.0) > WAITING * sum(parts.values())
        reasons = ["launches take longer than kernels: how long depends on the host"] * waits
        reasons += ["sequences wait for KV cache: not counted"] * (phase == "generate" and needed > cache)
        times.append(PhaseTime(phase, parts, about, (*_unknown(config, phase, policy, model), *reasons)))
    shared = [role for role in memory if role.role in plan.sharing]
    excess = sum(role.total for role in shared) - gpu.capacity
    if plan.takes_turns and excess > 0:
        state = sum(role.state for role in shared if role.role != GENERATION)
        times.append(PhaseTime("exchange", {"to the host and back": 2 * min(excess, state) / gpu.host}))
    between = {"step": GRPO_STEP_S, "samples": SAMPLE_S * len(rows.lengths)} if plan.generates else {"step": STEP_S}
    return [*times, PhaseTime("overhead", between)]


def _unknown(config: Config, phase: str, policy: PolicyConfig, model: Decoder) -> tuple[str, ...]:
    """Returns why the seconds of a phase are no prediction."""
    path, generation, fsdp = phase_path(config, phase), config.policy.generation, policy.backend == "fsdp"
    worker = generation.worker if generation is not None and phase == "generate" else policy.worker
    reasons: dict[str, object] = {
        f"{path}: a phase of your own": path != PHASES.get(phase),
        f"{worker}: a worker of your own": not worker.startswith(OURS) and phase != "refit",
        f"{model.unlike}: not counted": model.unlike and phase != "refit",
    }
    if generation is not None and phase == "generate":
        reasons |= {
            "turns with an environment or agent: not known": config.environment.enabled or config.environment.agent,
            "an engine without CUDA graphs: not measured": generation.vllm_cfg.enforce_eager,
            "an engine in FP8: not measured": generation.vllm_cfg.precision == "fp8",
            "adapters in the engine: not measured": sends_adapters(config),
            "top_p and top_k: not measured": generation.top_p < 1 or generation.top_k not in (None, 0, -1),
        }
    elif phase != "refit":
        reasons |= {
            "float32: not measured": policy.precision != "bfloat16",
            "layers without torch_compile: not measured": fsdp and not policy.fsdp_cfg.torch_compile,
            "cpu_offload: not measured": fsdp and policy.fsdp_cfg.cpu_offload,
            "adapters: counted as all weights": policy.peft.enabled,
        }
    return tuple(text for text, here in reasons.items() if here)


def step_seconds(config: Config, times: Sequence[PhaseTime]) -> float:
    """Returns the seconds of a step. Engines of asynchronous runs generate while the others work."""
    seconds = {time.phase: time.seconds for time in times}
    ahead = seconds.get("generate", 0.0) if config.grpo.async_grpo.enabled else 0.0
    total = sum(seconds.values()) - ahead
    return max(total, ahead + seconds.get("refit", 0.0))


def time_table(config: Config, times: Sequence[PhaseTime], gpu: str) -> str:
    """Returns the seconds of each phase and part."""
    lines, unknown = [f"seconds of a step on {gpu}"], sum((time.unknown for time in times), ())
    for time in (*times, PhaseTime("step", {"": step_seconds(config, times)}, "", unknown)):
        about = f"{', no prediction' if time.unknown else ''}  {time.about}"
        lines.append(f"{time.phase:<30}{time.seconds:9.3f}{about}".rstrip())
        lines += [f"  {part:<28}{seconds:9.3f}" for part, seconds in time.parts.items() if len(time.parts) > 1]
        lines += [f"  {reason}" for reason in time.unknown if time.phase != "step"]
    return "\n".join(lines) + "\n"
