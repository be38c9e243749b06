"""The channel suite over Gloo, with two to four processes, and refits over it."""

from __future__ import annotations

from typing import ClassVar

import pytest

from dagrl.channels import ChannelSpec, open_channel
from dagrl.errors import ChannelError
from dagrl.runtime.store import reserve_port
from tests import channel_cases as cases
from tests.channel_cases import Kind, run_case
from tests.channel_suite import ChannelSuite


class TestGloo(ChannelSuite):
    kind: ClassVar[Kind] = "gloo"
    ranks: ClassVar[int] = 4


def test_ranks_of_one_host_relay_what_is_sent_there_once() -> None:
    results = [result for result in run_case(cases.relayed, "gloo", 4) if isinstance(result, tuple)]
    assert len(results) == 4
    (sent, _, model), *receivers = results
    assert model <= sent < 1.05 * model  # alignment
    assert sum(passed_on for passed_on, _, _ in receivers) >= 2 * model
    assert all(received >= model for _, received, _ in receivers)


@pytest.mark.parametrize(
    ("address", "rank"), [("nowhere", 0), ("127.0.0.1:http", 0), ("127.0.0.1:1", 2), ("127.0.0.1:1", -1)]
)
def test_an_invalid_spec_is_rejected(address: str, rank: int) -> None:
    with pytest.raises(ChannelError):
        ChannelSpec("gloo", address, rank, 2)


def test_an_address_in_use_is_an_error() -> None:
    first = open_channel(ChannelSpec("gloo", f"127.0.0.1:{(port := reserve_port())}", 0, 1))
    with pytest.raises(ChannelError, match="the address must be free on the host of rank 0"):
        open_channel(ChannelSpec("gloo", f"127.0.0.1:{port}", 0, 1, timeout_s=2))
    first.close()
