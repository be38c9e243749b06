"""`dagrl view`: what it reads of a run, what its server answers, and its page in a headless Chromium."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest

from dagrl.cli.main import main
from dagrl.telemetry.rollouts import OTHER, RolloutFiles, table_of
from dagrl.telemetry.view.data import RunView, to_json, token_kl
from dagrl.telemetry.view.server import serving
from tests.browser import Tab, browser, needs_chromium
from tests.unit.telemetry.made_run import ANSWER, MARKUP, add_step, made_sample, make_run

ROWS = ".samples tbody tr"


def test_the_estimate_of_kl_is_unbiased() -> None:
    engine, trainer = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
    expected = float((engine * np.log(engine / trainer)).sum())
    assert float((engine * token_kl(np.log(engine), np.log(trainer))).sum()) == pytest.approx(expected, rel=1e-12)


def test_outliers_of_the_run_come_first(tmp_path: Path) -> None:
    view = RunView(make_run(tmp_path, "run", steps=3, drift=0.5))
    worst = view.outliers()[0]
    assert (worst["step"], worst["row"]) == (3, 2)
    assert worst["kl"] == pytest.approx(math.exp(1.5001) - 1 - 1.5001, rel=1e-4)  # float32 in the file
    assert [line["tokens"] for line in view.samples(1)] == [11, 11, 11, 8], "tokens of an environment do not count"
    assert view.steps()[0]["reward"] == pytest.approx(0.375)


def add_others(run: Path, step: int) -> None:
    """Writes a validation sample and a dropped one, which have no log-probabilities of the train workers."""
    rows = [
        {**made_sample(step, place, 0.0), "split": split, "dropped": dropped, "valid": not dropped, "train_logprobs": None}
        for place, split, dropped in ((1, "validation", ""), (3, "train", "zero_variance"))
    ]
    RolloutFiles(run / "rollouts", max_bytes=None, resumed_step=step).write(step, table_of(rows), OTHER)


def test_other_samples_follow_those_that_were_trained_on(tmp_path: Path) -> None:
    run = make_run(tmp_path, "run")
    add_others(run, 2)
    view = RunView(run)
    assert [line["row"] for line in view.samples(2)] == [0, 1, 2, 3, 4, 5]
    assert [(line["split"], line["dropped"]) for line in view.samples(2)[3:]] == [
        ("train", ""),
        ("validation", ""),
        ("train", "zero_variance"),
    ]
    assert view.sample(2, 4)["split"] == "validation" and view.sample(2, 3)["place"] == 3
    assert view.steps()[1]["reward"] == pytest.approx(0.375), "of what was trained on"


def test_metrics_are_read_from_where_they_ended(tmp_path: Path) -> None:
    run = make_run(tmp_path, "run", steps=2)
    view, path = RunView(run), run / "metrics.jsonl"
    first = view.metrics()
    assert [line["step"] for line in first["lines"]] == [1, 2]
    with path.open("a") as file:
        file.write('{"step": 3}\n{"step": 4, "lo')
    second = view.metrics(first["next"])
    assert [line["step"] for line in second["lines"]] == [3] and view.metrics(second["next"])["lines"] == []
    path.write_text('{"step": 1}\n')  # a resumed run dropped steps
    assert view.metrics(second["next"]) == {"after": 0, "next": 12, "lines": [{"step": 1}]}


def test_numbers_that_are_not_finite_are_null_in_the_browser() -> None:
    assert json.loads(to_json({"a": [1.0, float("-inf")], "b": float("nan")})) == {"a": [1.0, None], "b": None}


@pytest.mark.parametrize(
    "path, status",
    [("api/sample?run=0&step=9&row=0", 404), ("api/sample?run=7", 404), ("api/steps?run=x", 404), ("etc", 404)],
)
def test_what_does_not_exist_is_not_found(path: str, status: int, tmp_path: Path) -> None:
    with serving([RunView(make_run(tmp_path, "run"))], "127.0.0.1", 0) as address:
        with pytest.raises(HTTPError) as found:
            urlopen(address + path)  # noqa: S310
        assert found.value.code == status


def test_other_sites_that_resolve_to_this_machine_get_nothing(tmp_path: Path) -> None:
    with serving([RunView(make_run(tmp_path, "run"))], "127.0.0.1", 0) as address:
        assert json.load(urlopen(address + "api/runs"))[0]["name"] == "run"  # noqa: S310
        with pytest.raises(HTTPError) as found:
            urlopen(Request(address + "api/runs", headers={"Host": "evil.example"}))  # noqa: S310
        assert found.value.code == 403


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nowhere"], "nowhere is not the directory of a run"),
        (["broken"], "broken/config.yaml is not what a run saves"),
        (["other"], "other/config.yaml is not what a run saves (KeyError('algorithm'))"),
        (["a", "b", "c"], "at most 2 runs; found 3"),
        (["run", "--host", "192.0.2.1"], "cannot serve at 192.0.2.1"),
        (["run", "--port", "99999"], "port 99999"),
    ],
)
def test_bad_arguments_are_one_error(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path, "run")
    for name, text in (("broken", "name: [run"), ("other", "name: run")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert main(["view", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser(tmp_path_factory.mktemp("chromium")) as tab:
        yield tab
        assert tab.errors == []


def show(tab: Tab, address: str) -> None:
    """Opens the address, also if only its fragment differs, and waits until it is drawn."""
    tab.open("about:blank")
    tab.wait_for("location.href === 'about:blank'")
    tab.open(address)
    tab.wait_for("document.body && document.body.dataset.ready")


@needs_chromium
def test_samples_are_read_by_a_person(tab: Tab, tmp_path: Path) -> None:
    with serving([RunView(make_run(tmp_path, "run", drift=0.5))], "127.0.0.1", 0) as address:
        show(tab, address)
        assert tab.texts("#status") == ["step 2 of 8"] and "Reward0.4" in tab.texts(".chart h2")
        tab.click("#tabs button:nth-child(2)")
        tab.wait_for("document.querySelector('.conversation')")
        rows = tab.texts(ROWS)
        assert len(rows) == 4 and rows[0].startswith("0.50.50.72"), "reward, advantage and KL of the outlier come first"
        assert "task gsm8k" in tab.texts(".facts > span")
        assert MARKUP in tab.texts(".turn.prompt pre")[0], "text of a sample is not markup"
        assert tab.texts(".turn.policy .token") == [text.replace("\n", "↵\n") for text in ANSWER]
        assert alphas(tab)[0] == 0 < alphas(tab)[1] < alphas(tab)[9], "the less likely the redder"
        tab.hover(".turn.policy .token:nth-child(10)")
        assert 'token 19 "72"' in tab.texts(".tip")[0] and "ratio 2.7186" in tab.texts(".tip")[0]
        tab.choose("#color", "ratio")
        tab.wait_for("document.querySelector('.scale').textContent.startsWith('ratio')")
        assert alphas(tab)[9] == 0.75 and alphas(tab)[:9] == [0] * 9, "only one token has another ratio"
        tab.choose("#sort", "best")
        tab.wait_for(f"document.querySelector('{ROWS}').textContent.startsWith('0.75')")
        tab.click(f"{ROWS}:nth-child(1)")
        tab.wait_for("document.querySelector('.turn.environment')")
        assert tab.texts(".turn > span") == ["prompt", "policy, 2 tokens", "environment, 3 tokens", "policy, 6 tokens"]
        tab.choose("#search", "(1)")
        tab.wait_for(f"document.querySelectorAll('{ROWS}').length === 1")
        assert tab.texts("summary") == ["Conversation 2 of 3", "Conversation 3 of 3, not trained on"]
        assert tab.texts(".turn.prompt pre")[1:] == ["Another question"] * 2
        tab.evaluate("history.back()")
        tab.wait_for(f"document.querySelectorAll('{ROWS}').length === 4")


@needs_chromium
def test_validation_and_dropped_samples_are_told_apart(tab: Tab, tmp_path: Path) -> None:
    run = make_run(tmp_path, "run")
    add_others(run, 2)
    with serving([RunView(run)], "127.0.0.1", 0) as address:
        show(tab, address + "#tab=samples")
        assert len(tab.texts(ROWS)) == 4, "those that were trained on"
        tab.choose("#show", "dropped")
        tab.wait_for(f"document.querySelectorAll('{ROWS}').length === 1")
        assert tab.texts(".mark") == ["zero variance "] and tab.texts(ROWS)[0].startswith("0.75")
        assert "dropped zero variance" in tab.texts(".facts > span")
        tab.choose("#show", "all")
        tab.wait_for(f"document.querySelectorAll('{ROWS}').length === 6")
        assert sorted(tab.texts(".mark")) == ["validation ", "zero variance "]


def alphas(tab: Tab) -> list[float]:
    """The strength of each token's colour."""
    colors = tab.evaluate("[...document.querySelectorAll('.turn.policy .token')].map((one) => one.style.background)")
    return [float(re.findall(r"[\d.]+", color)[-1]) if color else 0.0 for color in colors]


@needs_chromium
def test_the_page_follows_a_run_that_trains(tab: Tab, tmp_path: Path) -> None:
    run = make_run(tmp_path, "run", steps=1)
    with serving([RunView(run)], "127.0.0.1", 0) as address:
        show(tab, address)
        assert tab.texts("#status") == ["step 1 of 8"]
        add_step(run, RolloutFiles(run / "rollouts", max_bytes=None, resumed_step=1), 2, 0.0)
        tab.wait_for("document.querySelector('#status').textContent === 'step 2 of 8'")
        show(tab, address + "#tab=samples")
        assert tab.texts("#step option")[:2] == ["KL outliers of the run", "step 2"]


@needs_chromium
def test_two_runs_stand_next_to_each_other_in_one_file(tab: Tab, tmp_path: Path) -> None:
    runs = [make_run(tmp_path, "first"), make_run(tmp_path, "second", drift=0.4)]
    file = tmp_path / "both.html"
    assert main(["view", *map(str, runs), "--export", str(file), "--samples", "6"]) == 0
    assert not re.search(r"""(src|href)=["'](?!data:)""", file.read_text()), "nothing is loaded from elsewhere"
    show(tab, f"file://{file}#tab=samples")
    assert tab.texts(".samples h2") == [f"{name}: Step 23 samples, mean reward {mean}" for name, mean in counted(runs)]
    lefts = tab.evaluate("[...document.querySelectorAll('.conversation')].map((one) => one.getBoundingClientRect().left)")
    assert len(lefts) == 2 and lefts[0] < lefts[1]
    show(tab, f"file://{file}")
    assert tab.texts('[data-title="Loss"] .legend span') == ["first loss", "second loss"]


def counted(runs: list[Path]) -> list[tuple[str, str]]:
    """Each run's name, and the mean reward of 3 of its 4 samples: the outlier, the least and the greatest reward."""
    return [(run.name, f"{(0.5 + 0.0 + 0.75) / 3:.4g}") for run in runs]
