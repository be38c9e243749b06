"""Which roles share GPUs, how many GPUs a run takes, and what Ray is asked for."""

from contextlib import ExitStack
from typing import Any

import pytest

from dagrl.config import Config
from dagrl.config.plan import RunPlan
from dagrl.run import fleet

CRITIC = {"megatron_cfg": {"tensor_model_parallel_size": 2}}
SHARES = {**CRITIC, "colocated": True}


class Bundles:
    """In place of Ray's placement groups."""

    released = False

    def __init__(self, count: int, timeout_s: float) -> None:
        self.count = count

    def release(self) -> None:
        self.released = True


def configuration(**sections: Any) -> Config:
    policy = {"megatron_cfg": {"data_parallel_size": 3}, "generation": {"vllm_cfg": {"data_parallel_size": 2}}}
    return Config.model_validate({"name": "t", "algorithm": "ppo", "data": {}, "policy": policy, **sections})


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "gpus_per_worker", lambda cluster: 1.0)
    monkeypatch.setattr(fleet, "GpuBundles", Bundles)


THIRDS = dict.fromkeys(("train", "critic", "teacher"), pytest.approx(1 / 3))


@pytest.mark.parametrize(
    ("sections", "engine", "devices", "shares"),
    [
        ({"critic": CRITIC}, False, 3 + 2 + 2, {}),
        ({"critic": SHARES, "models": {"teacher": {"model_name": "m", "colocated": True}}}, False, 3 + 2, THIRDS),
        ({"critic": CRITIC}, True, 3 + 2, {"train": 0.5, "generation": 0.5}),
        ({"critic": SHARES}, True, 3, {"train": 0.25, "critic": 0.25, "generation": 0.5}),
    ],
    ids=["apart", "a critic and a teacher", "generation", "a critic and generation"],
)
def test_shares_of_the_train_workers_gpus(sections: Any, engine: bool, devices: int, shares: dict[str, float]) -> None:
    """Three train workers, two of generation and two of a critic, which are placed together where they share GPUs."""
    config = configuration(**sections).with_keys({"policy.generation.colocated.enabled": engine})
    plan = RunPlan.of(config)
    assert plan.sharing == tuple(shares) and plan.devices == devices
    with ExitStack() as stack:
        found = fleet.shared_resources(config, plan, stack)
        assert {role: resources.num_gpus for role, resources in found.items()} == shares
        placed = {id(one.bundles): one.bundles for one in found.values()}.values()
        assert [isinstance(bundles, Bundles) and bundles.count for bundles in placed] == [3] * bool(shares)
    assert all(isinstance(bundles, Bundles) and bundles.released for bundles in placed)
