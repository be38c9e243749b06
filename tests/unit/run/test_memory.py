"""Predicted memory is within 3 % of what GPUs have measured, and what cannot fit is an error before the start."""

import json
import math
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from dagrl.bench.models import SHAPES
from dagrl.bench.train import parse_case, sft_config
from dagrl.cli.main import main
from dagrl.config import Config
from dagrl.config.plan import RunPlan
from dagrl.errors import ConfigError
from dagrl.machine import Gpu
from dagrl.run import derive, memory
from dagrl.run.memory import CUDA_CONTEXT, GIB, Decoder, RoleMemory, check_memory, memory_table, run_memory, train_memory
from dagrl.workers.train import logprobs

ROOT = Path(__file__).parents[3]
H200 = 139.8 * GIB
PACKED = " policy.sequence_packing.enabled=true"
FSDP = " policy.backend=fsdp policy.fsdp_cfg.torch_compile=true"
MEASURED = [  # `dagrl bench train` on one H200: case, rows, length, micro, peak GiB
    ("4b:dp1", 16, 2048, 2, 86.08),  # 1x-nvidia-h200/2026-11-25/train-lora-adapters.json
    ("4b:dp1 policy.peft.enabled=true", 16, 2048, 2, 33.24),
    ("8b@28:dp1", 64, 2048, 1, 121.07),  # 2x-nvidia-h200/2026-11-26/train-8b.json
    ("4b@18:dp1", 16, 2048, 2, 47.44),  # .../train-checkpoint.json
    ("30b@3:dp1" + PACKED, 16, 2048, 4, 48.07),  # .../train-experts.json
    ("30b@3:dp1 policy.megatron_cfg.cuda_graphs=true" + PACKED, 16, 2048, 4, 48.06),
    ("0.6b:dp1 policy.megatron_cfg.cuda_graphs=true", 16, 2048, 8, 36.80),  # 4x-nvidia-h200/2026-11-26/train-0.6b.json
    ("0.6b:dp1", 16, 2048, 8, 36.92),
    ("4b:dp1", 16, 2048, 4, 103.52),  # .../train-4b.json
    ("0.6b:dp1 policy.megatron_cfg.cuda_graphs=true" + PACKED, 4, 8192, 2, 37.68),  # 1x-.../2026-11-29/train-0.6b-8k.json
    ("4b:dp1" + PACKED, 8, 4096, 2, 104.27),  # 2x-nvidia-h200/2026-11-27/train-4b-4k.json
    # 1x-nvidia-h200/2026-11-30/grpo-0.6b-512: the size of its microbatches is that of bench peers, which fits its padding.
    ("0.6b:dp1 policy.sequence_packing.train_mb_tokens=16384" + PACKED, 512, 376, 16, 35.93),
    # What torch.compile saves is inferred from this one.
    ("4b:dp1 policy.fsdp_cfg.activation_checkpointing=selective" + FSDP, 1, 65536, 1, 91.78),  # 1x-.../2026-11-29/fsdp.json
    ("0.6b:dp1 policy.fsdp_cfg.activation_checkpointing=selective" + FSDP, 1, 262144, 1, 64.79),
    ("4b:dp1 policy.fsdp_cfg.activation_checkpointing=full" + FSDP, 1, 61440, 1, 84.12),  # 1x-.../2026-11-30/train.json
    ("4b:dp1" + FSDP, 18, 2048, 6, 119.07),
    ("0.6b:dp1", 32, 2048, 16, 62.67),
    ("1.7b:dp1" + FSDP, 32, 2048, 16, 98.55),
    ("1.7b:dp1" + FSDP, 64, 2048, 16, 101.76),
    ("0.6b:dp1" + FSDP + PACKED, 64, 32896, 1, 59.45),  # 1x-nvidia-h200/2026-11-30/peers-grpo.json
    ("4b:dp2" + FSDP, 16, 2048, 4, 65.72),  # 2x-nvidia-h200/2026-11-30/fsdp.json
    ("4b:tp2", 16, 2048, 4, 52.55),
]
BEFORE = [  # with layers that saved more, and an output layer that kept nothing, in November 2026 until the 25th
    ("0.6b:tp2", 72, 2048, 24, 46.44),  # 2x-nvidia-h200/2026-11-23/train-0.6b-tp2.json
    ("0.6b:tp2", 24, 2048, 6, 16.59),  # .../train-0.6b.json
    ("0.6b:cp2", 24, 2048, 6, 23.25),
    ("0.6b:dp2 policy.megatron_cfg.use_distributed_optimizer=true", 24, 2048, 6, 28.54),
    ("4b:tp4", 24, 2048, 6, 35.24),  # 4x-nvidia-h200/2026-11-22/train-4b.json
    ("30b@4:dp4ep4 policy.megatron_cfg.use_distributed_optimizer=true", 16, 2048, 2, 21.80),  # .../train-30b.json
    # With the first microbatch's gradients in float32, until the 30th.
    ("0.6b:dp1" + FSDP, 16, 2048, 8, 35.21),  # 1x-nvidia-h200/2026-11-28/fsdp.json
    ("4b:dp1 policy.fsdp_cfg.activation_checkpointing=selective" + FSDP, 1, 16384, 1, 69.11),  # 1x-.../2026-11-29/fsdp.json
    ("4b:dp1 policy.fsdp_cfg.activation_checkpointing=offloaded" + FSDP, 1, 131072, 1, 86.43),
]


def bench_config(case: str, rows: int, length: int, micro: int) -> tuple[Config, dict[str, Any]]:
    """Returns the configuration of a case of `dagrl bench train`, and its model's."""
    parsed = parse_case(case, tiny=False)
    config = Config.model_validate(sft_config(Path("m"), rows, length, micro, "bfloat16", parsed.layout, parsed.fsdp))
    values = (word.split("=") for word in parsed.overrides)
    return config.with_keys({key: yaml.safe_load(value) for key, value in values}), dict(parsed.shape.config)


def predicted(case: str, rows: int, length: int, micro: int) -> RoleMemory:
    config, model = bench_config(case, rows, length, micro)
    return train_memory(config.policy, Decoder.of(model), H200 - CUDA_CONTEXT)  # of the bench, which draws weights


@pytest.mark.parametrize(("case", "rows", "length", "micro", "gib"), MEASURED)
def test_predictions_are_close_to_measured_peaks(case: str, rows: int, length: int, micro: int, gib: float) -> None:
    found = predicted(case, rows, length, micro)
    assert not found.unknown and found.total / GIB == pytest.approx(gib, rel=0.03)


@pytest.mark.parametrize(("case", "rows", "length", "micro", "gib"), BEFORE)
def test_runs_take_less_than_they_did(case: str, rows: int, length: int, micro: int, gib: float) -> None:
    assert 0.87 * gib < predicted(case, rows, length, micro).total / GIB < gib


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_weights_are_those_of_transformers(name: str) -> None:
    shape = dict(SHAPES[name].config)
    model = Decoder.of(shape)
    assert bool(model.unlike) == model.images == ("-vl-" in name)
    text = {"model_type": "qwen3", **shape["text_config"]} if model.images else shape
    with torch.device("meta"):
        truth = AutoModelForCausalLM.from_config(AutoConfig.for_model(**text))
    assert model.weights == pytest.approx(sum(one.numel() for one in truth.parameters()), rel=1e-3)


def test_images_are_not_predicted() -> None:
    """GRPO of Qwen3-VL-2B's shape on an H200, 8 sequences of 968 tokens a microbatch, has peaked at 78.1 GiB."""
    config, _ = bench_config("0.6b:dp1" + FSDP, 128, 968, 8)
    found = train_memory(config.policy, Decoder.of(SHAPES["qwen3-vl-2b"].config), H200)
    assert found.unknown == ("tower and tokens of images: not counted",) and found.total / GIB < 78.1


def test_checkpointing_keeps_a_layers_input() -> None:
    """At the last layer's backward pass, of its MLP; with `offloaded` at the second one's, when gradients exist."""
    case, kinds = "4b:dp1 policy.fsdp_cfg.activation_checkpointing={}" + FSDP, ("none", "full", "selective", "offloaded")
    found = [predicted(case.format(kind), 1, 131072, 1).parts["activations"] / (2 * 131072) for kind in kinds]
    states, queries, keys, mlp = 2560, 4096, 1024, 3 * 9728
    saved, kept, again = 4 * states + 3 * (queries + keys) + mlp, states + queries, 4 * states + 2 * mlp
    early = states + 3 * (queries + keys)
    assert found == [36 * saved + mlp, 36 * states + again + early, 36 * kept + again, 2 * kept + again]


def test_exponentials_of_logits_are_kept_in_a_quarter_of_what_is_free() -> None:
    """Else memory peaks in a layer: the last one where rows are long, else the first one, whose gradient does not exist."""
    config, shape = bench_config("4b:dp1 policy.fsdp_cfg.activation_checkpointing=full" + FSDP, 1, 61440, 1)
    model, logits, embedding = Decoder.of(shape), 61440 * 151936, 2560 * 151936
    least = CUDA_CONTEXT + 14 * model.weights + 2 * (36 + 3) * 61440 * 2560 + 4 * 2 * logits
    below, above, unknown = (train_memory(config.policy, model, gpu).parts for gpu in (least - 8e6, least + 8e6, math.inf))
    assert above["exponentials of logits"] == 2 * logits and above == unknown
    assert below["output layer"] == 2 * embedding and not {"exponentials of logits", "gradients"} & {*below}
    short = predicted("4b:dp1 policy.fsdp_cfg.activation_checkpointing=full" + FSDP, 1, 8192, 1).parts
    assert short["gradients"] == pytest.approx(2 * 35 / 36 * (model.weights - embedding))


def test_a_microbatch_that_cannot_fit_is_an_error() -> None:
    says = r"need 297.\d GiB of a GPU for a microbatch .* has 139.8 GiB; recompute more"
    for keys, fits in (("", False), (" policy.fsdp_cfg.activation_checkpointing=selective", True)):
        config, model = bench_config("4b:dp1" + keys + FSDP, 1, 65536, 1)
        with nullcontext() if fits else pytest.raises(ConfigError, match=says):
            check_memory(RunPlan.of(config), run_memory(config, RunPlan.of(config), model, H200), H200)
    with pytest.raises(ConfigError, match="num_attention_heads = 0; expected a number of at least 1"):
        Decoder.of({"num_attention_heads": 0})


def grpo(exchange: str = "auto", cache: int | None = None, gpus: int = 1) -> Config:
    engine = {"kv_cache_memory_bytes": cache}
    generation = {"colocated": {"enabled": True, "exchange": exchange}, "vllm_cfg": engine}
    init = {"hf_config": dict(SHAPES["qwen3-4b"].config)}
    policy = {"precision": "bfloat16", "random_init": init, "generation": generation, "worker": "dagrl:MegatronWorker"}
    policy |= {"megatron_cfg": {"tensor_model_parallel_size": gpus}}
    return Config.model_validate({"name": "t", "algorithm": "grpo", "policy": policy, "data": {"path": "d"}})


@pytest.mark.parametrize(
    ("config", "gib", "needs"),
    [
        (grpo(), 90, None),
        (grpo(), 60, "train workers need 67.4 GiB of a GPU before any batch"),
        (grpo(gpus=2), 60, None),
        (grpo("never", 20 << 30), 80, "train and generation workers need 94.9 GiB of a GPU before any batch"),
        (grpo("never", 20 << 30), 100, "train workers need 85.8 GiB of a GPU for a microbatch beside the 27.5 GiB of other"),
        (grpo("never", 20 << 30), 120, None),
        (grpo("auto", 20 << 30), 90, None),
        (grpo("auto", 100 << 30), 80, "generation workers need 107.5 GiB of a GPU before any batch"),
    ],
)
def test_state_that_cannot_fit_is_an_error(config: Config, gib: int, needs: str | None) -> None:
    """Of a model with 4.02 B weights: 18 bytes each to train, 2 to generate."""
    plan, gpu = RunPlan.of(config), gib * GIB
    roles = run_memory(config, plan, SHAPES["qwen3-4b"].config, gpu)
    says = f"{needs} .* has {gib}.0 GiB; (spread|recompute)"
    with nullcontext() if needs is None else pytest.raises(ConfigError, match=says):
        check_memory(plan, roles, gpu)
        assert re.search(r"train and generation (take turns on|share) a GPU: [\d.]+ of ", memory_table(plan, roles, gpu))


@pytest.mark.parametrize(("gib", "cache"), [(22, "0.00"), (23, "0.31"), (24, None)])
def test_a_cache_of_less_than_a_sequence_is_warned_of(gib: float, cache: str | None, caplog: Any) -> None:
    """Of 60 % of a GPU 7.5 GiB are weights and 6 are assumed for the rest; 4,096 tokens take 144 KiB each."""
    config = grpo().with_keys({"policy.max_total_sequence_length": 4096})
    roles = run_memory(config, plan := RunPlan.of(config), SHAPES["qwen3-4b"].config, gib * GIB)
    check_memory(plan, roles[1:], gib * GIB)
    says = f"a KV cache of {cache} GiB is predicted, but one sequence of the greatest length takes 0.56. vLLM starts if"
    assert (says in caplog.text) == (cache is not None) and len(caplog.records) == (cache is not None)


def test_roles_with_parts_of_a_gpu_are_added_up() -> None:
    """Training takes 67.4 GiB before a batch and 85.8 at its peak, the engine 27.5 and 33.5."""
    config = grpo("never", 20 << 30).with_keys({"policy.generation.colocated.enabled": False})
    plan = RunPlan.of(config)
    roles = run_memory(config, plan, SHAPES["qwen3-4b"].config, 120 * GIB)
    check_memory(plan, roles, 86 * GIB)
    for gib, says in ((93, "cache, cluster.gpus_per_worker=1"), (112, "for a microbatch beside the 27.5")):
        with pytest.raises(ConfigError, match=says):
            check_memory(plan, roles, gib * GIB, 0.5)
    check_memory(plan, roles, 120 * GIB, 0.5)
    assert "train and generation share a GPU: 119.3" in memory_table(plan, roles, 120 * GIB, 0.5)
    teacher, layouts = replace(roles[1], role="teacher"), {**plan.layouts, "teacher": plan.layouts["train"]}
    for other, turns, line in (
        ("teacher", False, "train and generation and teacher share a GPU: 152.8"),
        ("generation", True, "train and teacher share a GPU: 119.3"),
    ):
        shared = replace(plan, sharing=("train", other), takes_turns=turns, layouts=layouts)
        assert line in memory_table(shared, [*roles, teacher], 200 * GIB, 0.5)
    with pytest.raises(ConfigError, match=r"or KV cache, models\.teacher\.colocated=false$"):
        check_memory(replace(plan, sharing=("train", "teacher"), layouts=layouts), [*roles, teacher], 93 * GIB)


def test_workers_of_ones_own_are_not_predicted() -> None:
    config = grpo("never", 20 << 30).with_keys({"policy.worker": "mine:Worker", "policy.generation.worker": "mine:Engine"})
    roles = run_memory(config, RunPlan.of(config), SHAPES["qwen3-4b"].config, GIB)
    assert [role.unknown for role in roles] == [(f"mine:{name}: a worker of your own",) for name in ("Worker", "Engine")]
    check_memory(RunPlan.of(config), roles, GIB)


def test_a_reward_model_has_no_logits() -> None:
    content = grpo().model_dump(exclude_unset=True) | {"algorithm": "reward_model"}
    content["policy"].pop("generation")
    config = Config.model_validate(content)
    (train,) = run_memory(config, RunPlan.of(config), SHAPES["qwen3-4b"].config, H200)
    assert "activations" in train.parts and "output layer" not in train.parts and "exponentials of logits" not in train.parts


def test_the_reference_of_adapters_is_no_copy() -> None:
    config = grpo("never").with_keys({"policy.reference_weights": "device", "loss_fn.reference_policy_kl_penalty": 0.1})
    for one, copied in ((config, True), (config.with_keys({"policy.peft.enabled": True}), False)):
        train = run_memory(one, RunPlan.of(one), SHAPES["qwen3-4b"].config, H200)[0]
        assert ("reference weights" in train.parts) == copied


def test_a_frozen_model_takes_the_weights_of_its_own_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SHAPES["qwen3-0.6b"].config}))
    content = grpo().model_dump(exclude_unset=True) | {"models": {"teacher": {"model_name": str(tmp_path)}}}
    config = Config.model_validate(content)
    _, engine, teacher = run_memory(config, RunPlan.of(config), SHAPES["qwen3-4b"].config, H200)
    assert engine.total == pytest.approx(0.6 * H200), "its share of the GPU"
    assert teacher.role == "teacher" and teacher.state == 2 * Decoder.of(SHAPES["qwen3-0.6b"].config).weights


def test_inspect_prints_memory_or_what_cannot_fit(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(ROOT)
    example = ["inspect", "examples/grpo_gpu.yaml", "--memory"]
    assert derive.gpu_memory() == 0 and main(example) == 2
    assert "the run has no GPUs; add --gpu-memory" in capsys.readouterr().err
    assert main([*example, "--gpu-memory", "80"]) == 0
    assert re.search(r"train \(single\)\n  weights +1\.1\n(.*\n)+  total +[\d.]+ of 80\.0\n", capsys.readouterr().out)
    assert main([*example, "--gpu-memory", "8"]) == 2
    assert "train workers need 10.0 GiB of a GPU before any batch" in capsys.readouterr().err


@pytest.mark.parametrize(("gib", "code"), [(8, 2), (80, 0)])
def test_a_dry_run_refuses_what_cannot_fit(gib: int, code: int, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(ROOT)
    cards = [Gpu(f"GPU-{index}", "a GPU", gib << 10, "580", (9, 0)) for index in range(2)]
    monkeypatch.setattr(derive, "gpus", lambda: cards)
    monkeypatch.setattr("dagrl.run.cluster.gpu_count", lambda: len(cards))
    assert main(["train", "examples/grpo_gpu.yaml", "--dry-run", f"output_dir={tmp_path}"]) == code
    assert ("train workers need 10.0 GiB of a GPU before any batch" in capsys.readouterr().err) == bool(code)


def test_the_output_layer_is_that_of_the_workers() -> None:
    assert (logprobs.CHUNK_ELEMENTS, logprobs.KEPT_SHARE) == (memory.CHUNK_ELEMENTS, memory.KEPT_SHARE)
