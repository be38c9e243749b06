"""Encodes the bytes that changed between two versions of a message.

A message is cut into pieces of `PIECE` bytes. The packet of a piece has:

    counts      uint8 [pages]      how many bytes changed in each page of `PAGE` bytes
    places      uint8 [changed]    where in its page each changed byte is
    values      uint8 [changed]    its new value

A small optimizer step usually changes only the lower byte of a bfloat16. Encoding bytes then costs two bytes per changed
element, and works for every dtype. A page has 255 bytes, so that counts and places fit into one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PAGE = 255
WORD = 8  # bytes that are compared at once
PIECE = (PAGE * WORD) << 14
"""32 MiB: bounds the memory that comparing and applying need. Pages and words end where pieces end."""


def pieces(nbytes: int) -> list[tuple[int, int]]:
    """Returns the byte ranges of a message's pieces."""
    return [(start, min(start + PIECE, nbytes)) for start in range(0, nbytes, PIECE)]


def encode(new: torch.Tensor, old: torch.Tensor, most: int) -> list[torch.Tensor] | None:
    """Returns the packet of each piece of `new` (empty if nothing in it changed), or None if they exceed `most` bytes.

    Both are vectors of bytes. Afterwards `old` equals `new`; its content is undefined if there are too many changes. Waits
    for a GPU, as the number of changes decides the sizes.
    """
    packets: list[torch.Tensor] = []
    for start, stop in pieces(len(new)):
        packet = _encode_piece(new[start:stop], old[start:stop], most)
        if packet is None:
            return None
        most -= len(packet)
        packets.append(packet)
    return packets


def apply(packets: Sequence[torch.Tensor], message: torch.Tensor) -> None:
    """Writes the changes into the older version of a message. Does not wait for a GPU."""
    for packet, (start, stop) in zip(packets, pieces(len(message)), strict=True):
        if len(packet):
            _apply_piece(packet, message[start:stop])


def _encode_piece(new: torch.Tensor, old: torch.Tensor, most: int) -> torch.Tensor | None:
    import torch

    pages = _pages(new)
    positions = _changed(new, old, max(0, most - pages) // 2)
    if positions is None:
        return None
    if not len(positions):
        return new.new_empty(0)
    page, values = positions // PAGE, new[positions]
    old[positions] = values
    counts = torch.bincount(page, minlength=pages)
    return torch.cat([counts.to(torch.uint8), (positions - page * PAGE).to(torch.uint8), values])


def _changed(new: torch.Tensor, old: torch.Tensor, most: int) -> torch.Tensor | None:
    """Returns the positions of the bytes that differ, ascending; None if there are more than `most`."""
    import torch

    if new.data_ptr() % WORD:
        new = new.clone()
    if old.data_ptr() % WORD:
        old = old.clone()
    end = len(new) // WORD * WORD
    mine, theirs = new[:end].view(torch.int64), old[:end].view(torch.int64)
    words = (mine != theirs).nonzero().flatten()
    tail = (new[end:] != old[end:]).nonzero().flatten() + end
    if len(words) + len(tail) > most:
        return None
    differ = mine[words].view(torch.uint8) != theirs[words].view(torch.uint8)
    cells = differ.nonzero().flatten()
    if len(cells) + len(tail) > most:
        return None
    return torch.cat([words[cells >> 3] * WORD + (cells & 7), tail])


def _apply_piece(packet: torch.Tensor, piece: torch.Tensor) -> None:
    import torch

    pages = _pages(piece)
    count = (len(packet) - pages) // 2
    starts = torch.arange(0, pages * PAGE, PAGE, device=packet.device)
    first = torch.repeat_interleave(starts, packet[:pages].long(), output_size=count)
    with torch.inference_mode():  # vLLM's parameters may be inference tensors
        piece[first + packet[pages : pages + count]] = packet[pages + count :]


def _pages(piece: torch.Tensor) -> int:
    return -(-len(piece) // PAGE)
