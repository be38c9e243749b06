"""Log-probabilities that stay with a train worker, from the phase that computes them to the optimizer step that uses them.

    kept.keep(batch, prev_logprobs=logprobs, entropy=entropy)      # in `logprobs`; arrays [rows, tokens]
    kept.keep(batch, reference_logprobs=logprobs)                  # in `reference_logprobs`
    batch = kept.join(batch, ("prev_logprobs",))                   # in `train_step`: the batch with these columns
    columns = kept.columns()                                       # for the record of the step's rollouts

Samples are identified by the field `row_ids` [rows]. The scalar `step` is the step that trains on them. A worker forgets its
columns when a batch of another step arrives, because they were computed with other weights.
"""

from collections.abc import Collection

import numpy as np

from dagrl.errors import RunError
from dagrl.runtime.shapes import Array, Batch


class KeptLogprobs:
    """The columns of one step, by name and row id: float32 [tokens] of each row."""

    def __init__(self) -> None:
        self._step: float | None = None
        self._columns: dict[str, dict[int, Array]] = {}

    def keep(self, batch: Batch, **columns: Array) -> None:
        """Keeps `columns` [rows, tokens] of the rows of `batch`. Padding rows are left out."""
        self._begin(batch)
        for name, values in columns.items():
            rows = self._columns.setdefault(name, {})
            for row, (row_id, length) in enumerate(_rows(batch)):
                if length:
                    rows[row_id] = np.array(values[row, :length], np.float32)

    def join(self, batch: Batch, columns: Collection[str], *, required: bool = True) -> Batch:
        """Returns `batch` with these `columns` of its rows in place of `row_ids`, and their entropy if it is known.

        They are 0 outside of `loss_mask`. Raises RunError if a row lacks one of them, unless they are not `required`: then
        they are 0. A batch without `row_ids` is returned unchanged.
        """
        if "row_ids" not in batch.fields:
            return batch
        self._begin(batch)
        for name in columns if required else ():
            missing = [row_id for row_id, length in _rows(batch) if length and row_id not in self._columns.get(name, {})]
            if missing:
                raise RunError(
                    f"step {self._step:g} trains on {len(missing)} rows whose {name} this worker does not hold, the first "
                    f"with row_id {missing[0]}; name a phase that computes {name} in the algorithm's `columns`"
                )
        mask, fields = batch["loss_mask"], {name: array for name, array in batch.fields.items() if name != "row_ids"}
        fields |= {name: self._column(name, batch) * mask for name in columns}
        if "entropy" in self._columns:
            fields["entropy"] = self._column("entropy", batch)
        return Batch(fields, batch.scalars)

    def columns(self) -> dict[str, dict[int, Array]]:
        """Returns the kept columns of the current step: by name and row id, float32 [tokens]."""
        return self._columns

    def _begin(self, batch: Batch) -> None:
        step = batch.number("step")
        if step != self._step:
            self._step, self._columns = step, {}

    def _column(self, name: str, batch: Batch) -> Array:
        column, rows = np.zeros((batch.rows, batch.tokens), np.float32), self._columns.get(name, {})
        for row, (row_id, length) in enumerate(_rows(batch)):
            if length and row_id in rows:
                column[row, :length] = rows[row_id]
        return column


def _rows(batch: Batch) -> list[tuple[int, int]]:
    """Returns the id and the length of each row."""
    return list(zip(batch["row_ids"].tolist(), batch["lengths"].tolist(), strict=True))
