"""Builds the page: one HTML file with its styles and scripts in it, and with the data too if it is exported."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from dagrl.telemetry.view.data import RunView, to_json

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
        exported.append({**data, "samples": samples, "outliers": outliers, "rows": rows})
    return page({"runs": exported})


def _chosen(samples: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    if len(samples) <= most:
        return samples
    by_kl = sorted(samples, key=lambda line: -(line["kl"] or 0))[: most // 2]
    rows = {line["row"] for line in by_kl}
    rest = sorted((line for line in samples if line["row"] not in rows), key=lambda line: line["reward"])
    left = most - len(by_kl)
    return by_kl + [rest[round(place * (len(rest) - 1) / max(1, left - 1))] for place in range(left)]
