"""A campaign of faults against real runs, for an hour or as long as is said:

    python -m tests.chaos.campaign --limit 3600 --seed 1 --json bench/results/2-cores/2026-11-25/chaos.json

Picks a scenario and a fault at a time, by the seed. Where it can (root on Linux), it runs in namespaces of its own for
processes, mounts and shared memory, so that what a run leaves behind is seen exactly. Results are written after each fault.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from dagrl.bench.report import commit, hardware, versions
from tests.chaos.faults import FAULTS, CannotError, Fault, NotNowError
from tests.chaos.machine import Disk
from tests.chaos.scenarios import SCENARIOS, Scenario
from tests.chaos.trial import Row, Trial, differences

INSIDE = "DAGRL_CHAOS_INSIDE"
MOUNTS = "/dev/shm", "/tmp", "/run/netns"  # noqa: S108  # the namespace's own, empty afterwards


@dataclass
class Results:
    """What the campaign has found so far; `path` is written after each fault."""

    seed: int
    path: Path | None
    began: float = field(default_factory=time.monotonic)
    rows: list[Row] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    trials: list[dict[str, object]] = field(default_factory=list)

    def write(self) -> None:
        """Writes everything, with counts and times first."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        times = defaultdict(list)
        for row in self.rows:
            if row.back_s is not None:
                times[row.fault].append(row.back_s)
        content = {
            "hardware": hardware(),
            "versions": versions(),
            "commit": commit(),
            "command": " ".join(["python", "-m", "tests.chaos.campaign", *sys.argv[1:]]),
            "seed": self.seed,
            "seconds": round(time.monotonic() - self.began),
            "faults": len(self.rows),
            "wrong": sum(bool(row.wrong) for row in self.rows),
            "hung": sum(row.outcome == "hung" for row in self.rows),
            "outcomes": dict(Counter(row.outcome for row in self.rows)),
            "back_s": {
                name: {"n": len(found), "median": statistics.median(found), "most": max(found)}
                for name, found in sorted(times.items())
            },
            "skipped": self.skipped,
            "runs": self.trials,
            "rows": [row.to_json() for row in self.rows],
        }
        self.path.write_text(json.dumps(content, indent=1) + "\n")


class Campaign:
    """Trials, one after the other, until the time is over."""

    def __init__(self, results: Results, random: Random, limit_s: float, faults: Sequence[Fault]) -> None:
        self._results, self._random, self._faults = results, random, faults
        self._until = time.monotonic() + limit_s
        self._work = Path(tempfile.mkdtemp(prefix="ray-chaos-"))
        self._truths: dict[str, Path] = {}

    def run(self, scenarios: Sequence[Scenario]) -> None:
        for number, scenario in enumerate(_in_turns(scenarios)):
            if time.monotonic() > self._until:
                break
            self._trial(scenario, f"trial{number}")
        shutil.rmtree(self._work, ignore_errors=True)

    def _trial(self, scenario: Scenario, name: str) -> None:
        truth = self._truth(scenario)
        disk = self._disk(name) if scenario.hosts == 1 else None
        trial = Trial(scenario, disk.path if disk else self._work, name, self._random, disk)
        trial.launch()
        own = [fault for fault in self._faults if not fault.scenarios or scenario.name in fault.scenarios]
        for fault in self._drawn(own):
            try:
                row = trial.disturb(fault)
            except CannotError as error:
                self._results.skipped[fault.name] = str(error)
                continue
            except NotNowError:
                continue
            self._note(trial.rows)
            if row is None or trial.stopped() or time.monotonic() > self._until:
                break
        wrong = trial.finish() or differences(scenario, truth if trial.exact else None, trial.directory)
        self._note(trial.rows)
        self._results.trials.append({"scenario": scenario.name, "faults": len(trial.rows), "wrong": wrong})
        self._results.write()
        print(f"  end of {name}: {wrong or 'as undisturbed'}", flush=True)
        if disk:
            disk.close()

    def _drawn(self, faults: Sequence[Fault]) -> Iterator[Fault]:
        """Yields all faults in random order, again and again."""
        while True:
            yield from self._random.sample(faults, len(faults))

    def _truth(self, scenario: Scenario) -> Path | None:
        """Returns the directory of an undisturbed run; None if none is needed."""
        if not scenario.exact:
            return None
        if scenario.name not in self._truths:
            name = f"truth-{scenario.name.replace(' ', '-')}"
            trial = Trial(scenario, self._work, name, self._random, None)
            trial.launch()
            wrong = trial.finish()
            assert not wrong, wrong
            self._truths[scenario.name] = trial.directory
        return self._truths[scenario.name]

    def _disk(self, name: str) -> Disk | None:
        try:
            return Disk(self._work / f"{name}.image", self._work / name)
        except (OSError, subprocess.CalledProcessError) as error:
            self._results.skipped["disk"] = f"no disk of its own can be mounted: {error}"
            return None

    def _note(self, rows: Sequence[Row]) -> None:
        """Shows and keeps the rows that are new."""
        new = [row for row in rows if not any(row is known for known in self._results.rows)]
        for row in new:
            print(f"  {row.to_json()}", flush=True)
        self._results.rows += new
        self._results.write()


def _in_turns(scenarios: Sequence[Scenario]) -> Iterator[Scenario]:
    while True:
        yield from scenarios


def _isolated(arguments: Sequence[str], results: Path | None) -> int | None:
    """Runs the campaign again in namespaces of its own. None if that cannot be done, or it is inside already."""
    if INSIDE in os.environ or os.geteuid() != 0 or shutil.which("unshare") is None:
        return None
    if results is not None and any(results.resolve().is_relative_to(place) for place in MOUNTS):
        raise SystemExit(f"--json {results} would be lost with the campaign's own {', '.join(MOUNTS)}; give another path")
    script = f'mkdir -p /run/netns; for at in {" ".join(MOUNTS)}; do mount -t tmpfs tmpfs $at || exit; done; "$@"; exit $?'
    command = ["unshare", "--mount", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc"]
    again = ["bash", "-c", script, "bash", sys.executable, "-m", "tests.chaos.campaign", *arguments]
    return subprocess.run([*command, *again], env={**os.environ, INSIDE: "1"}, check=False).returncode


def main(arguments: Sequence[str]) -> int:
    """Exit code 1 if anything was lost, hung or left behind."""
    parser = argparse.ArgumentParser(prog="tests.chaos.campaign", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds (default: 3600)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scenario", action="append", choices=SCENARIOS, help="only this one; repeatable")
    parser.add_argument("--fault", action="append", choices=FAULTS, help="only this one; repeatable")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if (code := _isolated(arguments, options.json)) is not None:
        return code
    results = Results(options.seed, options.json)
    chosen = [FAULTS[name] for name in options.fault or FAULTS]
    campaign = Campaign(results, Random(options.seed), options.limit, chosen)  # noqa: S311
    with suppress(KeyboardInterrupt):
        campaign.run([SCENARIOS[name] for name in options.scenario or SCENARIOS])
    results.write()
    bad = [row for row in results.rows if row.wrong]
    print(f"{len(results.rows)} faults, {len(bad)} wrong, {len(results.skipped)} skipped", flush=True)
    return int(bool(bad) or any(trial["wrong"] for trial in results.trials))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
