"""GRPO with images on one GPU: what the engine's vision tower sees is what training sees, by refitted weights too."""

from pathlib import Path

import pytest

from dagrl.config.file import load_config
from dagrl.run.train import train
from dagrl.telemetry.record import read_metrics

pytest.importorskip("PIL", reason="needs Pillow (dagrl[images])")
pytestmark = pytest.mark.usefixtures("one_cluster")
ROOT = Path(__file__).parents[2]
OVERRIDES = (
    *("policy.precision=bfloat16", "policy.generation.colocated.enabled=true"),
    "policy.generation.vllm_cfg.enforce_eager=false",
    "sft.max_num_steps=100",
    *("grpo.max_num_steps=4", "grpo.val_period=0"),
    "refit.verify=checksum",
    "logger.tensorboard_enabled=false",
)


@pytest.mark.parametrize("exchange", ["auto", "always"])
def test_engines_see_what_training_sees(exchange: str, tmp_path: Path) -> None:
    more = (f"policy.generation.colocated.exchange={exchange}", f"output_dir={tmp_path}")
    train(load_config(ROOT / "examples" / "grpo_images.yaml", [*OVERRIDES, *more]))
    rows = list(read_metrics(tmp_path / "grpo_images" / "metrics.jsonl"))
    losses = [float(row["loss"]) for row in rows if row["stage"] == "sft" and "loss" in row]  # type: ignore[arg-type]
    assert losses[-1] < 0.7 * losses[0]
    steps = [float(row["gen_kl_error"]) for row in rows if "gen_kl_error" in row]  # type: ignore[arg-type]
    assert len(steps) == 4 and max(steps) < 3e-3
