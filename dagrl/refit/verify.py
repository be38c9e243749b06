"""Proof that what was sent is what is held: checksums of every part, or all bytes once more.

A checksum is two sums modulo 2**64 over the part's bytes taken as whole numbers: a plain one, and one weighted by position,
so that neither a changed byte nor two exchanged rows go unseen. They are computed by the sender over what it packed, and by
the receiver over what its live tensors hold after unpacking (over what it received, where a cast changes the bytes).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

from dagrl.errors import RefitPlanError, RunError
from dagrl.refit.moves import Move

if TYPE_CHECKING:
    import torch

    from dagrl.refit.pack import BucketMemory

Verify = Literal["off", "checksum", "bitwise"]
_WORD = 8
_COLUMNS = 1024
_WEIGHT = 0x9E3779B1  # odd, so that it loses no bit: tells columns from rows


def check_mode(mode: str) -> None:
    """Raise RefitPlanError for a mode that there is not."""
    if mode not in get_args(Verify):
        raise RefitPlanError(f"refit.verify is {mode!r}; choose one of {', '.join(get_args(Verify))}")


def prepare_checksums(memory: BucketMemory) -> None:
    """Upload the tables of `checksums`, and of what `repack` copies for them, to the GPU of a bucket that is bound."""
    if memory.side == "target" and memory.exact:
        memory.prepare("source")
    parts = memory.bytes_of_moves(memory.messages)
    if all(part.is_cuda and part.data_ptr() % _WORD == 0 for part in parts):
        from dagrl.refit.checksum_kernel import ChecksumTable

        memory.checksums = ChecksumTable(parts, _COLUMNS, _WEIGHT)


def checksums(memory: BucketMemory) -> torch.Tensor:
    """`[moves, 2]` int64: the two sums of each move of the bucket; with a table by one launch, into one tensor."""
    import torch

    if memory.checksums is not None:
        return memory.checksums.launch()
    return torch.stack([checksum(part) for part in memory.bytes_of_moves(memory.messages)])


def checksum(raw: torch.Tensor) -> torch.Tensor:
    """`[2]` int64 of a vector of bytes, computed without a copy of it where it is aligned.

    Words of eight bytes: backends add int64 without converting it, on CPUs more than ten times as fast as smaller words.
    """
    import torch

    if raw.data_ptr() % _WORD:
        raw = raw.clone()
    whole = len(raw) // _WORD
    words = raw[: whole * _WORD].view(torch.int64)
    rows = whole // _COLUMNS * _COLUMNS
    sums = torch.zeros(2, dtype=torch.int64, device=raw.device)
    for first, part, width in ((0, words[:rows], _COLUMNS), (rows, words[rows:], whole - rows)):
        if len(part):
            sums += _sums(part.view(-1, width), first)
    if len(raw) % _WORD:
        last = raw.new_zeros(_WORD)
        last[: len(raw) % _WORD] = raw[whole * _WORD :]
        sums += _sums(last.view(torch.int64).view(1, 1), whole)
    return sums


def _sums(rows: torch.Tensor, first: int) -> torch.Tensor:
    """Plain sum, and sum weighted by the position of row and column: odd weights lose no bit of a word."""
    import torch

    of_rows = rows.sum(1)
    of_columns = rows.sum(0)
    weighted = (of_rows * _weights(len(of_rows), first, rows.device)).sum() + (
        of_columns * _weights(len(of_columns), 0, rows.device)
    ).sum() * _WEIGHT
    return torch.stack([of_rows.sum(), weighted])


def _weights(count: int, first: int, device: torch.device) -> torch.Tensor:
    import torch

    return torch.arange(first, first + count, dtype=torch.int64, device=device) * 2 + 1


def compare_checksums(moves: Sequence[Move], sent: torch.Tensor, held: torch.Tensor, peer: int, version: int) -> None:
    """Raise RunError naming the parts whose sums differ; `[moves, 2]` each."""
    wrong = (sent != held).any(1).nonzero().flatten().tolist()
    if wrong:
        raise differs([moves[index] for index in wrong], peer, version)


def differs(moves: Sequence[Move], peer: int, version: int) -> RunError:
    """The error for parts that are not what was sent."""
    first = moves[0]
    more = f" and {len(moves) - 1} more parts" if len(moves) > 1 else ""
    return RunError(
        f"refit to version {version}: parameter {first.name!r} {first.box} in tensor {first.target!r} is not what rank "
        f"{peer} sent{more}; the weights must not be used: replay a whole refit, and look for faulty memory or links if it "
        "fails again"
    )
