"""Measures delta refits over a slow link: whole refits and delta refits after the same optimizer steps, in turn.

    dagrl bench refit_delta --json F                                  1 Gbit/s and 100 Mbit/s, learning rates 1e-6 and 1e-5
    dagrl bench refit_delta --rates 10gbit --learning-rates 1e-6

A trainer and an engine's rank are processes in network namespaces, connected by a link whose rate `tc tbf` limits: two hosts
for all that they can see. The trainer takes AdamW steps of a policy gradient with float32 master weights, and sends the
bfloat16 weights into vLLM's layout. Both refits have tensors of their own on the engine's side, which must be equal after
each step. `whole_s` and `delta_s` are from the trainer's call to the commit of both ranks, `whole_cpu_s` and `delta_cpu_s`
the trainer's processor time in them. `load` is the load average, the benchmark included. Needs root, `ip` and `tc`.
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

from dagrl.bench.report import Row, add_outputs, count, report_rows
from dagrl.errors import ConfigError, MissingDependencyError, RunError

TRAINER, ENGINE = "trainer", "engine"
ADDRESSES = {TRAINER: "10.77.5.1", ENGINE: "10.77.5.2"}
_LIMIT_S = 900.0
_BURST = "512kb"
_NAMED = ("unshare", "--uts", "env")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_outputs(parser, plot=False)
    parser.add_argument("--rates", nargs="+", default=["1gbit", "100mbit"], help="rates of the link, in tc's units")
    parser.add_argument("--learning-rates", nargs="+", type=float, default=[1e-6, 1e-5], help="of AdamW")
    parser.add_argument("--steps", type=count, default=5, help="measured steps of each case")
    parser.add_argument("--layers", type=count, default=8, help="layers of the model, 4 million parameters each")


def run(options: argparse.Namespace) -> None:
    for program in ("ip", "tc", "unshare"):
        if shutil.which(program) is None:
            raise MissingDependencyError(f"{program!r} is missing; install iproute2 and util-linux")
    if os.geteuid() != 0:
        raise ConfigError("network namespaces need root; run this benchmark as root, for example in a container")
    if options.steps < 1 or options.layers < 1:
        raise ConfigError(f"--steps {options.steps} and --layers {options.layers} must be at least 1")
    report_rows(options, _measure(options), _print)


def _measure(options: argparse.Namespace) -> Iterator[list[Row]]:
    """Yields all rows so far."""
    rows: list[Row] = []
    for rate in options.rates:
        with two_hosts(rate) as prefixes:
            for learning_rate in options.learning_rates:
                rows.append({"rate": rate, **measure(prefixes, learning_rate, options.steps, options.layers)})
                yield rows


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


def measure(prefixes: Mapping[str, Sequence[str]], learning_rate: float, steps: int, layers: int) -> Row:
    """Runs both processes once. Returns the trainer's row. Raises RunError if one of them fails."""
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
    row: Row = json.loads(ended[TRAINER][0].splitlines()[-1])
    return row


def _tool(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)  # noqa: S603
    if done.returncode:
        raise ConfigError(
            f"{' '.join(words)} failed: {done.stderr.strip()}; this benchmark needs the right to make network namespaces"
        )


def _print(rows: Sequence[Row]) -> None:
    for row in rows:
        print("  ".join(f"{name}={value}" for name, value in row.items()))
