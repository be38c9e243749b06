"""The channel suite between two processes that share one GPU, over CUDA IPC; needs cupy."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from tests.channel_cases import Kind
from tests.channel_suite import ChannelSuite

pytest.importorskip("cupy", reason="needs cupy (dagrl[cu13] or dagrl[cu12])")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestIpc(ChannelSuite):
    kind: ClassVar[Kind] = "ipc on a GPU"
    ranks: ClassVar[int] = 2
