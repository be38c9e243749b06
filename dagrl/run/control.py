"""A run's control socket: `dagrl scale` and `dagrl status` ask the driver, which answers on a thread of its own.

    with control(directory, {"scale": ..., "status": ...}):     # in the driver
        ...
    text = ask(directory, "scale", {"engines": 3}, timeout_s)   # in the command

The socket is `control.sock` in the run's directory, for the driver's host and user alone (mode 0600). A question is one line
of JSON, an answer as well. It lives as long as the driver, and what a killed one left refuses connections.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dagrl.errors import ConfigError, DagrlError, DeadlineError, RunError, UserError, error_text

logger = logging.getLogger(__name__)

NAME = "control.sock"
MOST_BYTES = 1 << 16
"""The longest question or answer."""

ASK_S = 5.0
"""How long a client may take to send its question."""

Commands = Mapping[str, Callable[[Mapping[str, Any]], str]]
"""What answers each command, given its arguments. A UserError is a refusal: nothing has changed."""


@contextmanager
def control(directory: Path, commands: Commands) -> Iterator[None]:
    """Answers questions during the block. Logs a warning where the file system has no sockets."""
    path = directory / NAME
    path.unlink(missing_ok=True)  # a killed driver's; the caller holds the lock of the directory
    try:
        with _in_reach(path) as name:
            server = _Server(name, commands)
    except OSError as error:
        logger.warning("`dagrl scale` and `dagrl status` cannot reach this run: %s: %s", path, error.strerror)
        yield
        return
    threading.Thread(target=server.serve_forever, name="control", daemon=True).start()
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        server.shutdown()
        server.server_close()


def ask(directory: Path, command: str, arguments: Mapping[str, Any], timeout_s: float) -> str:
    """Returns the driver's answer to a command.

    Raises ConfigError if no driver listens or it refuses, DeadlineError after `timeout_s`, RunError if it failed.
    """
    path = directory / NAME
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            with _in_reach(path) as name:
                connection.connect(name)
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError) as error:
            raise ConfigError(
                f"{directory}: no driver answers; expected the directory of a run whose workers have started, on the "
                "driver's host"
            ) from error
        connection.settimeout(timeout_s)
        try:
            connection.sendall(json.dumps({"command": command, **arguments}).encode() + b"\n")
            with connection.makefile("rb") as file:
                line = file.readline(MOST_BYTES)
        except TimeoutError as error:
            raise DeadlineError(f"{directory}: no answer within {timeout_s:g} s") from error
    if not line.endswith(b"\n"):
        raise RunError(f"{directory}: the driver ended without an answer")
    answer = json.loads(line)
    if answer["kind"] == "done":
        return str(answer["text"])
    kinds = {"refused": ConfigError, "late": DeadlineError}
    raise kinds.get(answer["kind"], RunError)(f"{answer['kind']}: {answer['text']}")


@contextmanager
def _in_reach(path: Path) -> Iterator[str]:
    """A name of the socket at `path` that is shorter than the 108 bytes of a socket's address."""
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """A thread per question. None of them keeps the driver alive."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, name: str, commands: Commands) -> None:
        self.commands = commands
        super().__init__(name, _Handler)

    def server_bind(self) -> None:
        """Makes the socket with its mode: it has no other one for a moment."""
        before = os.umask(0o177)
        try:
            super().server_bind()
        finally:
            os.umask(before)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone, or one that sends nonsense, does not concern the run."""
        logger.debug("a question on the control socket failed", exc_info=True)


class _Handler(socketserver.StreamRequestHandler):
    timeout = ASK_S

    def handle(self) -> None:
        """Answers one question."""
        assert isinstance(self.server, _Server)
        kind, text = _answer(self.server.commands, self.rfile.readline(MOST_BYTES))
        with suppress(BrokenPipeError):
            self.wfile.write(json.dumps({"kind": kind, "text": text}).encode() + b"\n")


def _answer(commands: Commands, line: bytes) -> tuple[str, str]:
    """Returns how a question ended, and a text for its user."""
    try:
        question = json.loads(line)
    except ValueError:
        return "refused", "the question is not JSON"
    command = str(question.pop("command", None)) if isinstance(question, dict) else ""
    if command not in commands:
        return "refused", f"the command is {command!r}; expected one of {', '.join(commands)}"
    try:
        return "done", commands[command](question)
    except DeadlineError as error:
        return "late", str(error)
    except UserError as error:
        return "refused", str(error)
    except Exception as error:  # the driver goes on, whatever a question ran into
        logger.warning("dagrl %s failed: %s", command, error, exc_info=not isinstance(error, DagrlError))
        return "failed", error_text(error)
