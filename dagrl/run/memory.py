"""Predicts the memory that a run takes of each GPU, by role and by part: `dagrl inspect CONFIG --memory`.

Counted are the tensors that torch allocates at the peak of a training microbatch, as `perf/peak_memory_gib` measures them:
at the output layer, in the last layer's backward pass while others keep their tensors, or in the first one's, next to the
others' gradients. Each coefficient is a tensor. A decoder's layer saves for its backward pass, counted as in Korthikanti et
al. 2022 (arXiv:2205.05198), section 4.1, but with flash attention, RMSNorm and a gated MLP, in numbers a token:

    4 x hidden size      the inputs of both norms, and their results
    3 x query features   before and after the rotation, and the output of attention
    3 x key features     before and after the rotation, and values
    3 x MLP features     gate, up, and their product

Megatron's modules save these, and queries once more. That torch.compile saves all of them under FSDP, where it might compute
some again, is inferred from two measured runs. What a compiled layer has at once that computes them again was traced on
a CPU; FlashAttention and cuDNN sum up gradients of queries in float32, and have those of keys and values for every head.

`tests/unit/run/test_memory.py` has the measured runs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dagrl.config import Config, Json, PolicyConfig
from dagrl.config.plan import RunPlan
from dagrl.config.roles import CRITIC, GENERATION, TRAIN, role_config, section_key
from dagrl.config.settings import bucket_widths, casts_as_packed, generation_config, generation_dtype
from dagrl.errors import ConfigError
from dagrl.rl.algorithm import planned_algorithm
from dagrl.rl.preferences import gives_scores
from dagrl.run.model import checkpoint_bytes, language_keys, role_description

logger = logging.getLogger(__name__)

GIB = 1 << 30
ENGINE_ROOM = 6 * GIB
"""Bytes of a GPU that an engine needs in addition to weights and KV cache: activations, logits of a step, CUDA graphs."""

CUDA_CONTEXT = 610 << 20
"""Bytes of an H200 that a process takes without a tensor (`bench/results/2x-nvidia-h200/2026-11-23/train-4b.json`)."""

CHUNK_ELEMENTS = 1 << 27  # logits of a chunk of the output layer (`logprobs.CHUNK_ELEMENTS`), of which two exist
KEPT_SHARE = 0.25  # largest share of the free memory that kept exponentials of logits take (`logprobs.KEPT_SHARE`)

OURS = ("dagrl:", "dagrl.workers.")  # the beginnings of the paths of dagrl's own workers
ADAMW = "torch.optim:AdamW"
MERGED = "merged weights"
UNLIKE = 0.05
"""Share by which a checkpoint may differ from a plain decoder of its sizes, for which alone activations are known."""


@dataclass(frozen=True)
class Decoder:
    """Sizes of a decoder with grouped-query attention and gated MLPs, from its `config.json`.

    `queries` and `keys` are features of all heads. `sparse` layers have `experts`, of which a token visits `chosen`.
    `unlike` says what else the model has, whose memory is not predicted.
    """

    layers: int
    hidden: int
    queries: int
    keys: int
    ffn: int
    vocabulary: int
    tied: bool
    sparse: int
    experts: int
    chosen: int
    expert_ffn: int
    images: bool
    unlike: str

    @classmethod
    def of(cls, hf_config: Mapping[str, Json]) -> Decoder:
        """Reads the sizes. Raises ConfigError for one below 1."""
        sizes = language_keys(hf_config)
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
            if (size := size_of(sizes, key, 1)) < 1:
                raise ConfigError(f"the model's config.json has {key} = {size}; expected a number of at least 1")
        hidden, heads = size_of(sizes, "hidden_size", 4096), size_of(sizes, "num_attention_heads", 32)
        head, layers = size_of(sizes, "head_dim", hidden // heads), size_of(sizes, "num_hidden_layers", 32)
        experts = size_of(sizes, "num_experts", size_of(sizes, "num_local_experts", size_of(sizes, "n_routed_experts", 0)))
        ffn = size_of(sizes, "intermediate_size", 4 * hidden)
        images = "vision_config" in hf_config
        other = {
            "kv_lora_rank": "latent attention",
            "n_shared_experts": "shared experts",
            "layer_types": "layers of several kinds",
            "layers_block_type": "layers of several kinds",
        }
        full = {key for key, kinds in sizes.items() if isinstance(kinds, list) and {*map(str, kinds)} == {"full_attention"}}
        unlike = [what for key, what in other.items() if sizes.get(key) and key not in full]
        return cls(
            layers=layers,
            hidden=hidden,
            queries=heads * head,
            keys=size_of(sizes, "num_key_value_heads", heads) * head,
            ffn=ffn,
            vocabulary=size_of(sizes, "vocab_size", 0),
            tied=bool(hf_config.get("tie_word_embeddings")),
            sparse=layers - size_of(sizes, "first_k_dense_replace", 0) if experts else 0,
            experts=experts,
            chosen=size_of(sizes, "num_experts_per_tok", 1),
            expert_ffn=size_of(sizes, "moe_intermediate_size", ffn),
            images=images,
            unlike=", ".join(dict.fromkeys([*unlike, *(["tower and tokens of images"] if images else [])])),
        )

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def dense_weights(self) -> int:
        """Weights of all layers, without experts."""
        attention = 2 * self.hidden * (self.queries + self.keys)
        return self.layers * attention + (self.layers - self.sparse) * 3 * self.hidden * self.ffn

    @property
    def expert_weights(self) -> int:
        return self.sparse * self.experts * 3 * self.hidden * self.expert_ffn

    @property
    def weights(self) -> int:
        return self.dense_weights + self.expert_weights + self.embedding * (1 if self.tied else 2)

    def saved(self, tp: int = 1, *, split_hidden: bool = True, copied_queries: bool = False, eager: bool = False) -> float:
        """Returns the numbers that a token's layers save for the backward pass, over all layers, on one of `tp` ranks.

        `split_hidden`: sequence parallelism. `copied_queries`: Megatron keeps the joined projection, and cuts queries out of
        it. `eager`: transformers' own layers, whose norms keep float32 inputs, and activations their results.
        """
        norms, heads, gates = (8, 5, 4) if eager else (4, 3, 3)
        inner = (heads + copied_queries) * self.queries + heads * self.keys
        routed = self.chosen * (self.hidden + 3 * self.expert_ffn)  # rows in the order of experts, and their MLPs
        mlps = (self.layers - self.sparse) * gates * self.ffn + self.sparse * routed
        return self.layers * (norms * self.hidden / (tp if split_hidden else 1) + inner / tp) + mlps / tp

    def beside(self, recomputes: bool | str, tp: int) -> float:
        """Returns the numbers of a token in a layer's backward pass beside kept ones, of its MLP or its attention."""
        mlp = max(3 * self.ffn, self.chosen * (self.hidden + 3 * self.expert_ffn) if self.sparse else 0) / tp
        if recomputes in (False, "none"):
            return mlp
        waiting = self.hidden + 3 * (self.queries + self.keys) / tp if recomputes in ("full", True) else 0.0  # attention
        return max(4 * self.hidden + 2 * mlp + waiting, 6 * self.hidden + (8 * self.queries + 5 * self.keys) / tp)


def size_of(hf_config: Mapping[str, Json], key: str, otherwise: int) -> int:
    """Returns a size of the model."""
    value = hf_config.get(key)
    return value if isinstance(value, int) else otherwise


@dataclass(frozen=True)
class RoleMemory:
    """Bytes of a GPU that a role takes at its peak, by part. `state` has those that it needs at once whatever the batch.

    With reasons in `unknown` the total is no prediction. `sequence`: KV cache of the longest sequence, for an
    engine whose cache is predicted.
    """

    role: str
    parts: Mapping[str, float]
    state: float
    unknown: tuple[str, ...] = ()
    sequence: float = 0.0

    @property
    def total(self) -> float:
        return max(sum(self.parts.values()), self.state)


def state_bytes(policy: PolicyConfig, model: Decoder, weights: float = 0.0) -> dict[str, float]:
    """Returns the bytes of a rank's weights, gradients and optimizer state. `weights`: the number of all, if known.

    With pipeline parallelism those of the first stage, which has the embedding.
    """
    layout, width = policy.train_layout, 2 if policy.precision == "bfloat16" else 4
    ends = model.embedding * (1 if model.tied else 2)
    layers = max(0.0, (weights or model.weights) - ends - model.expert_weights)
    stage = (layout.first_stage_layers or model.layers / layout.pp) / model.layers
    if policy.backend == "fsdp":
        own = (layers + ends + model.expert_weights) / (layout.tp * _shards(policy))
        if policy.peft.enabled:
            return {"weights": width * own}
        return {} if policy.fsdp_cfg.cpu_offload else {"weights": 4 * own, "gradients": 4 * own, "optimizer": 8 * own}
    common = (layers * stage + (ends if layout.pp == 1 else model.embedding)) / layout.tp
    apart = model.expert_weights * stage / (layout.ep * layout.expert_tp)
    every = common + apart
    if policy.peft.enabled:  # merged weights last until the backward pass; adapters are small
        return {"weights": width * every, MERGED: width * every}
    summed = 4 if policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32 else width
    masters = 12 if width == 2 else 8  # float32 weights, unless the weights are; two moments
    optimized = every
    if policy.megatron_cfg.use_distributed_optimizer:
        ranks = layout.dp * layout.cp
        optimized = common / ranks + apart / max(1.0, ranks * layout.tp / (layout.ep * layout.expert_tp))
    return {"weights": width * every, "gradients": summed * every, "optimizer": masters * optimized}


def _shards(policy: PolicyConfig) -> int:
    """Returns the FSDP ranks over which each weight is sharded."""
    layout = policy.train_layout
    return layout.dp // policy.fsdp_cfg.data_parallel_replicas * layout.cp


def saved_bytes(policy: PolicyConfig, model: Decoder) -> float:
    """Returns the bytes that a token's layers save for the backward pass without checkpointing, on all pipeline stages."""
    layout, fsdp, width = policy.train_layout, policy.backend == "fsdp", 2 if policy.precision == "bfloat16" else 4
    numbers = model.saved(
        layout.tp,
        split_hidden=not fsdp and (policy.megatron_cfg.sequence_parallel or model.experts > 0),
        copied_queries=not fsdp and model.queries != model.keys,
        eager=fsdp and not policy.fsdp_cfg.torch_compile,
    )
    if layout.cp > 1 and not fsdp:  # gathered keys and values take the place of the own keys
        numbers += model.layers * model.keys / layout.tp * (2 * layout.cp - 1)
    return numbers * width


def train_memory(
    policy: PolicyConfig, model: Decoder, gpu: float, weights: float = 0.0, *, role: str = TRAIN, scalar: bool = False
) -> RoleMemory:
    """Returns the memory of a role that trains. `gpu`: bytes of the GPU, infinite if unknown; `weights`: their number.

    `scalar`: with one number per token in place of logits.
    """
    layout, fsdp, width = policy.train_layout, policy.backend == "fsdp", 2 if policy.precision == "bfloat16" else 4
    longest, rows = bucket_widths(policy)[-1], max(1, policy.train_global_batch_size // layout.dp)
    tokens = min(policy.train_micro_batch_size, rows) * longest
    tokens = policy.microbatch_tokens("train") if policy.sequence_packing.enabled else tokens
    own, count = tokens / layout.cp, -(-rows * longest // tokens)
    state = state_bytes(policy, model, weights)
    parts = {name: size for name, size in state.items() if name != "gradients"}
    # Those of no microbatch yet, one, and several. A rank alone keeps the first ones in the weights' precision.
    shares = (0.0, width / 4 if layout.world_size == 1 else 1.0, 1.0) if fsdp else (1.0, 1.0, 1.0)
    sizes = (state.get("gradients", 0.0) * shares[min(number, 2)] for number in (count - 1, count))
    early, gradients = ({"gradients": size} if size else {} for size in sizes)
    every, ends = (weights or model.weights) / layout.tp, model.embedding * (1 if model.tied else 2) / layout.tp
    if fsdp:  # FSDP2 has two layers gathered at a time, and the root; all if there is nothing to shard
        parts["gathered weights"] = width * (every if _shards(policy) == 1 else ends + 2 * (every - ends) / model.layers)
    recomputes = policy.fsdp_cfg.activation_checkpointing if fsdp else policy.megatron_cfg.activation_checkpointing
    saved, beside = saved_bytes(policy, model) * own, width * own * model.beside(recomputes, layout.tp)
    kept = saved / model.layers
    behind = 2 if recomputes == "offloaded" else 1  # layers whose backward pass is not done, at the third moment
    if recomputes not in (False, "none"):
        split = layout.tp if not fsdp and policy.megatron_cfg.sequence_parallel else 1
        kept = width * own * (model.hidden / split + (0.0 if recomputes in ("full", True) else model.queries / layout.tp))
        kept, saved = kept * behind, kept * (2 if recomputes == "offloaded" else model.layers)  # on their way
    # The first stage of a pipeline has a part of the layers, and as many microbatches as there are stages.
    saved *= min(layout.pp, count) / layout.pp
    waits = model.tied or _shards(policy) > 1  # the output layer's gradient, for the embedding's
    if fsdp and gradients and count == 1:
        gradients["gradients"] *= 1 - ((every - ends) * behind / model.layers + ends / (1 if waits else 2)) / every
    moments = [early | {"activations": saved}, early | {"activations": saved + beside}]
    moments.append(gradients | {"activations": kept + beside})
    if not scalar:
        kept = width * own * model.vocabulary / layout.tp
        hidden = width * own * model.hidden  # states before and after the last norm, where tokens are scored, and a gradient
        free = gpu - CUDA_CONTEXT - sum((parts | moments[0]).values()) - 3 * hidden
        if policy.logprob_chunk_size is None and kept <= KEPT_SHARE * free:
            moments[0]["exponentials of logits"] = kept
        weight = model.embedding / layout.tp if fsdp and not policy.peft.enabled else 0  # its gradient is summed in float32
        moments[0]["output layer"] = 4 * hidden + max(_chunk_bytes(policy, model, own), (4 + width) * weight)
        moments[1]["output layer"] = width * weight
        moments[2]["output layer"] = width * weight * waits
    parts = max((parts | moment for moment in moments), key=lambda sizes: sum(sizes.values()))
    reasons = {
        f"{policy.worker}: a worker of your own": not policy.worker.startswith(OURS),
        f"{model.unlike}: not counted": model.unlike,
        "float32: not measured": width == 4,
        "layers without torch_compile: not measured": fsdp and not policy.fsdp_cfg.torch_compile,
        "experts under FSDP: not measured": fsdp and model.experts,
        "products of adapters: not counted": fsdp and policy.peft.enabled,
        f"state of {policy.optimizer.name}: counted as AdamW's": policy.optimizer.name != ADAMW,
    }
    least = sum(size for name, size in state.items() if name != MERGED)
    return RoleMemory(role, parts, least, tuple(text for text, here in reasons.items() if here))


def frozen_memory(policy: PolicyConfig, model: Decoder, weights: float = 0.0, *, role: str) -> RoleMemory:
    """Returns the memory of a role that only computes log-probabilities."""
    layout, fsdp, width = policy.train_layout, policy.backend == "fsdp", 2 if policy.precision == "bfloat16" else 4
    size = width * (weights or model.weights) / (layout.tp * (_shards(policy) if fsdp else layout.pp * layout.ep))
    own = policy.microbatch_tokens("logprob") / layout.cp
    layer = saved_bytes(policy, model) / model.layers * own
    parts = {"weights": size, "activations of a layer": layer, "output layer": _chunk_bytes(policy, model, own)}
    return RoleMemory(role, parts, size)


def _chunk_bytes(policy: PolicyConfig, model: Decoder, tokens: float) -> float:
    """Returns the bytes of the output layer's float32 logits at a time."""
    columns = model.vocabulary / policy.train_layout.tp
    chunk = policy.logprob_chunk_size * columns if policy.logprob_chunk_size else CHUNK_ELEMENTS
    return 4 * min(2 * chunk, tokens * columns)


def engine_memory(config: Config, model: Decoder, gpu: float, weights: float = 0.0) -> RoleMemory:
    """Returns the memory of an engine: vLLM takes its share of the GPU, unless the bytes of its cache are set."""
    engine, width = generation_config(config).vllm_cfg, 4 if generation_dtype(config) == "float32" else 2
    own = (1 if engine.precision == "fp8" else width) * (weights or model.weights) / engine.layout.tp
    cache, sequence = engine.kv_cache_memory_bytes, 0.0
    if cache is None:
        longest = engine.max_model_len or config.policy.max_total_sequence_length
        sequence = 0.0 if model.unlike else 2 * width * model.layers * model.keys / engine.layout.tp * longest
        cache = max(0, int(engine.gpu_memory_utilization * gpu - own - ENGINE_ROOM)) if math.isfinite(gpu) else 0
    parts = {"weights": own, "KV cache": cache, "activations and CUDA graphs": ENGINE_ROOM}
    worker = generation_config(config).worker
    unknown = () if worker.startswith(OURS) else (f"{worker}: a worker of your own",)
    return RoleMemory(GENERATION, parts, own + cache, unknown, sequence)


def role_model(config: Config, role: str, hf_config: Mapping[str, Json]) -> tuple[PolicyConfig, Decoder, float]:
    """Returns the settings of a role, the sizes of its model, and the number of its weights, 0 if unknown."""
    policy, described = role_config(config, role).policy, role_description(config, role, hf_config)
    model, weights = Decoder.of(described), weight_count(described, checkpoint_bytes(policy))
    if not model.unlike and weights and abs(weights / model.weights - 1) > UNLIKE:
        counts = f"{weights / 1e9:.3g} B weights, not the {model.weights / 1e9:.3g} B of a plain decoder of its sizes"
        model = replace(model, unlike=counts)
    return policy, model, weights


def is_scalar(plan: RunPlan, role: str) -> bool:
    """Whether a role trains a model that gives numbers in place of logits."""
    return role == CRITIC or gives_scores(planned_algorithm(plan))


def run_memory(config: Config, plan: RunPlan, hf_config: Mapping[str, Json], gpu: float) -> list[RoleMemory]:
    """Returns the memory of each role of a run. `gpu`: bytes of a GPU, infinite if unknown."""
    roles = []
    for role in plan.layouts:
        policy, model, weights = role_model(config, role, hf_config)
        if role == GENERATION:
            roles.append(engine_memory(config, model, gpu, weights))
        elif role in (TRAIN, CRITIC):
            roles.append(train_memory(policy, model, gpu, weights, role=role, scalar=is_scalar(plan, role)))
        else:
            roles.append(frozen_memory(policy, model, weights, role=role))
    train = roles[0]
    copies = dict[str, float]()
    copied = config.policy.backend == "fsdp" and config.policy.precision == "bfloat16" and not casts_as_packed(config)
    if plan.generates and copied:
        copies["copies for refits"] = train.parts.get("weights", 0.0) / 2
    if plan.reference == TRAIN and config.policy.reference_weights == "device" and not config.policy.peft.enabled:
        copies["reference weights"] = train.parts.get("weights", 0.0)
    return [replace(train, parts={**train.parts, **copies}, state=train.state + sum(copies.values())), *roles[1:]]


def sharing_roles(plan: RunPlan, roles: Sequence[RoleMemory], share: float) -> list[list[RoleMemory]]:
    """Returns the roles that have memory of one GPU at once: those of `plan.sharing`, of which only the largest counts if
    they take turns, and, if workers take a `share` of a GPU (`cluster.gpus_per_worker`), as many others as have room there.
    If a GPU has not enough shares for all, the largest are taken to meet there.
    """
    shared = sorted((role for role in roles if role.role in plan.sharing), key=lambda role: -role.total)
    slots = [shared[:1] if plan.takes_turns else shared, *([role] for role in roles if role.role not in plan.sharing)]
    slots.sort(key=lambda slot: -sum(role.total for role in slot))
    most = int(1 / share) if 0 < share < 1 else 1
    groups = [[role for slot in slots[:most] for role in slot], *slots[most:]]
    return [[role for role in roles if role in group] for group in groups if len(group) > 1]


def check_memory(plan: RunPlan, roles: Sequence[RoleMemory], gpu: float, share: float = 1.0) -> None:
    """Raises ConfigError if what must be on a GPU at once, whatever the batch, is more than it has, or a microbatch is.

    Warns if a KV cache is predicted that does not hold one sequence. Roles whose memory is not predicted are not checked.
    `share`: as `sharing_roles` has it.
    """
    groups = sharing_roles(plan, roles, share)
    for group in (*([role] for role in roles), *groups):
        state = sum(role.state for role in group)
        if state > gpu and not any(role.unknown for role in group):
            names = " and ".join(role.role for role in group)
            apart = any(role.role not in plan.sharing for role in group)
            models = [f"{section_key(role.role)}.colocated=false" for role in group if role.role not in (TRAIN, GENERATION)]
            turns = "policy.generation.colocated.exchange=auto" if plan.colocated else models[0] if models else ""
            turns = ", cluster.gpus_per_worker=1" if apart else f", {turns}"
            raise ConfigError(
                f"{names} workers need {state / GIB:.1f} GiB of a GPU before any batch (`dagrl inspect --memory`), but "
                f"it has {gpu / GIB:.1f} GiB; spread them over more GPUs (tensor_model_parallel_size, "
                "use_distributed_optimizer, with policy.backend=fsdp data_parallel_size), or choose a smaller model or KV "
                f"cache{turns if len(group) > 1 else ''}"
            )
    for role in roles:
        cache = role.parts.get("KV cache", math.inf)
        if cache < role.sequence and math.isfinite(gpu) and not role.unknown:
            logger.warning(
                "%s: a KV cache of %.2f GiB is predicted, but one sequence of the greatest length takes %.2f. vLLM starts "
                "if activations and CUDA graphs take enough less than the %d GiB assumed. If it does not, raise "
                "policy.generation.vllm_cfg.gpu_memory_utilization, or lower policy.max_total_sequence_length",
                *(role.role, cache / GIB, role.sequence / GIB, ENGINE_ROOM / GIB),
            )
        others = sum(other.state for group in groups if role in group for other in group if other is not role)
        if "activations" in role.parts and role.total + others > gpu and not role.unknown:
            beside = f" beside the {others / GIB:.1f} GiB of other roles" if others else ""
            raise ConfigError(
                f"{role.role} workers need {role.total / GIB:.1f} GiB of a GPU for a microbatch{beside} (`dagrl inspect "
                f"--memory`), but it has {gpu / GIB:.1f} GiB; recompute more of it (activation_checkpointing; with "
                "policy.backend=fsdp first selective, last offloaded), choose a smaller one (policy.sequence_packing."
                "train_mb_tokens or policy.train_micro_batch_size) or split its rows (context_parallel_size)"
            )


def memory_table(plan: RunPlan, roles: Sequence[RoleMemory], gpu: float, share: float = 1.0) -> str:
    """Returns the memory of each role in GiB. `share`: as `sharing_roles` has it."""
    limit = f" of {gpu / GIB:.1f}" if math.isfinite(gpu) else ""
    lines = ["memory of a GPU at the peak, in GiB (tensors alone, without CUDA, NCCL and fragmentation)"]
    for role in roles:
        lines.append(f"{role.role} ({plan.layouts[role.role].describe()})")
        lines += [f"  {part:<28}{size / GIB:8.1f}" for part, size in role.parts.items()]
        lines.append(f"  {'total':<28}{role.total / GIB:8.1f}{limit}{', no prediction' if role.unknown else ''}")
        lines += [f"  {reason}" for reason in role.unknown]
    turns = [role for role in roles if role.role in plan.sharing and plan.takes_turns]
    for group in (turns, *sharing_roles(plan, roles, share)):
        sizes = [role.total for role in group]
        how, size = ("take turns on", max(sizes, default=0.0)) if group is turns else ("share", sum(sizes))
        if group:
            lines.append(f"{' and '.join(role.role for role in group)} {how} a GPU: {size / GIB:.1f}{limit}")
    return "\n".join(lines) + "\n"


def weight_count(hf_config: Mapping[str, Json], checkpoint: int) -> float:
    """Returns the number of weights of a checkpoint with so many bytes."""
    return checkpoint / (4 if hf_config.get("torch_dtype", hf_config.get("dtype")) == "float32" else 2)
