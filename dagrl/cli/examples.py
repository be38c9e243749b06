"""`dagrl examples`: lists the example configurations and programs that come with dagrl, and copies them."""

import difflib
import re
from pathlib import Path

from dagrl.config.file import CONFIG_DIR
from dagrl.errors import ConfigError
from dagrl.imports import did_you_mean

EXAMPLES = Path(__file__).parents[1] / "examples"
DATA = re.compile(rf"(?:{re.escape(CONFIG_DIR)}/|data\.path=(?=data/))([\w./-]+)")
"""A file, or a directory of files, that an example or its command reads from its own directory."""


def list_examples() -> str:
    """Returns a line per example: its name and the first sentence about it."""
    files = _example_files()
    width = max(map(len, files), default=0)
    return "".join(f"{name:{width}}  {_first_sentence(file)}\n" for name, file in files.items())


def copy_example(name: str, target: Path) -> list[Path]:
    """Copies an example, and the data files that it names, into the directory `target`; returns the copies.

    Raises ConfigError if there is no such example, or before it copies anything if one of the files exists already.
    """
    files = _example_files()
    source = files.get(name) or next((file for file in files.values() if file.name == name), None)
    if source is None:
        near = did_you_mean(difflib.get_close_matches(name, files))
        raise ConfigError(f"no example {name!r}{near}; expected one of: {', '.join(files)}")
    named = [EXAMPLES / found for found in DATA.findall(source.read_text(encoding="utf-8"))]
    sources = [source, *(file for path in named for file in (sorted(path.iterdir()) if path.is_dir() else [path]))]
    copies = {file: target / file.relative_to(EXAMPLES) for file in sources}
    existing = [str(copy) for copy in copies.values() if copy.exists()]
    if existing:
        raise ConfigError(f"{', '.join(existing)}: exists already; remove it, or choose another directory with -o")
    for file, copy in copies.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    return list(copies.values())


def _example_files() -> dict[str, Path]:
    """Returns the example files by name: configurations first, then programs."""
    return {file.stem: file for suffix in ("yaml", "py") for file in sorted(EXAMPLES.glob(f"*.{suffix}"))}


def _first_sentence(file: Path) -> str:
    """Returns the text at the top of the file, a YAML comment or a docstring, up to its first full stop or colon."""
    lines = file.read_text(encoding="utf-8").splitlines()
    if file.suffix == ".yaml":
        end = next(number for number, line in enumerate(lines) if not line.startswith("#"))
        text = " ".join(line.lstrip("# ") for line in lines[:end])
    else:
        text = lines[0].strip('"')
    return re.split(r"[.:;](?:\s|$)", text, maxsplit=1)[0]
