"""Damaged and arbitrary input: every reader of files gives its own error, or reads; none crashes or runs what it reads."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings, strategies as st

from dagrl.config import Config, DataConfig
from dagrl.config.file import load_config
from dagrl.data.examples import read_examples
from dagrl.errors import CheckpointError, ConfigError, DataError
from dagrl.run.checkpoint_store import FORMAT, MANIFEST, STATE, CheckpointStore, TrainState, load_checkpoint_directory
from dagrl.telemetry.record import prepare_run_directory
from tests.unit.run.test_checkpoints import saving

VALID = {"name": "fuzz", "algorithm": "sft", "policy": {}, "data": {}}
FUZZ = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=12)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
CONTENT: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
DEEP = "[\n" * 100_000
STATE_OF = TrainState(7, {"sampler": {"epoch": 1}}, 0.25)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = CheckpointStore(tmp_path_factory.mktemp("fuzz"))
    with saving(store, STATE_OF) as directory:
        (directory / "train").mkdir()
        (directory / "train" / "part.bin").write_bytes(bytes(range(256)))
    return store.root / "step_00000007"


def loads_or_says_why(saved: Path, copy: Path, name: str, content: bytes) -> TrainState | None:
    """Loads a copy in which one file has other content. Returns its state, or None after a CheckpointError."""
    directory = copy / saved.name
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(saved, directory)
    (directory / name).write_bytes(content)
    try:
        return load_checkpoint_directory(directory).state
    except CheckpointError:
        return None


@pytest.mark.parametrize("name", [MANIFEST, STATE, "train/part.bin"])
@FUZZ
@given(data=st.data())
def test_a_checkpoint_cut_or_flipped_at_any_byte_is_found(saved: Path, tmp_path: Path, name: str, data: Any) -> None:
    whole = (saved / name).read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    flip = data.draw(st.integers(1, 255))
    flipped = whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :]
    assert loads_or_says_why(saved, tmp_path, name, whole[:at]) is None
    found = loads_or_says_why(saved, tmp_path, name, flipped)
    assert found is None or (name == MANIFEST and found == STATE_OF), "a manifest may differ where it means the same"


@pytest.mark.parametrize("name", [MANIFEST, STATE])
@FUZZ
@given(content=CONTENT)
def test_other_content_in_a_checkpoint_is_an_error(saved: Path, tmp_path: Path, name: str, content: Any) -> None:
    for text in (DEEP, json.dumps(content)):
        assert loads_or_says_why(saved, tmp_path, name, text.encode()) is None
    shaped = {"format": FORMAT, "files": {STATE: content}, "step": 7, "counters": content}
    found = loads_or_says_why(saved, tmp_path, name, json.dumps(shaped).encode())
    assert found is None or found.step == 7


def test_a_manifest_cannot_name_files_outside_its_checkpoint(saved: Path, tmp_path: Path) -> None:
    manifest = json.loads((saved / MANIFEST).read_text())
    manifest["files"]["../../secret"] = {"size": 0, "crc32": 0}
    (tmp_path.parent / "secret").touch()
    assert loads_or_says_why(saved, tmp_path, MANIFEST, json.dumps(manifest).encode()) is None


@FUZZ
@given(content=st.binary(max_size=200) | CONTENT.map(lambda value: json.dumps(value).encode()) | st.just(DEEP.encode()))
def test_any_line_of_a_data_file_is_an_example_or_a_data_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    try:
        read_examples(path, "train", DataConfig())
    except DataError as error:
        assert str(path) in str(error)


@FUZZ
@given(text=st.text(max_size=200) | CONTENT.map(yaml.safe_dump) | st.just(DEEP))
def test_any_text_is_a_configuration_or_a_config_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    with pytest.raises(ConfigError):
        load_config(path)


@FUZZ
@given(key=st.sampled_from(sorted(Config.model_fields)), value=CONTENT)
def test_any_value_of_a_section_is_taken_or_a_config_error(tmp_path: Path, key: str, value: Any) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**VALID, key: value}), encoding="utf-8", errors="surrogatepass")
    try:
        load_config(path)
    except ConfigError as error:
        assert str(error)


def test_yaml_constructs_no_objects(tmp_path: Path) -> None:
    path, made = tmp_path / "config.yaml", tmp_path / "made"
    path.write_text(f"name: !!python/object/apply:os.mkdir ['{made}']\n")
    with pytest.raises(ConfigError):
        load_config(path)
    assert not made.exists()


def test_directories_with_data_are_closed_to_other_users(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        paths = prepare_run_directory(Config.model_validate({**VALID, "output_dir": str(tmp_path)}))
        elsewhere = CheckpointStore(tmp_path / "checkpoints")
        elsewhere.recover()
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (paths.directory, elsewhere.root)] == [0o750, 0o750]
