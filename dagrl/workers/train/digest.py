"""The digest of a tensor: its checksum, and numbers that say how much it changed. Imported only where torch is."""

import zlib

import torch
from torch import Tensor

SKETCH = 8  # numbers of a sketch


def digest(tensor: Tensor) -> list[float]:
    """Returns the CRC-32 of the tensor's bytes, its norm, the machine epsilon of its type, and its sketch.

    The sketch are sums of its elements with fixed signs that look random. So the distance of the sketches of two tensors is
    about the distance of the tensors, whichever elements differ.
    """
    plain = tensor.contiguous()
    data = plain.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    values = plain.reshape(-1).double()
    place = torch.arange(values.numel(), device=values.device)
    signed = values * (1 - 2 * ((place * 2654435761 >> 16) & 1))
    sums = torch.nn.functional.pad(signed, (0, -values.numel() % SKETCH)).view(-1, SKETCH).sum(0)
    epsilon = torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0
    return [float(zlib.crc32(data)), float(values.norm()), epsilon, *sums.tolist()]
