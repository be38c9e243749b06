"""`dagrl view`: the data of a run, the server, and the exported page."""

import base64
import io
import json
import math
import re
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest

from dagrl.cli.main import main
from dagrl.telemetry.rollouts import OTHER, RolloutFiles, table_of
from dagrl.telemetry.view.data import RunView, to_json, token_kl
from dagrl.telemetry.view.server import exported_page, serving


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


def write_rows(run: Path, *rows: dict[str, Any], step: int = 3, **options: Any) -> None:
    """Writes these samples of a step, in place of those that it had."""
    files = RolloutFiles(run / "rollouts", max_bytes=None, resumed_step=step)
    files.write(step, table_of([{**sample_row(step, 0, 0.0), **row} for row in rows]), **options)


def test_other_samples_follow_those_that_were_trained_on(tmp_path: Path) -> None:
    """A validation sample and a dropped one, which have no log-probabilities of the train workers."""
    run = make_run(tmp_path, "run")
    validation = {**sample_row(2, 1, 0.0), "split": "validation", "train_logprobs": None}
    dropped = {**sample_row(2, 3, 0.0), "dropped": "zero_variance", "valid": False, "train_logprobs": None}
    write_rows(run, validation, dropped, step=2, kind=OTHER)
    view = RunView(run)
    assert [line["row"] for line in view.samples(2)] == [0, 1, 2, 3, 4, 5]
    kinds = [(line["split"], line["dropped"]) for line in view.samples(2)[3:]]
    assert kinds == [("train", ""), ("validation", ""), ("train", "zero_variance")]
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


def test_images_of_samples_are_served(tmp_path: Path) -> None:
    run, name = make_run(tmp_path, "run"), "00000000000000ff"
    write_rows(run, {"media": [name]})
    (run / "media").mkdir()
    (tmp_path / "cat.png").write_bytes(b"\x89PNG")
    (run / "media" / name).symlink_to(tmp_path / "cat.png")
    (run / "media" / "0").write_text("secret")
    with serving([RunView(run)], "127.0.0.1", 0) as address:
        with urlopen(f"{address}api/sample?run=0&step=3&row=0") as answer:  # noqa: S310
            assert json.load(answer)["media"] == [name]
        with urlopen(f"{address}api/medium?run=0&name={name}") as answer:  # noqa: S310
            assert answer.read() == b"\x89PNG"
        for other in ("0", "../config.yaml", "00000000000000fe"):
            with pytest.raises(HTTPError, match="404"):
                urlopen(f"{address}api/medium?run=0&name={other}")  # noqa: S310


def test_an_exported_page_has_the_images_of_its_samples(tmp_path: Path) -> None:
    from PIL import Image

    run, names = make_run(tmp_path, "run"), [f"{number:016x}" for number in (1, 2, 3)]
    write_rows(run, {"media": names})
    (run / "media").mkdir()
    (run / "media" / names[0]).write_bytes(b"\x89PNG")
    noise = np.random.default_rng(0).integers(0, 255, (600, 1200, 3), np.uint8)
    turned = Image.Exif()
    turned[0x0112] = 6  # a camera held upright
    Image.fromarray(noise).save(run / "media" / names[1], "PNG", exif=turned)
    (line,) = re.findall(r"^const EXPORTED = (.*);$", exported_page([RunView(run)], 8), re.MULTILINE)
    (exported,) = json.loads(line)["runs"]
    files = {name: base64.b64decode(url.partition(",")[2]) for name, url in exported["media"].items()}
    assert [*files] == names[:2] and files[names[0]] == b"\x89PNG", "the file of the third is lost"
    with Image.open(io.BytesIO(files[names[1]])) as image:
        assert image.size == (256, 512)
        assert abs(np.asarray(image).mean() - noise.mean()) < 2


def test_the_tokens_of_an_image_are_one_with_their_number(tmp_path: Path) -> None:
    run = make_run(tmp_path, "run")
    for image in ("<|image_pad|>", "[IMG]"):
        write_rows(run, {"prompt": f"user <s>{image * 768}</s> what? {image * 2}"})
        expected = f"user <s>{image} \u00d7 768</s> what? {image * 2}"
        assert RunView(run).samples(3)[0]["prompt"] == RunView(run).sample(3, 0)["prompt"] == expected


def test_unknown_paths_are_not_found_and_other_hosts_are_forbidden(tmp_path: Path) -> None:
    with serving([RunView(make_run(tmp_path, "run"))], "127.0.0.1", 0) as address:
        assert json.load(urlopen(address + "api/runs"))[0]["name"] == "run"  # noqa: S310
        for path in ("api/sample?run=0&step=9&row=0", "api/sample?run=7", "api/steps?run=x", "etc"):
            with pytest.raises(HTTPError, match="404"):
                urlopen(address + path)  # noqa: S310
        with pytest.raises(HTTPError, match="403"):
            urlopen(Request(address + "api/runs", headers={"Host": "evil.example"}))  # noqa: S310


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
def test_invalid_arguments_are_reported(arguments: Any, message: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    make_run(tmp_path, "run")
    for name, text in (("broken", "name: [run"), ("other", "name: run")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert main(["view", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_an_exported_page_loads_nothing_and_has_the_samples(tmp_path: Path) -> None:
    """Of 4 samples of a step 3 are kept: the outlier, the least and the greatest reward."""
    runs = [make_run(tmp_path, "first"), make_run(tmp_path, "second", drift=0.4)]
    file = tmp_path / "both.html"
    assert main(["view", *map(str, runs), "--export", str(file), "--samples", "6"]) == 0
    page = file.read_text()
    assert not re.search(r"""(src|href)=["'](?!data:)""", page) and MARKUP not in page, "text of a sample is not markup"
    (line,) = re.findall(r"^const EXPORTED = (.*);$", page, re.MULTILINE)
    exported = json.loads(line)["runs"]
    assert [run["about"]["name"] for run in exported] == ["first", "second"]
    assert [sorted(run["rows"]["2"]) for run in exported] == [["0", "2", "3"]] * 2
    assert exported[0]["rows"]["2"]["0"]["prompt"].endswith(MARKUP)


ANSWER = ["Nat", "alia", " sold", " 48", "/2", " =", " 24", "\n", "#### ", "72", "<eos>"]
MARKUP = "<b>not markup</b>"


def make_run(directory: Path, name: str, *, steps: int = 2, drift: float = 0.01) -> Path:
    """Writes the run and returns its directory. In sample 2 the last token but one has a log-ratio of `drift` * step."""
    run = directory / name
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(
        f"name: {name}\nalgorithm: grpo\npolicy: {{model_name: models/qwen}}\nsft: {{max_num_steps: 0}}\n"
        "grpo: {max_num_steps: 8}\n"
    )
    files = RolloutFiles(run / "rollouts", max_bytes=None)
    for step in range(1, steps + 1):
        add_step(run, files, step, drift)
    return run


def add_step(run: Path, files: RolloutFiles, step: int, drift: float) -> None:
    """Writes the rollouts of a step and then its metrics, as a run does."""
    files.write(step, table_of([sample_row(step, place, drift) for place in range(4)]))
    line = {"step": step, "stage": "grpo", "time": 1e9 + 90 * step, "reward/mean": 0.2 * step, "loss": 0.5 / step}
    times = {"timing_s/total": 3.0, "timing_s/generate": 2.0, "timing_s/train_step": 0.5 + step / 10}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**line, **times}) + "\n")


def sample_row(step: int, place: int, drift: float) -> dict[str, Any]:
    """Returns a sample of a question of GSM8K. That of place 3 has a turn of an environment, that of place 1 three
    conversations."""
    count = len(ANSWER)
    logprobs = [-math.log(at + 1) for at in range(count)]
    train = [one + 1e-4 for one in logprobs]
    if place == 2:
        train[-2] += drift * step
    sampled = [not (place == 3 and 2 <= at < 5) for at in range(count)]
    turns = [("policy", 0, count)] if place != 3 else [("policy", 0, 2), ("environment", 2, 5), ("policy", 5, count)]
    about = {"step": step, "split": "train", "dropped": "", "valid": True, "finish_reason": "stop"}
    question = {"group": step, "place": place, "source": "train.jsonl, line 1", "task": "gsm8k", "reference": "72"}
    rewards = {"reward": place / 4, "reward_parts": {"right": place / 4, "format": 0.0}, "advantage": place - 1.5}
    tokens = {"prompt_tokens": [1, 2, 3], "tokens": list(range(10, 10 + count)), "token_texts": ANSWER, "sampled": sampled}
    by_turn = {"policy": 0.5, "environment": None}
    sample = {
        **(about | question | rewards | tokens),
        "prompt": f"How many clips did Natalia sell? {MARKUP}",
        "completion": "".join(ANSWER[:-1]) + f" ({place})",
        "turns": [
            {"role": role, "text": "".join(ANSWER[i:j]), "start": i, "end": j, "reward": by_turn[role]}
            for role, i, j in turns
        ],
        "logprobs": logprobs,
        "train_logprobs": train,
        "reference_logprobs": [one - 0.05 for one in train],
        "entropy": [0.3 * at for at in range(count)],
        "versions": [step - 1 - (at < 5) for at in range(count)],
    }
    conversations = [{**sample, "trained": trained, "prompt": "Another question"} for trained in (True, False)]
    return {**sample, "conversations": conversations if place == 1 else []}
