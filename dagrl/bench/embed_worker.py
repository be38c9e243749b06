"""The worker of `dagrl bench embed`: a verl worker whose methods return what they are given."""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def echo_class() -> type:
    """Returns the class. verl is imported here, because this file is read without it too."""
    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register

    class Echo(Worker):  # type: ignore[misc]
        """Every rank is a data-parallel rank of the mesh `train`."""

        def __init__(self) -> None:
            super().__init__()
            self._register_dispatch_collect_info("train", self.rank, True)

        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)  # type: ignore[untyped-decorator]
        def proto(self, data: Any) -> Any:
            return data

        @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("train"))  # type: ignore[untyped-decorator]
        def over_mesh(self, data: Any) -> Any:
            return data

    return Echo
