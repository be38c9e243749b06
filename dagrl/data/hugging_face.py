"""Reads Hugging Face datasets, on disk or from the Hub.

    read_rows("data/ultrachat", "train")          # a directory written by `save_to_disk`, or of Parquet files
    plain_files("data/chats", "train")            # the JSON or CSV files of a directory
    read_rows("data/train-00000.parquet", "")     # a Parquet or Arrow file, which is one split
    read_rows("openai/gsm8k", "train", "main")    # a dataset on the Hub, or in its cache if HF_HUB_OFFLINE is set

Needs `datasets`.
"""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dagrl.attributes import setting
from dagrl.errors import DataError
from dagrl.imports import require_package

if TYPE_CHECKING:
    from dagrl.config import Json

logger = logging.getLogger(__name__)

ANSWER_S = 5.0  # seconds to wait for an answer of the Hub

SUFFIXES = (".parquet", ".arrow")
JSON, CSV = (".jsonl", ".json"), (".csv", ".tsv")
_ONE_SPLIT = "state.json"  # written by `save_to_disk` for a dataset without splits
_SAVED = ("dataset_dict.json", _ONE_SPLIT)  # the first for a dataset with splits
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def is_hub_id(name: str) -> bool:
    """Whether the name is `owner/name`, and not a path that exists."""
    return _HUB_ID.fullmatch(name) is not None and not Path(name).exists()


def is_dataset(path: str | Path) -> bool:
    """Whether `datasets` reads the path: a directory, a file in one of its formats, or a name on the Hub."""
    return Path(path).is_dir() or Path(path).suffix in SUFFIXES or _is_hub_name(path)


def has_splits(path: str | Path) -> bool:
    """Whether the path may have several splits: a dataset that is not a single file and not saved without splits."""
    file = Path(path).suffix in SUFFIXES and not Path(path).is_dir()
    return is_dataset(path) and not file and not (Path(path) / _ONE_SPLIT).exists()


def read_rows(
    path: str | Path, split: str, subset: str | None = None, *, first: bool = False
) -> Iterator[tuple[str, Mapping[str, Json]]]:
    """Yields each row and its source; with `first` of a Parquet file the first row alone, without reading the others.

    Raises DataError, or MissingDependencyError without `datasets`.
    """
    _require(path)
    dataset = _open(Path(path), split, subset, first=first)
    dataset = dataset.cast(_undecoded(dataset.features)) if "Image(" in str(dataset.features) else dataset
    for number, row in enumerate(dataset):
        yield f"{path}, row {number}", {key: _without_nulls(value) for key, value in row.items()}


def _undecoded(feature: Any) -> Any:
    """Returns a type of `datasets` in which images are their files."""
    from datasets import Features, Image, LargeList, List

    if isinstance(feature, Image):
        return Image(mode=feature.mode, decode=False)
    if isinstance(feature, dict):
        kind = Features if isinstance(feature, Features) else dict
        return kind({name: _undecoded(below) for name, below in feature.items()})
    if isinstance(feature, List | LargeList):
        return replace(feature, feature=_undecoded(feature.feature))
    return feature


def plain_files(path: str | Path, split: str, subset: str | None = None) -> list[tuple[Path, str]] | None:
    """Returns the JSON or CSV files of a split, downloaded and unpacked, and their names; None for data in another format.

    `datasets` guesses types of what they hold: dates and numbers would not stay the text that they are. Raises DataError, or
    MissingDependencyError without `datasets`.
    """
    if not is_dataset(path):
        return [(Path(path), str(path))]
    if not has_splits(path) or any((Path(path) / name).exists() for name in _SAVED):
        return None
    _require(path)
    from datasets import DownloadManager, load_dataset_builder

    with _reading(Path(path)):
        files = load_dataset_builder(str(path), subset).config.data_files
        _check_all_taken(Path(path), files or {})
        if not files or not all({*Path(name).suffixes} & {*JSON, *CSV} for part in files.values() for name in part):
            return None
        _check_split(path, split, files)
        names = list(files[split])
        return list(zip(map(Path, DownloadManager().download_and_extract(names)), names, strict=True))


def _without_nulls(value: Json) -> Json:
    """Removes the null keys that Arrow adds to an object because other rows have them."""
    if isinstance(value, dict):
        return {key: _without_nulls(below) for key, below in value.items() if below is not None}
    return [_without_nulls(below) for below in value] if isinstance(value, list) else value


def _is_hub_name(path: str | Path) -> bool:
    """Whether the path is an id on the Hub, and not that of a missing JSONL file."""
    return is_hub_id(str(path)) and Path(path).suffix not in (".json", ".jsonl", ".txt")


def hub_has(name: str, kind: Literal["model", "dataset"]) -> bool | None:
    """Returns whether the Hub has a model or dataset; None if it does not answer. `datasets` itself tries again for 25 s."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().repo_info(name, repo_type=kind, timeout=ANSWER_S)
    except HfHubHTTPError:  # also if it wants a token
        return False
    except Exception:  # whatever its HTTP client raises without a connection
        return None
    return True


def cache_advice(error: Exception) -> str:
    """Returns what to do if the cache of the Hub's libraries cannot be written; "" for other errors."""
    readable = isinstance(error, OSError) and error.errno in (errno.EROFS, errno.EACCES, errno.EPERM)
    return ". Set HF_HOME to a directory that can be written" if readable else ""


@contextmanager
def _offline() -> Iterator[None]:
    """Lets `datasets` read its cache alone."""
    import datasets
    import huggingface_hub.constants as hub

    logger.warning("the Hugging Face Hub does not answer; looking in the cache of `datasets` alone")
    with setting(datasets.config, HF_HUB_OFFLINE=True), setting(hub, HF_HUB_OFFLINE=True):
        yield


def _require(path: str | Path) -> None:
    require_package("datasets", f"data.path {str(path)!r}", otherwise=", or write the examples as JSONL")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raises DataError for what `datasets` and Arrow raise in the block. Asks the Hub nothing if it does not answer."""
    import pyarrow
    from datasets.exceptions import DatasetsError

    try:
        with nullcontext() if not _is_hub_name(path) or hub_has(str(path), "dataset") is not None else _offline():
            yield
    except (OSError, ValueError, LookupError, pyarrow.ArrowException, DatasetsError) as error:
        what = "a Hugging Face dataset, on disk or on the Hub" if _is_hub_name(path) else "a Hugging Face dataset"
        raise DataError(f"cannot read {str(path)!r} as {what}: {error}{cache_advice(error)}") from error


def _check_split(path: str | Path, split: str, splits: Iterable[str]) -> None:
    if split not in splits:
        found = ", ".join(map(str, splits))
        raise DataError(f"{str(path)!r} has no split {split!r}; found: {found}. Set data.split or data.val_split")


def _check_all_taken(path: Path, splits: Mapping[str, Iterable[str]]) -> None:
    """Raises DataError for a data file of a directory that is in no split: `datasets` goes by names, and takes one format.

    A README.md may say what the splits are.
    """
    from datasets.data_files import FILES_TO_IGNORE

    if not path.is_dir() or (path / "README.md").exists():
        return
    folder, taken = path.resolve(), {Path(name) for files in splits.values() for name in files}
    found = ", ".join(map(str, splits)) or "none"
    formats = {*SUFFIXES, ".jsonl", *CSV}.union(*(file.suffixes for file in taken))
    for file in sorted(folder.rglob("*")):
        inside = file.relative_to(folder)
        hidden = any(part.startswith((".", "__")) for part in inside.parts) or file.name in FILES_TO_IGNORE
        if formats & {*file.suffixes} and not hidden and file not in taken and file.is_file():
            raise DataError(
                f"{str(path)!r}: the data file {str(inside)!r} is in no split; found {found}, by the names of files and "
                "folders, in one format. Set data.path to a single file or folder, or name the files of splits in a "
                "README.md there (configs, data_files)"
            )


def _open(path: Path, split: str, subset: str | None, *, first: bool) -> Any:
    from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
    from pyarrow import Table, parquet

    with _reading(path):
        if any((path / name).exists() for name in _SAVED):
            dataset = load_from_disk(str(path))
        elif path.suffix not in SUFFIXES or path.is_dir():
            dataset = load_dataset(str(path), subset)  # data files of a directory or the Hub
        elif path.suffix == ".arrow":
            dataset = Dataset.from_file(str(path))
        elif first:
            file = parquet.ParquetFile(path)
            dataset = Dataset(Table.from_batches(islice(file.iter_batches(1), 1), file.schema_arrow))
        else:
            dataset = Dataset(parquet.read_table(path))  # without a copy in the cache of `datasets`
    if not isinstance(dataset, DatasetDict):
        return dataset
    _check_split(path, split, dataset)
    return dataset[split]
