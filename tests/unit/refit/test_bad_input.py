"""Errors of a refit that are named before any byte is sent, and the connection of two groups."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file

from dagrl.channels.spec import ChannelKind
from dagrl.config import Config
from dagrl.errors import CheckpointError, ConfigError, LayoutError, RefitPlanError, RunError
from dagrl.refit import Refit, RefitReceiver, RefitSender, plan_refit
from dagrl.refit.connect import check_configs, check_devices, choose_kind, device_of, distinct_slices
from dagrl.refit.recording import Recording
from dagrl.refit.slices import Box, Scales, WeightSlice
from dagrl.runtime.executors.node import install
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.worker import WorkerContext
from dagrl.runtime.worker_group import WorkerGroup
from dagrl.workers.families.hf_config import model_keys
from dagrl.workers.megatron.weights import megatron_weight_slices
from dagrl.workers.train.hf_load import load_hf
from dagrl.workers.vllm import VllmWorker
from dagrl.workers.vllm.destinations import find_destinations
from dagrl.workers.vllm.loader import LoadedModel
from dagrl.workers.vllm.quantization import check_form, in_fp8
from tests.families import FAMILIES
from tests.unit.refit.memory_channel import MemoryChannel
from tests.unit.refit.test_plan import held
from tests.unit.refit.weight_reference import VllmRank, vllm_weight_slices

BOX = ((0, 128), (0, 128))


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("qwen3", "hidden_size", "wide"),
        ("qwen3", "vocab_size", None),
        ("deepseek_v3", "kv_lora_rank", None),
        ("glm4_moe", "n_shared_experts", 1.5),
        ("qwen3_moe", "moe_intermediate_size", True),
    ],
)
def test_a_missing_or_wrong_configuration_key_is_named(family: str, key: str, value: object) -> None:
    config = {**FAMILIES[family], key: value}
    with pytest.raises(ConfigError, match=key):
        megatron_weight_slices(config, ParallelLayout(), 0)


def test_different_configurations_name_the_keys() -> None:
    train = model_keys(FAMILIES["qwen3"])
    other = {**train, "intermediate_size": 96, "tie_word_embeddings": False}
    found = "intermediate_size is 48 and 96; tie_word_embeddings is True and False; give both the same model directory"
    with pytest.raises(RefitPlanError, match=f"train worker 0 and generation worker 1 differ: {found}"):
        check_configs([train, train], [train, other])
    with pytest.raises(RefitPlanError, match=r"train worker 0 and train worker 1 differ: hidden_size is 32 and missing"):
        check_configs([train, {key: value for key, value in train.items() if key != "hidden_size"}], [train])
    check_configs([train], [dict(train)])


@pytest.mark.parametrize(("key", "value"), [("rope_theta", 5e5), ("rms_norm_eps", 1e-3), ("num_experts_per_tok", 7)])
def test_keys_that_change_no_shape_are_compared(key: str, value: float) -> None:
    config = FAMILIES["qwen3_moe"]
    with pytest.raises(RefitPlanError, match=f"differ: {key} is .* and {value}; give both"):
        check_configs([model_keys(config)], [model_keys({**config, key: value})])
    written = {"_name_or_path": "elsewhere", "torch_dtype": "float32", "transformers_version": "5", "sliding_window": None}
    check_configs([model_keys(config)], [model_keys({**config, **written, "quantization_config": {}})])


def target(dtype: str, scales: bool) -> WeightSlice:
    return WeightSlice("p", BOX, "t", BOX, dtype, Scales("s", ((0, 1), (0, 1))) if scales else None)


@pytest.mark.parametrize(
    ("sent", "dtype", "scales", "message"),
    [
        ("float8_e4m3fn", "bfloat16", False, "'p' is float8_e4m3fn in the sources and cannot become bfloat16 without"),
        ("bfloat16", "float8_e4m3fn", False, "cannot become float8_e4m3fn without scales in tensor 't'"),
        ("int64", "float8_e4m3fn", True, "'p' is int64 in the sources and cannot become float8_e4m3fn"),
        ("bfloat16", "int32", False, "cannot become int32"),
        ("float8_e4m3fn", "float8_e4m3fn", True, "'p' is float8_e4m3fn in the sources and cannot"),
        ("complex64", "", False, "a refit cannot send dtype 'complex64'"),
    ],
)
def test_dtypes_that_cannot_be_cast_are_named(sent: str, dtype: str, scales: bool, message: str) -> None:
    with pytest.raises(RefitPlanError, match=message):
        plan_refit([[held(BOX)]], [[target(dtype, scales)]], dtype=sent)


def test_wrong_scales_and_unplanned_fp8_sources_are_rejected_when_bound() -> None:
    plan = plan_refit([[held(BOX)]], [[target("float8_e4m3fn", True)]], dtype="bfloat16")
    tensors = {"t": torch.zeros(128, 128, dtype=torch.float8_e4m3fn), "s": torch.zeros(1, 1, dtype=torch.bfloat16)}
    with pytest.raises(RefitPlanError, match=r"the scales 's' of 'p' are torch.bfloat16; expected torch\.float32"):
        RefitReceiver(plan.for_rank(1), tensors, MemoryChannel(1, 2, {}))
    with pytest.raises(RefitPlanError, match=r"float8_e4m3fn, but the plan was made for float64, float32, bfloat16 or"):
        RefitSender(plan.for_rank(0), tensors, MemoryChannel(0, 2, {}))


def test_a_channel_of_another_size_than_the_plan_is_rejected() -> None:
    plan = plan_refit([[held(BOX)]], [[held(BOX)]], dtype="float32")
    for rank, size in ((1, 3), (0, 2)):
        message = rf"the plan is for rank 1 of 2, the channel is rank {rank} of {size}; make the plan"
        with pytest.raises(RefitPlanError, match=message):
            RefitReceiver(plan.for_rank(1), {"t": torch.zeros(128, 128)}, MemoryChannel(rank, size, {}))
    with pytest.raises(RefitPlanError, match="the rank is 2; expected 0 to 1 in a refit of 2 ranks"):
        plan.for_rank(2)


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
def test_a_checkpoint_in_another_quantization_format_is_rejected(form: dict[str, object], found: str) -> None:
    hf_config = {**FAMILIES["qwen3"], "quantization_config": form}
    with pytest.raises(ConfigError, match=rf"quantization_config has .*{found}.*; a refit writes models without one, or"):
        VllmWorker.check(engine_config(), hf_config)
    assert in_fp8(engine_config(), {**FAMILIES["qwen3"], "quantization_config": {**BLOCKS, "modules_to_not_convert": []}})


def test_a_loaded_model_in_an_unsupported_format_is_rejected() -> None:
    class Fp8Config:
        weight_block_size, activation_scheme, is_checkpoint_fp8_serialized = None, "dynamic", True

    with pytest.raises(ConfigError, match=r"holds the generation model as Fp8Config with \{'weight_block_size': None"):
        check_form(Fp8Config())


def test_a_worker_that_cannot_be_written_to_aborts_the_channel() -> None:
    """Senders would otherwise wait for it until their deadline."""
    channel = Mock()
    worker = VllmWorker(WorkerContext("generation", 0, ParallelLayout()), engine_config())
    with pytest.raises(RunError, match="engine is not running"), worker.writing_weights(1, channel):
        pytest.fail("the block must not run")
    (reason,) = channel.abort.call_args.args
    assert reason.startswith("RunError: ") and "engine is not running" in reason


def test_engines_accept_any_family_whose_sizes_divide() -> None:
    model = {**FAMILIES["llama"], "model_type": "olmo2", "head_dim": 32, "num_attention_heads": 12, "num_key_value_heads": 6}
    VllmWorker.check(engine_config(), model)
    for tp, message in ((5, "12 attention heads are not divisible by tensor_parallel_size 5"), (4, "6 key/value heads")):
        with pytest.raises(LayoutError, match=message):
            VllmWorker.check(engine_config().with_keys({"policy.generation.vllm_cfg.tensor_parallel_size": tp}), model)


def test_moving_experts_are_rejected() -> None:
    config = SimpleNamespace(quant_config=None, parallel_config=SimpleNamespace(enable_eplb=True))
    with pytest.raises(ConfigError, match="EPLB moves experts at run time"):
        find_destinations(torch.nn.Module(), LoadedModel({}, Recording()), config)


def test_training_does_not_start_from_quantized_weights(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(4, 4, dtype=torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    box = ((0, 4), (0, 4))
    with pytest.raises(CheckpointError, match=r"parameter 'w' is stored as F8_E4M3; training starts from F64, F32"):
        load_hf(tmp_path, [WeightSlice("w", box, "t", box)], {"w": (4, 4)}, {"t": torch.ones(4, 4)})


@pytest.mark.parametrize(
    ("name", "tensor", "local", "message"),
    [
        ("p", "t", ((0, 3),), r"'p': the box \(\(0, 4\),\) has extents \[4\], but .* has \[3\]"),
        ("p", "t", (), r"'p': the box \(\(0, 4\),\) has extents \[4\], but \(\) in tensor 't' has \[\]"),
        ("p", "t", ((0, 2), (0, 4)), r"has \[2, 4\]; expected the same, apart from leading dimensions of size one"),
        ("p", "t.*", ((0, 4),), r"'t\.\*' is a stack, but the parameter 'p' in it is not"),
    ],
)
def test_a_slice_that_does_not_fit_its_tensor_is_rejected(name: str, tensor: str, local: Box, message: str) -> None:
    with pytest.raises(RefitPlanError, match=message):
        WeightSlice(name, ((0, 4),), tensor, local)


class Group:
    """Has `call_function` like a worker group, and counts the returned slices."""

    def __init__(self, slices: Sequence[Sequence[WeightSlice]]) -> None:
        self.workers = [SimpleNamespace(weight_slices=partial(list, one)) for one in slices]
        self.role = SimpleNamespace(name="generation")
        self.returned = 0
        for rank, worker in enumerate(self.workers):
            install(worker, "generation", rank, "")

    def call_function(self, function: Callable[..., Any], *args: object) -> list[Any]:
        results = [function(worker, *args) for worker in self.workers]
        self.returned += sum(len(result) for result in results if isinstance(result, list))
        return results


def test_workers_without_the_methods_of_a_refit_are_refused() -> None:
    group = SimpleNamespace(role=SimpleNamespace(name="generation", methods={"weight_slices": None}))
    with pytest.raises(RefitPlanError, match="the generation worker has no prepare_refit, which a refit calls"):
        Refit.connect(cast(WorkerGroup, group), cast(WorkerGroup, group), dtype="float32")


def test_replicas_send_their_slices_once() -> None:
    config = FAMILIES["qwen3_moe"]
    two = [vllm_weight_slices(config, VllmRank(2, rank)) for rank in range(2)]
    group = Group(two * 4)
    found = distinct_slices(cast(WorkerGroup, group))
    assert found == two * 4
    assert group.returned == sum(map(len, two))
    assert all(found[rank] is found[rank % 2] for rank in range(8))  # one object, so that the plan intersects it once
    plan = plan_refit([vllm_weight_slices(config, VllmRank())], found, dtype="float32")
    assert plan.destinations == 8


@pytest.mark.parametrize(
    ("kind", "hosts", "devices", "message"),
    [
        ("ipc", [0, 1], ["a", "a"], "joins processes of one host, but the workers are on 2 hosts; put"),
        ("nccl", [0, 0, 0], ["a", "b", "a"], "ranks 0 and 2 of the refit share GPU a, which NCCL does not support; set"),
        ("nccl", [0, 0], ["a", ""], "an nccl channel joins GPUs, but rank 1 of the refit has its weights on a CPU; put the"),
    ],
)
def test_channels_that_cannot_join_fail(kind: ChannelKind, hosts: list[int], devices: list[str], message: str) -> None:
    with pytest.raises(RefitPlanError, match=message):
        check_devices(kind, hosts, devices)


@pytest.mark.parametrize(("devices", "kind"), [(["", ""], "gloo"), (["a", "b"], "nccl"), (["a", "b", "a"], "ipc")])
def test_the_kind_follows_from_the_devices(devices: list[str], kind: ChannelKind) -> None:
    assert choose_kind(devices) == kind
    check_devices(kind, [0] * len(devices), devices)


def test_a_worker_without_tensors_is_on_no_gpu() -> None:
    assert device_of(SimpleNamespace(weight_slices=list)) == ""
