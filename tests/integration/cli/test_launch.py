"""Files of examples/launch: they parse, and name commands and keys that exist. No cluster manager runs here."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from dagrl.config.file import all_keys

LAUNCH = Path(__file__).parents[3] / "examples" / "launch"
KEYS = {key for key, _ in all_keys()}


def test_the_slurm_script_is_valid_bash() -> None:
    subprocess.run(["bash", "-n", LAUNCH / "slurm.sbatch"], check=True)


@pytest.mark.parametrize("path", sorted(LAUNCH.iterdir()), ids=lambda path: path.name)
def test_overrides_name_keys_that_exist(path: Path) -> None:
    found = set(re.findall(r"(?<![\w./-])([a-z_]+(?:\.[a-z_]+)+|output_dir)=", path.read_text()))
    assert found and found <= KEYS | {"a.b"}  # a.b=c stands for any override


def test_the_ray_job_has_the_gpus_that_its_layout_asks_for() -> None:
    job = yaml.safe_load((LAUNCH / "rayjob.yaml").read_text())["spec"]
    (workers,) = job["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    gpus = workers["replicas"] * int(container["resources"]["limits"]["nvidia.com/gpu"])
    sizes = re.findall(r"data_parallel_size=(\d+)", job["entrypoint"])
    assert [int(size) for size in sizes] == [gpus, gpus]
    shared = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {"/shared", "/dev/shm"} <= shared  # noqa: S108


def test_the_skypilot_file_has_what_a_task_needs() -> None:
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    assert {"num_nodes", "resources", "setup", "run"} <= task.keys()
    for part in ("setup", "run"):
        subprocess.run(["bash", "-n"], input=task[part], text=True, check=True)
