"""The baseline's refit on GPUs: an NCCL broadcast that vLLM's own `load_weights` takes brings the bytes of a refit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dagrl.bench.plain import PlainDriver, with_plain_workers
from dagrl.config.file import load_config
from dagrl.rl.rewards import RewardRunner
from dagrl.run.plans import grpo_plans
from dagrl.run.start import open_session
from tests.plain_calls import digests, scale_weights

pytest.importorskip("cupy", reason="needs cupy (dagrl[cu13] or dagrl[cu12])")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

CONFIG = Path(__file__).parents[2] / "examples" / "grpo_quickstart.yaml"
OVERRIDES = (
    "policy.precision=bfloat16",
    "policy.megatron_cfg.data_parallel_size=1",
    "policy.generation.vllm_cfg.enforce_eager=false",
    "checkpointing.enabled=false",
    "checkpointing.export_hf=false",
    "logger.tensorboard_enabled=false",
    "logger.plot_enabled=false",
)


def test_the_broadcast_brings_the_bytes_of_a_refit(tmp_path: Path) -> None:
    config = with_plain_workers(load_config(CONFIG, [*OVERRIDES, f"output_dir={tmp_path}"]))
    with open_session(config, grpo_plans) as session, RewardRunner(config.reward) as reward:
        driver = PlainDriver(session, reward)
        assert session.generation is not None
        (before,) = session.generation.call_function(digests)
        session.train.call_function(scale_weights)
        driver.refit(100)
        (by_broadcast,) = session.generation.call_function(digests)
        session.train.call_function(scale_weights)
        session.replays.replay("refit", 101)
        (by_refit,) = session.generation.call_function(digests)
        driver.refit(102)
        assert session.generation.call_function(digests) == [by_refit]
        driver.close()
    assert len(before) > 10
    for name, found in before.items():
        assert len({found, by_broadcast[name], by_refit[name]}) == 3, name
