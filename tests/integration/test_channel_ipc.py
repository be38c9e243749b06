"""The channel suite between processes of one host, over shared memory."""

from __future__ import annotations

from typing import ClassVar

from tests.channel_cases import Kind
from tests.channel_suite import ChannelSuite


class TestIpc(ChannelSuite):
    kind: ClassVar[Kind] = "ipc"
    ranks: ClassVar[int] = 2
