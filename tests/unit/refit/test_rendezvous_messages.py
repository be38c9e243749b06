"""Messages of processes that meet: plans arrive as they were, anything else is an error and runs nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from dagrl.channels import ChannelSpec
from dagrl.errors import ChannelError, RefitPlanError, RunError
from dagrl.refit import WeightSlice, plan_refit
from dagrl.refit.rendezvous import read_message, write_message

HELD = WeightSlice("w", ((0, 6), (0, 4)), "local", ((0, 6), (0, 4)))
PLAN = plan_refit([[HELD]], [[HELD]], dtype="float32").for_rank(0)
SPEC = ChannelSpec("gloo", "127.0.0.1:1", 0, 2)
MESSAGE = write_message((PLAN, SPEC))


class Runs:
    """A pickle that makes a directory when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_plans_slices_and_errors_arrive() -> None:
    assert read_message(MESSAGE, "train rank 0") == (PLAN, SPEC)
    assert read_message(write_message(((HELD,), "host", "")), "train rank 0") == ((HELD,), "host", "")
    error = read_message(write_message(RefitPlanError("no plan")), "train rank 0")
    assert isinstance(error, RefitPlanError) and str(error) == "no plan"
    error = read_message(write_message(KeyError("x")), "train rank 0")
    assert isinstance(error, RunError) and "KeyError" in str(error)


def test_a_message_runs_nothing(tmp_path: Path) -> None:
    with pytest.raises(ChannelError, match=r"train rank 3 is not one of dagrl .* it names posix\.mkdir"):
        read_message(write_message((HELD, Runs(tmp_path / "made"))), "train rank 3")
    assert not (tmp_path / "made").exists()


@given(data=st.data())
def test_a_damaged_message_is_an_error(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(MESSAGE) - 1))
    cut = MESSAGE[:at]
    flipped = MESSAGE[:at] + bytes([MESSAGE[at] ^ data.draw(st.integers(1, 255))]) + MESSAGE[at + 1 :]
    for message in (cut, flipped):
        with pytest.raises(ChannelError, match="its checksum differs"):
            read_message(message, "train rank 0")
