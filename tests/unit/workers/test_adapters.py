"""Adapters are those of peft, also of experts; those of another model or other settings are refused before the start."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from dagrl.config import PeftConfig
from dagrl.errors import CheckpointError
from dagrl.workers.fsdp.experts import use_permutations
from dagrl.workers.fsdp.lora import Adapters, add_adapters
from dagrl.workers.fsdp.sent import SentWeights
from dagrl.workers.train.adapters import check_adapters, write_adapters
from tests.integration.megatron_reference import SIZES

Q, UP = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"
SHAPES = {"model.embed_tokens.weight": (32, 8), Q: (16, 8), UP: (24, 8), "model.norm.weight": (8,)}


def write(directory: Path, shapes: dict[str, tuple[int, int]], **settings: Any) -> None:
    (directory / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8, **settings}))
    tensors = {f"base_model.model.{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, directory / "adapter_model.safetensors")


def settings(directory: Path) -> PeftConfig:
    return PeftConfig(enabled=True, dim=4, alpha=8, target_modules=("q_proj",), adapter_path=str(directory))


PAIR = {"model.layers.0.self_attn.q_proj.lora_A": (4, 8), "model.layers.0.self_attn.q_proj.lora_B": (16, 4)}


@pytest.mark.parametrize(
    ("shapes", "more", "message"),
    [
        ({**PAIR, "model.layers.0.self_attn.q_proj.lora_B": (32, 4)}, {}, r"shape \(32, 4\), expected \(16, 4\)"),
        ({**PAIR, "model.layers.1.self_attn.q_proj.lora_A": (4, 8)}, {}, r"shape \(4, 8\), expected none"),
        (dict(list(PAIR.items())[:1]), {}, r"lora_B.weight' has shape none, expected \(16, 4\)"),
        (PAIR, {"r": 16}, r"has r 16, but .*peft.dim is 4; set .*peft.dim=16"),
        (PAIR, {"use_rslora": True}, "use_rslora, which dagrl does not train"),
        (PAIR, {"use_dora": True}, "use_dora, which dagrl does not train"),
        (PAIR, {"rank_pattern": {"q_proj": 2}}, "rank_pattern, which dagrl does not train"),
    ],
    ids=["shape", "layer", "incomplete", "rank", "rslora", "dora", "ranks"],
)
def test_others_are_refused(shapes: dict[str, tuple[int, int]], more: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path, shapes, **more)
    with pytest.raises(CheckpointError, match=message):
        check_adapters(settings(tmp_path), SHAPES)


def test_fitting_adapters_are_accepted(tmp_path: Path) -> None:
    write(tmp_path, PAIR)
    check_adapters(settings(tmp_path), SHAPES)


peft = pytest.importorskip("peft")

ROPE = {"rope_type": "default", "rope_theta": 1e4}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, "mlp_only_layers": [1]},
    "gpt_oss": {"num_local_experts": 4, "intermediate_size": 32, "rope_parameters": ROPE},
}
EXPERTS = "experts.gate_up_proj", "experts.down_proj"


def tiny(kind: str) -> Any:
    """Returns the same model at each call. `gpt_oss` has its weights transposed, and biases."""
    torch.manual_seed(3)
    sizes = {**SIZES, "num_hidden_layers": 2, "num_experts_per_tok": 2, **MODELS[kind]}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).float().eval()


def adapted(kind: str, settings: PeftConfig) -> tuple[Any, Any]:
    model = tiny(kind)
    use_permutations(model)
    add_adapters(model, settings)
    adapters = Adapters(model, settings)
    adapters.fill(5)
    return model, adapters


@pytest.mark.parametrize("targets", [EXPERTS, EXPERTS[1:]], ids=len)
@pytest.mark.parametrize("kind", MODELS)
def test_adapters_of_experts_are_those_of_peft(kind: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    """Files both ways, logits, gradients, merged weights, and the base model."""
    wanted = peft.LoraConfig(r=4, lora_alpha=6.0, target_modules=["q_proj"], target_parameters=list(targets))
    theirs = peft.get_peft_model(tiny(kind), wanted)
    with torch.no_grad():
        for name, factor in theirs.named_parameters():
            if "lora_B" in name:
                factor.normal_(std=0.05)
    theirs.save_pretrained(tmp_path / "theirs")
    keys = {"target_modules": ("q_proj",), "target_parameters": targets, "adapter_path": str(tmp_path / "theirs")}
    settings = PeftConfig(enabled=True, dim=4, alpha=6.0, **keys)  # type: ignore[arg-type]
    model, adapters = adapted(kind, settings)
    tokens = torch.randint(0, 200, (2, 9))
    logits, expected = (one(input_ids=tokens, use_cache=False).logits for one in (model, theirs))
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    base = tiny(kind)(input_ids=tokens, use_cache=False).logits
    assert (logits - base).abs().max() > 1e-2
    with adapters.disabled():
        torch.testing.assert_close(model(input_ids=tokens, use_cache=False).logits, base, atol=1e-6, rtol=0)
    write_adapters(tmp_path / "ours", "base", settings, {name: one.whole() for name, one in adapters.held.items()})
    read = peft.PeftModel.from_pretrained(tiny(kind), tmp_path / "ours")
    torch.testing.assert_close(read(input_ids=tokens, use_cache=False).logits, expected, atol=1e-6, rtol=0)
    sent, merged = SentWeights(model, "float32", torch.device("cpu"), adapters), tiny(kind)
    sent.update()
    assert not any("lora" in part.name for part in sent.slices)
    merged.load_state_dict(dict(sent.tensors), strict=False)
    torch.testing.assert_close(merged(input_ids=tokens, use_cache=False).logits, expected, atol=1e-5, rtol=0)
    for one in (logits, expected):
        one.logsumexp(-1).square().mean().backward()
    for name, adapter in adapters.held.items():
        if ".experts." not in name:
            continue
        module, _, own = name.rpartition(".")
        inner = len(targets) == 2 and own == "gate_up_proj"  # PEFT wraps one parameter after the other
        wrapper: Any = theirs.base_model.model.get_submodule(module + ".base_layer" * inner)
        a, b = (factor.grad for factor in adapter.factors)
        for found, factor in ((a.flatten(0, 1), wrapper.lora_A), (b.movedim(0, -1).flatten(1), wrapper.lora_B)):
            torch.testing.assert_close(found, factor["default"].weight.grad, atol=1e-6, rtol=1e-4, msg=name)
            assert found.abs().sum() > 0


def test_linear_layers_next_to_experts_have_adapters_and_experts_none() -> None:
    """PEFT takes `up_proj` of this model type for experts."""
    _, adapters = adapted("qwen3_moe", PeftConfig(enabled=True, dim=4, target_modules=("q_proj", "up_proj")))
    assert set(adapters.held) == {f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)} | {
        "model.layers.1.mlp.up_proj.weight"
    }
