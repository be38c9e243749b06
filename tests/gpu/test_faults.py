"""Workers killed in an all-reduce, a quantum and a refit: the run goes on, and losses are the same."""

import pytest
import torch

from tests.faults.killing import DEATH_AT, PLACES, Fault, measure

pytest.importorskip("cupy", reason="needs cupy (dagrl[cu13] or dagrl[cu12])")
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> list[Fault]:
    """Returns the fault of an SFT run on all GPUs, and those of a GRPO run on two."""
    directory, ranks = tmp_path_factory.mktemp("faults"), 1 << (torch.cuda.device_count().bit_length() - 1)
    size = "policy.megatron_cfg.data_parallel_size={}".format
    sft = ["algorithm=sft", "sft.max_num_steps=8", size(ranks), f"policy.train_micro_batch_size={64 // ranks}"]
    return measure(directory / "sft", sft, ["all_reduce"]) + measure(directory / "grpo", [size(1)], ["quantum", "refit"])


@pytest.mark.parametrize("place", PLACES)
def test_the_run_goes_on(faults: list[Fault], place: str) -> None:
    (fault,) = [fault for fault in faults if fault.place == place]
    assert fault.steps_compared >= 2
    if place == "all_reduce":
        assert fault.resumed_from_step == DEATH_AT[place], "the newest checkpoint"
    assert fault.seconds < 60
    assert fault.loss_difference < 1e-3 and fault.grad_norm_difference < 1e-2
