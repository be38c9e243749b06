"""The run directory, its rollouts and traces: complete files, what a resume drops, bounds, earlier runs of the same name."""

import errno
import json
import math
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import yaml
from pyarrow import parquet
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from dagrl.config import Config
from dagrl.errors import CheckpointError, MissingDependencyError
from dagrl.telemetry import record as run_record
from dagrl.telemetry.record import RunPaths, RunRecord, lock_run, prepare_run_directory, read_metrics
from dagrl.telemetry.rollouts import OTHER, STEP, RolloutFiles, read_rollouts, rollout_files, table_of
from dagrl.telemetry.timing import PhaseClock
from dagrl.telemetry.trace import TraceEvent, TraceWriter
from tests.unit.run.test_checkpoints import full_disk


def config(tmp_path: Path, name: str = "tiny", resume: bool = False, **logger: Any) -> Config:
    policy = {"random_init": {"hf_config": {"hidden_size": 8, "rope": {"theta": 1e4}}}}
    sections = {"policy": policy, "data": {"task": "dagrl.rl.tasks:arithmetic"}, "checkpointing": {"resume": resume}}
    sections |= {"output_dir": str(tmp_path / "runs"), "logger": {"tensorboard_enabled": False, **logger}}
    return Config.model_validate({"name": name, "algorithm": "grpo", **sections})


def log_steps(run: Config, first: int, last: int, resumed_step: int = 0) -> RunPaths:
    paths = prepare_run_directory(run)
    with RunRecord(run, resumed_step=resumed_step) as record:
        for step in range(first, last + 1):
            record.log(step, "grpo", {"loss": 1 / step, "reward/mean": 0.1 * step})
    return paths


def test_each_step_is_flushed_as_one_line(tmp_path: Path) -> None:
    run = config(tmp_path)
    paths = prepare_run_directory(run)
    with RunRecord(run) as record:
        record.log(1, "sft", {"loss": 2.0, "validation/loss": 1.5})
        record.log(2, "grpo", {"loss": float("nan"), "reward/mean": float("inf")})
        lines = [json.loads(line) for line in paths.metrics.read_text().splitlines()]  # before the file is closed
    first, second = (line.pop("time") for line in lines)
    assert lines[0] == {"step": 1, "stage": "sft", "loss": 2.0, "validation/loss": 1.5} and second >= first > 1e9
    assert lines[1] == {"step": 2, "stage": "grpo", "loss": None, "reward/mean": None}


def test_a_resumed_run_drops_the_steps_it_repeats(tmp_path: Path) -> None:
    paths = log_steps(config(tmp_path), 1, 5)
    with paths.metrics.open("a") as file:
        file.write('{"step": 6, "sta')  # truncated by a crash
    log_steps(config(tmp_path, resume=True), 4, 6, resumed_step=3)
    assert [line["step"] for line in read_metrics(paths.metrics)] == [1, 2, 3, 4, 5, 6]
    assert [path.name for path in paths.directory.parent.iterdir()] == ["tiny"]


@pytest.mark.parametrize("resumed_step, kept", [(0, 0), (1, 2), (2, 3)])
def test_a_validation_at_the_start_is_recorded_once(tmp_path: Path, resumed_step: int, kept: int) -> None:
    lines = [(0, "sft"), (1, "sft"), (2, "sft"), (2, "grpo"), (3, "grpo")]
    run = config(tmp_path).with_keys({"sft.max_num_steps": 2})
    paths = prepare_run_directory(run)
    for start in (0, kept):
        with RunRecord(run, resumed_step=resumed_step) as record:
            for step, stage in lines[start:]:
                record.log(step, stage, {"validation/loss": 1.0})
        assert [(line["step"], line["stage"]) for line in read_metrics(paths.metrics)] == lines


def test_a_full_disk_error_names_the_file(tmp_path: Path) -> None:
    paths = log_steps(config(tmp_path), 1, 1)
    run = config(tmp_path, resume=True)
    room = paths.metrics.stat().st_size + 10  # for part of a line
    with pytest.raises(OSError, match="File too large") as raised, full_disk(room), RunRecord(run, resumed_step=1) as record:
        record.log(2, "grpo", {"loss": 1.0})
    assert raised.value.filename == str(paths.metrics)
    log_steps(run, 2, 3, resumed_step=1)
    assert [line["step"] for line in read_metrics(paths.metrics)] == [1, 2, 3]


def test_a_full_disk_error_of_tensorboard_names_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = config(tmp_path, tensorboard_enabled=True)
    paths = prepare_run_directory(run)
    full = MagicMock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))  # as its writer thread raises
    with RunRecord(run) as record, monkeypatch.context() as patch, pytest.raises(OSError, match="No space left") as raised:
        patch.setattr(EventFileWriter, "flush", full)
        record.log(1, "grpo", {"loss": 1.0})
    assert raised.value.filename == str(paths.tensorboard)


def test_a_failed_write_of_the_configuration_leaves_no_file(tmp_path: Path) -> None:
    run = config(tmp_path)
    with pytest.raises(OSError, match="File too large") as raised, full_disk(100):
        prepare_run_directory(run)
    assert raised.value.filename == str(RunPaths.of(run).config)
    assert prepare_run_directory(run).config.exists()


def test_a_new_run_of_the_same_name_keeps_the_earlier_one(tmp_path: Path) -> None:
    log_steps(config(tmp_path), 1, 3)
    paths = log_steps(config(tmp_path), 1, 2)
    assert len(read_metrics(paths.metrics)) == 2 and set(paths.written()) == {"configuration", "metrics"}
    assert len(read_metrics(paths.directory.with_name("tiny.1") / "metrics.jsonl")) == 3


def test_a_resume_with_another_configuration_keeps_both(tmp_path: Path) -> None:
    prepare_run_directory(config(tmp_path))
    paths = prepare_run_directory(config(tmp_path, resume=True))
    resumes = [yaml.safe_load(path.read_text())["checkpointing"]["resume"] for path in sorted(paths.directory.iterdir())]
    assert resumes == [False, True]  # config.1.yaml, config.yaml


@pytest.mark.parametrize("started", [False, True])
def test_a_resume_that_cannot_start_leaves_the_earlier_configuration(started: bool, tmp_path: Path) -> None:
    saved = prepare_run_directory(config(tmp_path)).config
    with suppress(CheckpointError), run_record.put_back_config(saved) as put_back:
        prepare_run_directory(config(tmp_path, resume=True))
        if started:
            put_back.pop_all()
        raise CheckpointError("of another model")
    assert yaml.safe_load(saved.read_text())["checkpointing"]["resume"] == started


@pytest.mark.parametrize("resume", [False, True])
def test_a_start_killed_while_writing_its_config_blocks_no_other(resume: bool, tmp_path: Path, monkeypatch: Any) -> None:
    """In a new directory, or in that of a run resumed with another configuration."""
    if resume:
        prepare_run_directory(config(tmp_path))
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(Path, "replace", MagicMock(side_effect=SystemExit))
        prepare_run_directory(config(tmp_path, resume=resume))
    assert prepare_run_directory(config(tmp_path, resume=resume)).config.exists()


@pytest.mark.parametrize("resumed_step", [3, 0], ids=["a checkpoint", "no checkpoint"])
def test_tensorboard_shows_steps_once(tmp_path: Path, resumed_step: int) -> None:
    paths = log_steps(config(tmp_path, tensorboard_enabled=True), 1, 5)
    (file,) = paths.tensorboard.iterdir()  # read first: of one second, TensorBoard reads a process's 10th before its 9th
    file.rename(file.with_name("events.out.tfevents.0000000001"))
    log_steps(config(tmp_path, resume=True, tensorboard_enabled=True), resumed_step + 1, 4, resumed_step)
    events = EventAccumulator(str(paths.tensorboard))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"grpo/loss", "grpo/reward/mean"}
    assert [event.step for event in events.Scalars("grpo/reward/mean")] == [1, 2, 3, 4]
    assert [event.value for event in events.Scalars("grpo/loss")] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4])


def test_a_run_restarts_without_a_tracker_that_cannot_be_opened(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    """A new run is refused instead: its user is there."""

    class Down(run_record.TensorBoardTracker):
        __init__ = MagicMock(side_effect=ConnectionError("server is down"))

    monkeypatch.setitem(run_record.TRACKERS, "tensorboard", Down)
    with pytest.raises(ConnectionError):
        log_steps(config(tmp_path, tensorboard_enabled=True), 1, 1)
    paths = log_steps(config(tmp_path, resume=True, tensorboard_enabled=True), 1, 2)
    assert [line["step"] for line in read_metrics(paths.metrics)] == [1, 2]
    assert "the run goes on without Down, which failed: ConnectionError: server is down" in caplog.text


def test_a_failing_tracker_stops_neither_the_run_nor_other_trackers(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    down = ConnectionError("server is down")
    first, *others = (MagicMock(**{"close.side_effect": down, "log.side_effect": [raised, None]}) for raised in (down, 0, 0))
    monkeypatch.setattr("dagrl.telemetry.record.open_trackers", lambda *_: [first, *others])
    paths = log_steps(config(tmp_path), 1, 2)
    assert [line["step"] for line in read_metrics(paths.metrics)] == [1, 2]
    assert first.log.call_count == 1 and not first.close.called
    assert all([call.args[0] for call in other.log.call_args_list] == [1, 2] and other.close.called for other in others)
    text = "the run goes on without MagicMock, which failed: ConnectionError: server is down. metrics.jsonl has all steps"
    assert caplog.messages == [text] * 3


@pytest.mark.parametrize("package", run_record.TRACKERS)
def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependencyError, match=rf"logger\.{package}_enabled .*'{package}'.*dagrl\[tracking\]"):
        RunRecord(config(tmp_path, **{f"{package}_enabled": True}))


def test_paths_are_absolute_and_a_check_for_running_runs_makes_none(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    paths = RunPaths.of(config(Path()))
    with lock_run(paths, existing=True):
        assert not any(tmp_path.iterdir())
    assert (paths.final_model, paths.checkpoints) == (tmp_path / "runs/tiny/final_model", tmp_path / "runs/tiny/checkpoints")


def test_warning_on_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr("fcntl.flock", MagicMock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with lock_run(RunPaths.of(config(tmp_path))):
        assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "tiny.lock (No locks available): nothing keeps other runs from" in caplog.text


TURN = {"role": "policy", "text": "2", "start": 0, "end": 1, "reward": None}
ROW = {"step": 3, "group": 7, "place": 1, "prompt": "1+1=", "reward": 1.0, "reward_parts": {"function": 1.0}}
ROW |= {"tokens": [4, 5], "logprobs": [-0.5, -1.5], "sampled": [True, False], "turns": [TURN]}


def test_rows_are_read_back_by_any_reader(tmp_path: Path) -> None:
    RolloutFiles(tmp_path / "rollouts", max_bytes=None).write(3, table_of([ROW]))
    path = rollout_files(tmp_path / "rollouts")[3]
    (row,) = parquet.read_table(path).to_pandas().to_dict("records")
    assert row["logprobs"].tolist() == [-0.5, -1.5] and row["turns"][0]["text"] == "2" and math.isnan(row["advantage"])
    (row,) = read_rollouts(path)
    assert {key: row[key] for key in ROW} == ROW and row["train_logprobs"] is None
    assert read_rollouts(path, ["reward"]) == [{"reward": 1.0}]


def test_the_oldest_steps_are_deleted_above_the_limit(tmp_path: Path) -> None:
    files = RolloutFiles(tmp_path, max_bytes=None)
    for step in range(1, 5):
        files.write(step, table_of([ROW]))
    size = rollout_files(tmp_path)[1].stat().st_size
    bounded = RolloutFiles(tmp_path, max_bytes=int(2.5 * size), resumed_step=4)
    for _ in range(3):  # written again, a file counts once
        bounded.write(5, table_of([ROW]))
    assert list(rollout_files(tmp_path)) == [4, 5]
    RolloutFiles(tmp_path, max_bytes=1, resumed_step=5).write(6, table_of([ROW]))
    assert list(rollout_files(tmp_path)) == [6]


def test_samples_that_were_not_trained_on_are_deleted_too(tmp_path: Path) -> None:
    """By a resumed run, which repeats their step, and above the limit, where the newest file is kept."""
    files, table = RolloutFiles(tmp_path, max_bytes=None), table_of([ROW])
    for step in (1, 2, 3):
        files.write(step, table)
        files.write(step, table, OTHER)
    bounded = RolloutFiles(tmp_path, max_bytes=1, resumed_step=2)
    assert list(rollout_files(tmp_path)) == list(rollout_files(tmp_path, OTHER)) == [1, 2]
    for step, kind, kept in ((3, STEP, ([3], [])), (4, OTHER, ([], [4]))):
        bounded.write(step, table, kind)
        assert (list(rollout_files(tmp_path)), list(rollout_files(tmp_path, OTHER))) == kept


def test_a_full_disk_error_names_the_file_and_leaves_no_part(tmp_path: Path) -> None:
    files = RolloutFiles(tmp_path, max_bytes=None)
    with full_disk(500), pytest.raises(OSError) as actual:
        files.write(1, table_of([ROW] * 1000))
    assert actual.value.errno in (errno.ENOSPC, errno.EFBIG) and "step_000001" in str(actual.value.filename)
    assert list(tmp_path.iterdir()) == []


NAMES = ("process_name", "process_sort_index", "thread_name")


def events(path: Path, kind: str = "X") -> list[dict[str, Any]]:
    """Returns the events of a file. While a run writes it, the closing bracket is missing."""
    text = path.read_text()
    return [event for event in json.loads(text if text.endswith("]\n") else text + "]") if event["ph"] == kind]


def test_rows_and_times(tmp_path: Path) -> None:
    path, about = tmp_path / "run" / "trace.json", {"replay": 3, "warmup": False}
    with TraceWriter(path) as trace:
        trace.declare(["driver", "train 0", "train 1"])
        start = time.time_ns() // 1000 * 1000
        step = TraceEvent("train_step", "replay", start + 2_500, 1_250, "train 1", "replays", about)
        quantum = TraceEvent("generate", "replay", start + 9_000, 4_000, "generation 0", "replays")
        trace.write([step, quantum, TraceEvent("checkpoint", "step", start, 1_000)])
    named = {kind: [event for event in events(path, "M") if event["name"] == kind] for kind in NAMES}
    names = {event["pid"]: event["args"]["name"] for event in named["process_name"]}
    order = {event["pid"]: event["args"]["sort_index"] for event in named["process_sort_index"]}
    assert [names[pid] for pid in sorted(order, key=order.__getitem__)] == ["driver", "train 0", "train 1", "generation 0"]
    first, second, third = events(path)
    assert (first["name"], first["cat"], first["dur"]) == ("train_step", "replay", 1.25)
    assert (first["ts"] - third["ts"], second["ts"] - third["ts"]) == (2.5, 9.0)
    assert first["args"] == about
    assert [names[event["pid"]] for event in (first, second, third)] == ["train 1", "generation 0", "driver"]
    threads = {event["tid"]: (event["pid"], event["args"]["name"]) for event in named["thread_name"]}
    assert threads[first["tid"]] == (first["pid"], "replays")
    assert threads[third["tid"]] == (third["pid"], "main")


def test_the_file_is_complete_after_every_write(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace.json") as trace:
        for number in range(1, 20):  # read while open, as after a crash
            trace.write([TraceEvent("event", "test", number, 1)])
            assert len(events(trace.path)) == number
    assert len(events(trace.path)) == 19


def test_recording_stops_at_the_limit(tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagrl.telemetry.trace.MAX_EVENTS", 3)
    with TraceWriter(tmp_path / "trace.json") as trace:
        for number in range(6):
            trace.write([TraceEvent("event", "test", number, 1)])
    assert len(events(trace.path)) == 3
    (message,) = (record.message for record in caplog.records if record.name == "dagrl.telemetry.trace")
    assert message == f"the trace {trace.path} is full; later events are not recorded"


@pytest.mark.parametrize("room", [0, 150])
def test_a_full_disk_ends_only_the_trace(tmp_path: Path, caplog: pytest.LogCaptureFixture, room: int) -> None:
    """While the disk is full, part of the events fits, or none."""
    with TraceWriter(tmp_path / "trace.json") as trace:
        trace.write([TraceEvent("kept", "test", 0, 1)])
        with full_disk(trace.path.stat().st_size + room):
            trace.write([TraceEvent("lost", "test", number, 1) for number in range(100)])
        trace.write([TraceEvent("later", "test", 0, 1)])
    assert [event["name"] for event in events(trace.path)] == ["kept"]
    (message,) = (record.message for record in caplog.records if record.name == "dagrl.telemetry.trace")
    assert message.startswith(f"cannot write the trace {trace.path}: ")


def test_traces_before_a_resume_are_kept(tmp_path: Path) -> None:
    for name in ("first", "second", "third"):
        with TraceWriter(tmp_path / "trace.json") as trace:
            trace.write([TraceEvent(name, "test", 0, 1)])
    actual = {path.name: events(path)[0]["name"] for path in tmp_path.iterdir()}
    assert actual == {"trace.1.json": "first", "trace.2.json": "second", "trace.json": "third"}


def test_threads_may_write_concurrently(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace.json") as trace:

        def work(worker: int) -> None:
            for number in range(200):
                trace.write([TraceEvent("event", "test", number, 1, f"worker {worker}")])

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
    assert len(events(trace.path)) == 800


def test_clock_measures_phases_and_writes_spans(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace.json") as trace:
        clock = PhaseClock(trace)
        with clock.measure("compile"):
            time.sleep(0.01)
        began = time.perf_counter()
        clock.restart()
        with clock.measure("generate"):
            pass
        first, took = clock.close_step(), time.perf_counter() - began
        with pytest.raises(RuntimeError), clock.measure("generate"):
            raise RuntimeError("a failed phase counts too")
        second = clock.close_step()
    assert set(first) == set(second) == {"timing_s/generate", "timing_s/total"}
    assert took >= first["timing_s/total"] >= first["timing_s/generate"] > 0
    assert clock.totals["generate"] == pytest.approx(first["timing_s/generate"] + second["timing_s/generate"])
    assert [event["name"] for event in events(trace.path)] == ["compile", "generate", "generate"]
