"""Records every replay of a run: its phase, input, rows and result, in the order of submission.

    session.replays.tape = tape = Tape(session)
    ...                                   # the run's own loop
    write_tape(path, tape.entries)

Workers run their replays in this order, so the same inputs submitted again in the order of a tape repeat a run: of any
algorithm, asynchronous ones too, as a tape has the engine steps of each quantum.
"""

import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from dagrl.errors import ConfigError
from dagrl.machine import PARTS, package_versions
from dagrl.rl.algorithm import columns_by_phase, planned_algorithm
from dagrl.rl.generation import Generated
from dagrl.run.rollout_log import kept_columns
from dagrl.run.session import Session
from dagrl.runtime.replay import Replay
from dagrl.runtime.shapes import Array, Batch
from dagrl.telemetry.metrics import StepMetrics, is_measured, merge_step_metrics

FORMAT = 2
ENGINE_STEPS = "engine_steps"

Values: TypeAlias = dict[str, Array]  # the numbers of a result by name, such as `grad_norm` or `tokens of request 3`


@dataclass
class Entry:
    """A replay of `phases.<phase>`. `rows` are those of each shard, if the loop chose them."""

    phase: str
    value: Any  # a batch, or a number
    rows: list[list[int]] | None = None
    result: Values = field(default_factory=dict)

    def again(self, lengths: Mapping[int, int]) -> Any:
        """Returns the input that repeats the replay: a quantum takes as many engine steps, whatever the clock says.

        Its requests end at their recorded `lengths` at the latest, so that other draws do not delay those that wait.
        """
        steps = self.result.get(ENGINE_STEPS)
        if steps is None:
            return self.value
        scalars = {name: item for name, item in self.value.scalars.items() if name != "seconds"}
        repeated = replace(self.value, scalars={**scalars, ENGINE_STEPS: tuple(steps.tolist())})
        if "request_ids" not in repeated.fields:
            return repeated
        limits = zip(repeated["request_ids"].tolist(), repeated["max_new_tokens"].tolist(), strict=True)
        return repeated.with_fields(
            max_new_tokens=np.array([lengths.get(number, limit) for number, limit in limits], np.int64)
        )


class Tape:
    """Entries of a running session; see the module's docstring."""

    def __init__(self, session: Session) -> None:
        self.entries: list[Entry] = []
        self._open: dict[Replay, Entry] = {}
        self._session = session
        self._columns = columns_by_phase(planned_algorithm(session.plan)) if session.plan.generates else {}

    def finished(self) -> list[Entry]:
        """Returns the entries without those that nobody waited for, such as the last quanta of an asynchronous run."""
        waiting = set(map(id, self._open.values()))
        return [entry for entry in self.entries if id(entry) not in waiting]

    def adapted(self, value: object) -> object:
        """Returns the input to submit. Every second request takes the likeliest tokens, which no sampler changes."""
        if not isinstance(value, Batch) or "greedy" not in value.fields:
            return value
        return value.with_fields(greedy=value["greedy"] | (value["request_ids"] % 2 == 0))

    def begin(self, phase: str, value: object, rows: Sequence[Any] | None, replay: Replay) -> None:
        """Adds a replay that was submitted."""
        entry = Entry(phase, value, None if rows is None else [[int(row) for row in shard] for shard in rows])
        self._open[replay] = entry
        self.entries.append(entry)

    def end(self, replay: Replay, result: object) -> None:
        """Adds its result."""
        entry = self._open.pop(replay)
        entry.result = values_of(result) | self.kept(entry.phase)

    def kept(self, phase: str) -> Values:
        """Returns the columns that the train workers keep from the last replay of `phase`, if it computes any."""
        if phase not in self._columns or self._session.replays.phases[phase].roles != (self._session.train.role.name,):
            return {}
        columns = kept_columns(self._session.train, self._session.config.timeouts.replay)
        names = [name for name in self._columns[phase] if name in columns]
        return {f"{name} of row {row}": column for name in names for row, column in sorted(columns[name].items())}


def values_of(result: object) -> Values:
    """Returns the numbers of a phase's result, without times and memory."""
    parts = list(result) if isinstance(result, list | tuple) else [result]
    if isinstance(result, Batch):
        return {name: np.array(column) for name, column in result.fields.items() if name != "lengths"}
    quanta = [part for part in parts if isinstance(part, Generated)]
    if quanta:
        values: Values = {ENGINE_STEPS: np.array([quantum.engine_steps for quantum in quanta])}
        for request in (request for quantum in quanta for request in quantum.requests()):
            for name in ("tokens", "logprobs", "versions"):
                values[f"{name} of request {request.request_id}"] = np.asarray(getattr(request, name))
        return values
    metrics = merge_step_metrics([part for part in parts if isinstance(part, StepMetrics)]).flat()
    return {name: np.array(value) for name, value in metrics.items() if not is_measured(name)}


def write_tape(path: Path, entries: Sequence[Entry]) -> None:
    """Writes entries as compressed JSON, with the versions of the packages that made them."""
    lines = [
        {
            "phase": entry.phase,
            "value": _packed(entry.value),
            "rows": entry.rows,
            "result": {name: _packed(value) for name, value in entry.result.items()},
        }
        for entry in entries
    ]
    content = {"format": FORMAT, "versions": package_versions(PARTS), "entries": lines}
    path.write_bytes(gzip.compress(json.dumps(content).encode(), mtime=0))


def read_tape(path: Path) -> tuple[dict[str, str], list[Entry]]:
    """Returns the versions and the entries. Raises ConfigError unless the file is a tape in this format."""
    try:
        content = json.loads(gzip.decompress(path.read_bytes()))
        if content["format"] != FORMAT:
            raise ConfigError(f"{path} has format {content['format']}; expected: {FORMAT}. Record the golden run again")
        return content["versions"], [
            Entry(
                line["phase"],
                _unpacked(line["value"]),
                line["rows"],
                {name: _unpacked(value) for name, value in line["result"].items()},
            )
            for line in content["entries"]
        ]
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read as a tape: {error}. Record the golden run again") from error


def _packed(value: Any) -> Any:
    """Returns a batch, an array or a number as JSON."""
    if isinstance(value, Batch):
        fields = {name: _packed(column) for name, column in value.fields.items()}
        return {"fields": fields, "scalars": dict(value.scalars)}
    if isinstance(value, np.ndarray):
        return {"dtype": str(value.dtype), "shape": value.shape, "data": value.ravel().tolist()}
    return value


def _unpacked(content: Any) -> Any:
    if not isinstance(content, Mapping):
        return content
    if "dtype" in content:
        return np.array(content["data"], content["dtype"]).reshape(content["shape"])
    scalars = {name: tuple(item) if isinstance(item, list) else item for name, item in content["scalars"].items()}
    return Batch({name: _unpacked(column) for name, column in content["fields"].items()}, scalars)
