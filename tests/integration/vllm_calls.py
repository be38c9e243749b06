"""Functions that tests run on the worker inside a vLLM process; importable by name."""

import contextlib
import inspect
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dagrl.errors import RunError
from dagrl.refit.slices import WeightSlice, expand
from tests.integration.vllm_models import state_of
from tests.integration.vllm_ranks import SOCKETS


def tensors(worker: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in worker.weight_tensors().items()}


def write_weights(worker: Any, checkpoint: Path, version: int, scales: dict[str, float] | None = None) -> None:
    """Writes a checkpoint's values and KV-cache scales to the destination tensors, like a refit."""
    state = state_of(checkpoint) | {name: torch.tensor([scale]) for name, scale in (scales or {}).items()}
    with worker.writing_weights(version):
        write_slices(worker, state)


def write_slices(worker: Any, state: dict[str, torch.Tensor]) -> None:
    live = worker.weight_tensors()
    for piece in expand(worker.weight_slices()):
        source = state[piece.name][tuple(slice(*extent) for extent in piece.box)]
        target = live[piece.tensor][tuple(slice(*extent) for extent in piece.local)]
        target.copy_(source.reshape(target.shape))


def tear_weights(worker: Any, checkpoint: Path) -> None:
    """Runs an update that fails after writing and before the commit."""
    with contextlib.suppress(ConnectionError), worker.writing_weights(99):
        write_slices(worker, state_of(checkpoint))
        raise ConnectionError("the sender is gone")


def load_into_slot(worker: Any, directory: Path) -> None:
    """Fills the LoRA slot with vLLM's own code from an adapter in PEFT's format."""
    worker._llm.collective_rpc(_load_into_slot, args=(directory,))


def _load_into_slot(vllm_worker: Any, directory: Path) -> None:
    from vllm.lora.request import LoRARequest

    manager = vllm_worker.model_runner.lora_manager
    loaded = manager._load_adapter(LoRARequest("loaded", 7, str(directory)))
    layers = manager._adapter_manager
    layers._create_merged_loras_inplace(loaded)
    for name, layer in layers.modules.items():
        if lora := loaded.get_lora(name):
            layer.set_lora(0, lora.lora_a, lora.lora_b)


def warm_up(worker: Any, batch: Any) -> Any:
    from dagrl.runtime.worker import ReplayContext, replay_context

    with replay_context(ReplayContext("generate", 0, warmup=True)):
        return worker.generate(batch)


def weight_slices(worker: Any) -> list[WeightSlice]:
    return list(worker.weight_slices())


def shared_memory(worker: Any) -> list[str]:
    """Returns vLLM's /dev/shm segments that this process has mapped, or that its CPU communicator has named.

    Engines of other tests, which run at the same time, may have segments: theirs have other names.
    """
    folder = "/dev/shm/"  # noqa: S108
    with open("/proc/self/maps") as maps:
        mapped = {line.split(folder)[1].strip() for line in maps if folder in line}
    return sorted(name for name in os.listdir(folder) if name in mapped or name.startswith(os.environ["VLLM_DIST_IDENT"]))


def socket_files(worker: Any) -> list[str]:
    """Returns vLLM's socket files, which have their own directory in tests."""
    return sorted(os.listdir(os.environ[SOCKETS]))


def generate_then_abort(worker: Any, batch: Any, after_s: float) -> float:
    """Starts a quantum and aborts it from another thread. Returns the seconds until the error."""
    threading.Timer(after_s, worker.abort).start()
    started = time.monotonic()
    with contextlib.suppress(RuntimeError, RunError):
        worker.generate(batch)
        raise AssertionError("the quantum ended well without its peer")
    return time.monotonic() - started


def generate_apart(worker: Any, batch: Any, patience_s: float) -> str:
    """Returns the error of a quantum on which ranks disagree; `patience_s` replaces the collective deadline."""
    worker._engine._peers._timeout_s = patience_s
    try:
        worker.generate(batch)
    except (RuntimeError, RunError) as error:
        worker.abort()  # as the runtime does
        return str(error)
    raise AssertionError("the quantum ended well")


def world_store(worker: Any) -> str:
    """Returns the store class of the engine's process group, after creating another group from it."""
    import torch.distributed as dist

    dist.barrier(dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True))
    store = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return type(store).__name__


def first_computed(worker: Any) -> int:
    """Returns the first position that the engine computed of its only request. Those before were in the prefix cache."""
    (followed,) = worker._engine._recorder._followed.values()
    return int(min(start for start, _ in followed.pieces))


def nothing(worker: Any) -> None:
    """Does not join the collective."""


def memory_addresses(worker: Any) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in worker.weight_tensors().items()}


def lacking_argument(worker: Any) -> None:
    """Raises the error of a vLLM without one of our engine arguments."""
    from dagrl.workers.vllm import features

    features.engine_config({"model": "unused", "no_such_argument": 1})


def start_again(worker: Any, fails: str, first: str, second: str) -> tuple[str, bool, int, int]:
    """End the engine; set up at address `first`, where the function `fails` raises; then at `second`, where it does not.

    Returns the error, whether a process group was left, and the threads before and after.
    """
    import torch.distributed as dist

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("not today")

    worker.shutdown()
    before, error = _threads(), ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fails, fail)
        try:
            worker.setup(first)
        except RuntimeError as raised:
            error = f"{type(raised).__name__}: {raised}"
    grouped, after = dist.is_initialized(), _threads()
    worker.setup(second)
    return error, grouped, before, after


def sampling_warm_up(worker: Any, changes: dict[str, Any], address: str) -> tuple[Any, Any]:
    """Sets the worker up again with `changes` of its configuration.

    Returns how vLLM's warm-up for GPUs samples during that and after it: parameters, and whether each step has grammars.
    """
    from vllm.v1.worker.cpu_worker import CPUWorker

    start, seen = CPUWorker.compile_or_warm_up_model, []

    def record(vllm_worker: Any) -> Any:
        seen.append(_sampled_in_warm_up())
        return start(vllm_worker)

    worker.shutdown()
    worker.config = worker.config.model_copy(update=changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CPUWorker, "compile_or_warm_up_model", record)
        worker.setup(address)
    [during] = seen
    return during, _sampled_in_warm_up()


def _sampled_in_warm_up() -> tuple[dict[str, Any], list[bool]]:
    """Runs vLLM's warm-up over a double of its second model runner, which needs a GPU. Returns no default parameters."""
    from vllm import SamplingParams
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.worker import gpu_worker

    group = SimpleNamespace(kv_cache_spec=FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32))
    runner = SimpleNamespace(
        num_speculative_steps=0,
        decode_query_len=1,
        max_model_len=64,
        is_encoder_decoder=False,
        is_pooling_model=False,
        is_last_pp_rank=True,
        kv_cache_config=SimpleNamespace(kv_cache_groups=[group], num_blocks=64),
        model_state=None,
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=64),
        vllm_config=SimpleNamespace(is_mm_encoder_only=False, num_lookahead_tokens=0),
        adaptive_verification=None,
        rejection_sampler=None,
        kv_block_zeroer=None,
        kv_connector=SimpleNamespace(set_disabled=lambda disabled: None),
        model_config=SimpleNamespace(get_vocab_size=lambda: 64),
    )
    steps: list[Any] = []
    grammars: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.accelerator.synchronize", lambda: None)
        gpu_worker.warmup_kernels(runner, steps.append, lambda grammar: grammars.append(grammar is not None))
    used, default = steps[0].scheduled_new_reqs[0].sampling_params, SamplingParams()
    names = "temperature top_p top_k min_p frequency_penalty min_tokens logit_bias logprobs prompt_logprobs seed".split()
    return {name: getattr(used, name) for name in names if getattr(used, name) != getattr(default, name)}, grammars


def _threads() -> int:
    """Returns the number of threads of this process after ending threads have ended."""
    time.sleep(1.0)
    return len(os.listdir("/proc/self/task"))


@contextlib.contextmanager
def lengths_of_steps(worker: Any, slots_are_free: bool) -> Iterator[list[int]]:
    """Notes the lengths of the steps and bursts that begin while a request waits, perhaps though a slot is free."""
    scheduler, lengths = worker._llm.engine_core.engine_core.scheduler, list[int]()
    schedule = scheduler.schedule

    def counted(*args: Any) -> Any:
        most = scheduler.max_num_running_reqs if slots_are_free else sys.maxsize
        waits = scheduler.running and scheduler.waiting and len(scheduler.running) < most
        output = schedule(*args)
        if waits:
            lengths.append(worker._engine._bursts.taken)
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "schedule", counted)
        yield lengths


def generate_in_little_memory(worker: Any, batch: Any, blocks: int, bursts: bool) -> tuple[Any, int, list[int]]:
    """Runs a quantum with `blocks` free blocks of KV cache, with or without bursts.

    Returns its result, the number of preemptions, and the `lengths_of_steps`.
    """
    engine, scheduler = worker._engine, worker._llm.engine_core.engine_core.scheduler
    pool, preempt, preempted = scheduler.kv_cache_manager.block_pool, scheduler._preempt_request, list[Any]()

    def counted_preempt(request: Any, *args: Any, **options: Any) -> None:
        preempted.append(request)
        preempt(request, *args, **options)

    taken = pool.get_new_blocks(pool.get_num_free_blocks() - blocks)
    with pytest.MonkeyPatch.context() as patch, lengths_of_steps(worker, slots_are_free=True) as lengths:
        patch.setattr(scheduler, "_preempt_request", counted_preempt)
        patch.setattr(engine._bursts, "_steps", engine._bursts._steps if bursts else 1)
        made = worker.generate(batch)
    pool.free_blocks(taken)
    return made, len(preempted), lengths


def generate_with_more_requests_than_slots(worker: Any, batch: Any, few: float) -> tuple[Any, list[int]]:
    """Runs a quantum; a burst follows each step that admitted fewer new requests than this share of those that ran.

    Returns its result, and the `lengths_of_steps`.
    """
    with pytest.MonkeyPatch.context() as patch, lengths_of_steps(worker, slots_are_free=False) as lengths:
        patch.setattr("dagrl.workers.vllm.bursts.FEW", few)
        return worker.generate(batch), lengths


def replay_steps(worker: Any, replays: bool) -> int:
    """Sets whether later steps of bursts are replayed as graphs. Returns how many batch sizes have one by now."""
    bursts = worker._engine._bursts
    graphs = vars(bursts).setdefault("kept", bursts._graphs)
    bursts._graphs = graphs if replays else None
    return 0 if graphs is None else sum(size.after_and_before is not None for size in graphs._sizes.values())


def generate_with_hits(worker: Any, batch: Any) -> tuple[Any, list[int]]:
    """Runs a quantum. Returns its result, and how many tokens of each new request were in the prefix cache."""
    manager = worker._llm.engine_core.engine_core.scheduler.kv_cache_manager
    find, hits = manager.get_computed_blocks, list[int]()

    def counted(request: Any) -> Any:
        found = find(request)
        hits.append(found[1])
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "get_computed_blocks", counted)
        return worker.generate(batch), hits


def forget_blocks(worker: Any, cached: int, used: bool) -> tuple[bool, int, int]:
    """Resets a pool of 64 blocks, of which `cached` have two hashes each that two share, and one is in use if `used`.

    Returns whether it was done, how many hashes of blocks then find one, and how many blocks have one.
    """
    from vllm.v1.core.block_pool import BlockPool

    pool = BlockPool(64, True, 16)
    every, blocks = pool.blocks, pool.get_new_blocks(cached)
    names = [b"%d" % (number // 2) + bytes(4) for number in range(cached)]  # the last four bytes number a group
    for name, block in zip(names, blocks, strict=True):
        pool._insert_block_hash(name, block, 16)
        pool._insert_block_hash(b"second" + name, block, 32)
    pool.free_blocks(blocks[used:])
    assert sum(block.block_hash is not None for block in every) == cached
    done = pool.reset_prefix_cache()
    assert pool.blocks is every
    found = [pool.cached_block_hash_to_block.get_one_block(prefix + name) for name in names for prefix in (b"", b"second")]
    return done, sum(block is not None for block in found), sum(block.block_hash is not None for block in every)


def recompute(worker: Any) -> None:
    """Lets running requests compute all their tokens again, as a weight update in flight may."""
    worker._engine.set_version(1, recompute=True)


def signatures(names: Sequence[str]) -> list[dict[str, bool]]:
    """Returns the parameters of methods of vLLM's engine, and whether each has a default."""
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.llm_engine import LLMEngine

    methods = [getattr(EngineCore if name.endswith("_scheduler") else LLMEngine, name) for name in names]
    found = [inspect.signature(method).parameters for method in methods]
    return [{name: one.default is not one.empty for name, one in parameters.items()} for parameters in found]
