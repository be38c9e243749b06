"""Which roles share GPUs, how many GPUs a run takes, and what Ray is asked for."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

from dagrl.config import Config
from dagrl.config.plan import RunPlan
from dagrl.run import fleet

CRITIC = {"megatron_cfg": {"tensor_model_parallel_size": 2}}


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


def test_a_critic_has_gpus_of_its_own() -> None:
    config = configuration(critic=CRITIC)
    plan = RunPlan.of(config)
    assert plan.sharing == () and plan.devices == 3 + 2 + 2
    with ExitStack() as stack:
        assert fleet.shared_resources(config, plan, stack) == {}


def test_a_critic_and_a_teacher_on_the_train_workers_gpus() -> None:
    config = configuration(critic={**CRITIC, "colocated": True}, teacher={"model_name": "m", "colocated": True})
    plan = RunPlan.of(config)
    assert plan.sharing == ("train", "critic", "teacher") and plan.devices == 3 + 2
    with ExitStack() as stack:
        found = fleet.shared_resources(config, plan, stack)
        assert {role: resources.num_gpus for role, resources in found.items()} == dict.fromkeys(found, pytest.approx(1 / 3))
        (bundles,) = {id(resources.bundles): resources.bundles for resources in found.values()}.values()
        assert isinstance(bundles, Bundles) and bundles.count == 3
    assert bundles.released


def test_generation_has_half_of_a_shared_gpu() -> None:
    config = configuration(critic=CRITIC).with_keys({"policy.generation.colocated.enabled": True})
    plan = RunPlan.of(config)
    assert plan.sharing == ("train", "generation") and plan.devices == 3 + 2
    with ExitStack() as stack:
        found = fleet.shared_resources(config, plan, stack)
        assert {role: resources.num_gpus for role, resources in found.items()} == {"train": 0.5, "generation": 0.5}
    config = config.with_keys({"critic.colocated": True})
    plan = RunPlan.of(config)
    assert plan.sharing == ("train", "critic", "generation") and plan.devices == 3
    with ExitStack() as stack:
        shares = {role: resources.num_gpus for role, resources in fleet.shared_resources(config, plan, stack).items()}
        assert shares == {"train": 0.25, "critic": 0.25, "generation": 0.5}
