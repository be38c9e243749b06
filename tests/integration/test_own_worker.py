"""A train worker of a user's own, as `docs/workers.md` describes it."""

from pathlib import Path

import pytest
import torch

from tests.integration.main_job import GRPO, Run, train

pytest.importorskip("megatron.core")
pytest.importorskip("vllm")

pytestmark = pytest.mark.slow  # test_wheel.py trains with workers of a user's
SFT_STEPS, GRPO_STEPS = 3, 2


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Run:
    steps = f"sft.max_num_steps={SFT_STEPS}", f"grpo.max_num_steps={GRPO_STEPS}"
    worker = "policy.worker=dagrl.examples.hf_worker:HfWorker"
    return train(GRPO, tmp_path_factory.mktemp("own"), "own", *steps, "sft.val_period=0", "grpo.val_period=0", worker)


def test_it_takes_the_steps_of_the_megatron_worker(own: Run, learned: Run) -> None:
    ours, theirs = ([line for line in run.metrics if line["stage"] == "sft" and "loss" in line] for run in (own, learned))
    assert len(ours) == SFT_STEPS
    for name in ("loss", "grad_norm", "lr", "valid_tokens"):
        assert [line.get(name) for line in ours] == pytest.approx([line.get(name) for line in theirs[:SFT_STEPS]], rel=1e-4)


def test_engines_sample_from_its_weights(own: Run) -> None:
    steps = [line for line in own.metrics if line["stage"] == "grpo" and "loss" in line]
    assert len(steps) == GRPO_STEPS and all(line["max_logprob_difference"] < 1e-5 for line in steps)


def test_its_checkpoint_and_its_export_have_the_same_weights(own: Run) -> None:
    from transformers import AutoModelForCausalLM

    (latest,) = (own.directory / "checkpoints").glob(f"step_{SFT_STEPS + GRPO_STEPS:08d}")
    (state,) = latest.rglob("state.pt")
    exported = AutoModelForCausalLM.from_pretrained(own.directory / "final_model").state_dict()
    for name, weight in torch.load(state)[0].items():
        torch.testing.assert_close(exported[name], weight, rtol=0, atol=0)
    assert Path(own.directory / "final_model" / "tokenizer.json").exists()
