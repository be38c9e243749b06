"""A checkpoint that is cut or flipped at any byte of any file."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random


@dataclass(frozen=True)
class Damage:
    """What was done to the newest checkpoint. `harmless`: the file means the same, as spaces of JSON may be other."""

    kind: str
    step: int
    text: str
    harmless: bool


@contextmanager
def damaged(checkpoints: Path, random: Random) -> Iterator[Damage | None]:
    """Damages one byte of the newest checkpoint for the block, or cuts a file there.

    None if there is no checkpoint, or one that is newer and may be whole, without its name: a resumed run would take that.
    """
    found = sorted(checkpoints.glob("step_*"))
    if not found or found[-1].suffix:
        yield None
        return
    newest = found[-1]
    path = random.choice(sorted(path for path in newest.rglob("*") if path.is_file()))
    whole = path.read_bytes()
    at = random.randrange(len(whole))
    kind = random.choice(("cut", "flipped"))
    content = whole[:at] if kind == "cut" else whole[:at] + bytes([whole[at] ^ random.randrange(1, 256)]) + whole[at + 1 :]
    path.write_bytes(content)
    harmless = path.name == "manifest.json" and _same(whole, content)
    try:
        yield Damage(kind, int(newest.name[5:]), f"{path.relative_to(newest)} at byte {at} of {len(whole)}", harmless)
    finally:
        if newest.exists():  # a run that took the damage for harmless may have replaced it
            path.write_bytes(whole)


def _same(one: bytes, other: bytes) -> bool:
    try:
        return bool(json.loads(one) == json.loads(other))
    except (ValueError, RecursionError):
        return False
