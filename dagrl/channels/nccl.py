"""Channel over NCCL: GPU memory, NVLink and RDMA, through `cupy`'s communicator.

cupy's communicator is independent of torch's process groups; each side already has its own default group. Messages run on
a stream of the channel. They start after the work queued on the caller's current stream, and a wait makes the current
stream wait for them. Only `synchronize` waits on the host, with the deadline.
"""

import ast
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

from dagrl.channels.base import Channel, PendingMessage, check_message
from dagrl.channels.spec import ChannelSpec, cannot_join
from dagrl.errors import ChannelError, MissingDependencyError
from dagrl.runtime.deadline import within
from dagrl.runtime.edges.futex import let_others_run

logger = logging.getLogger(__name__)

_SPIN_S = 0.2  # poll this long without sleeping: refits inside a host take milliseconds
_POLL_S = 50e-6
_ABORT_S = 5.0  # for NCCL to end an aborted communicator
_DESTROY_S = 2.0  # for a communicator to be destroyed; NCCL also waits until the peers on this host destroy theirs
_POSTING_S = 0.5  # for a thread that posts messages: a slower one waits for a peer, which only the abort ends


class NcclChannel(Channel):
    """One rank's end of an NCCL channel, on the current CUDA device."""

    def __init__(self, spec: ChannelSpec) -> None:
        nccl = _import_nccl()
        self._nccl = nccl
        self._device = torch.cuda.current_device()
        # High priority: NCCL's few kernels need whole multiprocessors, which other kernels must not take first.
        self._stream = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()  # guards the communicator and the reason why it is broken
        self._posting = threading.Lock()  # held while messages are posted
        self._communicator: Any = None
        self._aborting: threading.Thread | None = None
        super().__init__(spec)
        try:
            self._within_deadline(self._connect)
        except BaseException:
            self._agreement.close()  # the caller gets no object to close
            raise
        self._host_until: float | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="nccl-watch", daemon=True).start()

    def _connect(self) -> None:
        """Joins the communicator. Blocks until all ranks do, so it runs on its own thread."""
        torch.cuda.set_device(self._device)
        store = self._agreement.store
        if self.spec.rank == 0:
            store.set("nccl/id", repr(self._nccl.get_unique_id()))  # bytes; before cupy 14 a tuple of integers
        unique_id = ast.literal_eval(store.get("nccl/id").decode())
        self._communicator = self._nccl.NcclCommunicator(self.spec.size, unique_id, self.spec.rank)

    def _within_deadline(self, connect: Callable[[], None]) -> None:
        try:
            within(self.spec.timeout_s, connect, "nccl-connect")
        except TimeoutError as error:
            raise cannot_join(self.spec, TimeoutError("some rank did not join")) from error
        except Exception as error:
            raise cannot_join(self.spec, error) from error

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """See `Channel.guarded`. NCCL and CUDA may wait for a peer on the host.

        The first message to a peer waits until the peer posts its side, and a launch waits when the launch queue is full.
        """
        outermost, self._host_until = self._host_until, self._host_until or time.monotonic() + self.spec.timeout_s
        try:
            yield
        finally:
            self._host_until = outermost

    def _watch(self) -> None:
        while not self._closed.wait(min(1.0, self.spec.timeout_s / 4)):
            until = self._host_until
            if until is not None and time.monotonic() > until:
                self.abort(f"a peer did not post its messages within {self.spec.timeout_s} s")

    def exchange(
        self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
    ) -> list[PendingMessage]:
        """Posts several messages as one NCCL group."""
        for tensor, peer in (*sends, *receives):
            check_message(self.spec, tensor, peer, "cuda")
        self._check_usable()
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            self._post(sends, receives)
        except self._nccl.NcclError as error:
            peers = sorted({peer for _, peer in (*sends, *receives)})
            raise self._broken(f"messages with rank {', '.join(map(str, peers))} failed: {error}") from error
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(self._stream)
        for tensor, _ in (*sends, *receives):
            tensor.record_stream(self._stream)
        return [PendingMessage(lambda: torch.cuda.current_stream().wait_event(done))] * (len(sends) + len(receives))

    def _post(self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]) -> None:
        nccl, stream, communicator = self._nccl, self._stream.cuda_stream, self._communicator
        with self.guarded(), self._posting:
            self._check_usable()  # from here on an abort waits for this block
            nccl.groupStart()
            try:
                for tensor, peer in sends:
                    communicator.send(tensor.data_ptr(), tensor.nbytes, nccl.NCCL_UINT8, peer, stream)
                for tensor, peer in receives:
                    communicator.recv(tensor.data_ptr(), tensor.nbytes, nccl.NCCL_UINT8, peer, stream)
            finally:
                nccl.groupEnd()

    def synchronize(self) -> None:
        """Waits on the host for the channel's stream and the current one. Raises ChannelError at the deadline."""
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream()
        current.wait_stream(self._stream)
        done.record(current)
        self._wait_for(done)
        self._check_usable()

    def _wait_for(self, done: torch.cuda.Event) -> None:
        """Waits on the host, at most until the deadline. Raises ChannelError."""
        start = time.monotonic()
        while not done.query():  # type: ignore[no-untyped-call]
            self._check_usable()
            waited = time.monotonic() - start
            if waited > self.spec.timeout_s:
                raise self._broken(f"messages did not finish within {self.spec.timeout_s} s")
            if waited < _SPIN_S:
                let_others_run()
            else:
                time.sleep(_POLL_S)

    def _check_usable(self) -> None:
        with self._lock:  # an abort frees the communicator
            if self._communicator is None or self._reason is not None:
                raise ChannelError(f"{self.spec} is closed or broken: {self._reason}; open a new channel")
            try:
                self._communicator.check_async_error()
                return
            except self._nccl.NcclError as error:
                failure = error
        raise self._broken(f"a peer failed: {failure}") from failure

    def _broken(self, found: str) -> ChannelError:
        self.abort(found)
        reason = found if self._reason == found else f"{found} ({self._reason})"
        return ChannelError(f"{self.spec}: {reason}; open a new channel")

    def abort(self, reason: str) -> None:
        """Breaks the channel, from any thread. Kernels that wait for a peer end; NCCL's abort then waits for them."""
        with self._lock:
            if self._reason is not None or self._communicator is None:
                return
            self._reason = reason
            self._aborting = threading.Thread(target=self._end, args=(self._communicator,), name="nccl-abort", daemon=True)
            self._aborting.start()
        self._agreement.abort(reason)
        self._aborting.join(_ABORT_S)

    def _end(self, communicator: Any) -> None:
        """Aborts and so frees a communicator, after a thread that posts has left it, unless that thread waits for a peer."""
        if self._posting.acquire(timeout=_POSTING_S):
            self._posting.release()  # from now on posting threads find the channel broken
        communicator.abort()

    def close(self) -> None:
        """Destroys the communicator; aborts it if messages do not finish within the deadline."""
        self._closed.set()
        if self._communicator is not None and self._reason is None:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
            try:
                self._wait_for(done)
            except ChannelError as error:
                logger.warning("closing: %s", error)
        with self._lock:
            if self._aborting is not None:
                self._aborting.join(_ABORT_S)
                if self._aborting.is_alive():
                    logger.warning("%s: NCCL did not end the communicator within %s s", self.spec, _ABORT_S)
            elif self._communicator is not None:
                # A peer that goes on holds it up: the thread ends when the peer closes its channel, or with this process.
                with suppress(TimeoutError):
                    within(_DESTROY_S, partial(self._destroy, self._communicator), "nccl-destroy")
            self._communicator = None
            self._agreement.close()

    def _destroy(self, communicator: Any) -> None:
        torch.cuda.set_device(self._device)
        communicator.destroy()


def _import_nccl() -> Any:
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise MissingDependencyError(f"an NCCL channel needs cupy ({error}); install dagrl[cu13] or dagrl[cu12]") from error
    return nccl
