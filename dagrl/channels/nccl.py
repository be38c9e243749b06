"""Channel over NCCL: GPU memory, NVLink and RDMA, through `cupy`'s communicator.

cupy's communicator is independent of torch's process groups, of which each side already has its own default. Messages run
on a stream of the channel: they start after what the caller's current stream has been given so far, and a wait makes the
current stream wait for them. Only `synchronize` waits on the host, with the deadline. What is recorded becomes a CUDA graph.
"""

from __future__ import annotations

import ast
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from dagrl.channels.agreement import Agreement
from dagrl.channels.base import ChannelSpec, cannot_join, check_message, open_store
from dagrl.deadline import within
from dagrl.errors import ChannelError, MissingDependencyError

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]

logger = logging.getLogger(__name__)

_SPIN_S = 0.2  # a wait this long is polled without a pause: refits inside a host take milliseconds
_POLL_S = 50e-6
_ABORT_S = 5.0  # for NCCL to end a communicator that was aborted
_POSTING_S = 0.5  # for messages that are being posted: who takes longer waits for a peer, and only the abort ends that


def nccl_environment() -> dict[str, str]:
    """Variables of a process that opens such a channel, to be set before NCCL first records anything in it.

    Otherwise NCCL registers the memory of recorded messages with peers, which waits for them on the host, and they go on
    writing to it after it was given back and other memory was taken at its address.
    """
    return {"NCCL_GRAPH_REGISTER": os.environ.get("NCCL_GRAPH_REGISTER", "0")}


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

        os.environ.update(nccl_environment())
        self.spec = spec
        self._nccl = nccl
        self._device = torch.cuda.current_device()
        # Of high priority: its kernels are few and need whole multiprocessors, which others shall not take first.
        self._stream = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()  # over what stands: the communicator, and why it is broken
        self._posting = threading.Lock()  # held while messages are posted
        self._reason: str | None = None
        self._communicator: Any = None
        self._aborting: threading.Thread | None = None
        self._graphs_lock = threading.RLock()  # held while a graph is launched, or all are let go
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._recording = False
        store = open_store(spec)
        self._agreement = Agreement(store, spec)
        try:
            self._within_deadline(lambda: self._connect(store))
        except BaseException:
            self._agreement.close()  # nothing stays open of an end that nobody has
            raise
        self._host_until: float | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="nccl-watch", daemon=True).start()

    def _connect(self, store: Store) -> None:
        """Join the communicator; blocks until all ranks do, hence called in a thread of its own."""
        import torch

        torch.cuda.set_device(self._device)
        if self.spec.rank == 0:
            store.set("nccl/id", repr(self._nccl.get_unique_id()))  # bytes; in cupy before 14 a tuple of integers
        unique_id = ast.literal_eval(store.get("nccl/id").decode())
        self._communicator = self._nccl.NcclCommunicator(self.spec.size, unique_id, self.spec.rank)

    def _within_deadline(self, connect: Callable[[], None]) -> None:
        try:
            within(self.spec.timeout_s, connect, "nccl-connect")
        except TimeoutError as error:
            raise cannot_join(self.spec, TimeoutError("some rank did not come")) from error
        except Exception as error:
            raise cannot_join(self.spec, error) from error

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """See `Channel.guarded`: NCCL and CUDA may wait for a peer on the host.

        The first message to a peer waits until the peer posts its side too, and a launch waits for what was launched before
        when there is no room for more.
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
                self.abort(f"a peer did not take part within {self.spec.timeout_s} s")

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
            peers = sorted({peer for _, peer in (*sends, *receives)})
            raise self._broken(f"messages with rank {', '.join(map(str, peers))} failed: {error}") from error
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(self._stream)
        if not torch.cuda.is_current_stream_capturing():  # recorded work uses memory that stays
            for tensor, _ in (*sends, *receives):
                tensor.record_stream(self._stream)
        return [NcclPending(done)] * (len(sends) + len(receives))

    def _post(self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]) -> None:
        nccl, stream, communicator = self._nccl, self._stream.cuda_stream, self._communicator
        with self.guarded(), self._posting:
            self._check_usable()  # from here on an abort lets this end first
            nccl.groupStart()
            try:
                for tensor, peer in sends:
                    communicator.send(tensor.data_ptr(), tensor.nbytes, nccl.NCCL_UINT8, peer, stream)
                for tensor, peer in receives:
                    communicator.recv(tensor.data_ptr(), tensor.nbytes, nccl.NCCL_UINT8, peer, stream)
            finally:
                nccl.groupEnd()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture `work` in a CUDA graph, which one launch replays on the current stream."""
        import torch

        self._check_usable()
        graph = torch.cuda.CUDAGraph()
        try:
            with self.guarded():
                self._capture(graph, work)
            with self._graphs_lock:
                self._check_usable()  # an abort let go of the graphs that it knew
                self._graphs.add(graph)
        except BaseException:
            graph.reset()  # at once: the error's traceback refers to it, and NCCL's abort waits for its end
            raise
        return lambda: self._launch(graph)

    def _capture(self, graph: torch.cuda.CUDAGraph, work: Callable[[], None]) -> None:
        import torch

        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        self._recording = True
        try:
            with torch.cuda.stream(stream):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    work()
                except BaseException:
                    with suppress(RuntimeError):  # it says that work is not joined, which is not why
                        graph.capture_end()
                    raise
                graph.capture_end()
        finally:
            self._recording = False

    def _launch(self, graph: torch.cuda.CUDAGraph) -> None:
        with self._graphs_lock, self.guarded():
            self._check_usable()
            graph.replay()

    def agree(self, refusal: str = "", *, wait: bool = True) -> None:
        """See `Channel.agree`."""
        self._check_usable()
        self._agreement.reach(self._check_usable, refusal, wait=wait)

    def release(self) -> None:
        """Nothing is kept."""

    def synchronize(self) -> None:
        """Wait on the host for the channel's stream and the current one; raises ChannelError when the deadline passes."""
        import torch

        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream()
        current.wait_stream(self._stream)
        done.record(current)
        self._wait_for(done)
        self._check_usable()

    def _wait_for(self, done: torch.cuda.Event) -> None:
        """Wait on the host, with the deadline; raises ChannelError."""
        start = time.monotonic()
        while not done.query():  # type: ignore[no-untyped-call]
            self._check_usable()
            waited = time.monotonic() - start
            if waited > self.spec.timeout_s:
                raise self._broken(f"messages did not end within {self.spec.timeout_s} s")
            time.sleep(0 if waited < _SPIN_S else _POLL_S)

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
        """Break the channel from any thread; kernels that wait for a peer end.

        NCCL tells them at once, and then waits for graphs that refer to the communicator: hence in a thread of its own.
        """
        with self._lock:
            if self._reason is not None or self._communicator is None:
                return
            self._reason = reason
            self._aborting = threading.Thread(target=self._end, args=(self._communicator,), name="nccl-abort", daemon=True)
            self._aborting.start()
        self._agreement.abort(reason)
        if not self._recording:  # else `record` lets go of its graph, and `close` of the others
            self._free_graphs()
            self._aborting.join(_ABORT_S)

    def _end(self, communicator: Any) -> None:
        """Abort a communicator, which frees it: not under a thread that posts, unless that waits in NCCL for a peer."""
        if self._posting.acquire(timeout=_POSTING_S):
            self._posting.release()  # who comes now finds the channel broken
        communicator.abort()

    def _free_graphs(self) -> None:
        """Graphs refer to the communicator, whose end waits for theirs (NCCL's `commDestroySync`)."""
        if not self._graphs_lock.acquire(timeout=_ABORT_S):
            logger.warning("%s: a launch of recorded messages did not return within %s s", self.spec, _ABORT_S)
            return
        try:
            for graph in list(self._graphs):
                graph.reset()
            self._graphs.clear()
        finally:
            self._graphs_lock.release()

    def close(self) -> None:
        """Destroy the communicator; where messages do not end within the deadline, abort it."""
        import torch

        self._closed.set()
        if self._communicator is not None and self._reason is None:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
            try:
                self._wait_for(done)
            except ChannelError as error:
                logger.warning("closing: %s", error)
        self._free_graphs()
        with self._lock:
            if self._aborting is not None:
                self._aborting.join(_ABORT_S)
                if self._aborting.is_alive():
                    logger.warning("%s: NCCL did not end the communicator within %s s", self.spec, _ABORT_S)
            elif self._communicator is not None:
                self._communicator.destroy()
            self._communicator = None
            self._agreement.close()


def _import_nccl() -> Any:
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise MissingDependencyError(
            f"an NCCL channel needs cupy ({error}); install dagrl[cu13] or dagrl[cu12], or use a gloo channel"
        ) from error
    return nccl
