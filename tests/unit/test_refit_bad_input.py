"""What is wrong with a refit is named before any byte moves: families, configurations, dtypes, worlds, parameters."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dagrl.config import Config
from dagrl.errors import CheckpointError, ConfigError, RefitPlanError, RunError
from dagrl.layout import ParallelLayout
from dagrl.refit import RefitReceiver, RefitSender, plan_refit
from dagrl.refit.connect import check_configs
from dagrl.refit.slices import Box, Scales, WeightSlice
from tests.families import FAMILIES
from tests.unit.memory_channel import MemoryChannel
from tests.unit.test_refit_plan import held
from tests.unit.weight_reference import model_config
from workers.families.keys import model_keys
from workers.families.vllm import VllmRank
from workers.megatron.hf import load_hf
from workers.megatron.weights import megatron_weight_slices
from workers.vllm import VllmWorker
from workers.vllm.experts import held_experts
from workers.vllm.quantization import check_form, in_fp8
from workers.vllm.weights import vllm_weight_slices

BOX = ((0, 128), (0, 128))


def test_a_source_that_is_quantized_already() -> None:
    quantized = WeightSlice("p", BOX, "t", BOX, "float8_e4m3fn", Scales("s", ((0, 1), (0, 1))))
    with pytest.raises(
        RefitPlanError, match=r"'p' is quantized in the sources .*, which a refit cannot send; train in float32"
    ):
        plan_refit([[quantized]], [[quantized]], dtype="bfloat16")


@pytest.mark.parametrize("kind", ["gpt_oss", None])
def test_a_family_without_rules(kind: str | None) -> None:
    config = model_config(model_type=kind)  # type: ignore[arg-type]
    message = rf"model_type is {kind!r}, for which there are no weight layout rules; there are some for llama, .*nemotron_h"
    for describe in (
        lambda: megatron_weight_slices(config, ParallelLayout(), 0),
        lambda: vllm_weight_slices(config, VllmRank()),
    ):
        with pytest.raises(ConfigError, match=message):
            describe()


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("qwen3", "hidden_size", "wide"),
        ("qwen3", "vocab_size", None),
        ("deepseek_v3", "kv_lora_rank", None),
        ("nemotron_h", "ssm_state_size", 1.5),
        ("nemotron_h", "hybrid_override_pattern", "M*"),
        ("qwen3_moe", "moe_intermediate_size", True),
    ],
)
def test_a_configuration_that_lacks_a_key_or_has_a_wrong_one(family: str, key: str, value: object) -> None:
    config = {**FAMILIES[family], key: value}
    with pytest.raises(ConfigError, match=key):
        megatron_weight_slices(config, ParallelLayout(), 0)
    with pytest.raises(ConfigError, match=key):
        vllm_weight_slices(config, VllmRank())


def test_configurations_that_differ_name_the_keys() -> None:
    train = model_keys(FAMILIES["qwen3"])
    other = {**train, "intermediate_size": 96, "tie_word_embeddings": False}
    with pytest.raises(
        RefitPlanError,
        match=r"train worker 0 and that of generation worker 1 differ: intermediate_size is 48 and 96; "
        r"tie_word_embeddings is True and False; give both the same model directory",
    ):
        check_configs([train, train], [train, other])
    with pytest.raises(RefitPlanError, match=r"of train worker 1 differ: hidden_size is 32 and missing"):
        check_configs([train, {key: value for key, value in train.items() if key != "hidden_size"}], [train])
    check_configs([train], [dict(train)])


@pytest.mark.parametrize(("key", "value"), [("rope_theta", 5e5), ("rms_norm_eps", 1e-3), ("num_experts_per_tok", 7)])
def test_what_leaves_no_trace_in_shapes_is_compared(key: str, value: float) -> None:
    config = FAMILIES["qwen3_moe"]
    with pytest.raises(RefitPlanError, match=f"differ: {key} is .* and {value}; give both"):
        check_configs([model_keys(config)], [model_keys({**config, key: value})])
    written = {
        "_name_or_path": "elsewhere",
        "torch_dtype": "float32",
        "transformers_version": "5",
        "quantization_config": {},
    }
    check_configs([model_keys(config)], [model_keys({**config, **written, "sliding_window": None})])


def target(dtype: str, scales: bool) -> WeightSlice:
    return WeightSlice("p", BOX, "t", BOX, dtype, Scales("s", ((0, 1), (0, 1))) if scales else None)


@pytest.mark.parametrize(
    ("sent", "dtype", "scales", "message"),
    [
        (
            "float8_e4m3fn",
            "bfloat16",
            False,
            "'p' is float8_e4m3fn in the sources and cannot become bfloat16 without",
        ),
        ("bfloat16", "float8_e4m3fn", False, "cannot become float8_e4m3fn without scales in tensor 't'"),
        ("int64", "float8_e4m3fn", True, "'p' is int64 in the sources and cannot become float8_e4m3fn"),
        ("bfloat16", "int32", False, "cannot become int32"),
        ("float8_e4m3fn", "float8_e4m3fn", True, "'p' is float8_e4m3fn in the sources and cannot"),
        ("complex64", "", False, "dtype 'complex64' cannot be sent in a refit"),
    ],
)
def test_a_dtype_pair_that_cannot_be(sent: str, dtype: str, scales: bool, message: str) -> None:
    with pytest.raises(RefitPlanError, match=message):
        plan_refit([[held(BOX)]], [[target(dtype, scales)]], dtype=sent)


@pytest.mark.parametrize(("sent", "dtype"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "")])
def test_dtype_pairs_that_can_be(sent: str, dtype: str) -> None:
    plan_refit([[held(BOX)]], [[target(dtype, False)]], dtype=sent)


def test_scales_of_another_dtype_are_refused_when_bound() -> None:
    plan = plan_refit([[held(BOX)]], [[target("float8_e4m3fn", True)]], dtype="bfloat16")
    tensors = {"t": torch.zeros(128, 128, dtype=torch.float8_e4m3fn), "s": torch.zeros(1, 1, dtype=torch.bfloat16)}
    queues: defaultdict[tuple[int, int], Queue[Tensor]] = defaultdict(Queue)
    with pytest.raises(RefitPlanError, match=r"the scales 's' of 'p' are torch.bfloat16; expected torch\.float32"):
        RefitReceiver(plan.for_rank(1), tensors, MemoryChannel(1, 2, queues))


def test_a_source_in_fp8_is_refused_when_bound_to_a_plan_that_quantizes() -> None:
    plan = plan_refit([[held(BOX)]], [[target("float8_e4m3fn", True)]], dtype="bfloat16")
    tensors = {"t": torch.zeros(128, 128, dtype=torch.float8_e4m3fn)}
    with pytest.raises(RefitPlanError, match=r"float8_e4m3fn, but the plan was made for float64, float32, bfloat16 or"):
        RefitSender(plan.for_rank(0), tensors, MemoryChannel(0, 2, {}))


def test_a_world_that_does_not_match_the_plan() -> None:
    plan = plan_refit([[held(BOX)]], [[held(BOX)]], dtype="float32")
    queues: defaultdict[tuple[int, int], Queue[Tensor]] = defaultdict(Queue)
    with pytest.raises(RefitPlanError, match=r"the plan is for rank 1 of 2, the channel is rank 1 of 3; plan for the world"):
        RefitReceiver(plan.for_rank(1), {"t": torch.zeros(128, 128)}, MemoryChannel(1, 3, queues))
    with pytest.raises(RefitPlanError, match="the plan is for rank 1 of 2, the channel is rank 0 of 2"):
        RefitReceiver(plan.for_rank(1), {"t": torch.zeros(128, 128)}, MemoryChannel(0, 2, queues))
    with pytest.raises(RefitPlanError, match="rank 2 is outside a refit of 2 ranks"):
        plan.for_rank(2)


def test_a_parameter_that_one_side_lacks_is_named_with_its_stack() -> None:
    config = FAMILIES["deepseek_v3"]
    sources = [megatron_weight_slices(config, ParallelLayout(), 0)]
    wanted = vllm_weight_slices({**config, "topk_method": "greedy"}, VllmRank())
    with pytest.raises(RefitPlanError, match=r"destinations lack: 'model.layers.1.mlp.gate.e_score_correction_bias'"):
        plan_refit(sources, [wanted], dtype="bfloat16")
    fewer = vllm_weight_slices({**config, "n_routed_experts": 3}, VllmRank())
    with pytest.raises(RefitPlanError, match=r"mlp\.gate\.weight' is \(\(0, 4\), .* in the sources but \(\(0, 3\)"):
        plan_refit(sources, [fewer], dtype="bfloat16")


def engine_config(trained_in: str = "bfloat16", **vllm: str) -> Config:
    policy = {"model_name": "m", "precision": trained_in, "generation": {"vllm_cfg": vllm}}
    return Config.model_validate({"name": "t", "algorithm": "grpo", "data": {}, "policy": policy})


BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("form", "found"),
    [
        ({**BLOCKS, "weight_block_size": None}, r"'weight_block_size': None"),
        ({**BLOCKS, "activation_scheme": "static"}, "'activation_scheme': 'static'"),
        ({"quant_method": "awq", "bits": 4}, "'quant_method': 'awq'"),
    ],
)
def test_a_checkpoint_that_is_quantized_in_another_way(form: dict[str, object], found: str) -> None:
    hf_config = {**FAMILIES["qwen3"], "quantization_config": form}
    with pytest.raises(
        ConfigError, match=rf"quantization_config has .*{found}.*; a refit writes models without one, or with"
    ):
        VllmWorker.check(engine_config(), hf_config)
    assert in_fp8(engine_config(), {**FAMILIES["qwen3"], "quantization_config": {**BLOCKS, "modules_to_not_convert": []}})


def test_a_loaded_model_in_a_form_that_cannot_be_written() -> None:
    class Fp8Config:
        weight_block_size, activation_scheme, is_checkpoint_fp8_serialized = None, "dynamic", True

    with pytest.raises(ConfigError, match=r"holds the generation model as Fp8Config with \{'weight_block_size': None"):
        check_form(Fp8Config())


def test_an_engine_that_cannot_be_written_tells_the_ranks_that_send() -> None:
    """They would wait for it until their deadline."""
    told: list[str] = []
    worker = VllmWorker.__new__(VllmWorker)
    worker._receiver, worker._engine = Mock(), Mock()
    worker._channel = SimpleNamespace(abort=told.append)  # type: ignore[assignment]
    worker._asleep, worker._torn = {"weights"}, None
    with pytest.raises(RunError, match="sleeps without memory for weights"):
        worker.receive_weights(1)
    assert len(told) == 1 and "call wake_up" in told[0]
    assert worker._torn is None, "what it holds is whole"


def test_a_kv_cache_in_fp8_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype is fp8, but the engine computes in float32; set .*precision to"):
        VllmWorker.check(engine_config("float32", kv_cache_dtype="fp8"), FAMILIES["qwen3"])
    with pytest.raises(
        ConfigError, match=r"kv_cache_dtype is fp8, but mla models keep other things .* set kv_cache_dtype to"
    ):
        VllmWorker.check(engine_config(kv_cache_dtype="fp8"), FAMILIES["deepseek_v3"])
    VllmWorker.check(engine_config("float32", kv_cache_dtype="fp8", precision="bfloat16"), FAMILIES["qwen3"])


def test_experts_that_move_or_lie_differently() -> None:
    class Layer(torch.nn.Module):
        def __init__(self, mapping: list[int]) -> None:
            super().__init__()
            self.register_buffer("_expert_map", torch.tensor(mapping))

    config = SimpleNamespace(parallel_config=SimpleNamespace(enable_eplb=False))
    same = torch.nn.ModuleList([Layer([-1, 1, -1, 0]), Layer([-1, 1, -1, 0])])
    assert held_experts(same, config) == (3, 1)
    with pytest.raises(
        ConfigError, match=r"'1' holds the experts \(0, 1\), but '0' \(3, 1\); a refit expects one placement"
    ):
        held_experts(torch.nn.ModuleList([Layer([-1, 1, -1, 0]), Layer([0, 1, -1, -1])]), config)
    with pytest.raises(ConfigError, match="EPLB moves experts while it runs"):
        held_experts(same, SimpleNamespace(parallel_config=SimpleNamespace(enable_eplb=True)))


def test_training_does_not_start_from_quantized_weights(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(4, 4, dtype=torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    box = ((0, 4), (0, 4))
    with pytest.raises(CheckpointError, match=r"parameter 'w' is stored as F8_E4M3; training starts from F64, F32"):
        load_hf(tmp_path, [WeightSlice("w", box, "t", box)], {"w": (4, 4)}, {"t": torch.ones(4, 4)})


@pytest.mark.parametrize(
    ("name", "tensor", "local", "message"),
    [
        ("p", "t", ((0, 3),), r"'p': the box \(\(0, 4\),\) is of extents \[4\], but its place .* of \[3\]"),
        ("p", "t", (), r"'p': the box \(\(0, 4\),\) is of extents \[4\], but its place \(\) in tensor 't' of \[\]"),
        ("p", "t", ((0, 2), (0, 4)), r"of \[2, 4\]; expected the same, up to leading dimensions of size one"),
        ("p", "t.*", ((0, 4),), r"'t\.\*' is a stack, but the parameter 'p' in it is none"),
    ],
)
def test_a_slice_that_does_not_fit_its_tensor(name: str, tensor: str, local: Box, message: str) -> None:
    with pytest.raises(RefitPlanError, match=message):
        WeightSlice(name, ((0, 4),), tensor, local)
