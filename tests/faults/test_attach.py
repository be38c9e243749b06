"""`dagrl attach`: a driver is killed, and another one takes its workers over; or none does, and nothing is left.

Runs are compared with undisturbed ones without `timeouts.orphan_s`, bit for bit.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from dagrl.telemetry.record import read_metrics
from tests.integration.main_job import (
    GRPO,
    ROOT,
    SFT,
    SHARED_MEMORY,
    Process,
    Run,
    descendants,
    left_shared_memory,
    processes,
    running,
    untimed,
)

HOLD = "DAGRL_TEST_HOLD"
QUIET = ("logger.tensorboard_enabled=false", "logger.plot_enabled=false", "logger.trace_enabled=false")
WAITING = "timeouts.orphan_s=60"
OF_THE_DRIVER = ("replays", "padding_share")
"""Metrics of what the driver replays: the one that takes over does not repeat what the workers have done."""

PATIENCE_S = 120.0


def held_sevens(prompts: list[str], completions: list[str], references: list[str]) -> list[float]:
    """The share of sevens. While the file of the environment variable exists, it says so there and does not answer."""
    hold = Path(os.environ.get(HOLD, os.devnull + "/none"))
    while hold.exists():
        hold.write_text("held")
        time.sleep(0.02)
    return [text.count("7") / max(len(text), 1) for text in completions]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.02)


def wait_until_empty(left: Callable[[], Collection[object]]) -> None:
    until = time.monotonic() + PATIENCE_S
    while found := left():
        assert time.monotonic() < until, f"left: {found}"
        time.sleep(0.02)


def kill_driver(run: Run) -> set[Process]:
    """Kills the driver. Returns its workers."""
    workers = {one for one in descendants(run.process.pid) if one.name.startswith(("ray::Meg", "ray::Vllm"))}
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait()
    return workers


@contextmanager
def attaching(directory: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "dagrl.cli.main", "attach", str(directory)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def lines(directory: Path) -> list[dict[str, object]]:
    found = untimed(read_metrics(directory / "metrics.jsonl"))
    return [{name: value for name, value in line.items() if name not in OF_THE_DRIVER} for line in found]


def taken_over(killed: Run, workers: set[Process], driver: subprocess.Popen[str]) -> str:
    """Waits for the end of a killed run, whose `workers` `driver` has taken over. Returns what that logged."""
    begin = time.time()
    wait_until(lambda: killed.metrics[-1]["time"] > begin or driver.poll() is not None, "no step after the attach")
    gone = workers - set(processes().values())
    logged = driver.communicate(timeout=PATIENCE_S)[0]
    assert driver.returncode == 0 and not gone, f"{gone} ended; {logged}"
    assert not {"lease.json", "driver"} & set(os.listdir(killed.directory))
    wait_until_empty(killed.left_processes)
    wait_until_empty(killed.left_shared_memory)
    return logged


def check_equal(killed: Run, undisturbed: Run) -> None:
    assert undisturbed.finish() == 0, undisturbed.shown
    assert lines(killed.directory) == lines(undisturbed.directory)
    assert files(killed.directory / "final_model") == files(undisturbed.directory / "final_model")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sft_goes_on_with_the_workers_of_a_killed_driver(tmp_path: Path) -> None:
    """It is killed in mid-step: the workers have mostly applied an update that the driver has not recorded.

    They are one shard, which gets a step as a whole or not at all.
    """
    pytest.importorskip("megatron.core")
    shard = ("policy.megatron_cfg.data_parallel_size=1", "policy.megatron_cfg.tensor_model_parallel_size=2")
    overrides = ("sft.max_num_steps=24", "sft.val_period=12", "sft.max_val_samples=16", *shard, *QUIET)
    with (
        running(SFT, tmp_path, "killed", *overrides, WAITING) as killed,
        running(SFT, tmp_path, "undisturbed", *overrides) as undisturbed,
    ):
        killed.wait_for_step(8)
        workers = kill_driver(killed)
        assert len(workers) == 2
        with attaching(killed.directory) as one, attaching(killed.directory) as other:
            wait_until(lambda: (one.poll(), other.poll()) != (None, None), "both have the run")
            refused, driver = (one, other) if one.poll() is not None else (other, one)
            text = refused.communicate()[0]
            assert refused.returncode == 2 and re.search(r"^dagrl: error: .* is in use by pid \d+ on .*\n\Z", text, re.M)
            assert "Going on from step" in taken_over(killed, workers, driver)
        check_equal(killed, undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("moment", ["generating", "learning"])
def test_grpo_goes_on_with_the_workers_of_a_killed_driver(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While rewards are awaited, the workers hold the weights of the last step. Once a step has begun to update them, its
    metrics have died with the driver: the newest checkpoint is loaded into the living processes."""
    pytest.importorskip("megatron.core")
    pytest.importorskip("vllm")
    hold = tmp_path / "hold"
    monkeypatch.setenv(HOLD, str(hold))
    overrides = (
        "sft.max_num_steps=4",
        "grpo.max_num_steps=8",
        "grpo.val_period=4",
        "grpo.max_val_samples=16",
        "checkpointing.save_period=3",
        "reward.function=tests.faults.test_attach:held_sevens",
        *QUIET,
    )
    with running(GRPO, tmp_path, "killed", *overrides, WAITING) as killed:
        killed.wait_for_step(7)
        if moment == "generating":
            hold.touch()
            wait_until(lambda: hold.read_text() == "held", "no reward was asked for")
            workers = kill_driver(killed)
            monkeypatch.delenv(HOLD)
        else:
            workers = kill_driver(killed)
        assert len(workers) == 3
        with running(GRPO, tmp_path, "undisturbed", *overrides) as undisturbed, attaching(killed.directory) as driver:
            logged = taken_over(killed, workers, driver)
            check_equal(killed, undisturbed)
    assert ("Going on from step" in logged) == ("had begun to update" not in logged)
    assert moment == "learning" or "Going on from step" in logged


DRIVER = """
import os, signal, sys, time, ray
from dagrl.config.file import load_config
from dagrl.machine import descendants_of
from dagrl.run.leased_cluster import leased_cluster

class Worker:
    def pid(self):
        return os.getpid()

output, address = sys.argv[1:]
overrides = [f"output_dir={output}", "name=run", "timeouts.orphan_s=5", "cluster.num_cpus=1"]
config = load_config("examples/sft_quickstart.yaml", overrides + ([f"cluster.address={address}"] if address else []))
os.makedirs(f"{output}/run")
with leased_cluster(config, attach=False) as lease:
    worker = ray.get(lease.owner.create.remote(ray.remote(num_cpus=0)(Worker), {}, ()))
    print(ray.get(worker.pid.remote()), os.getpid(), *descendants_of(os.getpid()), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""

CLUSTER = """
import ray, sys
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("whose", ["its own", pytest.param("the user's", marks=pytest.mark.slow)])
def test_nothing_is_left_of_a_run_that_nobody_takes_over(whose: str, tmp_path: Path) -> None:
    """Workers wait for `timeouts.orphan_s`; then they end, with Ray unless the cluster is the user's."""
    before = set(os.listdir(SHARED_MEMORY))
    with users_cluster() if whose == "the user's" else nullcontext("") as address:
        command = [sys.executable, "-c", DRIVER, str(tmp_path), address]
        token = {**os.environ, "RAY_AUTH_MODE": "token"}
        ended = subprocess.run(command, cwd=ROOT, env=token, capture_output=True, text=True, timeout=120, check=False)
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        pids = [int(word) for word in ended.stdout.split()]
        assert pids[0] in processes(), "the worker did not outlive the driver"
        assert (tmp_path / "run" / "lease.json").exists()
        wait_until_empty(lambda: set(pids) & set(processes()))
    wait_until_empty(lambda: left_shared_memory(before, pids))


@contextmanager
def users_cluster() -> Iterator[str]:
    """A cluster that outlives the block's drivers. Yields its address."""
    command, pipes = [sys.executable, "-c", CLUSTER], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as cluster:
        assert cluster.stdout is not None
        yield cluster.stdout.readline().strip()
        assert cluster.poll() is None
        cluster.communicate(timeout=60)
