"""Measures delta refits over a slow link: whole refits and delta refits after the same optimizer steps, in turn.

A trainer and an engine's rank are processes in network namespaces, connected by a link whose rate `tc tbf` limits: two hosts
for all that they can see. The trainer takes AdamW steps of a policy gradient with float32 master weights, and sends the
bfloat16 weights into vLLM's layout. Both refits have tensors of their own on the engine's side, which must be equal after
each step. Times are from the trainer's call to the commit of both ranks, `cpu_s` is the trainer's processor time in it.
Needs root, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from dagrl.bench import harness
from dagrl.bench.harness import Column, Contest, Take, Turn
from dagrl.errors import ConfigError, MissingDependencyError, RunError

RATES, LEARNING_RATES = ("1gbit", "100mbit"), (1e-6, 1e-5)
LAYERS = 8
"""Layers of the model, 4 million parameters each."""

COLUMNS = (Column("MB", "megabytes", "{:.2f}"), Column("CPU s", "cpu_s", "{:.3f}"), Column("changed", "changed", "{:.1%}"))
TRAINER, ENGINE = "trainer", "engine"
ADDRESSES = {TRAINER: "10.77.5.1", ENGINE: "10.77.5.2"}
_LIMIT_S = 900.0
_BURST = "512kb"
_NAMED = ("unshare", "--uts", "env")


def run(options: argparse.Namespace) -> None:
    """Measures every rate and learning rate; a turn has `--repeats` steps."""
    for program in ("ip", "tc", "unshare"):
        if shutil.which(program) is None:
            raise MissingDependencyError(f"{program!r} is missing; install iproute2 and util-linux")
    if os.geteuid() != 0:
        raise ConfigError("network namespaces need root; run this benchmark as root, for example in a container")
    contests = []
    for rate in RATES:
        for learning_rate in LEARNING_RATES:
            name = f"{rate}, learning rate {learning_rate:g}"
            contests.append(Contest(name, {name: {}}, partial(sides, name, rate, learning_rate, options)))
    options.rounds = 1  # both sides alternate within one run
    harness.run(options, contests, COLUMNS)


@contextmanager
def sides(name: str, rate: str, learning_rate: float, options: argparse.Namespace) -> Iterator[dict[str, Take]]:
    """Runs both processes, and yields what they measured."""
    with two_hosts(rate) as prefixes:
        found = measure(prefixes, learning_rate, options.repeats, LAYERS)
    yield {side: partial(_taken, name, found[side]) for side in ("whole", "delta")}


def _taken(name: str, found: dict[str, Any]) -> dict[str, Turn]:
    return {name: Turn(found["seconds"], found["facts"])}


@contextmanager
def two_hosts(rate: str) -> Iterator[Mapping[str, Sequence[str]]]:
    """Makes two namespaces with a link of `rate` between them. Yields the words that start a command in each.

    Each has a host name of its own. Raises ConfigError if the system does not allow it.
    """
    spaces = {side: f"dagrl-{side}-{os.getpid()}" for side in ADDRESSES}
    links = {side: f"dagrl{side[0]}{os.getpid() % 100_000}" for side in ADDRESSES}
    try:
        for space in spaces.values():
            _tool("ip", "netns", "add", space)
        _tool("ip", "link", "add", links[TRAINER], "type", "veth", "peer", "name", links[ENGINE])
        for side, space in spaces.items():
            _tool("ip", "link", "set", links[side], "netns", space)
            inside = ("ip", "netns", "exec", space)
            _tool(*inside, "ip", "addr", "add", f"{ADDRESSES[side]}/24", "dev", links[side])
            for device in ("lo", links[side]):
                _tool(*inside, "ip", "link", "set", device, "up")
            limit = ("rate", rate, "burst", _BURST, "latency", "100ms")
            _tool(*inside, "tc", "qdisc", "add", "dev", links[side], "root", "tbf", *limit)
        named = 'hostname "$0" && exec "$@"'
        yield {
            side: ("ip", "netns", "exec", space, *_NAMED, f"GLOO_SOCKET_IFNAME={links[side]}", "sh", "-c", named, side)
            for side, space in spaces.items()
        }
    finally:
        for space in spaces.values():
            subprocess.run(["ip", "netns", "del", space], capture_output=True)  # noqa: S603, S607


def measure(prefixes: Mapping[str, Sequence[str]], learning_rate: float, steps: int, layers: int) -> dict[str, Any]:
    """Runs both processes once. Returns what the trainer measured. Raises RunError if one of them fails."""
    words = [f"{ADDRESSES[TRAINER]}:29611", str(learning_rate), str(steps), str(layers)]
    command = [sys.executable, "-m", "dagrl.bench.refit_delta_rank"]
    started = {
        side: subprocess.Popen([*prefix, *command, side, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # noqa: S603
        for side, prefix in prefixes.items()
    }
    try:
        ended = {side: process.communicate(timeout=_LIMIT_S) for side, process in started.items()}
    finally:
        for process in started.values():
            process.kill()
    for side, (_, errors) in ended.items():
        if started[side].returncode:
            raise RunError(f"the {side} failed: {errors[-2000:]}")
    found: dict[str, Any] = json.loads(ended[TRAINER][0].splitlines()[-1])
    return found


def _tool(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)  # noqa: S603
    if done.returncode:
        raise ConfigError(
            f"{' '.join(words)} failed: {done.stderr.strip()}; this benchmark needs the right to make network namespaces"
        )
