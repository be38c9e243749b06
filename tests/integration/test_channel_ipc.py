"""The channel suite between processes of one host, over shared memory."""

from __future__ import annotations

from typing import ClassVar

from tests import channel_cases as cases
from tests.channel_cases import Kind, run_case
from tests.channel_suite import ChannelSuite


class TestIpc(ChannelSuite):
    kind: ClassVar[Kind] = "ipc"
    ranks: ClassVar[int] = 2

    def test_mailboxes_are_given_back_and_never_under_a_peer_that_maps_them(self) -> None:
        """CUDA forbids to free memory that another process maps; host memory shows who does."""
        for result in run_case(cases.mailboxes, "ipc", 2):
            assert isinstance(result, tuple), result
            torn, before, after = result
            assert torn == [] and before == after, result
