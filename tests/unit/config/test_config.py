"""Configuration files: reading, defaults, overrides in order, and errors with their locations."""

from pathlib import Path

import pytest

from dagrl.config import ALGORITHMS
from dagrl.config.file import load_config
from dagrl.errors import ConfigError

SMALLEST = """
name: small
algorithm: sft
policy: {model_name: somewhere}
data: {path: data.jsonl}
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALLEST)
    return path


def test_overrides_in_order(small: Path) -> None:
    """A number may be text in YAML 1.1, a key may create its section, and a tilde is the home."""
    words = ["policy.megatron_cfg.data_parallel_size=2", "policy.optimizer.lr=3e-4", "policy.sequence_buckets=[16, 32]"]
    words += [
        "policy.generation.vllm_cfg.tensor_parallel_size=2",
        "data.path=a=b.jsonl",
        "data.val_path=null",
        "seed=1",
        "seed=2",
    ]
    defaults = load_config(small)
    assert defaults.executor == "compiled" and defaults.policy.generation is None
    config = load_config(small, words)
    assert config.policy.megatron_cfg.layout.dp == config.policy.generation.vllm_cfg.layout.tp == 2
    assert (config.policy.optimizer.lr, config.policy.sequence_buckets) == (3e-4, (16, 32))
    assert (config.data.path, config.data.val_path, config.seed) == ("a=b.jsonl", None, 2)
    config = load_config(small, ["data.path=~/train.jsonl", "output_dir=~/runs"])
    assert (config.data.path, config.output_dir) == (str(Path.home() / "train.jsonl"), str(Path.home() / "runs"))


def test_every_error_is_listed_with_its_location(small: Path) -> None:
    small.write_text(SMALLEST.replace("model_name", "modelname") + "sft:\n  lr: -1\n")
    with pytest.raises(ConfigError) as caught:
        load_config(small, ["algorithm=sftt", "policy.random_init={}"])
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    assert f"policy.modelname ({small}, line 4); did you mean 'policy.model_name'" in lines[2]
    assert f"sft.lr ({small}, line 7): found -1; expected: greater than 0" in lines
    known = f"{', '.join(map(repr, ALGORITHMS))} or the import path 'module:Class' of your own"
    assert f"algorithm (command line): found 'sftt'; expected: {known}" in lines
    assert "missing key policy.random_init.hf_config (command line); it is required" in lines


def test_replaced_values_are_reported_at_the_command_line(small: Path) -> None:
    small.write_text(SMALLEST.replace("somewhere", "somewhere, sequence_buckets: [8, 16]"))
    for words in (["policy.sequence_buckets=[8, many]"], ["policy.sequence_buckets=null", "policy.sequence_buckets.1=many"]):
        with pytest.raises(ConfigError, match=r"policy\.sequence_buckets(\.1)? \(command line\): found .*'many'"):
            load_config(small, words)
    with pytest.raises(ConfigError, match=r"unknown key polcy \(command line\)"):
        load_config(small, ["polcy.megatron_cfg.seed=1"])
