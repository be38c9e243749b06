"""Starts one vLLM engine rank in this process: rendezvous with its tensor-parallel peers, engine arguments, executor.

vLLM calls this SPMD mode `external_launcher`: every rank has a complete engine with its own scheduler and receives the same
requests in the same order (vllm/v1/executor/uniproc_executor.py). vLLM is imported inside functions, because drivers import
this package.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import os
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlparse

from dagrl.config import Config
from dagrl.config.plan import starts_together
from dagrl.errors import DeadlineError, MissingDependencyError
from dagrl.imports import UNUSED, brief_imports, gc_paused
from dagrl.machine import VISIBLE, device_index
from dagrl.runtime.process_groups import break_groups, reset_group_names
from dagrl.runtime.store import open_tcp_store, reserve_port
from dagrl.runtime.worker import WorkerContext
from dagrl.workers.vllm import features
from dagrl.workers.vllm.engine import warmup_params
from dagrl.workers.vllm.environment import OWN_ARGUMENTS, model_path, require_generation
from dagrl.workers.vllm.loader import LOAD_FORMAT, register_loader
from dagrl.workers.vllm.lora import lora_arguments
from dagrl.workers.vllm.quantization import quantization_arguments, quantizes

if TYPE_CHECKING:
    from vllm import LLMEngine

    from dagrl.workers.vllm.expert_recorder import ExpertRecorder

SCHEME = "dagrl"  # URL scheme of the init methods of `torch.distributed` that `make_rendezvous` returns
SOCKET = "ipc://"  # URL scheme of a socket file

MOST_CAPTURED = 1024
"""Tokens of the largest step with a CUDA graph. vLLM has 512, which a full engine exceeds in each step with a prompt."""

CAPTURE_STEPS = {8: 64, 16: 128, 32: 256, 64: 512, 128: MOST_CAPTURED}  # distance of captured sizes, and up to where


@dataclasses.dataclass(frozen=True)
class Rendezvous:
    """How the ranks of one engine meet: an init method of `torch.distributed`, and this process's ranks.

    A single-rank engine has its store in memory, because a file would remain when the process is killed.

    The end of `init_method` is unique to the run and, with tensor parallelism, to the rank. vLLM's CPU backend names shared
    memory after it. A segment left by a killed run would fail the next start ("create shm in SHMManager failed. errno: 17").
    Ranks with different segment names fall back to Gloo, which we want: its waits do not spin (2.3 times faster for two
    ranks on two busy cores) and end when a peer dies, and nothing remains in /dev/shm.
    """

    init_method: str
    rank: int
    local_rank: int


def make_rendezvous(context: WorkerContext, address: str) -> Rendezvous:
    """Agrees on a rendezvous with the other ranks of this shard at `address`, on the host of its first rank."""
    tp_rank = context.coordinates.tp
    _register_rendezvous()
    if context.layout.tp == 1:
        return Rendezvous(f"{SCHEME}://rank:{uuid.uuid4().hex}", 0, _local_rank(0))
    host, port = address.rsplit(":", 1)
    timeout = timedelta(seconds=context.collective_timeout_s)
    store = open_tcp_store(host, int(port), context.layout.tp, serves=tp_rank == 0, timeout=timeout)
    if tp_rank == 0:
        store.set("vllm", f"{SCHEME}://{host}:{reserve_port()}?run={uuid.uuid4().hex}")
    init_method = store.get("vllm").decode()
    store.set(f"met/{tp_rank}", "")
    if tp_rank == 0:  # this process hosts the store, which must live until all ranks have read
        try:
            store.wait([f"met/{rank}" for rank in range(context.layout.tp)])
        except RuntimeError as error:
            raise DeadlineError(
                f"not all of {context.layout.tp} generation workers of a shard met within {timeout.total_seconds():g} s "
                f"({error}); start all of them"
            ) from error
    return Rendezvous(f"{init_method}&member={tp_rank}", tp_rank, _local_rank(tp_rank))


@functools.cache
def _register_rendezvous() -> None:
    """Registers init methods `dagrl://` with torch, once per process: as `tcp://`, at one address alone or in memory."""
    from torch.distributed import HashStore, Store  # type: ignore[attr-defined]
    from torch.distributed.rendezvous import register_rendezvous_handler

    def rendezvous(url: str, timeout: timedelta, **options: object) -> Iterator[tuple[Store, int, int]]:
        address = urlparse(url)
        query = parse_qs(address.query)
        rank, size = (int(query[name][0]) for name in ("rank", "world_size"))
        if size == 1:
            yield HashStore(), rank, size
        else:
            assert address.hostname is not None and address.port is not None
            yield open_tcp_store(address.hostname, address.port, size, serves=rank == 0, timeout=timeout), rank, size

    register_rendezvous_handler(SCHEME, rendezvous)  # type: ignore[no-untyped-call]


def start_engine(
    config: Config, context: WorkerContext, rendezvous: Rendezvous, recorder: ExpertRecorder | None
) -> LLMEngine:
    """Starts an engine rank with loaded weights and an empty KV cache. Raises MissingDependencyError without vLLM.

    A `recorder` is attached to its model.
    """
    hf_config = read_hf_config(config)
    import_vllm(hf_config)
    if config.policy.deterministic:
        features.require_batch_invariance()
    from vllm import LLMEngine

    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    os.environ.update(RANK=str(rendezvous.rank), LOCAL_RANK=str(rendezvous.local_rank), WORLD_SIZE=str(context.layout.tp))
    register_loader(quantizes(config, hf_config))
    # vLLM caches compiled code that contains the GPU index and fails on another GPU. This makes the cache key differ.
    own = {"additional_config": {"device": rendezvous.local_rank, "records_experts": recorder is not None}}
    engine_config = features.engine_config(engine_arguments(config, context) | own)
    features.sample_by_our_kernels()
    features.reset_cached_blocks_alone()
    features.attend_decodes(engine_config)
    executor = _executor_class(rendezvous, recorder)
    # An agent's requests choose their own parameters, so its engines warm up all that vLLM has.
    own_sampling = config.environment.agent is not None
    warm_up = nullcontext() if own_sampling else features.warm_up_sampling(warmup_params(require_generation(config)))
    with warm_up, gc_paused():  # loading compiled code makes a million objects that stay
        engine = LLMEngine(engine_config, executor, log_stats=False, multiprocess_mode=False)
    _drop_message_queue()
    return engine


def end_engine(engine: LLMEngine | None) -> None:
    """Ends an engine, or cleans up after a failed start: process groups, their threads, memory."""
    import torch.distributed as dist

    if engine is not None:
        engine.engine_core.shutdown()
    elif "vllm.distributed.parallel_state" in sys.modules:
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory, model_parallel_is_initialized

        if model_parallel_is_initialized():
            _drop_message_queue()
        cleanup_dist_env_and_memory()
    if not dist.is_initialized():
        reset_group_names()


def _drop_message_queue() -> None:
    """Frees the shared memory and sockets with which vLLM's ranks broadcast objects. SPMD engines do not use them.

    A killed process would leave its memory in /dev/shm, and every process leaves its socket files, which all ranks have
    opened by now. `GroupCoordinator` falls back to its process group without a queue.
    """
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    addresses = () if group.mq_broadcaster is None else vars(group.mq_broadcaster.handle).values()
    for address in addresses:
        if isinstance(address, str) and address.startswith(SOCKET):
            Path(address.removeprefix(SOCKET)).unlink(missing_ok=True)
    group.mq_broadcaster = None


def break_collectives() -> None:
    """Aborts the collectives in which this rank and its peers wait for each other. Works from any thread; ends the engine.

    NCCL operations end without an error, and their results must not be used (see `QuantumEngine.abandon`). A communicator
    that the engine's CUDA graphs refer to ends with the process.
    """
    from vllm.distributed import get_tp_group

    coordinator = get_tp_group()
    communicator = getattr(coordinator.device_communicator, "pynccl_comm", None)
    own = []  # vLLM's communicator, in addition to torch's process groups
    if communicator is not None and communicator.available:
        own.append(functools.partial(communicator.nccl.ncclCommAbort, communicator.comm))
    break_groups((coordinator.cpu_group, coordinator.device_group), own)


def import_vllm(hf_config: Mapping[str, Any]) -> None:
    """Imports vLLM and the model's class.

    vLLM would start a process to inspect the class, which takes 10 s or more when cold. Raises MissingDependencyError
    without vLLM.
    """
    try:
        with brief_imports(*UNUSED):
            import vllm.v1.engine.llm_engine
            import vllm.v1.worker.gpu_worker  # which the engine imports by name
            from torch._inductor import config

            config.compile_threads = 1  # as vLLM's TORCHINDUCTOR_COMPILE_THREADS, which torch may have read before
            with features.without_torchvision():
                for architecture in hf_config.get("architectures") or ():
                    entry = vllm.ModelRegistry.models.get(architecture)
                    if entry is not None:
                        kind = entry.load_model_cls()
                        features.process_images_alone(kind)
                        vllm.ModelRegistry.register_model(architecture, kind)
            gc.freeze()
    except ImportError as error:
        raise MissingDependencyError(
            f"vLLM cannot be imported ({error}); install dagrl[vllm] on a GPU host, dagrl[cpu] on one without"
        ) from error


def engine_arguments(config: Config, context: WorkerContext) -> dict[str, Any]:
    """Returns vLLM's `EngineArgs` for this configuration."""
    import torch

    vllm = require_generation(config).vllm_cfg
    hf_config = read_hf_config(config)
    shows = config.data.images.enabled or _class_has(hf_config, "supports_multimodal")
    tokenizer = _tokenizer(config, shows)
    timeout = max(1, round(context.collective_timeout_s))
    arguments: dict[str, Any] = {
        "model": model_path(config),
        "tokenizer": tokenizer or model_path(config),
        "skip_tokenizer_init": tokenizer is None,
        "load_format": LOAD_FORMAT,
        **quantization_arguments(config, hf_config),
        **lora_arguments(config, hf_config),
        "seed": config.seed,  # equal on all ranks of a shard, which must sample the same tokens
        "max_model_len": vllm.max_model_len or config.policy.max_total_sequence_length,
        "max_num_seqs": vllm.max_num_seqs,
        "enforce_eager": vllm.enforce_eager,
        # Of no effect with a given KV cache, but this much must be free, next to what training may hold by now.
        "gpu_memory_utilization": 0.05 if starts_together(config) else vllm.gpu_memory_utilization,
        "kv_cache_memory_bytes": vllm.kv_cache_memory_bytes,
        "tensor_parallel_size": context.layout.tp,
        "enable_expert_parallel": context.layout.ep > 1,
        "distributed_executor_backend": "external_launcher",
        "logprobs_mode": "processed_logprobs",  # of the sampling distribution
        "disable_log_stats": True,
        "speculative_config": None,  # a burst makes several tokens in a step as drafts would
        "enable_sleep_mode": require_generation(config).colocated.enabled and features.can_sleep(),
        # With it, ranks on H200 returned different tokens in the first batch after a start.
        "disable_custom_all_reduce": True,
        "distributed_timeout_seconds": timeout,
        "cpu_distributed_timeout_seconds": timeout,
    }
    if shows:
        arguments["limit_mm_per_prompt"] = {"video": 0, "audio": 0}
        arguments["mm_processor_cache_gb"] = 0  # `EngineMedia` keeps what it makes
    assert arguments.keys() <= OWN_ARGUMENTS, f"not in OWN_ARGUMENTS: {sorted(arguments.keys() - OWN_ARGUMENTS)}"
    # Between prompt chunks a seeded request draws an extra random number, which vLLM's CPU backend cannot take back. Without
    # chunks vLLM caches no prefixes of models with a recurrent state.
    on_gpu = torch.cuda.is_available()
    defaults: dict[str, Any] = {"enable_prefix_caching": on_gpu or not _class_has(hf_config, "has_inner_state")}
    # On CPUs memory is not profiled, and vLLM's images for that may need torchvision.
    defaults |= {} if on_gpu else {"enable_chunked_prefill": False, "skip_mm_profiling": True}
    if context.layout.tp > 1:
        defaults["async_scheduling"] = False  # untested with several ranks on GPUs
    return {**defaults, **arguments, **require_generation(config).vllm_kwargs, **_compilation(config, hf_config, on_gpu)}


def _class_has(hf_config: Mapping[str, Any], feature: str) -> bool:
    """Whether vLLM's class of the model has a feature: a recurrent state, such as Mamba's, or a processor of images."""
    import vllm

    entries = (vllm.ModelRegistry.models.get(name) for name in hf_config.get("architectures") or ())
    return any(getattr(entry.load_model_cls(), feature, False) for entry in entries if entry is not None)


def capture_sizes(most: int) -> list[int]:
    """Returns the steps, in tokens, that are captured as CUDA graphs for up to `most` sequences; others are padded to them.

    Half as many as vLLM's own, which are captured one after the other at the start; at most a fifth of a step is padding.
    """
    limit, sizes, begin = min(2 * most, MOST_CAPTURED), {1, 2, 4}, 0
    for distance, end in CAPTURE_STEPS.items():
        sizes |= set(range(begin + distance, end + 1, distance))
        begin = end
    return sorted(size for size in sizes | {most, limit} if size <= limit)


def _compilation(config: Config, hf_config: Mapping[str, Any], on_gpu: bool) -> dict[str, Any]:
    """Returns vLLM's `compilation_config`: the given one, and where it has none the sizes of CUDA graphs.

    On GPUs independent kernels are combined without first timing whether that pays, which prolongs the compilation.
    """
    generation = require_generation(config)
    vllm, configured = generation.vllm_cfg, generation.vllm_kwargs.get("compilation_config", {})
    if not isinstance(configured, dict):
        return {}
    ours: dict[str, Any] = {}
    if not on_gpu and hf_config.get("kv_lora_rank"):
        # The kernel of vLLM 0.32 for CPUs rotates one head alone of the queries of latent attention.
        ours["custom_ops"] = ["-rotary_embedding"]
    if not vllm.enforce_eager and not {"cudagraph_capture_sizes", "max_cudagraph_capture_size"} & configured.keys():
        ours["cudagraph_capture_sizes"] = capture_sizes(vllm.max_num_seqs)
    if not vllm.enforce_eager and on_gpu:
        ours["inductor_compile_config"] = {"combo_kernels": True, "benchmark_combo_kernel": False}
    return {"compilation_config": {**ours, **configured}} if ours else {}


def read_hf_config(config: Config) -> dict[str, Any]:
    """Returns the checkpoint's `config.json` unchanged (vLLM changes `tie_word_embeddings` in its own copy)."""
    path = Path(model_path(config)) / "config.json"
    if path.is_file():
        return dict(json.loads(path.read_text()))
    from transformers import AutoConfig

    return dict(AutoConfig.from_pretrained(model_path(config), trust_remote_code=False).to_dict())


def _tokenizer(config: Config, shows: bool) -> str | None:
    """Returns the tokenizer's directory, or None if the engine needs only token ids: without stop strings.

    A model that can be shown images has its processor made, also in a run on texts.
    """
    if not require_generation(config).stop_strings and config.environment.agent is None and not shows:
        return None
    return config.policy.tokenizer.name or model_path(config)


def _executor_class(rendezvous: Rendezvous, recorder: ExpertRecorder | None) -> type[Any]:
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    class QuantumExecutor(ExecutorWithExternalLauncher):  # type: ignore[misc]
        """vLLM's external launcher with our rendezvous instead of `env://`, which is not unique to a run."""

        def _distributed_args(self) -> tuple[str, int, int]:
            return rendezvous.init_method, rendezvous.rank, rendezvous.local_rank

        def _init_executor(self) -> None:
            super()._init_executor()
            if recorder is not None:
                recorder.attach(self.driver_worker.worker.get_model(), self.vllm_config)

        def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
            output = super().execute_model(scheduler_output, non_block)
            if recorder is not None:
                recorder.step(self.driver_worker.worker.model_runner, scheduler_output)
            return output

    return QuantumExecutor


def _local_rank(tp_rank: int) -> int:
    """Returns the index of this process's device on the host. CPUs ignore it."""
    import ray

    if ray.is_initialized():
        assigned = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        index = device_index(assigned, os.environ.get(VISIBLE))
        return tp_rank if index is None else index
    return int(os.environ.get("LOCAL_RANK", tp_rank))
