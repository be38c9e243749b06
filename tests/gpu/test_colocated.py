"""Train and generation workers in turn on one GPU: engines agree after each exchange, and memory really changes hands."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dagrl.config.file import load_config
from dagrl.run.loops.grpo import train_samples
from dagrl.run.loops.sft import train_sft
from dagrl.run.model import load_tokenizer, write_random_model
from dagrl.run.session import Session
from dagrl.run.start import open_session
from dagrl.telemetry.record import read_metrics

ROOT = Path(__file__).parents[2]
KV_CACHE = 4 << 30
OVERRIDES = (
    *("policy.precision=bfloat16", "policy.megatron_cfg.data_parallel_size=1"),
    *("policy.generation.colocated.enabled=true", "policy.generation.colocated.exchange=always"),
    "policy.generation.vllm_cfg.enforce_eager=false",
    f"policy.generation.vllm_cfg.kv_cache_memory_bytes={KV_CACHE}",
    "sft.max_num_steps=12",
    *("grpo.max_num_steps=5", "grpo.val_period=2"),
    "refit.verify=checksum",
    *("checkpointing.save_period=16", "checkpointing.export_hf=false"),
    "logger.tensorboard_enabled=false",
)


def test_what_fits_stays_where_it_is(tmp_path: Path) -> None:
    """On a GPU with room for both roles nothing moves, and the engines agree as they do with exchanges."""
    auto = ("policy.generation.colocated.exchange=auto", "sft.max_num_steps=0", f"output_dir={tmp_path}")
    config = load_config(ROOT / "examples" / "grpo_quickstart.yaml", [*OVERRIDES, *auto])
    with open_session(config) as session:
        session.replays.hold("generation", keep_generation_weights=True)  # warm-up ended with generation asleep
        free = torch.cuda.mem_get_info()[0]
        train_samples(session)
        assert abs(torch.cuda.mem_get_info()[0] - free) < KV_CACHE / 4
        lines = [line for line in read_metrics(session.recorder.paths.metrics) if line["stage"] == "grpo" and "loss" in line]
    assert len(lines) == 5
    for line in lines:
        assert float(line["gen_kl_error"]) < 3e-3  # type: ignore[arg-type]
        assert "timing_s/exchange" not in line


PPO = ("algorithm=ppo", "critic.colocated=true", "critic.optimizer.lr=1e-3")
DISTILL = ("loss_fn={name: distill, reference_policy_kl_penalty: 0}", "models.teacher.colocated=true")


@pytest.mark.parametrize("exchange", ["always", "auto"])
@pytest.mark.parametrize("third", [PPO, DISTILL], ids=["critic", "teacher"])
def test_a_third_role_takes_turns_on_the_same_gpu(third: tuple[str, ...], exchange: str, tmp_path: Path) -> None:
    more = (*third, f"policy.generation.colocated.exchange={exchange}", f"output_dir={tmp_path}")
    example = ROOT / "examples" / "grpo_quickstart.yaml"
    if third is DISTILL:
        policy = load_config(example).policy
        assert policy.random_init is not None
        other = policy.random_init.model_copy(update={"seed": 7})
        write_random_model(other, load_tokenizer(policy), tmp_path / "teacher")
        more += (f"models.teacher.model_name={tmp_path / 'teacher'}",)
    config = load_config(example, [*OVERRIDES, *more])
    with open_session(config) as session:
        train_samples(session)
        lines = [line for line in read_metrics(session.recorder.paths.metrics) if "gen_kl_error" in line and "loss" in line]
    assert len(lines) == 5
    for line in lines:
        assert float(line["gen_kl_error"]) < 3e-3  # type: ignore[arg-type]
        found = line["critic/loss" if third is PPO else "policy/reverse_kl"]
        assert math.isfinite(float(found))  # type: ignore[arg-type]
        assert exchange == "auto" or float(line["timing_s/exchange"]) > 0  # type: ignore[arg-type]


WAYS = {"all weights": "policy.peft.enabled=false", "adapters alone": "policy.peft={enabled: true, refit: adapters}"}


@pytest.fixture(scope="module", params=WAYS.values(), ids=list(WAYS))
def session(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    output = tmp_path_factory.mktemp("runs")
    config = load_config(ROOT / "examples" / "grpo_quickstart.yaml", [*OVERRIDES, request.param, f"output_dir={output}"])
    with open_session(config) as session:
        train_sft(session)
        yield session


def test_engines_agree_in_every_step(session: Session) -> None:
    train_samples(session)
    lines = [line for line in read_metrics(session.recorder.paths.metrics) if line["stage"] == "grpo" and "loss" in line]
    assert len(lines) == 5
    for line in lines:
        assert float(line["gen_kl_error"]) < 3e-3  # type: ignore[arg-type]
        assert float(line["timing_s/exchange"]) > 0  # type: ignore[arg-type]


def test_memory_changes_hands(session: Session) -> None:
    free = {}
    for roles in (("generation",), ("train",), ("train", "generation"), ("generation",)):
        session.replays.hold(*roles, keep_generation_weights=True)
        free[roles] = torch.cuda.mem_get_info()[0]
    assert free["train",] - free["generation",] > 0.9 * KV_CACHE
    assert free["train", "generation"] - free["generation",] > 0.9 * KV_CACHE
