"""Independent reference for train workers: tiny Hugging Face models trained by plain torch in this process."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dagrl.config import Config
from dagrl.runtime.shapes import Batch, Bucket, pad_rows

VOCABULARY = 200  # not a multiple of Megatron's padding: at tp 2 the second worker holds 72 tokens and 56 rows of padding
WIDTH, ROWS, STEPS = 22, 8, 3  # the width is not a multiple of 4: context parallelism has to pad sequences
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LONGROPE = {  # the short factors hold up to the length of the batch; the attention factor is 1.2
    **{"rope_type": "longrope", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 512},
    **{"short_factor": [1.0 + 0.1 * number for number in range(16)], "long_factor": [4.0] * 16},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GLM4_MOE = {
    "model_type": "glm4_moe",
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "attention_bias": True,
    "use_qk_norm": True,
    "routed_scaling_factor": 1.5,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 12,
}
PADDING = {"pad_token_id": 185}  # in the batch, and at tp 2 on the second worker; transformers makes its row zeros
END = {"pad_token_id": 118, "eos_token_id": 118}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": False, **PADDING},
    "qwen3_tied": {"model_type": "qwen3", "tie_word_embeddings": True, **PADDING},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True, **END},
    "llama": {"model_type": "llama", "rope_parameters": LLAMA3_ROPE},
    "mistral": {"model_type": "mistral", "sliding_window": 7, "rope_parameters": YARN_ROPE},
    "qwen3_windows": {
        "model_type": "qwen3",
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "small_vocabulary": {"model_type": "qwen3", "vocab_size": 30},  # at tp 2 the second worker holds padding alone
    "qwen3_moe": {"model_type": "qwen3_moe", "norm_topk_prob": True, **EXPERTS},
    "qwen3_many_experts": {"model_type": "qwen3_moe", "norm_topk_prob": True, **EXPERTS, "num_experts": 16},
    "mixtral": {"model_type": "mixtral", "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": GLM4_MOE,
    "glm4_moe_groups": {**GLM4_MOE, "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2},
    "deepseek_v3": {**DEEPSEEK, "rope_parameters": {**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 1.0}},
    "deepseek_v3_plain": {**DEEPSEEK, "q_lora_rank": None},
    "dynamic": {"model_type": "llama", "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
    "longrope": {"model_type": "llama", "rope_parameters": LONGROPE},
    "qwen3_moe_mixed": {"model_type": "qwen3_moe", "norm_topk_prob": False, "mlp_only_layers": [1], **EXPERTS},
    # Megatron does not train those that follow.
    "gemma3": {  # tied, with a soft cap and windows shorter than its sequences
        "model_type": "gemma3_text",
        "sliding_window": 4,
        "query_pre_attn_scalar": 32,
        "final_logit_softcapping": 3.0,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "phi3_long": {  # other frequencies from 19 tokens on
        "model_type": "phi3",
        "head_dim": 16,
        **END,
        "original_max_position_embeddings": 18,
        "max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 8,
            "long_factor": [4.0] * 8,
            "original_max_position_embeddings": 18,
        },
    },
    "granite": {"model_type": "granite", "logits_scaling": 3.0, "embedding_multiplier": 2.0},  # scaled logits
    "phi": {"model_type": "phi", "partial_rotary_factor": 0.5, "head_dim": 16},  # biases, also of the head
    "gpt_oss": {
        "model_type": "gpt_oss",
        **END,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}


def load_model(directory: Path) -> Any:
    """Loads a model in float32. A padding token that also ends text is text: its embedding is trained."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    if model.config.pad_token_id == model.config.eos_token_id:
        model.get_input_embeddings().padding_idx = None
    return model


def make_model(name: str, directory: Path, **changes: Any) -> Path:
    """Writes a tiny model, with `changes` of its sizes. Norms and biases are random: defaults of 1 or 0 hide omissions."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    settings = {**SIZES, **MODELS[name], **changes}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings)).float()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif "mlp.gate" in parameter_name:
                parameter.mul_(20)  # routing without near ties
            else:
                parameter.mul_(3)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn_like(buffer))
    model.save_pretrained(directory / name)
    return directory / name


class TinyModels(dict[str, Path]):
    """Tiny models by name, each written when it is first asked for."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory

    def __missing__(self, name: str) -> Path:
        self[name] = make_model(name, self._directory)
        return self[name]


def make_config(model: Path, **policy: Any) -> Config:
    """Returns a run's configuration. `policy` adds or replaces keys of the section; `sharded=True` means ZeRO-1."""
    optimizer = {"lr": 1e-3, "weight_decay": 0.01, "clip_grad": 1.0, "adam_eps": 1e-6}
    optimizer |= policy.pop("optimizer", {})
    sharded = policy.pop("sharded", False)
    section = {"model_name": str(model), "train_micro_batch_size": 2, "logprob_batch_size": 3, **policy}
    section["optimizer"] = optimizer
    section["megatron_cfg"] = {**section.get("megatron_cfg", {}), "use_distributed_optimizer": sharded}
    return Config.model_validate({"name": "test", "algorithm": "grpo", "seed": 3, "data": {}, "policy": section})


def padded(batch: Batch, bucket: Bucket) -> Batch:
    """Returns a batch with zeros up to the bucket's shape."""
    return Batch({name: pad_rows(array, bucket) for name, array in batch.fields.items()}, batch.scalars)


def make_batch(vocabulary: int = VOCABULARY, grpo: bool = False) -> Batch:
    """Rows of very different lengths with masked prompts; one row has no loss."""
    generator = np.random.default_rng(11)
    lengths = np.array([22, 5, 17, 3, 21, 9, 4, 13], dtype=np.int64)
    prompts = np.array([2, 1, 12, 1, 1, 4, 4, 2])
    positions = np.arange(WIDTH)[None, :]
    inside = positions < lengths[:, None]
    mask = (inside & (positions >= prompts[:, None])).astype(np.float32)
    fields = {"tokens": generator.integers(0, vocabulary, (ROWS, WIDTH)) * inside, "lengths": lengths, "loss_mask": mask}
    if grpo:
        fields |= {
            name: generator.normal(mean, 0.3, (ROWS, WIDTH)).astype(np.float32) * mask
            for name, mean in {"generation_logprobs": -5.3, "prev_logprobs": -5.3, "reference_logprobs": -5.2}.items()
        }
        fields["advantages"] = generator.normal(size=(ROWS, 1)).astype(np.float32) * mask
    scalars = {"global_valid_tokens": float(mask.sum()), "global_valid_sequences": float((mask.sum(1) > 0).sum())}
    return Batch(fields, scalars)


def hf_logits(model: Any, batch: Batch) -> Tensor:
    """Returns logits [rows, width, vocabulary], computed row by row without padding."""
    rows = []
    for tokens, length in zip(batch["tokens"], batch["lengths"], strict=True):
        logits = model(torch.tensor(tokens[: int(length)])[None]).logits[0]
        rows.append(torch.nn.functional.pad(logits, (0, 0, 0, WIDTH - int(length))))
    return torch.stack(rows)


def hf_logprobs(model: Any, batch: Batch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Returns token-aligned log-probabilities and entropies [rows, width], 0 at entry 0 and past the length."""
    distribution = (hf_logits(model, batch)[:, :-1] / temperature).log_softmax(-1)
    labels = torch.tensor(batch["tokens"])[:, 1:, None]
    inside = torch.arange(1, WIDTH)[None] < torch.tensor(batch["lengths"])[:, None]
    logprobs = distribution.gather(-1, labels)[..., 0]
    entropy = -(distribution.exp() * distribution).sum(-1)
    return tuple(torch.nn.functional.pad(torch.where(inside, value, 0.0), (1, 0)) for value in (logprobs, entropy))


def sft_reference(logprobs: Tensor, batch: Batch) -> Tensor:
    """Mean negative log-likelihood over the tokens of the whole batch."""
    mask = torch.tensor(batch["loss_mask"])
    return -(logprobs * mask).sum() / mask.sum()


@dataclass(frozen=True)
class Run:
    """Training results: loss and gradient norm (before clipping) per step, and the first step's clipped gradients."""

    logprobs: Any
    entropy: Any
    losses: list[float]
    norms: list[float]
    gradients: Mapping[str, Any]


def decay_groups(parameters: Iterable[Tensor], decay: float) -> list[dict[str, Any]]:
    """Returns parameters in two groups, as Megatron: norms and biases have no weight decay."""
    both: dict[bool, list[Tensor]] = {True: [], False: []}
    for parameter in parameters:
        both[parameter.ndim > 1].append(parameter)
    return [{"params": both[True], "weight_decay": decay}, {"params": both[False], "weight_decay": 0.0}]


def adamw(parameters: Iterable[Tensor], config: Config) -> torch.optim.Optimizer:
    wanted = config.policy.optimizer
    groups = decay_groups(parameters, wanted.weight_decay)
    return torch.optim.AdamW(groups, lr=wanted.lr, betas=(wanted.adam_beta1, wanted.adam_beta2), eps=wanted.adam_eps)


def train_reference(
    model_directory: Path,
    batch: Batch,
    config: Config,
    loss: Callable[[Tensor, Batch], Tensor],
    steps: int = STEPS,
    optimizers_of: Callable[[Any], Sequence[torch.optim.Optimizer]] | None = None,
) -> Run:
    """Runs steps of AdamW, or of other optimizers, on a Hugging Face model in one process."""
    model, clip = load_model(model_directory), config.policy.optimizer.clip_grad
    optimizers = [adamw(model.parameters(), config)] if optimizers_of is None else optimizers_of(model)
    with torch.no_grad():
        first = hf_logprobs(model, batch)
    losses, norms, gradients = [], [], {}
    for _ in range(steps):
        model.zero_grad()
        value = loss(hf_logprobs(model, batch, _temperature(config))[0], batch)
        value.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        losses.append(value.item())
        gradients = gradients or gradients_of(model)
        for optimizer in optimizers:
            optimizer.step()
    return Run(first[0].numpy(), first[1].numpy(), losses, norms, gradients)


def assert_near_float32(found: Run, expected: Run) -> None:
    """Compares float32 results of a GPU, whose order of operations differs."""
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-4, rtol=0)
    np.testing.assert_allclose(found.losses, expected.losses, atol=1e-4, rtol=0)
    np.testing.assert_allclose(found.norms, expected.norms, rtol=1e-3)
    assert_gradients(found.gradients, {name: expected.gradients[name] for name in found.gradients}, 2e-3)


def assert_gradients(found: Mapping[str, Any], expected: Mapping[str, Any], atol: float) -> None:
    """Compares each expected gradient, relative to its largest element."""
    for name, gradient in expected.items():
        scale = float(np.abs(gradient).max()) or 1.0
        np.testing.assert_allclose(found[name] / scale, gradient / scale, atol=atol, rtol=0, err_msg=name)


def beyond_bfloat16(found: Run, expected: Run) -> dict[str, tuple[float, float]]:
    """Returns the relative distances of a bfloat16 run from float32 that exceed their bounds.

    CPU runs have 0.002, 0.038, 0.00023 and 0.0013; a model without attention has at least 0.11, 1.6, 0.0027 and 0.0038.
    If a run has no gradients (sharded optimizer), only their norms are compared.
    """
    bounds = {
        "logprobs": (_distance(found.logprobs, expected.logprobs), 0.01),
        "gradients": (_distance(*_flat(found.gradients, expected.gradients)), 0.1),
        "first loss": (_distance(found.losses[0], expected.losses[0]), 0.001),
        "losses": (_distance(found.losses, expected.losses), 0.005),
        "first norm": (_distance(found.norms[0], expected.norms[0]), 0.05),
    }
    return {name: pair for name, pair in bounds.items() if not pair[0] < pair[1]}


def gradient_error(found: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    """Relative norm of the difference over all expected gradients."""
    difference = sum(float(np.square(found[name] - value).sum()) for name, value in expected.items())
    return float(np.sqrt(difference / sum(float(np.square(value).sum()) for value in expected.values())))


def _flat(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[Any]:
    assert not found or set(found) == set(expected)
    return [np.concatenate([np.zeros(0), *(part[name].ravel() for name in found)]) for part in (found, expected)]


def _distance(found: Any, expected: Any) -> float:
    difference = np.linalg.norm(np.subtract(found, expected, dtype=np.float64))
    return float(difference / np.linalg.norm(expected)) if difference else 0.0


def _temperature(config: Config) -> float:
    return config.policy.generation.temperature if config.policy.generation else 1.0


def gradients_of(model: Any) -> dict[str, Any]:
    """Returns a model's gradients by the names of checkpoints."""
    gradients = {name: parameter.grad.numpy().copy() for name, parameter in model.named_parameters()}
    return checkpoint_names(gradients, mixtral=model.config.model_type == "mixtral")


def checkpoint_names(gradients: Mapping[str, Any], mixtral: bool = False) -> dict[str, Any]:
    """Renames gradients. Transformers stacks a layer's experts but saves them separately; Mixtral's under other names."""
    gate_name, up_name, down_name = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    found = {}
    for name, value in gradients.items():
        name = name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name
        prefix, _, kind = name.rpartition(".experts.")
        if kind == "gate_up_proj":
            for expert, rows in enumerate(value):
                gate, up = np.split(rows, 2)
                found[f"{prefix}.experts.{expert}.{gate_name}.weight"] = gate
                found[f"{prefix}.experts.{expert}.{up_name}.weight"] = up
        elif kind == "down_proj":
            found |= {f"{prefix}.experts.{expert}.{down_name}.weight": rows for expert, rows in enumerate(value)}
        else:
            found[name] = value
    return found


def assemble(parts: list[list[tuple[str, Any, Any]]]) -> dict[str, Any]:
    """Assembles whole tensors from the boxes of all ranks. Replicas must agree."""
    boxes: dict[str, dict[Any, Any]] = {}
    for name, box, values in (piece for rank in parts for piece in rank):
        known = boxes.setdefault(name, {}).setdefault(box, values)
        np.testing.assert_allclose(values, known, rtol=1e-5, atol=1e-7, err_msg=f"replicas of {name} {box}")
    whole = {}
    for name, held in boxes.items():
        tensor = np.full(
            [max(box[axis][1] for box in held) for axis in range(len(next(iter(held))))], np.nan, dtype=np.float32
        )
        for box, values in held.items():
            tensor[tuple(slice(start, stop) for start, stop in box)] = values
        whole[name] = tensor
    return whole
