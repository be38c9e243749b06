"""The channel suite over NCCL; needs two GPUs and cupy. A dead peer shows only by the deadline."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from tests.channel_cases import Kind
from tests.channel_suite import ChannelSuite

pytest.importorskip("cupy", reason="needs cupy (dagrl[cu13] or dagrl[cu12])")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
class TestNccl(ChannelSuite):
    kind: ClassVar[Kind] = "nccl"
    ranks: ClassVar[int] = 2
    notices_death: ClassVar[bool] = False
