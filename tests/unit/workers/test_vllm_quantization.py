"""Plain checkpoints for FP8 engines: vLLM's arguments, and the weights it receives while loading."""

from __future__ import annotations

import pytest
import torch

from dagrl.config import Config as Settings
from dagrl.workers.vllm.quantization import quantization_arguments, quantize_checkpoint, quantizes
from tests.unit.refit.fp8_reference import is_quantized, quantized, random_weights
from tests.unit.refit.test_bad_input import BLOCKS, engine_config
from tests.unit.refit.weight_reference import Config, hf_weights, model_config

KINDS = ["qwen3", "qwen3_moe", "deepseek_v3"]


def config_of(kind: str) -> Config:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128}
    latent = {"qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64, "q_lora_rank": 256, "kv_lora_rank": 192}
    config = model_config(kind, hidden_size=128, num_hidden_layers=2, intermediate_size=256, **heads)
    return config | {"moe_intermediate_size": 128} | (latent if kind == "deepseek_v3" else {})


@pytest.mark.parametrize("kind", KINDS)
def test_only_linear_layers_are_quantized_while_loading(kind: str) -> None:
    config = config_of(kind)
    weights = random_weights(config, torch.bfloat16)
    names = {name for name, tensor in weights.items() if is_quantized(name, tensor)}
    given = list(quantize_checkpoint(iter(weights.items()), names, torch.device("cpu")))
    expected: list[tuple[str, torch.Tensor]] = []
    for name, tensor in weights.items():
        if name in names:
            fp8, scales = quantized(tensor)
            expected += [(name, fp8), (f"{name}_scale_inv", scales)]
        else:
            expected.append((name, tensor))
    assert [name for name, _ in given] == [name for name, _ in expected]
    for (name, found), (_, wanted) in zip(given, expected, strict=True):
        assert found.dtype == wanted.dtype and torch.equal(found.float(), wanted.float()), name


@pytest.mark.parametrize("kind", KINDS)
def test_vllms_arguments_name_the_unquantized_matrices(kind: str) -> None:
    """Routers, by all names that they may have: vLLM knows that embedding and head are not linear layers."""
    config = config_of(kind)
    weights = hf_weights(config)
    routers = {name.removesuffix(".weight") for name in weights if name.endswith("gate.weight")}
    assert bool(routers) == (kind != "qwen3")
    arguments = quantization_arguments(engine_config("float32", precision="fp8"), config)
    kept = arguments["hf_overrides"]["quantization_config"].pop("modules_to_not_convert")
    assert {name for name in kept if f"{name}.weight" in weights} == routers
    assert arguments["hf_overrides"] == {"quantization_config": BLOCKS}
    assert arguments["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("settings", "form", "dtype"),
    [
        (engine_config("float32"), None, "float32"),
        (engine_config("float32"), BLOCKS, "bfloat16"),
        (engine_config(precision="fp8"), BLOCKS, "bfloat16"),
    ],
    ids=["plain", "as the checkpoint is", "asked for too"],
)
def test_other_checkpoints_are_loaded_unchanged(settings: Settings, form: object, dtype: str) -> None:
    config = config_of("qwen3") | ({} if form is None else {"quantization_config": form})
    assert not quantizes(settings, config)
    assert quantization_arguments(settings, config) == {"dtype": dtype}
