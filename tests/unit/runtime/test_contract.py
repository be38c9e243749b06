"""Worker classes that do not fit their protocols are refused before any actor starts."""

from typing import Any, Protocol

import pytest

from dagrl.config import Config
from dagrl.config.plan import RunPlan
from dagrl.errors import ConfigError
from dagrl.run.preflight import worker_classes
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.worker import check_worker_class
from dagrl.runtime.worker_group import WorkerGroup


class Saver(Protocol):
    def save(self, directory: str, state: dict[str, int], background: bool = False, /) -> None: ...


class Lacks:
    def __init__(self, context: object, config: object) -> None: ...


class Base(Lacks):
    def save(self, where: str, state: dict[str, int], background: bool = False) -> None: ...


class Varied(Base):
    def save(self, *args: object, **more: object) -> None: ...

    def setup(self, address: str, retries: int = 3) -> None: ...

    @staticmethod
    def environment(config: object) -> dict[str, str]:
        return {}


async def waits(self: object, directory: str, state: dict[str, int], background: bool = False) -> None: ...


def bad(**methods: Any) -> type:
    """Returns a worker class with these methods in place of its own."""
    return type("Bad", (Base,), methods)


NARROW = {"save": lambda self, directory, state: None}
HOOKS: dict[str, Any] = {"setup": lambda self: None, "environment": lambda self, config: {}}
EXPECTED = r"expected save\(directory: str, state: dict\[str, int\], background: bool = False\) -> None \(Saver\)"


@pytest.mark.parametrize("worker", [Base, Varied])
def test_classes_that_accept_every_call_fit(worker: type) -> None:
    check_worker_class(worker, [Saver])


@pytest.mark.parametrize(
    ("worker", "words"),
    [
        (Lacks, rf"it has no method save; {EXPECTED}"),
        (bad(**NARROW), rf"save is save\(directory, state\); {EXPECTED}"),
        (bad(save=lambda self, d, state, background, compress: None), rf"save is save\(d, .*, compress\); {EXPECTED}"),
        (bad(save=waits), rf"save is an `async def`; {EXPECTED}, a plain `def`"),
        (bad(save=3), rf"save is of type int; {EXPECTED}"),
        (bad(**HOOKS), r"setup is setup\(\); expected setup\(address: str\) -> None \(WorkerHooks\)"),
        (bad(**HOOKS), r"environment is environment\(self, config\); expected static environment\(config: Any\)"),
        (bad(__init__=lambda self, config: None), r"constructor is Bad\(config\); expected Bad\(context, config\)"),
    ],
)
def test_the_error_names_class_method_and_expected_signature(worker: type, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)the worker class .*test_contract:{worker.__name__} does not fit.*{words}"):
        check_worker_class(worker, [Saver])


def test_all_mistakes_are_in_one_error() -> None:
    with pytest.raises(ConfigError) as caught:
        check_worker_class(bad(**HOOKS, **NARROW), [Saver], where="policy.worker")
    assert str(caught.value).startswith("policy.worker: the worker class ")
    assert len(str(caught.value).splitlines()) == 4


def test_a_group_of_a_class_that_does_not_fit_starts_no_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.remote", lambda *_, **__: pytest.fail("no actor may start"))
    with pytest.raises(ConfigError, match="it has no method save"):
        WorkerGroup.create("train", Lacks, ParallelLayout(), None, protocols=[Saver])


SAVES = {"load_checkpoint", "save_checkpoint"}
TRAINS = {*SAVES, "export_hf", "prepare_refit", "weight_slices", "reset_optimizer"}
UNEXPORTED = {"export_hf": False}


@pytest.mark.parametrize(
    ("algorithm", "keys", "needed"),
    [
        ("sft", {"checkpointing": UNEXPORTED}, SAVES),
        ("sft", {}, {*SAVES, "export_hf"}),
        ("sft", {"checkpointing": UNEXPORTED | {"async_save": True}}, {*SAVES, "checkpoint_written", "finish_checkpoint"}),
        ("grpo", {"loss_fn": {"reference_policy_kl_penalty": 0.0}}, TRAINS),
        ("grpo", {}, {*TRAINS, "snapshot_reference"}),
    ],
)
def test_a_run_requires_the_methods_that_it_uses(algorithm: str, keys: dict[str, Any], needed: set[str]) -> None:
    worker = {"worker": f"{__name__}:Lacks"}
    given = {"name": "t", "algorithm": algorithm, "data": {}, "policy": {**worker, "generation": worker}, **keys}
    config = Config.model_validate(given)
    with pytest.raises(ConfigError, match=r"^policy\.worker: ") as caught:
        worker_classes(config, RunPlan.of(config))
    lines = [line for line in str(caught.value).splitlines() if "has no method" in line]
    assert {line.split(" has no method ")[1].split(";")[0] for line in lines} == needed
