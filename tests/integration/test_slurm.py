"""examples/launch/slurm.sbatch runs a job on two nodes: network namespaces with raylets, and doubles of Slurm's commands.

Needs root, for the namespaces.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

import pytest

from tests.integration.main_job import ROOT
from tests.integration.processes import command_line

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and `ip`, for network namespaces"
    ),
]

NETWORK, INTERFACE = "10.77.0", "fabric0"
DOUBLES = {
    # the nodes of the allocation
    "scontrol": '#!/bin/bash\n[ "$1 $2" = "show hostnames" ] || exit 2\ntr , "\\n" <<< "$3"\n',
    # runs a command on a node
    "srun": """#!/bin/bash
while [[ $1 == --* ]]; do
  case $1 in
    --nodelist=*) node=${1#*=} ;;
    --nodes=1|--ntasks=1|--cpus-per-task=*) ;;
    *) echo "srun: $1" >&2; exit 2 ;;
  esac
  shift
done
exec ip netns exec "$node" "$@"
""",
    # the address of the node that it runs on: a namespace has the machine's name
    "hostname": f"#!/bin/bash\nip -4 -o addr show dev {INTERFACE} | grep -oE '{NETWORK}.[0-9]+' | head -1\n",
}


@dataclass(frozen=True)
class Nodes:
    """Two network namespaces, and the environment of a batch script that Slurm runs on the first."""

    names: list[str]
    environment: dict[str, str]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Starts the script as Slurm does, with the arguments of `dagrl train`."""
        script = ROOT / "examples" / "launch" / "slurm.sbatch"
        command = ["ip", "netns", "exec", self.names[0], "bash", script, *arguments]
        return subprocess.Popen(
            command, cwd=ROOT, env=self.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    names = [f"dagrl{os.getpid()}-{number}" for number in range(2)]
    doubles, temporary = tmp_path / "bin", mkdtemp(prefix="dagrl")  # short: Ray's sockets are in it
    doubles.mkdir()
    for name, text in DOUBLES.items():
        (doubles / name).write_text(text)
        (doubles / name).chmod(0o755)
    for name in names:
        ip("netns", "add", name)
    try:
        ip("link", "add", INTERFACE, "netns", names[0], "type", "veth", "peer", "name", INTERFACE, "netns", names[1])
        for number, name in enumerate(names, start=1):
            ip("-n", name, "addr", "add", f"{NETWORK}.{number}/24", "dev", INTERFACE)
            ip("-n", name, "link", "set", INTERFACE, "up")
            ip("-n", name, "link", "set", "lo", "up")
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "GLOO_", "SLURM_"))},
            "PATH": f"{doubles}:{os.environ['PATH']}",
            "VENV": str(Path(sys.executable).parents[1]),
            "SLURM_JOB_NODELIST": ",".join(names),
            "SLURM_CPUS_ON_NODE": "2",
            "RAY_TMPDIR": temporary,
            "RAY_START_ARGS": "--num-cpus=2 --num-gpus=2 --object-store-memory=200000000",
        }
        yield Nodes(names, environment)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        for name in names:
            ip("netns", "del", name)


def workers_of(node: str) -> int:
    found = subprocess.run(["ip", "netns", "pids", node], check=True, capture_output=True, text=True).stdout.split()
    return sum("ray::MegatronWorker" in command_line(int(pid)) for pid in found)


def job(directory: Path, *more: str) -> list[str]:
    """Four data-parallel workers of the quickstart, two on each node: a node has two places."""
    return [
        "examples/sft_quickstart.yaml",
        f"output_dir={directory}",
        "policy.megatron_cfg.data_parallel_size=4",
        "cluster.gpus_per_worker=1",
        "timeouts.start_s=360",
        "sft.max_num_steps=6",
        "sft.max_val_samples=16",
        "logger.tensorboard_enabled=false",
        "checkpointing.export_hf=false",
        *more,
    ]


def test_a_job_runs_on_both_nodes(nodes: Nodes, tmp_path: Path) -> None:
    with nodes.start(*job(tmp_path)) as process:
        text, _ = process.communicate(timeout=540)
    assert process.returncode == 0, text[-6000:]
    lines = [json.loads(line) for line in (tmp_path / "sft_quickstart" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 6 and losses[-1] < losses[0]
    assert not any(map(workers_of, nodes.names)) and "Traceback" not in text


def test_sigterm_saves_a_checkpoint(nodes: Nodes, tmp_path: Path) -> None:
    """Slurm sends it to the batch shell; the script passes it on and waits."""
    metrics = tmp_path / "sft_quickstart" / "metrics.jsonl"
    with nodes.start(*job(tmp_path, "sft.max_num_steps=100000", "checkpointing.save_period=100000")) as process:
        until = time.monotonic() + 300
        while not metrics.exists() or metrics.read_text().count('"loss"') < 3:
            assert process.poll() is None and time.monotonic() < until, process.communicate()[0][-6000:]
            time.sleep(0.2)
        assert [workers_of(name) for name in nodes.names] == [2, 2]
        process.send_signal(signal.SIGTERM)
        text, _ = process.communicate(timeout=120)
    assert process.returncode == 130, text[-6000:]
    assert list((tmp_path / "sft_quickstart" / "checkpoints").glob("step_*")), text[-6000:]
