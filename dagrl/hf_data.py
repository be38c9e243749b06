"""Examples from Hugging Face datasets on disk: what `save_to_disk` wrote, Parquet and Arrow files. Needs `datasets`.

read_rows("data/ultrachat", "train")          # a directory of one dataset, or of one for each split
read_rows("data/train-00000.parquet", "")     # a file is one split
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dagrl.config import Json
from dagrl.errors import DataError
from dagrl.imports import require_package

SUFFIXES = (".parquet", ".arrow")


def is_dataset(path: str | Path) -> bool:
    """Whether a path is for `datasets` to read: a directory, or a file in one of its formats."""
    return Path(path).is_dir() or Path(path).suffix in SUFFIXES


def read_rows(path: str | Path, split: str) -> Iterator[tuple[str, Mapping[str, Json]]]:
    """Each row, with where it is from. DataError for what cannot be read, MissingDependencyError without the package."""
    require_package("datasets", f"data.path {str(path)!r}", otherwise=", or write the examples as JSONL")
    dataset = _open(Path(path), split)
    for number, row in enumerate(dataset):
        yield f"{path}, row {number}", row


def _open(path: Path, split: str) -> Any:
    import pyarrow
    from datasets import DatasetDict

    try:
        found = _open_directory(path) if path.is_dir() else _open_file(path)
    except (OSError, ValueError, KeyError, pyarrow.ArrowException) as error:
        raise DataError(f"{str(path)!r} cannot be read as a Hugging Face dataset: {error}") from error
    if not isinstance(found, DatasetDict):
        return found
    if split not in found:
        raise DataError(
            f"{str(path)!r} has the splits {', '.join(found)}; found no {split!r}. Set data.split or data.val_split"
        )
    return found[split]


def _open_directory(path: Path) -> Any:
    """What `save_to_disk` wrote."""
    from datasets import load_from_disk

    return load_from_disk(str(path))


def _open_file(path: Path) -> Any:
    """One table, without a copy in the cache of `datasets`."""
    from datasets import Dataset

    if path.suffix == ".arrow":
        return Dataset.from_file(str(path))
    from pyarrow import parquet

    return Dataset(parquet.read_table(path))
