"""Examples from Hugging Face datasets, on disk or from the Hub: what `save_to_disk` wrote, Parquet and Arrow files, names.

read_rows("data/ultrachat", "train")          # a directory: saved, or data files; of one split or several
read_rows("data/train-00000.parquet", "")     # a file is one split
read_rows("openai/gsm8k", "train", "main")    # a dataset of the Hub, or of its cache where HF_HUB_OFFLINE is set

Needs `datasets`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dagrl.config import Json
from dagrl.errors import DataError
from dagrl.imports import require_package

SUFFIXES = (".parquet", ".arrow")
_ONE_SPLIT = "state.json"  # what `save_to_disk` writes beside the data of one split,
_SAVED = ("dataset_dict.json", _ONE_SPLIT)  # and of several
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def is_dataset(path: str | Path) -> bool:
    """Whether a path is for `datasets` to read: a directory, a file in one of its formats, or a name on the Hub."""
    return Path(path).is_dir() or Path(path).suffix in SUFFIXES or _is_hub_name(path)


def has_splits(path: str | Path) -> bool:
    """Whether a path may hold several splits: a dataset that is no single file, nor saved without splits."""
    file = Path(path).suffix in SUFFIXES and not Path(path).is_dir()
    return is_dataset(path) and not file and not (Path(path) / _ONE_SPLIT).exists()


def read_rows(path: str | Path, split: str, subset: str | None = None) -> Iterator[tuple[str, Mapping[str, Json]]]:
    """Each row, with where it is from. DataError for what cannot be read, MissingDependencyError without the package."""
    require_package("datasets", f"data.path {str(path)!r}", otherwise=", or write the examples as JSONL")
    dataset = _open(Path(path), split, subset)
    for number, row in enumerate(dataset):
        yield f"{path}, row {number}", {key: _without_nulls(value) for key, value in row.items()}


def _without_nulls(value: Json) -> Json:
    """Without the keys that Arrow gives to every object because another row's has them."""
    if isinstance(value, dict):
        return {key: _without_nulls(below) for key, below in value.items() if below is not None}
    return [_without_nulls(below) for below in value] if isinstance(value, list) else value


def _is_hub_name(path: str | Path) -> bool:
    """`owner/name`, where no such file is; JSONL files are not datasets also where they are missing."""
    missing = not Path(path).exists() and Path(path).suffix not in (".json", ".jsonl", ".txt")
    return missing and _HUB_NAME.fullmatch(str(path)) is not None


def _open(path: Path, split: str, subset: str | None) -> Any:
    import pyarrow
    from datasets import DatasetDict
    from datasets.exceptions import DatasetsError

    try:
        found = _open_file(path) if path.suffix in SUFFIXES and not path.is_dir() else _open_dataset(path, subset)
    except (OSError, ValueError, LookupError, pyarrow.ArrowException, DatasetsError) as error:
        what = "a Hugging Face dataset, on disk or on the Hub" if _is_hub_name(path) else "a Hugging Face dataset"
        raise DataError(f"{str(path)!r} cannot be read as {what}: {error}") from error
    if not isinstance(found, DatasetDict):
        return found
    if split not in found:
        raise DataError(
            f"{str(path)!r} has the splits {', '.join(found)}; found no {split!r}. Set data.split or data.val_split"
        )
    return found[split]


def _open_dataset(path: Path, subset: str | None) -> Any:
    """What `save_to_disk` wrote, or data files, of a directory or of the Hub, by way of the cache of `datasets`."""
    from datasets import load_dataset, load_from_disk

    if any((path / name).exists() for name in _SAVED):
        return load_from_disk(str(path))
    return load_dataset(str(path), subset)


def _open_file(path: Path) -> Any:
    """One table, without a copy in the cache of `datasets`."""
    from datasets import Dataset

    if path.suffix == ".arrow":
        return Dataset.from_file(str(path))
    from pyarrow import parquet

    return Dataset(parquet.read_table(path))
