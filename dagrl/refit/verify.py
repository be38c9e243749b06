"""Proof that what was sent is what is held: checksums of every part, or all bytes once more.

A checksum is two sums modulo 2**64 over the part's bytes taken as whole numbers: a plain one, and one weighted by position,
so that neither a changed byte nor two exchanged rows go unseen. Of the highest bits, which are signs, a sum knows little
more than whether an odd number of them is set; the weighted one counts each number's upper half as a lower one too. The
sender computes them over its live tensors and the receiver over its own after unpacking, each where they lie: nothing that
packs, carries or unpacks stands between a tensor and its sum. Where the two differ by intent, the sums are of the message:
the sender's of what it quantized, the receiver's of what came where it casts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

from dagrl.channels.base import as_bytes
from dagrl.errors import RefitPlanError, RunError
from dagrl.refit.checksum_rows import WORD, Piece
from dagrl.refit.moves import Move

if TYPE_CHECKING:
    import torch

    from dagrl.refit.pack import BucketMemory

Verify = Literal["off", "checksum", "bitwise"]
_COLUMNS = 1024
_WEIGHT = 0x9E3779B1  # odd, so that it loses no bit: tells columns from rows
_UPPER = 5  # how often an upper half counts as a lower one
_SLAB = 512  # rows that are summed at once: 4 MiB


def check_mode(mode: str) -> None:
    """Raise RefitPlanError for a mode that there is not."""
    if mode not in get_args(Verify):
        raise RefitPlanError(f"refit.verify is {mode!r}; choose one of {', '.join(get_args(Verify))}")


def prepare_checksums(memory: BucketMemory) -> None:
    """Upload the table of `checksums` to the GPU of a bucket that is bound."""
    moves = memory.summed()
    if moves[0][0][1].is_cuda:
        from dagrl.refit.checksum_kernel import ChecksumTable

        memory.checksums = ChecksumTable(moves, _COLUMNS, _WEIGHT, _UPPER, memory.alone)


def checksums(memory: BucketMemory) -> torch.Tensor:
    """`[moves, 2]` int64: the two sums of each move of the bucket; on a GPU by one launch, into one tensor."""
    import torch

    if memory.checksums is not None:
        return memory.checksums.launch()
    return torch.stack([checksum(in_one_piece(pieces)) for pieces in memory.summed()])


def in_one_piece(pieces: Sequence[Piece]) -> torch.Tensor:
    """The bytes of a move: itself where it is contiguous, else a copy, with zeros between its pieces."""
    import torch

    (_, view), *others = pieces
    if not others:
        return as_bytes(view.contiguous())
    offset, last = pieces[-1]
    whole = torch.zeros(offset + last.nbytes, dtype=torch.uint8, device=view.device)
    for at, one in pieces:
        whole[at : at + one.nbytes] = as_bytes(one.contiguous())
    return whole


def checksum(raw: torch.Tensor) -> torch.Tensor:
    """`[2]` int64 of a vector of bytes, computed without a copy of all of it where it is aligned.

    Words of eight bytes, the last filled up with zeros, in rows of `_COLUMNS`: backends add int64 without converting it, on
    CPUs more than ten times as fast as smaller words.
    """
    import torch

    if raw.data_ptr() % WORD:
        raw = raw.clone()
    square = len(raw) // (WORD * _COLUMNS)  # whole rows
    rest = raw[square * WORD * _COLUMNS :]
    if len(rest) % WORD:
        rest = torch.cat([rest, rest.new_zeros(-len(rest) % WORD)])
    sums = torch.zeros(2, dtype=torch.int64, device=raw.device)
    rows = raw[: square * WORD * _COLUMNS].view(-1, WORD * _COLUMNS)
    slabs = [(first, rows[first : first + _SLAB]) for first in range(0, square, _SLAB)]
    for first, part in (*slabs, (square, rest.view(1, -1))):
        if part.numel():
            sums += _sums(part.view(torch.int64), first)
    return sums


def _sums(rows: torch.Tensor, first: int) -> torch.Tensor:
    """Plain sum, and sum weighted by the position of row (they count from `first`) and column."""
    import torch

    words = (rows >> 32).mul_(_UPPER).add_(rows)
    of_rows, of_columns = words.sum(1), words.sum(0)
    weighted = (of_rows * _weights(len(of_rows), first, rows.device)).sum() + (
        of_columns * _weights(len(of_columns), 0, rows.device)
    ).sum() * _WEIGHT
    return torch.stack([rows.sum(), weighted])


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
