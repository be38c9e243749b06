"""Compares the weight layout with what vLLM's own loaders make of checkpoints; run by test_vllm_families.py in a process.

Each rank's model is built in turn, on the CPU: tensor-parallel size and rank are set on vLLM's groups, which nothing uses
while a model is built and loaded. Checkpoints are written by transformers, under the names of the published ones.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from dagrl.refit.slices import WeightSlice, expand, volume
from tests.families import FAMILIES, Hf
from workers.families.vllm import VllmRank
from workers.vllm.launch import _import_model, _import_vllm
from workers.vllm.weights import local_name, vllm_weight_slices


@dataclass(frozen=True)
class Case:
    """One model over the ranks of one engine."""

    family: str
    tp: int = 1
    ep: bool = False
    changes: tuple[tuple[str, Any], ...] = ()

    @property
    def config(self) -> Hf:
        return {**FAMILIES[self.family], **dict(self.changes)}


CASES = [
    *(Case(family, tp) for family in FAMILIES for tp in (1, 2)),
    *(Case(family, 2, ep=True) for family in ("qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3", "nemotron_h")),
    Case("qwen3_moe", 3, True, (("num_attention_heads", 6), ("num_key_value_heads", 3), ("vocab_size", 192))),  # 2, 1, 1
    Case("qwen3", 4),  # a key-value head on two ranks
    Case("nemotron_h", 2, changes=(("n_groups", 1), ("num_key_value_heads", 1))),  # a group on two ranks
    Case("deepseek_v3", 2, changes=(("q_lora_rank", None),)),
    Case("llama", 2, changes=(("attention_bias", True), ("mlp_bias", True))),
]


def write_checkpoint(config: Hf, directory: Path) -> dict[str, Tensor]:
    """A checkpoint in which no two elements of a matrix are alike; its tensors."""
    from transformers import AutoConfig, AutoModelForCausalLM

    keys = {key: value for key, value in config.items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **keys), dtype=torch.float32)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.dtype.is_floating_point:
                tensor.copy_(torch.rand(tensor.shape) - 0.5)
    model.save_pretrained(directory)
    return load_file(directory / "model.safetensors")


def build(directory: Path, case: Case, rank: int) -> torch.nn.Module:
    """The model of one rank, its weights not loaded."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    arguments = {"skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True, "max_model_len": 64}
    config = EngineArgs(model=str(directory), enable_expert_parallel=case.ep, **arguments).create_engine_config()
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            store = Path(tempfile.mkdtemp()) / "store"
            parallel_state.init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
            parallel_state.initialize_model_parallel(1, 1)
        for group in (parallel_state.get_tp_group(), parallel_state.get_ep_group()):
            group.world_size, group.rank_in_group, group.ranks = case.tp, rank, list(range(case.tp))
        config.parallel_config.tensor_parallel_size = case.tp
        return initialize_model(config)


def check_rank(checkpoint: dict[str, Tensor], model: torch.nn.Module, slices: Sequence[WeightSlice]) -> None:
    """Every slice equals what is held there, and nothing is held that no slice covers, save padding."""
    named = {local_name(name): parameter.data for name, parameter in model.named_parameters(remove_duplicate=False)}
    covered: dict[int, int] = {}
    for held in expand(slices):
        tensor = named[held.tensor.replace("mixer.A_log", "mixer.A")]
        found = tensor[tuple(slice(*part) for part in held.local)]
        wanted = checkpoint[held.name][tuple(slice(*part) for part in held.box)]
        if held.tensor.endswith("mixer.A_log"):  # vLLM keeps only what the hook makes of it
            wanted = -torch.exp(wanted.float())
        assert torch.equal(found.reshape(wanted.shape), wanted), (held, found, wanted)
        covered[tensor.data_ptr()] = covered.get(tensor.data_ptr(), 0) + volume(held.box)
    for name, tensor in named.items():
        padding = name in ("model.embed_tokens.weight", "lm_head.weight")
        found_elements = covered.get(tensor.data_ptr(), 0)
        assert found_elements == tensor.numel() or (padding and 0 <= found_elements < tensor.numel()), (name, found_elements)


def check(case: Case, root: Path) -> None:
    directory = root / "-".join(map(str, (case.family, case.tp, case.ep, len(case.changes))))
    checkpoint = write_checkpoint(case.config, directory)
    config = json.loads((directory / "config.json").read_text())
    for rank in range(case.tp):
        model = build(directory, case, rank)
        model.load_weights(iter(checkpoint.items()))
        check_rank(checkpoint, model, vllm_weight_slices(config, VllmRank(case.tp, rank, expert_parallel=case.ep)))
    print("agrees:", case.family, case.tp, case.ep, dict(case.changes), flush=True)


def _allow_experts_without_gate() -> None:
    """vLLM refuses them on CPUs, where it has no kernel for them; their weights are laid out all the same."""
    from vllm.model_executor.layers.fused_moe import config, unquantized_fused_moe_method
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    class Platform:
        def __getattr__(self, name: str) -> Any:
            return (lambda: True) if name == "is_xpu" else getattr(real, name)

    real = config.current_platform
    config.current_platform = Platform()
    unquantized_fused_moe_method.select_unquantized_moe_backend = lambda moe_config: (UnquantizedMoeBackend.CPU, None)


def main() -> None:
    os.environ.update(VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    _import_vllm()
    _import_model([name for config in FAMILIES.values() for name in config["architectures"]])
    _allow_experts_without_gate()
    with tempfile.TemporaryDirectory() as root:
        # vLLM makes its expert-parallel group when the first model has experts.
        for case in sorted(CASES, key=lambda case: "expert" not in str(case.config)):
            check(case, Path(root))


if __name__ == "__main__":
    main()
