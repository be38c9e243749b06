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


class Base:
    def __init__(self, context: object, config: object) -> None:
        pass

    def save(self, where: str, state: dict[str, int], background: bool = False) -> None: ...


class Varied(Base):
    def save(self, *args: object, **more: object) -> None: ...  # type: ignore[override]

    def setup(self, address: str, retries: int = 3) -> None: ...

    @staticmethod
    def environment(config: object) -> dict[str, str]:
        return {}


class Narrow(Base):
    def save(self, directory: str, state: dict[str, int]) -> None: ...  # type: ignore[override]


class NeedsMore(Base):
    def save(self, directory: str, state: dict[str, int], background: bool, compress: bool) -> None: ...  # type: ignore[override]


class Lacks:
    def __init__(self, context: object, config: object) -> None:
        pass


class Waits(Base):
    async def save(self, directory: str, state: dict[str, int], background: bool = False) -> None: ...  # type: ignore[override]


class NotAMethod(Base):
    save = 3  # type: ignore[assignment]


class BadHooks(Base):
    def setup(self) -> None: ...

    def environment(self, config: object) -> dict[str, str]:
        return {}


class BadConstructor(Base):
    def __init__(self, config: object) -> None:
        pass


@pytest.mark.parametrize("worker", [Base, Varied])
def test_classes_that_accept_every_call_fit(worker: type) -> None:
    check_worker_class(worker, [Saver])


EXPECTED = r"expected save\(directory: str, state: dict\[str, int\], background: bool = False\) -> None \(Saver\)"


@pytest.mark.parametrize(
    ("worker", "words"),
    [
        (Lacks, rf"it has no method save; {EXPECTED}"),
        (Narrow, rf"save is save\(directory: str, state: dict\[str, int\]\) -> None; {EXPECTED}"),
        (NeedsMore, rf"save is save\(directory: str, .*, compress: bool\) -> None; {EXPECTED}"),
        (Waits, rf"save is an `async def`; {EXPECTED}, a plain `def`"),
        (NotAMethod, rf"save is of type int; {EXPECTED}"),
        (BadHooks, r"setup is setup\(\) -> None; expected setup\(address: str\) -> None \(WorkerHooks\)"),
        (BadHooks, r"environment is environment\(self, config: object\) .*; expected static environment\(config: Any\)"),
        (
            BadConstructor,
            r"its constructor is BadConstructor\(config: object\).*; expected BadConstructor\(context, config\)",
        ),
    ],
)
def test_the_error_names_class_method_and_expected_signature(worker: type, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)the worker class .*test_contract:{worker.__name__} does not fit.*{words}"):
        check_worker_class(worker, [Saver])


def test_all_mistakes_are_in_one_error() -> None:
    class Both(BadHooks, Narrow):
        pass

    with pytest.raises(ConfigError) as caught:
        check_worker_class(Both, [Saver], where="policy.worker")
    assert str(caught.value).startswith("policy.worker: the worker class ")
    assert len(str(caught.value).splitlines()) == 4


def test_a_group_of_a_class_that_does_not_fit_starts_no_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("no actor may start")

    monkeypatch.setattr("ray.remote", refuse)
    with pytest.raises(ConfigError, match="it has no method save"):
        WorkerGroup.create("train", Lacks, ParallelLayout(), None, protocols=[Saver])


def run_config(algorithm: str, **keys: Any) -> Config:
    generation = {"worker": f"{__name__}:Lacks"}
    policy = {"worker": f"{__name__}:Lacks", "generation": generation}
    return Config.model_validate({"name": "t", "algorithm": algorithm, "data": {}, "policy": policy, **keys})


SAVES = {"load_checkpoint", "save_checkpoint"}
REFITS = {"prepare_refit", "weight_slices"}


@pytest.mark.parametrize(
    ("config", "needed"),
    [
        (run_config("sft", checkpointing={"export_hf": False}), SAVES),
        (run_config("sft"), {*SAVES, "export_hf"}),
        (
            run_config("sft", checkpointing={"export_hf": False, "async_save": True}),
            {*SAVES, "checkpoint_written", "finish_checkpoint"},
        ),
        (
            run_config("grpo", loss_fn={"reference_policy_kl_penalty": 0.0}),
            {*SAVES, *REFITS, "export_hf", "reset_optimizer"},
        ),
        (run_config("grpo"), {*SAVES, *REFITS, "export_hf", "reset_optimizer", "snapshot_reference"}),
    ],
)
def test_a_run_requires_the_methods_that_its_configuration_uses(config: Config, needed: set[str]) -> None:
    with pytest.raises(ConfigError, match=r"^policy\.worker: ") as caught:
        worker_classes(config, RunPlan.of(config))
    lines = [line for line in str(caught.value).splitlines() if "has no method" in line]
    assert {line.split(" has no method ")[1].split(";")[0] for line in lines} == needed
