"""The baseline of `dagrl bench compare` does the same work: its steps are equal to ours, and so is what engines get."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.compare import at_rest
from bench.plain import PlainDriver, with_plain_workers
from bench.step import PLAIN, WAYS, run_way
from dagrl.config import Config
from dagrl.config.file import load_config
from dagrl.errors import DeadlineError
from dagrl.loops.grpo_step import grpo_plans
from dagrl.loops.session import Session
from dagrl.loops.start import open_session
from dagrl.rewards import RewardRunner
from dagrl.worker_group import free_address
from tests.plain_calls import digests, scale_weights

ROOT = Path(__file__).parents[2]
SYNC = next(way for way in WAYS if way.name == "sync")
SETTINGS = (
    "policy.megatron_cfg.tensor_model_parallel_size=2",
    "policy.generation.forced_lengths.median=12",
    "policy.generation.max_new_tokens=32",
    "policy.max_total_sequence_length=48",
    "policy.generation.vllm_cfg.max_model_len=48",
    "policy.train_global_batch_size=16",
    "policy.train_micro_batch_size=8",
    "grpo.num_prompts_per_step=4",
    "grpo.max_num_steps=2",
    "reward.function=bench.gpu.task:alternating",
    "cluster.max_workers=3",
)

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Baseline:
    config: Config
    session: Session
    reward: RewardRunner


@pytest.fixture(scope="module")
def baseline(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Baseline]:
    """One session of two tensor-parallel train workers and an engine, on the tests' cluster."""
    directory = tmp_path_factory.mktemp("runs")
    config = with_plain_workers(at_rest(load_config(ROOT / "bench" / "step.yaml", [*SETTINGS, f"output_dir={directory}"])))
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr("dagrl.loops.start.ray_cluster", lambda *_, **__: nullcontext())
        session = stack.enter_context(open_session(config, grpo_plans(config)))
        reward = stack.enter_context(RewardRunner(config.reward))
        session.train.call("snapshot_reference")
        yield Baseline(config, session, reward)


def test_plain_and_synchronous_steps_are_equal(baseline: Baseline) -> None:
    """Losses, gradients and what was generated, in every step of either way, from the same weights."""
    plain, ours = (run_way(baseline.config, baseline.session, baseline.reward, way, None) for way in (PLAIN, SYNC))
    assert len(plain) == len(ours) == 2
    for theirs, mine in zip(plain, ours, strict=True):
        assert theirs["trained_tokens"] == mine["trained_tokens"] > 16 * 12
        assert theirs["reward/mean"] == mine["reward/mean"] == 0.5
        assert theirs["grad_norm"] == pytest.approx(mine["grad_norm"], rel=1e-4)
        assert mine["grad_norm"] > 1e-3
        for name in ("loss", "policy/kl", "gen_kl_error"):
            assert theirs[name] == pytest.approx(mine[name], rel=1e-4, abs=1e-6), name
    assert plain[0]["grad_norm"] != plain[1]["grad_norm"]  # other prompts, the same weights


def test_the_broadcast_brings_the_bytes_of_a_refit(baseline: Baseline) -> None:
    session, driver = baseline.session, PlainDriver(baseline.session, baseline.reward)
    before = session.generation.call_function(digests)
    session.train.call_function(scale_weights)
    driver.refit(100)
    by_broadcast = session.generation.call_function(digests)
    session.train.call_function(scale_weights)
    session.replay("refit", 101)
    by_refit = session.generation.call_function(digests)
    driver.refit(102)
    assert session.generation.call_function(digests) == by_refit
    driver.close()
    changed = [name for name in before[0] if len({before[0][name], by_broadcast[0][name], by_refit[0][name]}) == 3]
    assert len(changed) == len(before[0]) > 10


def test_workers_that_are_waited_for_too_long_are_told_with_their_stacks(baseline: Baseline) -> None:
    """The last test of the module: worker 0 goes on waiting for a generation worker that was not asked to come."""
    driver, session = PlainDriver(baseline.session, baseline.reward), baseline.session
    driver.close()
    timeouts = session.config.timeouts.model_copy(update={"replay_s": 2.0})
    session.config = session.config.model_copy(update={"timeouts": timeouts})
    address = session.train.call_function(free_address)[0]
    with pytest.raises(DeadlineError, match="'join_broadcast' are not done after 2 s") as error:
        driver._together("join_broadcast", [(session.train, "join_broadcast", [(address, 2)] * 2)])
    assert "train worker 0: join_broadcast for" in str(error.value) and "in _open_group" in str(error.value)
    assert "generation worker 0: nothing" in str(error.value)
