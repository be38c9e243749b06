"""Builds the page: one HTML file with its styles and scripts in it, and with the data too if it is exported."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.resources import files
from typing import Any

from dagrl.telemetry.view.data import RunView, to_json

LARGEST_BYTES, LARGEST_SIDE = 64 << 10, 512
"""Of an image in an exported page: larger files are scaled down to this side, in pixels."""

PARTS = ("charts.js", "tokens.js", "samples.js", "page.js")


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
        names = {
            name
            for sample in shown
            for part in (sample, *(sample.get("conversations") or ()))
            for name in part.get("media") or ()
        }
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
        from PIL import Image

        with Image.open(io.BytesIO(content)) as image:
            image.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
            image.convert("RGB").save(file, "JPEG")
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
