"""Channel over NCCL: GPU memory, NVLink and RDMA, through `cupy`'s communicator.

cupy's communicator is independent of torch's process groups, of which each side already has its own default. Messages run
on a stream of the channel: they start after what the caller's current stream has been given so far, and a wait makes the
current stream wait for them. Only `synchronize` waits on the host, with the deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dagrl.channels.base import ChannelSpec, cannot_join, check_message, open_store
from dagrl.errors import ChannelError, MissingDependencyError

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]

_POLL_S = 50e-6


class NcclPending:
    """Messages on their way; all of one group end together."""

    def __init__(self, done: torch.cuda.Event) -> None:
        self._done = done

    def wait(self) -> None:
        """Make the current stream wait for the messages."""
        import torch

        torch.cuda.current_stream().wait_event(self._done)


class NcclChannel:
    """One rank's end of an NCCL channel, on the current CUDA device; see `dagrl.channels.base.Channel`."""

    def __init__(self, spec: ChannelSpec) -> None:
        nccl = _import_nccl()
        import torch

        self.spec = spec
        self._nccl = nccl
        self._device = torch.cuda.current_device()
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._communicator: Any = None
        self._store: Store | None = open_store(spec)
        store = self._store
        self._within_deadline(lambda: self._connect(store))

    def _connect(self, store: Store) -> None:
        """Join the communicator; blocks until all ranks do, hence called in a thread of its own."""
        import torch

        torch.cuda.set_device(self._device)
        if self.spec.rank == 0:
            store.set("nccl/id", _encode(self._nccl.get_unique_id()))
        unique_id = _decode(store.get("nccl/id"))
        self._communicator = self._nccl.NcclCommunicator(self.spec.size, unique_id, self.spec.rank)

    def _within_deadline(self, connect: Callable[[], None]) -> None:
        failures: list[Exception] = []

        def attempt() -> None:
            try:
                connect()
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=attempt, name="nccl-connect", daemon=True)
        thread.start()
        thread.join(self.spec.timeout_s)
        if failures:
            raise cannot_join(self.spec, failures[0]) from failures[0]
        if self._communicator is None:
            raise cannot_join(self.spec, TimeoutError("some rank did not come"))

    def send(self, tensor: torch.Tensor, peer: int) -> NcclPending:
        """Send `tensor`, which must not change before the wait."""
        return self.exchange([(tensor, peer)], [])[0]

    def receive(self, tensor: torch.Tensor, peer: int) -> NcclPending:
        """Receive into `tensor`."""
        return self.exchange([], [(tensor, peer)])[0]

    def exchange(
        self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
    ) -> list[NcclPending]:
        """Post several messages as one NCCL group."""
        import torch

        for tensor, peer in (*sends, *receives):
            check_message(self.spec, tensor, peer, "cuda")
        self._check_usable()
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            self._post(sends, receives)
        except self._nccl.NcclError as error:
            raise self._broken(f"posting {len(sends)} sends and {len(receives)} receives failed: {error}") from error
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(self._stream)
        for tensor, _ in (*sends, *receives):
            tensor.record_stream(self._stream)
        return [NcclPending(done)] * (len(sends) + len(receives))

    def _post(self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]) -> None:
        nccl, stream = self._nccl, self._stream.cuda_stream
        nccl.groupStart()
        try:
            for tensor, peer in sends:
                self._communicator.send(tensor.data_ptr(), tensor.nbytes, nccl.NCCL_UINT8, peer, stream)
            for tensor, peer in receives:
                self._communicator.recv(tensor.data_ptr(), tensor.nbytes, nccl.NCCL_UINT8, peer, stream)
        finally:
            nccl.groupEnd()

    def synchronize(self) -> None:
        """Wait on the host for the channel's stream and the current one; raises ChannelError when the deadline passes."""
        import torch

        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream()
        current.wait_stream(self._stream)
        done.record(current)
        deadline = time.monotonic() + self.spec.timeout_s
        while not done.query():  # type: ignore[no-untyped-call]
            self._check_usable()
            if time.monotonic() > deadline:
                raise self._broken(f"messages did not end within {self.spec.timeout_s} s")
            time.sleep(_POLL_S)
        self._check_usable()

    def _check_usable(self) -> None:
        communicator = self._communicator
        if communicator is None or self._reason is not None:
            raise ChannelError(f"{self._name()} is closed or broken: {self._reason}; open a new channel")
        try:
            communicator.check_async_error()
        except self._nccl.NcclError as error:
            raise self._broken(f"a peer failed: {error}") from error

    def _broken(self, reason: str) -> ChannelError:
        self.abort(reason)
        return ChannelError(f"{self._name()}: {reason}; open a new channel")

    def _name(self) -> str:
        return f"nccl channel rank {self.spec.rank} of {self.spec.size} ({self.spec.address})"

    def abort(self, reason: str) -> None:
        """Break the channel from any thread; kernels that wait for a peer end."""
        with self._lock:
            if self._reason is None and self._communicator is not None:
                self._reason = reason
                self._communicator.abort()

    def close(self) -> None:
        """Destroy the communicator."""
        with self._lock:
            if self._communicator is not None and self._reason is None:
                self._stream.synchronize()
                self._communicator.destroy()
            self._communicator = None
            self._store = None


def _encode(unique_id: Sequence[int]) -> str:
    """cupy's unique id (128 signed bytes) as text."""
    return ",".join(str(byte) for byte in unique_id)


def _decode(text: bytes) -> tuple[int, ...]:
    return tuple(int(byte) for byte in text.decode().split(","))


def _import_nccl() -> Any:
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise MissingDependencyError(
            f"an NCCL channel needs cupy ({error}); install dagrl[cu13] or dagrl[cu12], or use a gloo channel"
        ) from error
    return nccl
