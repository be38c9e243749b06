"""`dagrl train` as a person runs it: in a terminal of its own, stopped with Ctrl-C, with an account of what it leaves.

Each run has a pseudo terminal, so that Ctrl-C reaches the whole foreground process group, as on a real one.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from dagrl.config import Config
from dagrl.rl.rewards import exact_match
from dagrl.telemetry.metrics import is_measured
from dagrl.telemetry.record import read_metrics
from tests.integration.processes import alive, command_line, descendants, of_session, running as running_processes

ROOT = Path(__file__).parents[2]
GRPO, SFT = "examples/grpo_quickstart.yaml", "examples/sft_quickstart.yaml"
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
COMPLETIONS = "DAGRL_TEST_COMPLETIONS"
SECRETS = {"WANDB_API_KEY": "a-secret-key-of-a-tracker"}
OF_REPLAYS = {"replays": 0, "padding_share": 0}
"""Metrics that differ in a resumed run: it refits once more, and does not repeat generation."""

PATIENCE_S = 180.0  # for what takes 10 s on two free cores
ESCAPE = r"\x1b\[[0-9;?]*[A-Za-z]"
TAKE_TERMINAL = "import os, sys; os.close(os.open(sys.argv[1], os.O_RDWR)); os.execv(sys.argv[2], sys.argv[2:])"

Metrics = dict[str, Any]

SFT_STEPS, GRPO_STEPS = 120, 16
STEPS = SFT_STEPS + GRPO_STEPS
LEARNING = (
    f"sft.max_num_steps={SFT_STEPS}",
    *(f"grpo.max_num_steps={GRPO_STEPS}", "grpo.val_period=8"),
    *(f"checkpointing.save_period={SFT_STEPS}", "checkpointing.async_save=true"),
    "policy.offload_optimizer_for_logprob=true",
)
"""The GRPO quickstart with half of its steps, which is enough to learn."""

SMALL = (
    *("sft.max_num_steps=8", "sft.max_val_samples=64"),
    *("grpo.max_num_steps=6", "grpo.max_val_samples=32", "grpo.val_period=3"),
    *("checkpointing.save_period=3", "checkpointing.async_save=true"),
    "policy.offload_optimizer_for_logprob=true",
    "reward.function=tests.integration.main_job:recorded_exact_match",
)
"""The GRPO quickstart in seconds: too short to learn, long enough to compare."""


def recorded_exact_match(prompts: list[str], completions: list[str], references: list[str]) -> list[float]:
    """Scores as the quickstart does, in the reward process, and records what it was asked."""
    with Path(os.environ[COMPLETIONS]).open("a", encoding="utf-8") as file:
        file.write(json.dumps([prompts, completions]) + "\n")
    return exact_match(prompts, completions, references)


class Run:
    """One `dagrl` command in a terminal of its own; `directory` is where its run is written."""

    def __init__(
        self, config: str, output: Path, name: str, *overrides: str, prefix: Sequence[str] = (), **environment: str
    ) -> None:
        """`prefix` is a command that becomes ours, such as `ip netns exec NAME`."""
        self.directory = output / name
        self.completions = output / f"{name}.completions"
        self.seen: set[psutil.Process] = set()
        self.commands: set[str] = set()
        self._before = set(os.listdir(SHARED_MEMORY))
        self._mapped: set[str] = set()
        self._looked_at = set(self._before)
        self._terminal, inside = os.openpty()
        termios.tcsetwinsize(inside, (50, 160))
        installed = Path(sys.executable).with_name("dagrl")
        dagrl = [str(installed)] if installed.exists() else [sys.executable, "-m", "dagrl.cli.main"]
        command = [*dagrl, "train", config, f"output_dir={output}", f"name={name}"]
        usual = {"OMP_NUM_THREADS": "1", "TERM": "xterm", **SECRETS, COMPLETIONS: str(self.completions)}
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-c", TAKE_TERMINAL, os.ttyname(inside), *command, *overrides],
            stdin=inside,
            stdout=inside,
            stderr=inside,
            cwd=ROOT,
            env={**os.environ, **usual, **environment},
            start_new_session=True,
        )
        os.close(inside)
        self._shown: list[bytes] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while self._terminal >= 0 and (text := os.read(self._terminal, 1 << 16)):
                self._shown.append(text)
        except OSError:  # the last process that had the terminal is gone
            return

    @property
    def drawn(self) -> str:
        """Everything written to the terminal, also what was overwritten since, without colours."""
        return re.sub(ESCAPE, "", b"".join(self._shown).decode(errors="replace"))

    @property
    def shown(self) -> str:
        return screen(b"".join(self._shown).decode(errors="replace"))

    @property
    def metrics(self) -> list[Metrics]:
        path = self.directory / "metrics.jsonl"
        return list(read_metrics(path)) if path.exists() else []

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Returns as soon as `condition` holds, while the command runs."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.returncode} before {what}:\n{self.shown}"
            assert time.monotonic() < deadline, f"not within {PATIENCE_S} s: {what}\n{self.shown}"
            time.sleep(0.02)
        self.notice()

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: any(line["step"] >= step for line in self.metrics), f"step {step}")

    def wait_for_text(self, text: str) -> None:
        self.wait_until(lambda: text in self.drawn, f"{text!r} on the terminal")

    def interrupt(self) -> None:
        self.notice()
        os.write(self._terminal, b"\x03")

    def hang_up(self) -> None:
        """Closes the terminal, as a lost connection does. The next output ends its reader."""
        self.notice()
        terminal, self._terminal = self._terminal, -1
        self._reader.join(5.0)
        os.close(terminal)

    def finish(self, timeout_s: float = 2 * PATIENCE_S) -> int:
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"still running after {timeout_s} s:\n{self.shown}"
            self.notice()
            time.sleep(0.5)
        self._reader.join(1.0)
        return self.process.returncode

    def notice(self) -> None:
        """Remembers the processes that run now, and which new segments they have mapped."""
        new = set(descendants(self.process.pid)) - self.seen
        self.seen |= new
        self.commands |= {command_line(process.pid) for process in new}
        names = set(os.listdir(SHARED_MEMORY)) - self._looked_at
        self._looked_at |= names
        self._mapped |= _mapped({name for name in names if not _maker(name)}, [process.pid for process in self.seen])

    def pids(self, pattern: str) -> list[int]:
        """Returns the processes of this command whose command line has the pattern."""
        return [process.pid for process in descendants(self.process.pid) if re.search(pattern, command_line(process.pid))]

    def left_processes(self) -> list[psutil.Process]:
        left = of_session(self.process.pid) | set(filter(alive, self.seen))
        return sorted(left, key=lambda process: process.pid)

    def left_shared_memory(self) -> list[str]:
        """Returns its segments and semaphores that are left, less those of processes that run."""
        return left_shared_memory(self._before, {process.pid for process in self.seen} | {self.process.pid}, self._mapped)

    def end(self) -> None:
        """Kills what still runs after a failed test."""
        self.notice()
        self.process.kill()
        self.process.wait()
        for process in self.left_processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if self._terminal >= 0:
            os.close(self._terminal)


@contextmanager
def running(config: str, output: Path, name: str, *overrides: str, **environment: str) -> Iterator[Run]:
    """Starts a command, and ends it after the block."""
    run = Run(config, output, name, *overrides, **environment)
    try:
        yield run
    finally:
        run.end()


def train(config: str, output: Path, name: str, *overrides: str) -> Run:
    """Runs a command to its end, which must be good."""
    with running(config, output, name, *overrides) as run:
        assert run.finish() == 0, run.shown
    return run


def screen(text: str) -> str:
    """Returns what a terminal shows after `text`, of the escapes that rich uses."""
    lines, row = [""], 0
    for part in re.findall(rf"{ESCAPE}|\n|[^\x1b\n]+", text):
        if part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part.startswith("\x1b") and part.endswith("A"):
            row = max(0, row - int(re.sub(r"\D", "", part) or 1))
        elif part == "\x1b[2K":
            lines[row] = ""
        elif not part.startswith("\x1b"):
            lines[row] += part.replace("\r", "")
    return "\n".join(line.rstrip() for line in lines)


def copy_run(source: Path, target: Path, last_step: int) -> None:
    """Copies a run as if it had been stopped after `last_step`, of which it has a checkpoint."""
    shutil.copytree(source, target)
    lines = (target / "metrics.jsonl").read_text().splitlines(keepends=True)
    (target / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] <= last_step))
    for directory in (target / "checkpoints").iterdir():
        if int(directory.name.removeprefix("step_")) > last_step:
            shutil.rmtree(directory)


def steps_of(run: Config | Path, name: str = "loss") -> list[Metrics]:
    """Returns the records of a run, or of its directory, that have this metric."""
    directory = run if isinstance(run, Path) else Path(run.output_dir) / run.name
    return [dict(line) for line in read_metrics(directory / "metrics.jsonl") if name in line]


def untimed(lines: Sequence[Metrics]) -> list[Metrics]:
    return [{name: value for name, value in line.items() if not is_measured(name)} for line in lines]


def left_shared_memory(before: set[str], pids: Collection[int], mapped: Collection[str] = ()) -> list[str]:
    """Returns what came after `before` and is of `pids` or among `mapped`, less what a running process has made or mapped.

    Where other tests kill workers or servers, their segments and semaphores stay.
    """
    new = set(os.listdir(SHARED_MEMORY)) - before
    ours = {name for name in new if name in mapped or _maker(name) in pids}
    others = {process.pid for process in running_processes()}
    return sorted(ours - {name for name in ours if _maker(name) in others} - _mapped(ours, others))


def _maker(name: str) -> int | None:
    """Returns the process that made this semaphore of Ray's channels; None for other names."""
    found = re.match(r"sem\.(?:hdr|obj)(\d+)-", name)
    return int(found[1]) if found else None


def _mapped(names: set[str], pids: Iterable[int]) -> set[str]:
    """Returns those of `names` that one of `pids` has mapped."""
    used: set[str] = set()
    for pid in pids if names else ():
        with suppress(OSError):  # it has ended
            maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
            used |= {name for name in names if f"{SHARED_MEMORY}/{name}" in maps}
    return used
