"""Serves the page and the data of runs over HTTP.

with serving([RunView(Path("runs/a"))], host="127.0.0.1", port=0) as address:
    ...                                   # http://127.0.0.1:40123/

GET /                                     the page
GET /api/runs                             name, algorithm, model of each run
GET /api/metrics?run=0&after=BYTES        lines of metrics.jsonl
GET /api/steps?run=0                      steps with rollouts
GET /api/samples?run=0&step=3             a line for each sample; without `step` the outliers of the run
GET /api/sample?run=0&step=3&row=7        one sample
GET /api/medium?run=0&name=HEX            the file of an image of a sample
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from dagrl.telemetry.view.data import RunView, to_json
from dagrl.telemetry.view.page import page

LOCAL = ("127.0.0.1", "localhost", "::1")


class ViewServer(ThreadingHTTPServer):
    """Answers from `runs`. Raises OSError if the port is taken."""

    daemon_threads = True

    def __init__(self, runs: Sequence[RunView], host: str, port: int) -> None:
        self.runs, self.host = runs, host
        super().__init__((host, port), _Handler)

    @property
    def address(self) -> str:
        return f"http://{self.host}:{self.server_address[1]}/"


@contextmanager
def serving(runs: Sequence[RunView], host: str, port: int) -> Iterator[str]:
    """Serves during the block and gives it the address. Port 0: any free one."""
    with ViewServer(runs, host, port) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="view", daemon=True)
        thread.start()
        try:
            yield server.address
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: ViewServer

    def do_GET(self) -> None:
        """Answers one request."""
        if not self._from_here():
            self._send(HTTPStatus.FORBIDDEN, "text/plain", "this server answers to its own address only")
            return
        url = urlsplit(self.path)
        if url.path == "/":
            self._send(HTTPStatus.OK, "text/html", page())
            return
        try:
            answer = _answer(self.server.runs, url.path.removeprefix("/api/"), dict(parse_qsl(url.query)))
        except (KeyError, IndexError, ValueError, FileNotFoundError) as error:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", f"not found: {error}")
            return
        if isinstance(answer, bytes):
            self._send(HTTPStatus.OK, "application/octet-stream", answer)
        else:
            self._send(HTTPStatus.OK, "application/json", to_json(answer))

    def _from_here(self) -> bool:
        """Whether the browser asked for this server by its own name. Other sites may resolve their names to loopback."""
        named = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        return self.server.host not in LOCAL or named in LOCAL

    def _send(self, status: HTTPStatus, kind: str, body: str | bytes) -> None:
        content = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8" if isinstance(body, str) else kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing."""


def _answer(runs: Sequence[RunView], what: str, query: dict[str, str]) -> Any:
    """Raises KeyError, IndexError or ValueError for what does not exist."""
    if what == "runs":
        return [run.about() for run in runs]
    run = runs[int(query["run"])]
    if what == "metrics":
        return run.metrics(int(query.get("after", 0)))
    if what == "steps":
        return run.steps()
    if what == "samples":
        return run.samples(int(query["step"])) if "step" in query else run.outliers()
    if what == "sample":
        return run.sample(int(query["step"]), int(query["row"]))
    if what == "medium":
        return run.medium(query["name"])
    raise KeyError(what)
