"""Golden runs executed in this environment, and a recorded step replayed, against the run's own record."""

import shutil
from pathlib import Path

import pytest
import yaml

from dagrl.cli.certify import SHIPPED
from dagrl.config.file import load_config
from dagrl.run.certify import certify
from dagrl.run.counterfactual import replay_step
from dagrl.run.train import train
from dagrl.telemetry.record import read_metrics
from tests.integration.main_job import GRPO, ROOT

pytestmark = pytest.mark.usefixtures("one_cluster")


def test_half_the_limit_of_gradients_is_found_though_adam_all_but_cancels_it(tmp_path: Path) -> None:
    golden = shutil.copytree(SHIPPED / "sft_fsdp", tmp_path / "golden")
    config = yaml.safe_load((golden / "config.yaml").read_text())
    assert config["policy"]["optimizer"]["clip_grad"] == 1.0
    config["policy"]["optimizer"]["clip_grad"] = 0.5
    (golden / "config.yaml").write_text(yaml.safe_dump(config))
    reports = {report.phase: report for report in certify(golden).phases}
    assert reports["weights before"].verdict != "differs"
    assert reports["demonstration_step"].verdict == reports["weights after"].verdict == "differs"


@pytest.mark.slow
@pytest.mark.parametrize("golden", sorted(path.name for path in SHIPPED.iterdir()))
def test_this_environment_is_certified(golden: str) -> None:
    certificate = certify(SHIPPED / golden)
    assert certificate.passed, certificate.json()


@pytest.mark.slow
def test_a_replayed_step_has_the_gradient_norm_of_its_record(tmp_path: Path) -> None:
    overrides = [
        *("sft.max_num_steps=60", "grpo.max_num_steps=3", "checkpointing.save_period=61", "checkpointing.export_hf=false"),
        *("policy.megatron_cfg.data_parallel_size=2", f"output_dir={tmp_path}", "name=run"),
    ]
    train(load_config(ROOT / GRPO, overrides))
    (compared,) = replay_step(tmp_path / "run", 63, ["loss_fn.name=reinforce"])  # two steps after the checkpoint
    recorded = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    original = compared.original.flat()
    assert original["grad_norm"] == recorded["grad_norm"]
    assert original["loss"] == pytest.approx(recorded["loss"], abs=1e-6)
    assert compared.cosine == pytest.approx(1, abs=1e-4), "the clip's gradient at the sampling policy is REINFORCE's"
