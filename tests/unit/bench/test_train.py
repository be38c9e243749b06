"""`bench train` reports cases that fail."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from dagrl.bench import train
from dagrl.bench.report import Row
from dagrl.errors import ConfigError, RunError


class Nobody:
    """Contenders that do nothing."""

    def __init__(self, *words: object) -> None:
        pass

    def __enter__(self) -> Nobody:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def connect(self) -> None:
        pass


def test_failed_cases_raise_after_the_last_case(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    taken: list[str] = []

    def measure(case: train.TrainCase, *rest: Any) -> list[Row]:
        taken.append(case.name)
        raise ValueError(f"no room for {case.name}")

    for name in ("PlainSteps", "DagrlSteps"):
        monkeypatch.setattr(train, name, Nobody)
    monkeypatch.setattr(train, "measure", measure)
    monkeypatch.setattr(train, "write_model", lambda *rest: tmp_path)
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    with pytest.raises(RunError, match=r"2 of 2 cases failed, see above: 0\.6b:dp1, 0\.6b:tp2"):
        train.run(parser.parse_args(["--tiny", "--cases", "0.6b:dp1", "0.6b:tp2"]))
    assert taken == ["0.6b:dp1", "0.6b:tp2"]  # the second ran after the first had failed
    assert "no room for 0.6b:tp2" in capsys.readouterr().out


def test_cases_with_adapters_and_in_float8(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    options = parser.parse_args(["--cases", "4b:dp1:lora", "4b:dp2df!"])
    lora, whole = (train.parse_case(text, tiny=False) for text in options.cases)
    assert (lora.lora, lora.alone, lora.sharded, lora.name) == (True, True, False, "4b:dp1:lora")
    assert (whole.lora, whole.alone, whole.sharded, whole.name) == (False, True, True, "4b:dp2df")
    found = [train.case_config(case, tmp_path, options).policy.megatron_cfg for case in (lora, whole)]
    assert [(keys.peft.enabled, keys.fp8_cfg.enabled) for keys in found] == [(True, False), (False, True)]
    with pytest.raises(ConfigError, match=r"expected MODEL:LAYOUT"):
        train.parse_case("4b:dp1:peft", tiny=False)
