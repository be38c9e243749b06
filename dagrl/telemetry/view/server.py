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

import base64
import io
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from dagrl.telemetry.view.data import RunView, to_json

LARGEST_BYTES, LARGEST_SIDE = 64 << 10, 512
"""Of an image in an exported page: larger files are scaled down to this side, in pixels."""

PARTS = ("charts.js", "tokens.js", "samples.js", "page.js")

LOCAL = ("127.0.0.1", "localhost", "::1")


def page(data: dict[str, Any] | None = None) -> str:
    """Returns the page. Without `data` it asks the server that it came from."""
    here = files(__package__)
    scripts = [here.joinpath(name).read_text(encoding="utf-8") for name in PARTS]
    exported = to_json(data).replace("<", "\\u003c")
    text = here.joinpath("page.html").read_text(encoding="utf-8")
    text = text.replace("/*STYLE*/", here.joinpath("page.css").read_text(encoding="utf-8"))
    return text.replace("/*SCRIPT*/", f"const EXPORTED = {exported};\n" + "\n".join(scripts))


def exported_page(runs: Sequence[RunView], most_samples: int) -> str:
    """Returns a page that needs no server: all curves, all lines of samples, and at most `most_samples` conversations a run.

    Of each step these are the KL outliers, and others spread evenly over the rewards.
    """
    exported = []
    for run in runs:
        steps = run.steps()
        share = max(1, most_samples // max(1, len(steps)))
        samples = {summary["step"]: _chosen(run.samples(summary["step"]), share) for summary in steps}
        rows = {step: {line["row"]: run.sample(step, line["row"]) for line in lines} for step, lines in samples.items()}
        outliers = [line for line in run.outliers() if line["row"] in rows[line["step"]]]
        data = {"about": run.about(), "metrics": run.metrics(), "steps": steps}
        shown = [sample for chosen in rows.values() for sample in chosen.values()]
        shown += [conversation for sample in shown for conversation in sample.get("conversations") or ()]
        names = {name for sample in shown for name in sample.get("media") or ()}
        exported.append({**data, "samples": samples, "outliers": outliers, "rows": rows, "media": _images(run, names)})
    return page({"runs": exported})


def _images(run: RunView, names: Iterable[str]) -> dict[str, str]:
    """Returns data URLs of the images whose files are there."""
    urls = {}
    for name in sorted(names):
        with suppress(FileNotFoundError):
            urls[name] = f"data:image/*;base64,{base64.b64encode(_small(run.medium(name))).decode()}"
    return urls


def _small(content: bytes) -> bytes:
    """Returns an image's file, or a smaller one. Without Pillow, or of an image that it cannot read, it stays as it is."""
    if len(content) <= LARGEST_BYTES:
        return content
    file = io.BytesIO()
    try:
        from PIL import Image, ImageOps

        with Image.open(io.BytesIO(content)) as image:
            image.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
            ImageOps.exif_transpose(image).convert("RGB").save(file, "JPEG")
    except Exception:  # Pillow raises anything for broken files
        return content
    return file.getvalue()


def _chosen(samples: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    if len(samples) <= most:
        return samples
    by_kl = sorted(samples, key=lambda line: -(line["kl"] or 0))[: most // 2]
    rows = {line["row"] for line in by_kl}
    rest = sorted((line for line in samples if line["row"] not in rows), key=lambda line: line["reward"])
    left = most - len(by_kl)
    return by_kl + [rest[round(place * (len(rest) - 1) / max(1, left - 1))] for place in range(left)]


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
        named = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        if self.server.host in LOCAL and named not in LOCAL:  # other sites may resolve their names to loopback
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
