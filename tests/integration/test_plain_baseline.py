"""The plain calls of `dagrl bench step` do the same work: equal steps, and the same bytes in the engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dagrl.bench.plain import PlainDriver, with_plain_workers
from dagrl.bench.step import PLAIN, VARIANTS, at_rest, run_variant
from dagrl.config import Config
from dagrl.config.file import load_config
from dagrl.errors import DeadlineError
from dagrl.rl.rewards import RewardRunner
from dagrl.run.plans import grpo_plans
from dagrl.run.session import Session
from dagrl.run.start import open_session
from dagrl.runtime.worker_group import free_address
from tests.plain_calls import digests, scale_weights

ROOT = Path(__file__).parents[2]
SYNC = next(variant for variant in VARIANTS if variant.name == "sync")
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
    "reward.function=dagrl.bench.gpu.task:alternating",
    "cluster.num_cpus=2",
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
        patch.setattr("dagrl.run.fleet.ray_cluster", lambda *_, **__: nullcontext())
        session = stack.enter_context(open_session(config, grpo_plans))
        reward = stack.enter_context(RewardRunner(config.reward))
        session.train.call("snapshot_reference")
        yield Baseline(config, session, reward)


def test_plain_and_synchronous_steps_are_equal(baseline: Baseline) -> None:
    """Losses, gradients and generated tokens agree in every step, from the same weights."""
    plain, ours = (
        run_variant(baseline.config, baseline.session, baseline.reward, variant, None) for variant in (PLAIN, SYNC)
    )
    assert len(plain) == len(ours) == 2
    for theirs, mine in zip(plain, ours, strict=True):
        assert theirs["trained_tokens"] == mine["trained_tokens"] > 16 * 12
        assert theirs["reward/mean"] == mine["reward/mean"] == 0.5
        assert theirs["grad_norm"] == pytest.approx(mine["grad_norm"], rel=1e-4)
        assert mine["grad_norm"] > 1e-3
        for name in ("loss", "policy/kl", "gen_kl_error"):
            assert theirs[name] == pytest.approx(mine[name], rel=1e-4, abs=1e-6), name
    assert plain[0]["grad_norm"] != plain[1]["grad_norm"]  # different prompts, same weights


def test_broadcast_and_refit_write_the_same_bytes(baseline: Baseline) -> None:
    session, driver = baseline.session, PlainDriver(baseline.session, baseline.reward)
    before = session.generation.call_function(digests)
    session.train.call_function(scale_weights)
    driver.refit(100)
    by_broadcast = session.generation.call_function(digests)
    session.train.call_function(scale_weights)
    session.replays.replay("refit", 101)
    by_refit = session.generation.call_function(digests)
    driver.refit(102)
    assert session.generation.call_function(digests) == by_refit
    driver.close()
    changed = [name for name in before[0] if len({before[0][name], by_broadcast[0][name], by_refit[0][name]}) == 3]
    assert len(changed) == len(before[0]) > 10


def test_workers_that_are_waited_for_too_long_are_told_with_their_stacks(baseline: Baseline) -> None:
    """The last test of the module: worker 0 goes on waiting for a generation worker that was not asked to come."""
    config = baseline.session.config
    timeouts = config.timeouts.model_copy(update={"replay_s": 2.0})
    session = replace(baseline.session, config=config.model_copy(update={"timeouts": timeouts}))
    driver = PlainDriver(session, baseline.reward)
    driver.close()
    address = session.train.call_function(free_address)[0]
    with pytest.raises(DeadlineError, match="'join_broadcast' did not finish within 2 s") as error:
        driver._together("join_broadcast", [(session.train, "join_broadcast", [(address, 2)] * 2)])
    assert "train worker 0: join_broadcast for" in str(error.value) and "in _open_group" in str(error.value)
    assert "generation worker 0: nothing" in str(error.value)
