"""Expert parallelism in a live engine: each rank holds the experts of vLLM's own expert map."""

from __future__ import annotations

from pathlib import Path

from dagrl.refit.slices import expand
from tests.integration import vllm_calls
from tests.integration.vllm_models import make_checkpoint, make_config, state_of
from tests.integration.vllm_ranks import Ranks


def test_whole_experts_are_where_vllm_put_them(vllm_ranks: Ranks, tmp_path: Path) -> None:
    """vLLM's CPU kernels need all experts on a rank, so nothing is generated here."""
    checkpoint = make_checkpoint(tmp_path / "model", "qwen3_moe")
    state = state_of(checkpoint)
    spread = {"vllm_cfg": {"tensor_parallel_size": 2, "expert_parallel_size": 2, "kv_cache_memory_bytes": 8 << 20}}
    with vllm_ranks.engine(make_config(checkpoint, spread), 2) as engine:
        tensors, slices = engine.on_all(vllm_calls.tensors), engine.on_all(vllm_calls.weight_slices)
    experts = []
    for held, described in zip(tensors, slices, strict=True):
        for piece in expand(described):
            part = held[piece.tensor][tuple(slice(*extent) for extent in piece.local)]
            whole = state[piece.name][tuple(slice(*extent) for extent in piece.box)]
            assert part.reshape(whole.shape).equal(whole), piece
        experts.append({piece.name for piece in expand(described) if ".experts." in piece.name})
    names = {name for name in state if ".experts." in name}
    assert experts[0] | experts[1] == names and not experts[0] & experts[1]
    assert len(experts[0]) == len(experts[1])
