"""Several data sets mixed by weights: shares of any stretch of draws, tasks, and resumed positions."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from dagrl.config import DataConfig
from dagrl.data import Sampler, load_splits, open_sampler
from dagrl.data.tokenization import encode_prompts
from dagrl.errors import CheckpointError, ConfigError, DataError
from dagrl.run.model import character_tokenizer
from tests.unit.data.test_data import write


def write_sums(path: Path, sums: list[str], key: str = "prompt") -> str:
    return write(path, [{key: text, "response": "0"} for text in sums])


def mixture(tmp_path: Path, **more: object) -> DataConfig:
    """Returns a mixture of twenty sums of ones and five of twos, in files with different columns."""
    ones = {"path": write_sums(tmp_path / "ones.jsonl", [f"1+{n}=" for n in range(20)]), "val_fraction": 0.1}
    twos = {"path": write_sums(tmp_path / "twos.jsonl", [f"2+{n}=" for n in range(5)], "q"), "prompt_key": "q"}
    return DataConfig.model_validate({"mixture": {"ones": ones, "twos": {**twos, "val_fraction": 0.2, **more}}})


@given(
    weights=st.lists(st.floats(0.1, 10.0), min_size=1, max_size=5),
    draws=st.integers(1, 60),
    counts=st.lists(st.integers(1, 7), min_size=5, max_size=5),
)
def test_any_stretch_of_draws_has_the_shares(weights: list[float], draws: int, counts: list[int]) -> None:
    names, start, sources = "abcde"[: len(weights)], 0, {}
    for name, count in zip(names, counts, strict=False):
        sources[name], start = list(range(start, start + count)), start + count
    sampler = Sampler(sources, dict(zip(names, weights, strict=True)), seed=3)
    drawn = sampler.take(draws)
    for name, weight in zip(names, weights, strict=True):
        mine = [index for index in drawn if index in sources[name]]
        assert abs(len(mine) - draws * weight / sum(weights)) <= len(names)
        epochs = [mine[at : at + len(sources[name])] for at in range(0, len(mine), len(sources[name]))]
        assert all(len(set(epoch)) == len(epoch) for epoch in epochs), "each source has epochs of its own"


def test_examples_carry_their_task_and_validation_takes_turns(tmp_path: Path) -> None:
    splits = load_splits(mixture(tmp_path))
    assert Counter(example.task for example in splits.train) == {"ones": 18, "twos": 4}
    assert [example.task for example in splits.validation] == ["ones", "twos", "ones"]
    assert all(example.prompt.startswith("1" if example.task == "ones" else "2") for example in splits.train)
    assert splits.train[-1].columns["q"] == splits.train[-1].prompt


@pytest.mark.parametrize(
    ("weights", "expected"), [({}, {"ones": 18, "twos": 4}), ({"weight": 18.0}, {"ones": 11, "twos": 11})]
)
def test_weights_and_a_resumed_position(tmp_path: Path, weights: dict[str, float], expected: dict[str, int]) -> None:
    """Without a weight a source has that of its examples."""
    config = mixture(tmp_path, **weights)
    rows = encode_prompts(load_splits(config).train, character_tokenizer("0123456789+="))
    sampler = open_sampler(rows, config)
    drawn = sampler.take(22)
    assert Counter(rows[index].task for index in drawn) == expected
    state = json.loads(json.dumps(sampler.state()))
    resumed = open_sampler(rows, config)
    resumed.restore(state)
    assert resumed.take(30) == sampler.take(30)
    with pytest.raises(CheckpointError, match=r"data\.mixture, data\.seed"):
        open_sampler(rows, mixture(tmp_path, weight=1.5)).restore(state)


def test_errors_name_the_source(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.mixture\.twos: .*no key 'prompt'.*data\.prompt_key"):
        load_splits(mixture(tmp_path, prompt_key="prompt"))
    with pytest.raises(ConfigError, match=r"data\.mixture\.twos: data\.path and data\.task: found neither"):
        load_splits(mixture(tmp_path, path=None))
