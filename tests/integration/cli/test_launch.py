"""Commands as processes of their own, and the files of examples/launch, without a cluster manager."""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dagrl.config.file import all_keys, load_config

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


ROOT = Path(__file__).parents[3]


def test_help_is_fast_and_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from dagrl.cli.main import BENCHES, main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'ray', 'torch', 'transformers', 'numpy', 'pydantic', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    fastest = min(processor_seconds([sys.executable, "-c", code]) for _ in range(3))
    assert fastest < 0.5


def processor_seconds(command: list[str]) -> float:
    """Returns the command's CPU time, which does not depend on the load of the machine."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_it_asks_at_a_terminal(tmp_path: Path) -> None:
    outside, inside = os.openpty()
    command = [sys.executable, "-m", "dagrl.cli.main", "init", "-o", "asked.yaml"]
    process = subprocess.Popen(command, stdin=inside, stdout=subprocess.PIPE, cwd=tmp_path)
    os.write(outside, b"\nopenai/gsm8k\nmath\n")
    shown = process.communicate(timeout=60)[0].decode()
    os.close(inside)
    os.close(outside)
    assert process.returncode == 0 and shown.count(": ") >= 3 and "dagrl train asked.yaml --dry-run" in shown
    config = load_config(tmp_path / "asked.yaml", [])
    assert (config.policy.model_name, config.data.subset, config.data.prompt_key) == ("Qwen/Qwen3-0.6B", "main", "question")


HEAVY = {"ray", "torch", "megatron", "vllm", "transformers", "matplotlib", "cupy"}

LIGHT = (
    "dagrl.cli.main",
    "dagrl.runtime.phase",
    "dagrl.runtime.draw",
    "dagrl.config",
    "dagrl.graphs.phases",
    "dagrl.workers.megatron",
    "dagrl.workers.vllm",
)


def test_importing_is_light() -> None:
    code = f"import sys, {', '.join(LIGHT)}\nsys.stdout.write(','.join(name.partition('.')[0] for name in sys.modules))"
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    assert not HEAVY & set(output.stdout.split(","))
