"""`dagrl evaluate`: measures one or more models, prints a table, and writes the completions."""

import argparse
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dagrl.config.file import load_config
from dagrl.data.hugging_face import is_hub_id
from dagrl.errors import ConfigError
from dagrl.files import write_whole
from dagrl.run.evaluate import Evaluation, Report, against, evaluate


def run_evaluation(options: argparse.Namespace) -> str:
    """Runs the evaluation that the command line asks for, of one model after the other; returns the table."""
    overrides = [*options.overrides]
    overrides.append(f"evaluation.sets={json.dumps(options.set or [])}")
    if options.limit is not None:
        overrides += [f"grpo.max_val_samples={options.limit}", f"evaluation.max_samples={options.limit}"]
    wanted = Evaluation(
        samples=options.samples,
        ks=tuple(sorted(set(options.k or [k for k in (1, options.samples) if k]))),
        greedy=not options.no_greedy,
        right_from=options.right_from,
        train_split=options.train,
    )
    names = options.checkpoint or [None]
    configs = [load_config(options.config, [*overrides, *_checkpoint(name)]) for name in names]
    if options.set and options.train:
        raise ConfigError("--train and --set were both given; a standard set has no prompts of training")
    reports: dict[str, Report] = {}
    for config in configs:
        report = evaluate(config, wanted)
        first = next(iter(reports.values()), None)
        reports[str(config.policy.model_name)] = report if first is None else against(first, report, wanted)
        if options.json is not None:  # after each: the next one may fail
            content = [{"model": name, **_content(report)} for name, report in reports.items()]
            write_whole(options.json, json.dumps(content, indent=1, ensure_ascii=False))
    return table_text(reports)


def _checkpoint(name: str | None) -> list[str]:
    """Returns the overrides that evaluate another model. Raises ConfigError for a checkpoint of train workers."""
    if name is None:
        return []
    if not (Path(name) / "config.json").is_file() and not is_hub_id(name):
        trained = (Path(name) / "state.json").is_file()
        advice = f"convert it first: dagrl export {name} -o MODEL" if trained else "expected one, or an id on the Hub"
        reason = "it has no config.json" if Path(name).is_dir() else "there is no such directory"
        raise ConfigError(f"--checkpoint {name} is not a Hugging Face directory: {reason}; {advice}")
    return [f"policy.model_name={name}", "policy.random_init=null", "policy.tokenizer.name=null"]  # it has its own tokenizer


def table_text(reports: Mapping[str, Report]) -> str:
    """Returns the metrics as a table: a column for each model, and a line for each metric of a task."""
    table = Table("task", "metric")
    for model in reports:
        table.add_column(model, overflow="fold")
    for task in next(iter(reports.values())).rows:
        rows = [report.rows[task] for report in reports.values()]
        for name in dict.fromkeys(name for row in rows for name in row if not name.endswith(("_low", "_high"))):
            table.add_row(task, name, *(_shown(row, name) for row in rows))
        table.add_section()
    text = io.StringIO()
    Console(file=text, width=200).print(table)
    return text.getvalue()


def _shown(row: Mapping[str, float], name: str) -> str:
    value = row.get(name)
    if value is None:
        return ""
    if f"{name}_low" in row:
        return f"{value:.4f} ({row[f'{name}_low']:.3f} to {row[f'{name}_high']:.3f})"
    digits = {"prompts": 0, "failed": 0, "greedy/tokens": 1, "sampled/tokens": 1}.get(name, 4)
    return f"{value:.{digits}f}"


def _content(report: Report) -> dict[str, Any]:
    prompts = [
        {
            "prompt": of_prompt[0].sample.prompt.text,
            "reference": of_prompt[0].sample.prompt.reference,
            "completions": [{"text": one.sample.text, "greedy": one.greedy, "reward": one.reward} for one in of_prompt],
        }
        for of_prompt in report.completions
    ]
    return {"metrics": report.rows, "prompts": prompts}
