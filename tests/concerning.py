"""Prints the test files that concern a change, for `make check`: those given, and those that import what is given.

python tests/concerning.py dagrl/refit/slices.py tests/unit/test_machine.py
python tests/concerning.py --room refit
"""

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


def module_of(file: Path) -> str:
    """Returns the import path of a Python file of this repository."""
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(test: Path) -> Iterator[str]:
    """Yields what a file imports: modules, and the full names taken from them."""
    for node in ast.walk(ast.parse(test.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def concerning(files: list[Path]) -> list[Path]:
    """Returns the test files among `files`, given relative to the repository, and those that import one of `files`."""
    changed = {module_of(file) for file in files if file.suffix == ".py"}
    tests = [path.relative_to(ROOT) for path in sorted((ROOT / "tests").rglob("test_*.py"))]
    return [test for test in tests if test in files or changed & set(imports_of(ROOT / test))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--room", help="all files of dagrl/ROOM, tests/unit/ROOM and tests/integration/ROOM")
    options = parser.parse_args()
    files = [file.resolve().relative_to(ROOT) for file in options.files]
    if options.room:
        rooms = [ROOT / folder / options.room for folder in ("dagrl", "tests/unit", "tests/integration")]
        files += [path.relative_to(ROOT) for room in rooms for path in room.rglob("*.py")]
    tests = concerning(files)
    if not tests:
        raise SystemExit("no test file imports what was given; name files of dagrl/ or tests/, or --room a folder of dagrl/")
    sys.stdout.write("\n".join(map(str, tests)) + "\n")


if __name__ == "__main__":
    main()
