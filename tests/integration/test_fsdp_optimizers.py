"""8-bit Adam of torchao under FSDP2, against AdamW of torch in one process; `make test-extras` runs it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.integration import megatron_reference as reference
from tests.integration.train_cases import UNCLIPPED, fsdp, plain_torch, train
from tests.integration.train_pool import WorkerPool

optim = pytest.importorskip("torchao.optim")


class EagerAdamW8bit(optim.AdamW8bit):  # type: ignore[misc]
    """Does not compile a kernel for each shape, which takes minutes for a tiny model."""

    def step(self, closure: Any = None) -> Any:
        with torch.compiler.set_stance("force_eager"):
            return super().step(closure)


def test_8bit_adam_trains_and_continues_at_another_layout(pool: WorkerPool, tmp_path: Path) -> None:
    batch, optimizer = reference.make_batch(), {"name": f"{__name__}:EagerAdamW8bit", **UNCLIPPED}
    with fsdp("qwen3", dp=2).group(pool, optimizer=optimizer) as group:
        held = group.call("resident_bytes")[0]
        assert held["optimizer"] < 0.7 * held["weights"]  # 1 + 1 bytes for 4; matrices of 4,096 numbers and more
        steps = [train(group, batch) for _ in range(reference.STEPS)]
        group.call("save_checkpoint", str(tmp_path / "checkpoint"))
        went_on = train(group, batch)
        group.call("load_checkpoint", str(tmp_path / "checkpoint"))
        assert train(group, batch) == went_on  # bit for bit: moments are quantized as they were
        group.call("reset_optimizer")
        assert train(group, batch)["loss"] < went_on["loss"]
    expected = plain_torch(pool.models["qwen3"])
    np.testing.assert_allclose([step["loss"] for step in steps], expected.losses, atol=5e-3)
    assert steps[0]["grad_norm"] == pytest.approx(expected.norms[0], rel=1e-4)
    with fsdp("qwen3", dp=4).group(pool, optimizer=optimizer) as group:
        group.call("load_checkpoint", str(tmp_path / "checkpoint"))
        assert train(group, batch)["loss"] == pytest.approx(went_on["loss"], abs=1e-5)
