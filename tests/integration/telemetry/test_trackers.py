"""Each tracker with its real package, offline, and the lock of a run's directory between processes."""

import json
import math
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dagrl.errors import ConfigError
from dagrl.telemetry.record import RunPaths, RunRecord, lock_run, prepare_run_directory
from tests.unit.telemetry.test_record import config


def run_twice(tmp_path: Path, **logger: Any) -> Path:
    """Logs steps 1 and 2, and step 3 after a resume. Returns the run's directory."""
    for steps, resumed in (((1, 2), 0), ((3,), 2)):
        made = config(tmp_path, resume=bool(resumed), **logger)
        paths = prepare_run_directory(made)
        with RunRecord(made, resumed_step=resumed) as record:
            for step in steps:
                record.log(step, "grpo", {"reward/mean": step / 4, "loss": math.nan if step == 2 else 1 / step})
    return paths.directory


EXPECTED = [(1, 0.25), (2, 0.5), (3, 0.75)]


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    run = run_twice(tmp_path, wandb_enabled=True, wandb={"project": "mine"})
    history: list[tuple[int, float]] = []
    about: list[Any] = []
    for file in sorted(run.glob("wandb/offline-run-*/*.wandb"), key=os.path.getmtime):
        for data in records(file.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            items = {(item.key or "/".join(item.nested_key)): item.value_json for item in record.history.item}
            if "grpo/reward/mean" in items:
                history.append((int(items["_step"]), json.loads(items["grpo/reward/mean"])))
            about += [record.run] if record.HasField("run") else []
    assert history == EXPECTED
    assert {(one.project, one.display_name) for one in about} == {("mine", "tiny")}
    assert {one.run_id for one in about} == {(run / "wandb_id").read_text()}


def records(content: bytes) -> list[bytes]:
    """Reads the records of a `.wandb` file: LevelDB's log format after a header of 7 bytes, in blocks of 32 KiB."""
    actual, at, parts = [], 7, b""
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", content[at + 4 : at + 7])
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            actual.append(parts)
            parts = b""
    return actual


HOLD = """
import subprocess, sys
from pathlib import Path
from dagrl.telemetry.record import RunPaths, lock_run
with lock_run(RunPaths(Path(sys.argv[1]))):
    print(subprocess.Popen(["sleep", "60"], close_fds=False).pid, flush=True)
    sys.stdin.read()
"""


def test_the_lock_of_a_killed_run_is_free_although_its_child_lives(tmp_path: Path) -> None:
    paths = RunPaths.of(config(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, paths.directory], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as run:
        assert run.stdout is not None
        child = int(run.stdout.readline())
        with (
            pytest.raises(ConfigError, match=rf"tiny is in use by pid {run.pid} on .* choose another name"),
            lock_run(paths),
        ):
            pass
        with pytest.raises(ConfigError, match=f"tiny is in use by pid {run.pid}"), lock_run(paths, existing=True):
            pass
        run.kill()
    try:
        for _ in range(2):  # twice, like a restart in the same process
            with lock_run(paths):
                os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)
