"""GRPO on two GPUs, one for each role: both executors, sync and async, against Hugging Face. One start serves all tests."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dagrl.config import Config
from dagrl.config.file import load_config
from dagrl.rl.rollout.episodes import new_group, request_seeds
from dagrl.rl.rollout.rollouts import Rollouts
from dagrl.rl.rollout.turns import EnvironmentTurns
from dagrl.run.checkpoint_store import TrainState
from dagrl.run.engines import WorkerEngines
from dagrl.run.loops.grpo import train_samples
from dagrl.run.loops.sft import train_sft
from dagrl.run.plans import PhasePlan, run_plans
from dagrl.run.session import Session
from dagrl.run.start import open_session
from dagrl.runtime.schedule import Scheduler, SchedulerOptions
from dagrl.telemetry.metrics import KL
from dagrl.telemetry.record import read_metrics

pytest.importorskip("cupy", reason="needs cupy (dagrl[cu13] or dagrl[cu12])")
ROOT = Path(__file__).parents[2]
SFT_STEPS, STEPS = 12, 4
LARGEST_KL = 3e-3
"""Between the engines, in bfloat16; published runs have 0.0004 to 0.003, and 1.46 with weights in the wrong places."""

OVERRIDES = (
    *("policy.precision=bfloat16", "policy.megatron_cfg.data_parallel_size=1"),
    "policy.generation.vllm_cfg.enforce_eager=false",
    f"sft.max_num_steps={SFT_STEPS}",
    *(f"grpo.max_num_steps={STEPS}", "grpo.val_period=0", "grpo.val_at_start=false"),
    "refit.verify=checksum",
    *("checkpointing.enabled=false", "checkpointing.export_hf=false"),
    "logger.tensorboard_enabled=false",
)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """Opens a session after its SFT phase, from whose weights each test begins."""
    output = tmp_path_factory.mktemp("runs")
    config = load_config(ROOT / "examples" / "grpo_quickstart.yaml", [*OVERRIDES, f"output_dir={output}"])
    with open_session(config) as session:
        train_sft(session)
        session.train.call("snapshot_reference")
        session.train.call("save_checkpoint", str(output / "sft"))
        yield session


def begin_again(session: Session) -> int:
    """Take up the weights after SFT; how many metrics there are by now."""
    session.train.call("load_checkpoint", str(Path(session.config.output_dir) / "sft"))
    session.checkpoints.state = TrainState(SFT_STEPS)
    return len(read_metrics(session.recorder.paths.metrics))


def run(session: Session, **grpo: Any) -> list[dict[str, Any]]:
    """Returns the metrics of GRPO steps from the weights after SFT."""
    before, config = begin_again(session), session.config
    changed = replace(session, config=config.model_copy(update={"grpo": config.grpo.model_copy(update=grpo)}))
    train_samples(changed)
    return [dict(line) for line in read_metrics(session.recorder.paths.metrics)[before:] if "loss" in line]


def test_sft_learns(session: Session) -> None:
    losses = [
        line["loss"] for line in read_metrics(session.recorder.paths.metrics) if line["stage"] == "sft" and "loss" in line
    ]
    assert losses[-1] < 0.8 * losses[0]  # type: ignore[operator]


def test_both_executors_take_the_same_steps(session: Session) -> None:
    compiled = run(session)
    with eager(session):
        eagerly = run(session)
    for one, other in zip(compiled, eagerly, strict=True):
        assert one["gen_kl_error"] < LARGEST_KL and other["gen_kl_error"] < LARGEST_KL
    # The same samples and the same loss from the same weights; after an update, sums in another order draw other tokens.
    assert compiled[0]["reward/mean"] == eagerly[0]["reward/mean"]
    assert compiled[0]["loss"] == pytest.approx(eagerly[0]["loss"], rel=1e-2, abs=1e-4)
    assert compiled[0]["grad_norm"] == pytest.approx(eagerly[0]["grad_norm"], rel=1e-2)


def test_updates_in_flight_keep_the_engines_in_agreement(session: Session) -> None:
    settings = session.config.grpo.async_grpo
    in_flight = settings.model_copy(
        update={"enabled": True, "in_flight_weight_updates": True, "max_trajectory_age_steps": 1}
    )
    lines = run(session, async_grpo=in_flight)
    moved = max(line[KL] for line in lines)  # since SFT, so at least as far as a step moves
    for line in lines:
        assert line["staleness/policy_age_max"] <= 1
        assert np.isfinite(line["loss"])
        assert line["gen_kl_error"] < min(LARGEST_KL + 2 * moved, 0.5)


def test_generation_has_the_log_probabilities_of_hugging_face(session: Session, tmp_path: Path) -> None:
    """Of the policy as it stands, exported and read by transformers in float32."""
    from transformers import AutoModelForCausalLM

    session.replays.replay("refit", session.step + 1)
    session.train.call("export_hf", str(tmp_path / "policy"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype=torch.float32).eval()
    gaps = []
    for prompt, tokens, logprobs in sampled(session):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        gaps += (torch.tensor(logprobs) - expected).abs().tolist()
    assert len(gaps) > 50
    assert np.mean(gaps) < 0.02 and np.max(gaps) < 0.15  # bfloat16 has 8 bits


def sampled(session: Session) -> list[tuple[list[int], list[int], list[float]]]:
    """Prompt, completion and log-probabilities of some samples."""
    config = session.config
    assert session.generation is not None
    engines = WorkerEngines(session.generation, session.replays, config.timeouts.replay)
    tokenizer = session.inputs.tokenizer
    rollouts = Rollouts(config, engines, EnvironmentTurns(config, tokenizer))
    for number, prompt in enumerate(session.inputs.prompts[:8]):
        rollouts.start(new_group(config, number, number, prompt, request_seeds(0, number, 4)))
    groups = []
    while rollouts.busy:
        groups += rollouts.advance()
    rollouts.settle()
    return [
        (list(episode.prompt.tokens), episode.tokens.tolist(), episode.logprobs.tolist())
        for group in groups
        for episode in group.episodes
    ]


class eager:
    """The session's phases on plain actor calls, for a while."""

    def __init__(self, session: Session) -> None:
        self._session, self._compiled = session, session.replays.scheduler

    def __enter__(self) -> None:
        session, config = self._session, self._session.config
        self._compiled._teardown()
        scheduler = Scheduler(session.recorder.groups, SchedulerOptions(executor="eager", fallback="error"))
        for plan in run_plans(config, session.plan):
            add_phase(scheduler, config, plan)
        scheduler.compile()
        session.replays.scheduler = scheduler

    def __exit__(self, *exception: object) -> None:
        self._session.replays.scheduler.close()
        self._session.replays.scheduler = self._compiled
        self._compiled.recover()


def add_phase(scheduler: Scheduler, config: Config, plan: PhasePlan) -> None:
    from dagrl.run.plans import load_phase

    scheduler.add(
        load_phase(config, plan.name),
        buckets=plan.buckets,
        scalars={"global_valid_tokens": 1.0, "global_valid_sequences": 1.0, **plan.scalars},
        warmup_value=plan.value,
        result_bytes=plan.result_bytes,
    )
