"""The samples of a run in Parquet files, one row per sample.

The batch of a training step is in `rollouts/step_000042.parquet`, what was validated or dropped by then in
`rollouts/other_000042.parquet`.

    files = RolloutFiles(paths.rollouts, max_bytes=10 << 30, resumed_step=0)
    files.write(step, table_of(rows))              # rows: one dictionary per sample, with the columns of `schema`
    read_rollouts(path, ["reward", "completion"])  # any Parquet reader can: pandas, DuckDB, `datasets`

All lists of a row run over the tokens after the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagrl.files import replacing

if TYPE_CHECKING:
    import pyarrow

Row = Mapping[str, Any]

STEP, OTHER = "step", "other"  # first words of the files' names

COMPRESSION = "zstd"


def schema() -> pyarrow.Schema:
    """Returns the columns of a file.

    `split` is `train` or `validation`. `media` are files of the prompt's images, in the run's directory of that name.
    `dropped` says why a sample of `train` was not trained on: its group by dynamic
    sampling (`zero_variance`, `failed`), itself by filtering (`overlong`), for lack of a reward
    (`no_reward`) or of an answer of its environment (`failed`). `logprobs` are the engine's, `train_logprobs` and
    `reference_logprobs` those of the train workers and of the reference policy (null where no phase computes them),
    `versions` the policy version that made each token. `sampled` is false on tokens of an environment. `advantage` is 0 for
    samples that are not trained on (`valid` is false). `failure` says what the reward or the environment raised, "" if
    nothing. `reward` of a turn is the environment's, null if it gives none by turn. `conversations` are those of an agent
    after the first, with the same columns; `trained` says whether they are trained on too.
    """
    import pyarrow as pa

    text, number, real, truth = pa.string(), pa.int32(), pa.float32(), pa.bool_()
    numbers, reals = pa.list_(number), pa.list_(real)
    turn = {"role": text, "text": text, "start": number, "end": number, "reward": real}
    sequence = {
        "prompt": text,
        "media": pa.list_(text),
        "turns": pa.list_(pa.struct(turn)),
        "finish_reason": text,
        "prompt_tokens": numbers,
        "tokens": numbers,
        "token_texts": pa.list_(text),
        "sampled": pa.list_(truth),
        **dict.fromkeys(("logprobs", "train_logprobs", "reference_logprobs", "entropy"), reals),
        "versions": numbers,
    }
    sample = {
        "step": number,
        "split": text,
        "dropped": text,
        "group": pa.int64(),
        "place": number,
        **dict.fromkeys(("source", "task", "reference", "completion"), text),
        "reward": real,
        "reward_parts": pa.map_(text, real),
        "advantage": real,
        "valid": truth,
        "failure": text,
    }
    return pa.schema({**sample, **sequence, "conversations": pa.list_(pa.struct({"trained": truth, **sequence}))})


def load_writer() -> None:
    """Loads what the first file needs, which takes a fifth of a second."""
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(schema().empty_table(), pyarrow.BufferOutputStream(), compression=COMPRESSION)


def rollout_files(directory: Path, kind: str = STEP) -> dict[int, Path]:
    """Returns the files of trained (`STEP`) or of other samples (`OTHER`) of a run by step, in order of steps."""
    files = {int(path.stem.removeprefix(f"{kind}_")): path for path in directory.glob(f"{kind}_*.parquet")}
    return dict(sorted(files.items()))


def read_rollouts(path: Path, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Returns the rows of a file; only some of the columns, if named."""
    from pyarrow import parquet

    rows: list[dict[str, Any]] = parquet.read_table(path, columns=columns).to_pylist(maps_as_pydicts="strict")
    return rows


def table_of(rows: Sequence[Row]) -> pyarrow.Table:
    """Returns rows as a table of `schema`; missing columns are null. Lists may be arrays.

    The lists of a column are joined first: as Python objects they would keep the interpreter from the loop for long.
    """
    import pyarrow as pa

    columns = []
    for field in schema():
        values = [row.get(field.name) for row in rows]
        flat = pa.types.is_list(field.type) and not pa.types.is_nested(field.type.value_type)
        columns.append(_joined_lists(values, field.type) if flat else pa.array(values, field.type))
    return pa.table(columns, schema=schema())


def _joined_lists(values: Sequence[Sequence[Any] | None], kind: pyarrow.ListType) -> pyarrow.ListArray:
    import numpy as np
    import pyarrow as pa

    offsets = np.cumsum([0, *(0 if value is None else len(value) for value in values)], dtype=np.int32)
    present = [value for value in values if value is not None]
    if pa.types.is_string(kind.value_type):
        items = pa.array([text for value in present for text in value], kind.value_type)
    else:
        dtype = kind.value_type.to_pandas_dtype()
        joined = np.concatenate([np.empty(0, dtype), *(np.asarray(value, dtype) for value in present)])
        items = pa.array(joined, kind.value_type)
    return pa.ListArray.from_arrays(offsets, items, type=kind, mask=pa.array([value is None for value in values]))


class RolloutFiles:
    """Writes the files of a run, and deletes the oldest above `max_bytes` (None: never), but not the newest.

    A run that resumes from `resumed_step` first deletes the files of the steps it repeats.
    """

    def __init__(self, directory: Path, *, max_bytes: int | None, resumed_step: int = 0) -> None:
        self._directory, self._max_bytes = directory, max_bytes
        self._sizes: dict[Path, int] = {}  # the oldest first; listing a long run's directory after each step takes long
        directory.mkdir(exist_ok=True)
        files = [(step, path) for kind in (OTHER, STEP) for step, path in rollout_files(directory, kind).items()]
        for step, path in sorted(files, key=itemgetter(0)):
            if step > resumed_step:
                path.unlink()
            else:
                self._sizes[path] = path.stat().st_size

    def write(self, step: int, table: pyarrow.Table, kind: str = STEP) -> None:
        """Writes the table of a step's samples."""
        from pyarrow import parquet

        path = self._directory / f"{kind}_{step:06d}.parquet"
        with replacing(path) as part:
            parquet.write_table(table, part, compression=COMPRESSION)
        self._sizes.pop(path, None)  # a file that is written again is the newest
        self._sizes[path] = path.stat().st_size
        total = sum(self._sizes.values())
        while self._max_bytes is not None and total > self._max_bytes and len(self._sizes) > 1:
            oldest = next(iter(self._sizes))
            oldest.unlink(missing_ok=True)
            total -= self._sizes.pop(oldest)
