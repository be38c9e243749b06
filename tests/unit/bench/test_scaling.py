"""The cost model of a step recovers the costs from which rows were generated."""

from __future__ import annotations

from pathlib import Path

import pytest

from dagrl.bench.report import BenchReport, Row, check_plot, command_line, plot, print_table
from dagrl.bench.scaling import MIB, PER_HOST, LineFit, fit_array, fit_hosts, fit_line, levels, table
from dagrl.bench.worker import SMALL
from dagrl.errors import ConfigError


def row(us: float, workers: int, payload: int = SMALL, variant: str = "dagrl_compiled", **more: str | int) -> Row:
    shape = {"variant": variant, "shape": "scatter-gather", "workers": workers, "hosts": 1}
    return shape | {"payload_bytes": payload, "result_bytes": SMALL, "p50_us": us, "p99_us": 2 * us, "n": 9} | more


def report(rows: list[Row]) -> BenchReport:
    return BenchReport(rows, "command", "hardware", {})


@pytest.mark.parametrize(("count", "cell"), [(99, "10 / 20 (n 99)"), (100, "10 / 20")])
def test_a_percentile_of_few_samples_shows_their_number(count: int, cell: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_table([row(10.0, 1) | {"n": count}])
    assert cell + " " in capsys.readouterr().out


@pytest.mark.parametrize(("hosts", "depth"), [(1, 0), (2, 1), (9, 1), (10, 2), (73, 2), (74, 3), (585, 3), (586, 4)])
def test_depth_of_a_tree_of_hosts_with_fan_out_eight(hosts: int, depth: int) -> None:
    assert levels(hosts) == depth


@pytest.mark.parametrize("shape", ["scatter-gather", "chain"])
def test_a_line_is_fitted_without_the_left_out_size_and_without_sizes_beyond_a_host(shape: str) -> None:
    rows = [row(40 + 2.5 * n, n, shape=shape) for n in (1, 8, 16)] + [row(240.0, 32, shape=shape)]
    others = [
        row(9000.0, 2 * PER_HOST, shape=shape),
        row(1.0, 8, variant="ray_calls", shape=shape),
        row(1.0, 8, payload=MIB, shape=shape),
        row(1.0, 8, shape="other"),
    ]
    line = fit_line(report(rows + others), "dagrl_compiled", 32, shape)
    assert (line.constant_us, line.each_us) == pytest.approx((40, 2.5))
    assert line.predict(1000) == pytest.approx(2540)
    assert line.error == pytest.approx(120 / 240 - 1)


def test_joining_results_in_a_tree_costs_its_levels() -> None:
    rows = [row(us, n, shape="reduce") for us, n in ((60.0, 1), (115.0, 8), (170.0, 9), (200.0, 32))]
    line = fit_line(report(rows), "dagrl_compiled", 32, "reduce")
    assert (line.constant_us, line.each_us, line.error) == pytest.approx((60, 55, 170 / 200 - 1))
    assert [line.predict(n) for n in (64, 65, 4096)] == pytest.approx([170, 225, 280])


def test_no_cost_is_negative() -> None:
    line = fit_line(report([row(100.0, 1), row(50.0, 8), row(1.0, 32)]), "dagrl_compiled", 32)
    assert line.each_us == 0.0 and 50.0 < line.constant_us < 100.0
    through_zero = fit_line(report([row(10.0, 1), row(1000.0, 8), row(1.0, 32)]), "dagrl_compiled", 32)
    assert through_zero.constant_us == 0.0


@pytest.mark.parametrize(("variant", "for_each"), [("dagrl_compiled", False), ("ray_calls", True)])
def test_the_cost_of_an_array_is_on_top_of_the_small_step(variant: str, for_each: bool) -> None:
    rows = []
    for n in (1, 8, 32):
        copies = n if for_each else 1
        rows += [row(50 + 3.0 * n, n, variant=variant), row(51 + 3.0 * n, n, MIB // 16, variant)]
        rows += [row(50 + 3.0 * n + (20 + 35 * mib) * copies, n, mib * MIB, variant) for mib in (1, 16)]
    array = fit_array(report(rows), variant, 32)
    assert (array.array_us, array.mib_us, array.error) == pytest.approx((20, 35, 0), abs=1e-6)
    assert array.predict(100, 4.0) == pytest.approx((20 + 35 * 4) * (100 if for_each else 1))


def test_hosts_add_a_round_trip_per_level_of_their_tree() -> None:
    line = LineFit("dagrl_compiled", 40.0, 2.5, 32, 120.0)
    tree = fit_hosts(line, report([row(40 + 2.5 * n + extra, n, hosts=2) for n, extra in ((8, 100.0), (16, 140.0))]))
    assert (tree.level_us, tree.level_rows) == (pytest.approx(120.0), 2)
    assert tree.predict(PER_HOST) == pytest.approx(line.predict(PER_HOST))
    assert tree.predict(PER_HOST * 16) == pytest.approx(line.predict(PER_HOST * 16) + 2 * 120.0)
    rows = table(
        [
            (
                "dagrl_compiled",
                tree,
                fit_array(report([row(10, n, p) for n in (1, 32) for p in (SMALL, MIB)]), "dagrl_compiled", 32),
            )
        ]
    )
    assert "| 1,024 | 2.8 ms |" in rows


def test_any_shape_on_any_number_of_hosts_can_be_plotted(tmp_path: Path) -> None:
    """A report of two hosts, or of chains alone, can be plotted."""
    rows = [row(10.0 * n, n, shape="chain", hosts=2) for n in (2, 4)]
    plot(rows, tmp_path / "chain.png")
    plot([row(9.0, 2, shape="reduce", arity=arity) for arity in (2, 8)], tmp_path / "reduce.svg")
    assert (tmp_path / "chain.png").stat().st_size > 1000
    assert "arity 8" in (tmp_path / "reduce.svg").read_text()


def test_an_unknown_plot_type_is_rejected_before_measuring(tmp_path: Path) -> None:
    check_plot(tmp_path / "a.png")
    with pytest.raises(ConfigError, match=r"--plot .*a\.xyz: cannot draw file type '\.xyz'; use one of .*png"):
        check_plot(tmp_path / "a.xyz")


def test_the_recorded_command_is_runnable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/dagrl", "bench", "overhead", "--shapes", "multiple args,chain"])
    assert command_line() == "dagrl bench overhead --shapes 'multiple args,chain'"
