"""Compares the weight layout with what vLLM's own loaders make of checkpoints; run in a process by test_vllm_families.py.

Builds each rank's model in turn on the CPU. Tensor-parallel size and rank are set on vLLM's groups, which building and
loading do not use. Transformers writes the checkpoints, with the names of published ones.
"""

import json
import os
import pickle
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml
from torch import Tensor

from dagrl.config import Config
from dagrl.refit import plan_refit
from dagrl.refit.fp8 import in_blocks, quantize_blocks
from dagrl.refit.recording import record
from dagrl.refit.slices import Box, WeightSlice, expand
from dagrl.runtime.layout import ParallelLayout
from dagrl.workers.megatron.weights import megatron_weight_slices
from dagrl.workers.vllm import VllmWorker, described
from dagrl.workers.vllm.described import build, do_without_kernels
from dagrl.workers.vllm.destinations import ABSORBED, absorbed
from dagrl.workers.vllm.launch import import_vllm
from tests.families import FAMILIES, Hf, random_model
from tests.unit.refit import fp8_reference
from tests.unit.refit.memory_channel import run_refit
from tests.unit.refit.weight_reference import LATENT, VllmRank, vllm_weight_slices

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    family: str
    tp: int = 1
    ep: bool = False
    changes: tuple[tuple[str, Any], ...] = ()
    fp8: bool = False

    @property
    def config(self) -> Hf:
        return {**FAMILIES[self.family], **dict(self.changes)}


CASES = [
    *(Case(family, tp) for family in FAMILIES for tp in (1, 2)),
    *(Case(family, 2, ep=True) for family in ("qwen3_moe", "glm4_moe", "mixtral", *LATENT)),
    Case("qwen3_moe", 3, True, (("num_attention_heads", 6), ("num_key_value_heads", 3), ("vocab_size", 192))),  # 2, 1, 1
    Case("qwen3", 4),  # a key-value head on two ranks
    Case("qwen3_moe", 2, changes=(("vocab_size", 15),)),  # the second rank's share of the vocabulary is padding alone
    Case("llama", 2, changes=(("num_key_value_heads", 1),)),
    Case("deepseek_v3", 2, changes=(("q_lora_rank", None),)),
]

_WIDE = {"hidden_size": 128, "intermediate_size": 512, "head_dim": 128, "num_attention_heads": 4}
_WIDE_MOE = {**_WIDE, "moe_intermediate_size": 256}
_WIDE_LATENT = {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
FP8_CASES = [
    Case("llama", 2, changes=tuple({**_WIDE, "num_key_value_heads": 2}.items()), fp8=True),
    Case("qwen3_moe", 2, changes=tuple({**_WIDE_MOE, "num_key_value_heads": 2}.items()), fp8=True),
    Case("mixtral", 2, True, changes=tuple({**_WIDE, "num_key_value_heads": 2}.items()), fp8=True),
    Case("glm4_moe", 2, changes=tuple({**_WIDE_MOE, "num_key_value_heads": 2}.items()), fp8=True),
    Case("deepseek_v3", 2, changes=tuple({**_WIDE_MOE, **_WIDE_LATENT}.items()), fp8=True),
]


def build_rank(directory: Path, case: Case, rank: int, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return build(directory, case.tp, rank, dtype, enable_expert_parallel=case.ep)[0]


def quantized(checkpoint: Weights, directory: Path) -> Weights:
    """Quantizes the checkpoint to DeepSeek's blockwise FP8 with vLLM's quantizer, and marks its configuration."""
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    out: Weights = {}
    kept = ("embed_tokens", "lm_head", "norm", "gate.weight", "e_score")
    for name, tensor in checkpoint.items():
        if any(part in name for part in kept) or tensor.ndim == 1:
            out[name] = tensor.float() if "e_score" in name else tensor.bfloat16()
            continue
        out[name], out[f"{name}_scale_inv"] = per_block_cast_to_fp8(tensor.bfloat16())
        for part, scales in (quantize_blocks(tensor.bfloat16()), fp8_reference.quantized(tensor.bfloat16())):
            assert torch.equal(part.view(torch.uint8), out[name].view(torch.uint8)), name
            assert torch.equal(scales, out[f"{name}_scale_inv"]), name
    config = json.loads((directory / "config.json").read_text())
    routers = sorted({name.removesuffix(".weight") for name in checkpoint if name.endswith("gate.weight")})
    blocks = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    config["quantization_config"] = {**blocks, "modules_to_not_convert": routers}
    (directory / "config.json").write_text(json.dumps(config))
    return out


def named_tensors(model: torch.nn.Module) -> Weights:
    """Returns the model's tensors by local name, without KV-cache scales."""
    named = model.named_parameters(remove_duplicate=False)
    return {local_name(name): parameter.data for name, parameter in named if parameter.dim()}


def check_rank(checkpoint: Weights, named: Weights, slices: Sequence[WeightSlice]) -> None:
    """Checks that every slice equals its tensor content, and that slices cover everything except padding."""
    covered: dict[int, int] = {}

    def check_part(tensor: str, local: Box, name: str, box: Box) -> None:
        held = named[tensor]
        found, wanted = held[_slices(local)], checkpoint[name][_slices(box)]
        assert torch.equal(_raw(found.reshape(wanted.shape)), _raw(wanted)), (tensor, local, name, box)
        covered[held.data_ptr()] = covered.get(held.data_ptr(), 0) + wanted.numel()

    for held in expand(slices):
        check_part(held.tensor, held.local, held.name, held.box)
        if held.scales is not None:
            check_part(held.scales.tensor, held.scales.local, f"{held.name}_scale_inv", in_blocks(held.box))
    for name, tensor in named.items():
        padding = name in ("model.embed_tokens.weight", "lm_head.weight")
        elements = covered.get(tensor.data_ptr(), 0)
        assert elements == tensor.numel() or (padding and 0 <= elements < tensor.numel()), (name, elements)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*part) for part in box)


def _raw(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def check(case: Case, root: Path) -> None:
    from tests.integration.vllm_slots import check_slots  # imports vLLM

    directory = root / "-".join(map(str, (case.family, case.tp, case.ep, case.fp8, len(case.changes))))
    _, whole = random_model(case.config, directory)
    checkpoint = quantized(whole, directory) if case.fp8 else whole
    config = case.config
    ranks = [VllmRank(case.tp, rank, expert_parallel=case.ep, fp8=case.fp8) for rank in range(case.tp)]
    held = []
    for rank in ranks:
        model = build_rank(directory, case, rank.tp_rank, torch.bfloat16 if case.fp8 else torch.float32)
        model.load_weights(iter(checkpoint.items()))
        held.append(named_tensors(model))
        check_rank(checkpoint, held[-1], vllm_weight_slices(config, rank))
        check_recording(model, checkpoint, vllm_weight_slices(config, rank), "bfloat16" if case.fp8 else "float32")
        if not case.fp8:
            check_derived(model)
            slots = check_slots(model, json.loads((directory / "config.json").read_text()), rank)
    if case.fp8:
        check_refit(whole, config, ranks, held)
    else:
        print("slots agree:", case.family, case.tp, case.ep, slots, flush=True)
    print("agrees:", case.family, case.tp, case.ep, case.fp8, flush=True)


def local_name(parameter: str) -> str:
    """Returns the name in the reference; since 0.25 vLLM's experts are in a module of their own."""
    return parameter.replace(".experts.routed_experts.", ".experts.")


def boxes(slices: Sequence[WeightSlice], dtype: str) -> list[tuple[object, ...]]:
    """Returns the content of slices, in an order and with names that rules and recordings share."""

    found = []
    for one in expand(slices):
        scales = ("", ()) if one.scales is None else (local_name(one.scales.tensor), one.scales.local)
        found.append((one.name, one.box, local_name(one.tensor), one.local, one.dtype or dtype, *scales))
    return sorted(found)


def check_recording(model: torch.nn.Module, checkpoint: Weights, rules: Sequence[WeightSlice], dtype: str) -> None:
    """Checks that a recording of vLLM's loader has the boxes of the rules."""
    before = {name: tensor.clone() for name, tensor in named_tensors(model).items()}
    whole = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in checkpoint.items()]
    found = record(model, whole, getattr(torch, dtype))
    for name, tensor in named_tensors(model).items():
        assert torch.equal(_raw(tensor), _raw(before[name])), f"recording has changed {name}"
    assert boxes(found.slices, dtype) == boxes(rules, dtype)
    assert len(found.slices) == len(rules)  # experts are stacked alike
    assert not (found.unwritten or found.refused or found.arranged or found.computations)


def check_derived(model: torch.nn.Module) -> None:
    """Hooks recompute in place what vLLM computes from `kv_b_proj` after loading."""
    latent = [
        module
        for name, module in model.named_modules()
        if hasattr(module, "kv_b_proj") and name.endswith("mla_attn.mla_attn")
    ]
    for module in latent:
        module.process_weights_after_loading(torch.float32)
    hooks = list(absorbed(model, torch.float32))
    assert len(hooks) == len(latent)
    held = [getattr(module, name) for module in latent for name in ABSORBED]
    right = [tensor.clone() for tensor in held]
    for module in latent:
        module.kv_b_proj.weight.data.mul_(2)
    for hook in hooks:
        hook()
    for old, new, was in zip(held, [getattr(module, name) for module in latent for name in ABSORBED], right, strict=True):
        assert new is old and torch.allclose(new, 2 * was)


def check_refit(whole: Weights, config: Hf, ranks: Sequence[VllmRank], held: Sequence[Weights]) -> None:
    """Checks that a refit from a BF16 trainer gives the bytes of vLLM's loader for the FP8 checkpoint."""
    latent = config["model_type"] in LATENT  # whose down-projections end inside a block
    layout = ParallelLayout(tp=1 if latent else 2, pp=2)
    slices = [megatron_weight_slices(config, layout, rank) for rank in range(layout.world_size)]
    wanted = [vllm_weight_slices(config, rank) for rank in ranks]
    check_received(slices, [fill(whole, mine) for mine in slices], wanted, held)


def check_received(
    slices: Sequence[Sequence[WeightSlice]],
    sources: Sequence[Weights],
    wanted: Sequence[Sequence[WeightSlice]],
    held: Sequence[Weights],
) -> None:
    plan = plan_refit(slices, wanted, dtype="bfloat16", bucket_bytes=100_000)
    built = [{name: torch.zeros_like(tensor) for name, tensor in tensors.items()} for tensors in held]
    run_refit(plan, [*sources, *built], verify="checksum")
    for ours, theirs, mine in zip(built, held, wanted, strict=True):
        for one in expand(mine):
            assert torch.equal(_raw(ours[one.tensor][_slices(one.local)]), _raw(theirs[one.tensor][_slices(one.local)])), one
            if one.scales:
                name, local = one.scales.tensor, _slices(one.scales.local)
                assert torch.equal(ours[name][local], theirs[name][local]), one


def fill(whole: Weights, slices: Sequence[WeightSlice]) -> Weights:
    """Allocates a rank's tensors as large as their slices require."""
    shapes: dict[str, list[int]] = {}
    parts = list(expand(slices))
    for one in parts:
        ends = [stop for _, stop in one.local]
        shapes[one.tensor] = [max(pair) for pair in zip(shapes.get(one.tensor, ends), ends, strict=True)]
    dtypes = {one.tensor: torch.float32 if one.dtype else torch.bfloat16 for one in parts}
    built = {name: torch.zeros(shape, dtype=dtypes[name]) for name, shape in shapes.items()}
    for one in parts:
        target = built[one.tensor][_slices(one.local)]
        target.copy_(whole[one.name][_slices(one.box)].view(target.shape))
    return built


def check_descriptions(root: Path) -> None:
    """Checks what `dagrl inspect` says of engines before they run, here without the process that it starts for that."""

    def describe_here(request: str) -> list[list[WeightSlice]]:
        (root / "request.json").write_text(request)
        described.main(str(root))
        ranks: list[list[WeightSlice]] = pickle.loads((root / "slices").read_bytes())  # noqa: S301
        return ranks

    hf = next(case.config for case in FP8_CASES if case.ep)
    policy = {"precision": "bfloat16", "generation": {"vllm_cfg": {"precision": "fp8"}}}
    config = Config.model_validate({"name": "t", "algorithm": "grpo", "data": {}, "policy": policy})
    with patch.object(described, "_describe_ranks", describe_here):
        for rank in range(2):
            found = VllmWorker.describe(config, hf, ParallelLayout(tp=2, ep=2, etp=1), rank)
            wanted = vllm_weight_slices(hf, VllmRank(2, rank, expert_parallel=True, fp8=True))
            assert boxes(found, "bfloat16") == boxes(wanted, "bfloat16")
        without_rules = {**FAMILIES["llama"], "model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]}
        (only,) = described.describe_ranks(without_rules, 1, {"dtype": "bfloat16"})
        assert {one.name for one in only} >= {
            "model.embed_tokens.weight",
            "model.layers.0.post_feedforward_layernorm.weight",
        }
        example = yaml.safe_load((Path(__file__).parents[2] / "examples" / "grpo_images.yaml").read_text())
        (only,) = described.describe_ranks(example["policy"]["random_init"]["hf_config"], 1, {"dtype": "bfloat16"})
        assert {one.name for one in only} >= {"model.visual.patch_embed.proj.weight", "model.language_model.norm.weight"}
        with pytest.raises(AssertionError):  # vLLM cannot divide it
            described.describe_ranks({**FAMILIES["llama"], "intermediate_size": 30}, 4, {"dtype": "bfloat16"})


def begin() -> None:
    """Imports vLLM and all families' classes, and does without the kernels that this machine lacks."""
    os.environ.update(VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    import_vllm({"architectures": [name for config in FAMILIES.values() for name in config["architectures"]]})
    do_without_kernels()


def check_all() -> str:
    begin()
    torch.compiler.set_stance("force_eager")  # vLLM's quantizer is compiled, which takes a third of the time
    with tempfile.TemporaryDirectory() as root, redirect_stdout(StringIO()) as shown:
        # vLLM makes its expert-parallel group when the first model has experts.
        for case in sorted([*CASES, *FP8_CASES], key=lambda case: "expert" not in str(case.config)):
            check(case, Path(root))
        check_descriptions(Path(root))
    return shown.getvalue()
