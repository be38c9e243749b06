"""Counts the configuration's keys, and shows which ones anybody sets: `python docs/keys.py`.

Each line has a key, its default, how many shipped YAML files set it, and whether NeMo-RL has it. A key that no file sets and
NeMo-RL does not have is a candidate to go.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterator

import yaml
from reference import ROOT, configuration_keys, default_of


def shipped_keys() -> Counter[str]:
    """Returns how many of the YAML files in the repository set each key."""
    files = subprocess.check_output(["git", "ls-files", "dagrl/*.yaml", "recipes/*.yaml"], cwd=ROOT, text=True).split()
    found: Counter[str] = Counter()
    for file in files:
        content = yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))
        found.update(written_keys(content) if isinstance(content, dict) and "policy" in content else ())
    return found


def written_keys(section: dict[str, object], name: str = "") -> Iterator[str]:
    """Yields the keys that a file sets, with those of its sections."""
    for key, value in section.items():
        yield f"{name}{key}"
        if isinstance(value, dict):
            yield from written_keys(value, f"{name}{key}.")


def main() -> None:
    shipped, keys = shipped_keys(), configuration_keys()
    nemo = {row["key"] for row in yaml.safe_load((ROOT / "docs" / "nemo_rl.yaml").read_text(encoding="utf-8"))}
    for key, field in keys:
        pattern = re.compile(re.escape(key).replace(r"\*", r"[^.]+"))
        files = max((count for written, count in shipped.items() if pattern.fullmatch(written)), default=0)
        print(f"{files:3d} {'NeMo-RL' if key in nemo else '       '} {key} {default_of(field, required=False)}")
    print(f"{len(keys)} keys")


if __name__ == "__main__":
    main()
