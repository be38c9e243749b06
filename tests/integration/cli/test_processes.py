"""Commands as processes of their own."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

from dagrl.config.file import load_config

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
