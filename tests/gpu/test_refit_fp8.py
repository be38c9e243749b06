"""A BF16 refit on a GPU into an engine in blockwise FP8, against vLLM's loader.

The truth is an engine that vLLM loads from the same checkpoint in FP8, quantized by vLLM's own `per_block_cast_to_fp8`.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dagrl.config import Config
from dagrl.errors import RunError
from tests.gpu import refit_calls
from tests.integration.vllm_models import make_checkpoint, make_config
from tests.integration.vllm_ranks import Engine, Ranks, call, requests

PROMPTS = [[3 + (7 * row + 11 * place) % 900 for place in range(5 + 9 * row)] for row in range(6)]
SIZES: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True,
    "mlp_only_layers": [1], "decoder_sparse_step": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    pytest.importorskip("vllm")
    from dagrl.workers.vllm import VllmWorker

    ranks = Ranks(VllmWorker.environment(make_config(tmp_path_factory.mktemp("vllm"))))
    yield ranks
    ranks.close()


def checkpoint_of(directory: Path, model_type: str, seed: int) -> Path:
    """Bfloat16 weights whose blocks have different magnitudes."""
    sizes = {**SIZES, **(EXPERTS if model_type == "qwen3_moe" else {})}
    return make_checkpoint(directory, model_type, seed=seed, dtype=torch.bfloat16, norms=0.1, spread=0.1, **sizes)


def export_fp8(checkpoint: Path, directory: Path) -> Path:
    """Writes a checkpoint in DeepSeek's format: blocks by vLLM's own function; routers, embedding and head unquantized."""
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    shutil.copytree(checkpoint, directory)
    whole = load_file(directory / "model.safetensors")
    out: dict[str, Tensor] = {}
    routers = []
    with torch.compiler.set_stance("force_eager"):
        for name, tensor in whole.items():
            if any(part in name for part in ("embed_tokens", "lm_head", "norm", "mlp.gate.weight", "_scale")):
                out[name] = tensor
                routers += [name.removesuffix(".weight")] if "mlp.gate." in name else []
            else:
                out[name], out[f"{name}_scale_inv"] = per_block_cast_to_fp8(tensor)
    save_file(out, directory / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((directory / "config.json").read_text())
    form = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    content["quantization_config"] = {**form, "modules_to_not_convert": routers}
    (directory / "config.json").write_text(json.dumps(content))
    return directory


def fp8_config(model: Path, *, sleeps: bool = False, **vllm: Any) -> Config:
    """Returns an engine's configuration. vLLM allows one engine that can sleep in a process."""
    content: dict[str, Any] = make_config(model, length=128).model_dump()
    content["policy"]["precision"] = "bfloat16"
    content["policy"]["generation"]["colocated"] = {"enabled": sleeps}
    more = {"max_num_seqs": 8, "kv_cache_memory_bytes": 256 << 20, "gpu_memory_utilization": 0.3, "precision": "fp8", **vllm}
    content["policy"]["generation"]["vllm_cfg"] |= more
    return Config.model_validate(content)


@contextmanager
def running(ranks: Ranks, config: Config) -> Iterator[Engine]:
    assert config.policy.generation is not None
    with ranks.engine(config, config.policy.generation.vllm_cfg.tensor_parallel_size) as engine:
        yield engine


def greedy(engine: Engine) -> list[list[int]]:
    rows = engine.run(requests(range(len(PROMPTS)), PROMPTS, new=24, greedy=True))
    return [list(row.tokens) for row in rows]


@pytest.mark.parametrize(
    ("model_type", "sleeps", "experts_over"), [("qwen3", False, 1), ("qwen3_moe", True, 1), ("qwen3_moe", False, 2)]
)
def test_a_refit_leaves_what_vllm_loads_from_the_checkpoint_in_fp8(
    ranks: Ranks, tmp_path: Path, model_type: str, sleeps: bool, experts_over: int
) -> None:
    if torch.cuda.device_count() < experts_over:
        pytest.skip("expert parallelism needs two GPUs")
    engine_of: dict[str, Any] = {"tensor_parallel_size": experts_over, "expert_parallel_size": experts_over}
    first, second = (checkpoint_of(tmp_path / str(seed), model_type, seed) for seed in range(2))
    with running(ranks, fp8_config(first, sleeps=sleeps, **engine_of)) as engine:
        before, slices = greedy(engine), engine.on_all(call, "weight_slices")
        with pytest.raises(RunError, match=r"parameter .* differs from what rank 0 sent"):
            engine.on_all(refit_calls.refit_from, slices, second, 1, 700_001)  # one byte is changed in transit
        with pytest.raises(RunError, match="torn"):
            greedy(engine)
        engine.on_all(refit_calls.refit_from, slices, second, 2)
        if sleeps:
            for level in (1, 2):
                engine.on_all(call, "sleep", level)
                engine.on_all(call, "wake_up", ["weights"])
                engine.on_all(refit_calls.refit_from, slices, second, 2 + level)
                engine.on_all(call, "wake_up", ["kv_cache"])
        held, tokens = engine.on_all(refit_calls.held), greedy(engine)
    truth = export_fp8(second, tmp_path / "fp8")
    with running(ranks, fp8_config(truth, **engine_of, precision=None)) as engine:
        right, expected = engine.on_all(refit_calls.held), greedy(engine)
    for ours, theirs in zip(held, right, strict=True):
        assert ours.keys() == theirs.keys()
        assert any(name.endswith("scale_inv") for name in ours)
        assert sum(tensor.dtype == torch.uint8 for tensor in ours.values()) >= 3 * 4
        assert not [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert tokens == expected != before
