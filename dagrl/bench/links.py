"""Edges between hosts, plain and with TLS: time of a small message there and back, and throughput of large ones.

    dagrl bench links --json links.json

Writer and reader are two processes of this machine, so the numbers are the cost of the processor, not of a network.
Certificates are made for the measurement by the `openssl` command.
"""

from __future__ import annotations

import argparse
import multiprocessing
import pickle
import statistics
import subprocess
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dagrl.bench.report import add_outputs, count, report_medians
from dagrl.runtime.edges.link import LinkReader, LinkWriter
from dagrl.runtime.edges.tls import TlsFiles

LIMIT, TIMEOUT_S = 256 << 20, 60.0
LARGE = 16 << 20  # bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=count, default=5, help="measurements of each kind, in turns (default: 5)")
    parser.add_argument("--messages", type=count, default=2000, help="small messages of a measurement (default: 2000)")
    add_outputs(parser, plot=False)


def run(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as directory:
        files = {"plain": None, "tls": make_certificates(Path(directory))}
        found: dict[str, list[dict[str, float]]] = {name: [] for name in files}
        for _ in range(options.rounds):
            for name, tls in files.items():
                found[name].append(measure(tls, options.messages))
    report_medians(options.json, {"rounds": options.rounds, "large_bytes": LARGE}, found)


def make_certificates(directory: Path) -> TlsFiles:
    """Makes an authority and a certificate of it with `openssl`, valid for a day."""
    certificate, key, authority = (str(directory / f"{name}.pem") for name in ("certificate", "key", "authority"))
    own = str(directory / "authority-key.pem")
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1"]
    for command in (
        [*make, "-subj", "/CN=authority", "-keyout", own, "-out", authority],
        [*make, "-subj", "/CN=host", "-CA", authority, "-CAkey", own, "-keyout", key, "-out", certificate],
    ):
        subprocess.run(command, check=True, capture_output=True, timeout=60)  # noqa: S603
    return TlsFiles(certificate, key, authority)


def measure(tls: TlsFiles | None, messages: int) -> dict[str, float]:
    """Returns medians of one pair of links, one in each direction."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    other = multiprocessing.get_context("spawn").Process(target=_echo, args=(there, tls, messages))
    other.start()
    out = LinkWriter("127.0.0.1", LIMIT, 2, tls)
    here.send(out.address)
    back = LinkReader(here.recv())
    try:
        return {"round_trip_us": _round_trips(out, back, messages), **_throughput(out, back)}
    finally:
        other.join(TIMEOUT_S)
        out.close()
        back.close()


def _echo(connection: Connection, tls: TlsFiles | None, messages: int) -> None:
    """The other process: returns small messages, and only the size of large ones."""
    out, back = LinkWriter("127.0.0.1", LIMIT, 2, tls), LinkReader(connection.recv())
    connection.send(out.address)
    for _ in range(messages + 1):
        out.write([pickle.dumps(back.read(TIMEOUT_S))], TIMEOUT_S)
    before = time.process_time()
    for _ in range(_LARGE_MESSAGES):
        found: npt.NDArray[np.uint8] = back.read(TIMEOUT_S)  # type: ignore[assignment]
        assert found.nbytes == LARGE
    out.write([pickle.dumps(time.process_time() - before)], TIMEOUT_S)
    back.read(TIMEOUT_S)


_LARGE_MESSAGES = 32


def _round_trips(out: LinkWriter, back: LinkReader, messages: int) -> float:
    times = []
    for _ in range(messages + 1):
        start = time.perf_counter()
        out.write([pickle.dumps(start)], TIMEOUT_S)
        back.read(TIMEOUT_S)
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times[1:])  # without the handshake


def _throughput(out: LinkWriter, back: LinkReader) -> dict[str, float]:
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(np.ones(LARGE, np.uint8), protocol=5, buffer_callback=buffers.append)
    start, before = time.perf_counter(), time.process_time()
    for _ in range(_LARGE_MESSAGES):
        out.write([head, *(buffer.raw() for buffer in buffers)], TIMEOUT_S)
    there: float = back.read(TIMEOUT_S)  # type: ignore[assignment]
    seconds, gigabytes = time.perf_counter() - start, _LARGE_MESSAGES * LARGE / 1e9
    processor = time.process_time() - before + there
    out.write([pickle.dumps("end")], TIMEOUT_S)
    return {"gb_per_s": gigabytes / seconds, "processor_s_per_gb": processor / gigabytes}
