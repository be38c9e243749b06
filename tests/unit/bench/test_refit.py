"""The refit benchmark: which cases fit, the groups of a layout, and errors for failed methods and wrong parameters."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dagrl.bench import refit
from dagrl.bench.refit_cases import CASES, TRIALS, largest_that_fit, trials
from dagrl.bench.refit_control import Control
from dagrl.bench.refit_vllm_engines import Calls, answer_calls
from dagrl.config import Config
from dagrl.config.checks import check_settings
from dagrl.config.plan import RunPlan
from dagrl.errors import RunError
from dagrl.run.preflight import check_model, worker_classes
from dagrl.runtime.store import reserve_port
from tests.refit_mappings import TABLE, RefitMapping, configuration


class Ranks:
    """Ranks that answer at once: two senders, and two receivers of which one has a wrong parameter."""

    def __init__(self, wrong: list[str]) -> None:
        self.wrong = wrong

    def ask(self, command: str, *arguments: object) -> list[dict[str, Any]]:
        facts = {"bytes_into_rank": 8 * 10**9, "raw_gb_per_s": 400.0, "staging_bytes": 10**6}
        answers = [{"seconds": [0.01, 0.02], "wrong": [], "holder": "modules", "facts": facts} for _ in range(4)]
        answers[2] |= {"seconds": [0.04, 0.02], "wrong": self.wrong}
        return answers


def test_the_slowest_rank_counts() -> None:
    case = TRIALS[0]
    (turn,) = refit.turn(Ranks([]), case, "dagrl", 2).values()  # type: ignore[arg-type]
    assert turn.seconds == [0.04, 0.02]
    (row,) = refit.finish([{"median_s": 0.04, **turn.facts}])
    assert (row["gb_per_s"], row["share_of_raw"], row["staging_mb"]) == (200.0, 0.5, 1.0)


def test_wrong_parameters_fail_the_method() -> None:
    with pytest.raises(RunError, match=r"wrong parameters: 1, such as lm_head\.weight"):
        refit.turn(Ranks(["lm_head.weight"]), TRIALS[0], "packed broadcast", 2)  # type: ignore[arg-type]


def test_a_case_needs_the_gpus_of_both_sides() -> None:
    wanted = "4B TP2PP2->TP4"
    chosen, left_out = largest_that_fit(8, 140 << 30, [wanted])
    assert [case.name for case in chosen] == [wanted]
    assert not left_out
    chosen, left_out = largest_that_fit(4, 140 << 30, [wanted])
    assert not chosen
    assert left_out == {f"{wanted} bf16": "needs 8 GPUs, found 4"}
    assert len({(case.name, case.dtype) for case in CASES}) == len(CASES)
    chosen, left_out = largest_that_fit(1, 24 << 30, ["4B TP1->TP1"])
    assert [(case.name, case.dtype, case.ranks) for case in chosen] == [
        ("4B TP1->TP1 colocated", dtype, 2) for dtype in ("bf16", "fp8")
    ]
    assert left_out["4B TP1->TP1 bf16"] == "needs 2 GPUs, found 1"
    assert "needs 20 GB" in largest_that_fit(1, 16 << 30, ["4B TP1->TP1 colocated"])[1]["4B TP1->TP1 colocated bf16"]
    assert [case.name for case in trials(["trial TP2PP2"])] == ["trial TP2PP2->TP4"]


@pytest.mark.parametrize("mapping", TABLE, ids=str)
def test_every_mapping_can_be_planned(mapping: RefitMapping) -> None:
    """`dagrl inspect` makes these checks first; it takes models that the train worker does not support."""
    config = Config.model_validate(configuration(mapping))
    check_settings(config, RunPlan.of(config))
    plan = RunPlan.of(config)
    check_model(config, plan, mapping.model, worker_classes(config, plan))


class _Engine:
    """A worker that keeps its calls, and rejects one update."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def start_weight_update(self) -> None:
        self.seen.append("start")

    def update_weights(self, update_info: Any) -> None:
        self.seen.append(update_info)
        if update_info == "bad":
            raise ValueError("no such parameter")

    def finish_weight_update(self) -> None:
        self.seen.append("finish")


def test_calls_of_vllms_trainer_run_on_the_generation_rank() -> None:
    port = reserve_port()
    engine = _Engine()

    def generation() -> None:
        control = Control(port, 1, 2, 20)
        answer_calls(control, engine)
        control.barrier()

    with ThreadPoolExecutor(1) as pool:
        answered = pool.submit(generation)
        control = Control(port, 0, 2, 20)
        calls = Calls(control)
        calls.start_weight_update()
        with pytest.raises(RunError, match="no such parameter"):
            calls.update_weights("bad")
        calls.update_weights({"names": ["a"]})
        calls.finish_weight_update()
        calls.call("done")
        control.barrier()
        answered.result(20)
    assert engine.seen == ["start", "bad", {"names": ["a"]}, "finish"]
