"""Verifies a refit: compares a checksum of every move.

A checksum is two sums modulo 2**64 over the bytes as 64-bit integers: a plain one, and one weighted by position. It detects
a changed byte as well as two swapped rows. A plain sum of the highest bits, the signs, shows little more than their parity,
so the weighted sum also counts each integer's upper half as a lower one.

The sender sums its live tensors and the receiver its own after unpacking, in place, so this verifies packing, sending and
unpacking. If the two tensors differ by intent, the sums are of the message: a sender that quantizes sums the FP8 bytes, a
receiver that casts sums what it received.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from dagrl.channels.base import as_bytes
from dagrl.errors import RunError
from dagrl.refit.kernels.rows import WORD, SummedView
from dagrl.refit.transfers import Move

if TYPE_CHECKING:
    from dagrl.refit.carry.pack import BucketMemory

_COLUMNS = 1024
_WEIGHT = 0x9E3779B1  # odd, so that it loses no bit; distinguishes columns from rows
_UPPER = 5  # the factor with which an upper half counts as a lower one
_SLAB = 512  # rows per sum: 4 MiB


def prepare_checksums(memory: BucketMemory) -> None:
    """Uploads the table of `checksums` to the GPU of a bound bucket."""
    moves = memory.summed()
    if moves[0][0][1].is_cuda:
        from dagrl.refit.kernels.checksum_kernel import ChecksumTable

        memory.checksums = ChecksumTable(moves, _COLUMNS, _WEIGHT, _UPPER, memory.alone)


def checksums(memory: BucketMemory) -> torch.Tensor:
    """Returns `[moves, 2]` int64: the two sums of each move. On a GPU it is one launch, always into the same tensor."""
    if memory.checksums is not None:
        return memory.checksums.launch()
    return torch.stack([checksum(contiguous_bytes(pieces)) for pieces in memory.summed()])


def contiguous_bytes(pieces: Sequence[SummedView]) -> torch.Tensor:
    """Returns the bytes of a move: a view if it is contiguous, otherwise a copy with zeros between its views."""
    (_, view), *others = pieces
    if not others:
        return as_bytes(view.contiguous())
    offset, last = pieces[-1]
    whole = torch.zeros(offset + last.nbytes, dtype=torch.uint8, device=view.device)
    for at, piece in pieces:
        whole[at : at + piece.nbytes] = as_bytes(piece.contiguous())
    return whole


def checksum(raw: torch.Tensor) -> torch.Tensor:
    """Returns the `[2]` int64 checksum of a vector of bytes, without copying it if it is aligned.

    Sums words of eight bytes in rows of `_COLUMNS`, the last padded with zeros. Backends add int64 without a conversion; on
    CPUs this is more than ten times as fast as with smaller words.
    """
    if raw.data_ptr() % WORD:
        raw = raw.clone()
    square = len(raw) // (WORD * _COLUMNS)  # full rows
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
    """Returns the plain sum, and the sum weighted by row (numbered from `first`) and column."""
    words = (rows >> 32).mul_(_UPPER).add_(rows)
    of_rows, of_columns = words.sum(1), words.sum(0)
    weighted = (of_rows * _weights(len(of_rows), first, rows.device)).sum() + (
        of_columns * _weights(len(of_columns), 0, rows.device)
    ).sum() * _WEIGHT
    return torch.stack([rows.sum(), weighted])


def _weights(count: int, first: int, device: torch.device) -> torch.Tensor:
    return torch.arange(first, first + count, dtype=torch.int64, device=device) * 2 + 1


def compare_checksums(moves: Sequence[Move], sent: torch.Tensor, own: torch.Tensor, peer: int, version: int) -> None:
    """Raises RunError if the sums, `[moves, 2]` each, differ; names the moves."""
    wrong = [moves[index] for index in (sent != own).any(1).nonzero().flatten().tolist()]
    if wrong:
        first, more = wrong[0], f", and {len(wrong) - 1} more parts" if len(wrong) > 1 else ""
        raise RunError(
            f"refit to version {version}: parameter {first.name!r} {first.box} in tensor {first.target!r} differs from what "
            f"rank {peer} sent{more}; replay the refit before using the weights, and check memory and links if it fails"
            " again"
        )
