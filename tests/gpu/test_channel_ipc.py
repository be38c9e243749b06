"""The channel suite between two processes that share one GPU, over CUDA IPC; needs cupy."""

from typing import ClassVar

import pytest

from tests.channel_cases import Kind, mapped_refit, run_case
from tests.integration.test_channel_gloo import ChannelSuite

pytest.importorskip("cupy", reason="needs cupy (dagrl[cu13] or dagrl[cu12])")


class TestIpc(ChannelSuite):
    kind: ClassVar[Kind] = "ipc on a GPU"
    ranks: ClassVar[int] = 2

    def test_a_receiver_reads_the_senders_tensors(self) -> None:
        for rounds in run_case(mapped_refit, self.kind, 2):
            assert rounds[:-1] == [0] * 4 and rounds[-1] > 1, rounds
