"""The refit benchmark: which cases fit, the groups of a layout, and errors for failed methods and wrong parameters."""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dagrl.bench import refit, refit_rank
from dagrl.bench.deadline import TIME_IS_UP
from dagrl.bench.refit import _free_ports, sorted_out
from dagrl.bench.refit_cases import CASES, TRIALS, largest_that_fit, trials
from dagrl.bench.refit_control import Control
from dagrl.bench.refit_mappings import TABLE, RefitMapping
from dagrl.bench.refit_plan import configuration
from dagrl.bench.refit_rank import Rank, Settings
from dagrl.bench.refit_resharding import _along
from dagrl.bench.refit_vllm_engines import Calls, answer_calls
from dagrl.bench.report import BenchReport
from dagrl.config import Config
from dagrl.config.checks import check_settings
from dagrl.errors import RunError
from dagrl.run.preflight import check_model, worker_classes
from dagrl.runtime.layout import ParallelLayout

GOOD = {"name": "4B TP2->TP2", "dtype": "bf16", "method": "dagrl", "median_s": 0.01, "gb_per_s": 1.0, "wrong_parameters": 0}


def test_rows_are_measured_left_out_or_failed() -> None:
    wrong = {**GOOD, "method": "broadcast", "wrong_parameters": 3}
    rows = [
        {"name": "4B TP2->TP2", "dtype": "bf16", "note": "built in 1 s"},
        GOOD,
        {"name": "4B TP4->TP4", "dtype": "bf16", "left_out": "the time is up"},
        wrong,
        {"name": "30B", "dtype": "fp8", "method": "prepare", "error": "rank 1: out of memory"},
        {"error": "2 ranks died"},
    ]
    left_out: dict[str, str] = {"30B bf16": "needs 8 GPUs, found 2"}
    failed: dict[str, str] = {}
    *_, measured = sorted_out(rows, left_out, failed)
    assert measured == [GOOD, wrong]
    assert left_out == {"30B bf16": "needs 8 GPUs, found 2", "4B TP4->TP4 bf16": "the time is up"}
    assert failed == {
        "4B TP2->TP2 bf16 broadcast": "wrong parameters: 3",
        "30B fp8 prepare": "rank 1: out of memory",
        "the benchmark": "2 ranks died",
    }


@pytest.mark.parametrize("row", [{**GOOD, "wrong_parameters": 3}, {**GOOD, "error": "out of memory"}])
def test_failed_methods_raise(row: dict[str, object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(refit, "_measure_all", lambda *rest: [row])
    monkeypatch.setattr(refit, "print_table", lambda *rest, **more: None)
    parser = argparse.ArgumentParser()
    refit.add_arguments(parser)
    with pytest.raises(RunError, match=r"1 methods .* failed, see their rows: 4B TP2->TP2 bf16 dagrl"):
        refit.run(parser.parse_args(["--trial", "--json", str(tmp_path / "refit.json")]))
    assert list(BenchReport.read(tmp_path / "refit.json").failed) == ["4B TP2->TP2 bf16 dagrl"]


def test_a_case_needs_the_gpus_of_both_sides() -> None:
    wanted = "4B TP2PP2->TP4"
    chosen, left_out = largest_that_fit(8, 140 << 30, [wanted])
    assert [(case.name, case.to_megatron) for case in chosen] == [(wanted, False), (f"{wanted} Megatron", True)]
    assert not left_out
    chosen, left_out = largest_that_fit(4, 140 << 30, [wanted])
    assert not chosen
    assert left_out == dict.fromkeys((f"{wanted} bf16", f"{wanted} Megatron bf16"), "needs 8 GPUs, found 4")
    assert len({(case.name, case.dtype) for case in CASES}) == len(CASES)
    chosen, left_out = largest_that_fit(1, 24 << 30, ["4B TP1->TP1"])
    assert [(case.name, case.dtype, case.ranks) for case in chosen] == [
        ("4B TP1->TP1 colocated", dtype, 2) for dtype in ("bf16", "fp8")
    ]
    assert left_out["4B TP1->TP1 bf16"] == "needs 2 GPUs, found 1"
    assert "needs 20 GB" in largest_that_fit(1, 16 << 30, ["4B TP1->TP1 colocated"])[1]["4B TP1->TP1 colocated bf16"]
    assert [case.name for case in trials(["trial TP2PP2"])] == ["trial TP2PP2->TP4 Megatron"]


@pytest.mark.parametrize("mapping", TABLE, ids=str)
def test_every_mapping_can_be_planned(mapping: RefitMapping) -> None:
    """`dagrl inspect` makes these checks first; it takes models that the train worker does not support."""
    config = Config.model_validate(configuration(mapping))
    check_settings(config)
    check_model(config, mapping.model, worker_classes(config))


def test_groups_are_the_ranks_along_an_axis() -> None:
    layout = ParallelLayout(tp=2, pp=2, dp=2)
    assert list(_along(layout, "tp")) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert list(_along(layout, "dp")) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert list(_along(layout, "pp")) == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize("others", [True, False])
def test_methods_without_time_are_left_out_on_all_ranks(monkeypatch: pytest.MonkeyPatch, others: bool) -> None:
    """Even if this rank alone has enough time."""
    said: list[dict[str, Any]] = []
    control = SimpleNamespace(gather=lambda mine: [mine, others], leave=lambda: None)
    monkeypatch.setattr(refit_rank, "Control", lambda *given: control)
    until = time.monotonic() + (-1.0 if others else 60.0)
    settings = Settings(TRIALS[:1], on_gpus=False, rounds=1, control_port=0, ports=range(9), until=until)
    Rank(settings, 0, said.append).run()
    assert said == [{"name": TRIALS[0].name, "dtype": TRIALS[0].dtype, "method": "all methods", "left_out": TIME_IS_UP}]


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
    (port,) = _free_ports(1)
    engine = _Engine()

    def generation() -> None:
        control = Control(port, 1, 2, 20)
        answer_calls(control, engine)
        control.leave()

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
        control.leave()
        answered.result(20)
    assert engine.seen == ["start", "bad", {"names": ["a"]}, "finish"]
