"""Transformer Engine's attention, against plain math; whole steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dagrl.config.kernel_checks import engine_version
from dagrl.workers.megatron import cpu
from tests.gpu.test_megatron_packing import SEQUENCES, error, plain_attention
from tests.integration import megatron_reference as reference
from tests.integration.megatron_worker import TestedWorker
from tests.integration.test_megatron_layouts import group_batch
from tests.single_worker import single_worker
from tests.unit.workers.test_megatron_experts import relative

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or engine_version() is None, reason="needs a GPU, and transformer_engine[pytorch]"
)


@pytest.fixture(scope="module")
def engine() -> Any:
    """The module around Transformer Engine."""
    cpu.adapt()
    from dagrl.workers.megatron import transformer_engine

    return transformer_engine


def attention_of(attention: Any, exact: list[Tensor], segments: Any, kind: torch.dtype) -> list[Tensor]:
    """Returns the output and the gradients of query, key and value."""
    leaves = [tensor.to(kind).requires_grad_() for tensor in exact[:3]]
    out = attention(*leaves, segments, 128**-0.5)
    return [out.detach(), *torch.autograd.grad(out, leaves, exact[3].to(kind))]


def random_inputs(queries: int, keys: int) -> list[Tensor]:
    """Returns query, key, value and the gradient of the output, in float64, exact in bfloat16."""
    shapes = (queries, 8), (keys, 2), (keys, 2), (queries, 8)
    return [torch.randn(n, heads, 128, device="cuda", dtype=torch.bfloat16).double() for n, heads in shapes]


@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 0), (2, 1), (4, 2)])
def test_attention_agrees_with_plain_math(engine: Any, size: int, rank: int) -> None:
    from dagrl.workers.train.microbatches import make_segments

    torch.manual_seed(0)
    segments = make_segments(SEQUENCES, size, rank, torch.device("cuda"))
    exact = random_inputs(sum(segments.query_lengths), sum(segments.key_lengths))
    found = attention_of(engine.segment_attention, exact, segments, torch.bfloat16)
    for one, truth in zip(found, attention_of(plain_attention, exact, segments, torch.float64), strict=True):
        assert relative(one, truth) < 1e-2


def test_a_recording_takes_other_lengths(engine: Any) -> None:
    from dagrl.workers.train.microbatches import Segments, make_segments

    def padded(row: list[int]) -> Segments:
        """As CUDA graphs have them: room for eight segments of up to 2048 tokens, the last ones empty."""
        made = make_segments([row], 1, 0, torch.device("cuda"))
        starts = torch.cat([made.query_starts, made.query_starts[-1:].expand(9 - len(made.query_starts))])
        return replace(made, query_lengths=(2048,), key_lengths=(2048,), query_starts=starts, key_starts=starts)

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        exact, segments, other = random_inputs(2048, 2048), padded([768, 264, 1016]), [256, 1528, 264]
        for _ in range(2):
            attention_of(engine.segment_attention, exact, segments, torch.bfloat16)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            found = attention_of(engine.segment_attention, exact, segments, torch.bfloat16)
        for tensor in found:
            tensor.fill_(torch.nan)
        segments.query_starts.copy_(padded(other).query_starts)
        graph.replay()
        truth = make_segments([other], 1, 0, torch.device("cuda"))
        expected = attention_of(plain_attention, exact, truth, torch.float64)
    torch.cuda.synchronize()
    for one, value in zip(found, expected, strict=True):
        assert relative(one, value) < 1e-2


@pytest.mark.parametrize("shared", [False, True], ids=["whole", "shared-prefixes"])
@pytest.mark.parametrize("graphs", [False, True], ids=["launched", "recorded"])
def test_steps_are_as_close_to_float32_as_with_our_kernels(tmp_path: Path, graphs: bool, shared: bool) -> None:
    model, batch = reference.make_model("qwen3", tmp_path), group_batch()
    plain = reference.make_config(model, optimizer={"clip_grad": 1e3})
    truth = reference.train_reference(model, batch, plain, reference.sft_reference)
    inside = np.arange(batch.tokens) < batch["lengths"][:, None]
    off: dict[str, tuple[float, float]] = {}
    for wanted in ("never", "always"):
        packing = {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 96, "shared_prefix": shared}
        config = reference.make_config(
            model,
            precision="bfloat16",
            megatron_cfg={"transformer_engine": wanted, "cuda_graphs": graphs},
            optimizer={"clip_grad": 1e3},
            sequence_packing=packing,
        )
        with single_worker(config, TestedWorker) as made:
            for _ in range(3 if graphs else 1):  # the third is a replay
                rows = made.logprobs(batch)
                made.train_step(batch.with_scalars(lr=0.0), "likelihood")
            gradients = reference.assemble([made.gradients()])
        assert rows is not None
        off[wanted] = error(gradients, truth.gradients), float(np.abs(rows["logprobs"] - truth.logprobs * inside).mean())
    assert off["never"][0] < 0.05
    assert off["always"][0] < 1.2 * off["never"][0] + 1e-3 and off["always"][1] < 1.2 * off["never"][1] + 1e-3
