"""VllmWorker: a generation worker. Each process holds one vLLM engine rank; tensor-parallel ranks run in SPMD."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dagrl.channels import Channel, ChannelSpec, open_channel
from dagrl.config import Config, Json
from dagrl.config.settings import burst_steps, recomputes_kv_cache, sends_adapters
from dagrl.data.media import MEDIA, MediaStore
from dagrl.errors import ConfigError, RunError, error_text
from dagrl.refit import RankPlan, RefitReport, commit_together, merge_reports
from dagrl.refit.slices import WeightSlice
from dagrl.rl.generation import AS_CONFIGURED, Generated, merge_generated, quantum_options, quantum_seconds, quantum_steps
from dagrl.rl.routed_experts import routed_layers
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.shapes import Batch
from dagrl.runtime.worker import WorkerContext, in_warmup
from dagrl.telemetry.record import RunPaths
from dagrl.workers.families.hf_config import model_keys
from dagrl.workers.vllm import features
from dagrl.workers.vllm.described import describe_ranks
from dagrl.workers.vllm.destinations import find_destinations
from dagrl.workers.vllm.engine import Peers, QuantumEngine, Request, sampling_params
from dagrl.workers.vllm.environment import (
    check_head_size,
    check_layout,
    require_generation,
    show_host_gpus,
    vllm_environment,
)
from dagrl.workers.vllm.expert_recorder import ExpertRecorder
from dagrl.workers.vllm.launch import (
    break_collectives,
    end_engine,
    import_vllm,
    make_rendezvous,
    read_hf_config,
    start_engine,
)
from dagrl.workers.vllm.loader import take_loaded_model
from dagrl.workers.vllm.lora import check_slots, fill_slot, find_slots, lora_request
from dagrl.workers.vllm.media import EngineMedia
from dagrl.workers.vllm.quantization import compute_dtype, quantization_arguments

if TYPE_CHECKING:
    import torch
    from vllm import LLMEngine

    from dagrl.refit import RefitReceiver

logger = logging.getLogger(__name__)


class VllmWorker:
    """Generates in quanta. `dagrl.runtime.worker` documents the methods that the runtime calls."""

    requires = ("vllm",)
    meets_by_shard = True

    def __init__(self, context: WorkerContext, config: Config) -> None:
        self.context = context
        self.config = config
        self.generation = require_generation(config)
        self._engine: QuantumEngine | None = None
        self._llm: LLMEngine | None = None
        self._torn: str | None = None
        self._asleep: set[str] = set()
        self._channel: Channel | None = None
        self._receiver: RefitReceiver | None = None
        self.version = 0
        show_host_gpus()

    @staticmethod
    def check(config: Config, hf_config: Mapping[str, Json]) -> None:
        """Raises LayoutError or ConfigError before any actor starts if vLLM cannot hold the model in this layout."""
        compute_dtype(config, hf_config)
        check_layout(hf_config, require_generation(config).vllm_cfg.layout)
        if sends_adapters(config):
            check_slots(config, hf_config)
        if config.policy.router_replay:
            routed_layers(hf_config)
        check_head_size(config, hf_config)

    @staticmethod
    def describe(config: Config, hf_config: Mapping[str, Json], layout: ParallelLayout, rank: int) -> list[WeightSlice]:
        """Returns what `rank` of `layout` will hold, without a worker; takes some 20 seconds (`described.py`).

        Raises ConfigError if refits send adapters alone, whose slots only a running engine has.
        """
        if sends_adapters(config):
            raise ConfigError("a refit of adapters is planned when the engine runs: only a running engine has their slots")
        arguments = {**quantization_arguments(config, hf_config), "enable_expert_parallel": layout.ep > 1}
        return describe_ranks(hf_config, layout.tp, arguments)[layout.coordinates(rank).tp]

    @staticmethod
    def environment(config: Config) -> dict[str, str]:
        return vllm_environment(config)

    @staticmethod
    def imports(config: Config) -> Callable[[], object]:
        """Returns what imports vLLM, and the model's class if that is known by now, without threads and CUDA."""
        init, model = config.policy.random_init, Path(config.policy.model_name or "")
        known = config.policy.model_name is not None and (model / "config.json").is_file()
        hf_config = init.hf_config if init is not None else read_hf_config(config) if known else {}
        return partial(import_vllm, {"architectures": hf_config.get("architectures")})

    def prepare(self) -> None:
        """Imports vLLM and the model's class, which takes 10 to 20 seconds."""
        import_vllm(read_hf_config(self.config))

    def setup(self, address: str) -> None:
        """Starts the engine together with the other ranks of the shard, unless it runs. `address` is the group's rendezvous.

        On failure it frees groups and memory before raising, so the worker can be set up again.
        """
        if self._engine is not None:  # since before a `reset`
            return
        try:
            self._start(address)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # frames hold the partial engine
            self._end()
            raise

    def _start(self, address: str) -> None:
        self._hf_config = read_hf_config(self.config)
        recorder = ExpertRecorder(routed_layers(self._hf_config)) if self.config.policy.router_replay else None
        rendezvous = make_rendezvous(self.context, address)
        llm = self._llm = start_engine(self.config, self.context, rendezvous, recorder)
        if recorder is not None:
            recorder.cache_holds(int(llm.vllm_config.cache_config.num_gpu_blocks or 0))
        model, self._device = llm.collective_rpc(lambda worker: (worker.get_model(), worker.device))[0]
        if sends_adapters(self.config):
            layers = llm.collective_rpc(fill_slot, args=(self.config.policy.peft.dim,))[0]
            self._destinations = find_slots(layers, self._hf_config, self.config.policy.peft, llm.model_config.dtype)
        else:
            tied = bool(self._hf_config.get("tie_word_embeddings"))
            self._destinations = find_destinations(model, take_loaded_model(model), llm.vllm_config, tied=tied)
        peers = None
        if self.context.layout.tp > 1:
            from vllm.distributed import get_tp_group

            most = llm.vllm_config.scheduler_config.max_num_seqs
            peers = Peers(get_tp_group().cpu_group, most, self.context.collective_timeout_s)
        eos = self._hf_config.get("eos_token_id")
        ends = eos if isinstance(eos, list) else [] if eos is None else [eos]
        stops = sorted({*self.generation.stop_token_ids, *ends})
        sampling = partial(sampling_params, self.generation, stops, int(llm.model_config.max_model_len))
        adapter = lora_request() if sends_adapters(self.config) else None
        media = None
        if self.config.data.images.enabled:
            media = EngineMedia(llm, MediaStore(RunPaths.of(self.config).media, self.config.data.images).open)
        bursts = burst_steps(self.config, gpus=self._device.type == "cuda")
        self._engine = QuantumEngine(llm, sampling, peers, bursts, recorder, adapter, media)
        if self._device.type == "cuda":
            import torch

            self._stream = torch.cuda.current_stream(self._device)

    def reset(self) -> bool:
        """Drops requests and the refit channel. A single-rank engine at rest goes on, any other one ends.

        False on a GPU where the engine ended: its memory is free for certain only when the process has ended.
        """
        self._close_channel()
        engine, whole = self._engine, self.context.layout.tp == 1 and self._torn is None and not self._asleep
        if engine is None:
            return True
        if whole and not engine.interrupted:
            self._enter_device()
            engine.abort()
            engine.set_version(0)
            self.version = 0
            return True
        self._end()
        self._torn = None
        self._asleep.clear()
        return bool(self._device.type != "cuda")

    def shutdown(self) -> None:
        self._close_channel()
        if self._engine is not None:
            self._end()

    def _end(self) -> None:
        llm, self._llm, self._engine = self._llm, None, None
        end_engine(llm)

    def generate(self, batch: Batch) -> Generated:
        """Runs one quantum: adds the batch's requests, runs engine steps, returns what finished.

        Fields: `tokens` [n, P] prompts, `lengths` [n] (0: padding row), `request_ids`, `seeds`, `max_new_tokens`, `greedy`
        [n], and in runs with images `media` [n, P] (`dagrl.data.media`). Scalars: `engine_steps`, of all shards or of each
        (optional in a warm-up); 0 drains the engine. `seconds` (optional): a single-rank engine ends the quantum after the
        step in which they have passed. `options` (optional): how some requests are sampled
        (`dagrl.rl.generation.RequestOptions`).
        """
        if self._torn is not None:
            raise RunError(f"the weights may be torn: {self._torn}. Replay a complete refit before generating")
        if self._asleep:
            raise RunError(f"the engine sleeps without its {' and '.join(sorted(self._asleep))}; call wake_up() first")
        engine = self._require_engine()
        self._enter_device()
        steps = quantum_steps(batch, self.context.coordinates.dp)
        if in_warmup():
            return self._warm_up(engine, batch, steps)
        return engine.run(_requests(batch), steps, quantum_seconds(batch))

    def merge_generated(self, parts: Sequence[Generated]) -> Generated:
        """Merges the results of a shard's ranks. Raises RunError if they differ."""
        return merge_generated(parts)

    def abort_requests(self, request_ids: Iterable[int] | None = None) -> int:
        """Drops requests (None: all). Returns how many there were."""
        engine = self._require_engine()
        self._enter_device()
        return engine.abort(request_ids)

    def sleep(self, level: int) -> int:
        """Frees GPU memory until `wake_up`. Returns the freed bytes; 0 if vLLM cannot sleep here (no GPU).

        Level 1 moves the weights to host memory. Level 2 drops them, and generate() raises until a complete refit. Raises
        ConfigError at level 2 if refits send adapters alone.
        """
        engine = self._require_engine()
        self._enter_device()
        if not features.can_sleep():
            logger.debug("vLLM cannot sleep on this platform; the generation worker keeps its memory")
            return 0
        if level == 2 and sends_adapters(self.config):
            raise ConfigError("sleep(2) drops base weights that no refit brings back; use level 1, or peft.refit=merged")
        before = self._free_bytes()
        if self._channel is not None:
            self._channel.release()
        engine.sleep(level)
        self._asleep = set(features.SLEEP_TAGS)
        if level == 2:
            self._torn = "the engine slept at level 2 and dropped them"
        return self._free_bytes() - before

    def wake_up(self, tags: Sequence[str] = features.SLEEP_TAGS) -> None:
        """Restores the memory that `tags` name: `weights` before a refit, `kv_cache` before generation."""
        self._enter_device()
        wanted = tuple(tag for tag in features.SLEEP_TAGS if tag in tags and tag in self._asleep)
        if wanted:
            self._require_engine().wake_up(wanted)
            self._asleep -= set(wanted)

    def weight_slices(self) -> list[WeightSlice]:
        """Returns which Hugging Face parameters, or which of their adapters, a refit writes, and where.

        Available after setup().
        """
        return list(self._destinations.slices)

    def weight_config(self) -> dict[str, Json]:
        return model_keys(self._hf_config)

    def weight_tensors(self) -> dict[str, torch.Tensor]:
        """Returns the tensors that a refit writes, by the local names in `weight_slices()`."""
        return dict(self._destinations.tensors)

    def prepare_refit(self, plan: RankPlan, channel: ChannelSpec) -> None:
        """Joins the channel of a refit, collectively over its ranks. Replaces the channel of an earlier plan."""
        from dagrl.refit import RefitReceiver

        self._close_channel()
        self._enter_device()
        self._channel = open_channel(channel)
        self._receiver = RefitReceiver(plan, self.weight_tensors(), self._channel)

    def receive_weights(self, version: int) -> RefitReport:
        """Receives `version` of the weights. generate() raises from the first byte until success.

        Running requests continue from their KV cache. A warm-up changes neither version nor requests.
        """
        if self._receiver is None:
            raise RunError("no refit is prepared on this worker; call prepare_refit(plan, channel) on all workers first")
        start = time.perf_counter()
        with self.writing_weights(version, self._channel):
            report = self._receiver.receive(version)
        return replace(report, pause_s=time.perf_counter() - start)

    @contextmanager
    def writing_weights(self, version: int, channel: Channel | None = None) -> Iterator[None]:
        """Context for writing `weight_tensors()`. On success hooks run and `version` becomes current.

        With a channel, all of its ranks must succeed; otherwise this raises, and generate() raises from then on.
        """
        engine = self._drained_engine(channel)
        self._torn = f"an update of the weights to version {version} has started and not completed"
        with nullcontext() if channel is None else commit_together(channel, wait=True):
            yield
            for hook in self._destinations.hooks:
                hook()
            if self._device.type == "cuda":
                import torch

                torch.cuda.synchronize(self._device)  # vLLM may run on another stream than the update
        if in_warmup():
            engine.reset_prefix_cache()
        else:
            engine.set_version(version, recompute=recomputes_kv_cache(self.config))
            self.version = version
        self._torn = None

    def _drained_engine(self, channel: Channel | None) -> QuantumEngine:
        """Returns the drained engine. A failure aborts the channel, so the refit's other ranks raise too."""
        try:
            engine = self._require_engine()
            if "weights" in self._asleep:
                raise RunError("the engine sleeps and has no memory for weights; call wake_up(['weights']) before a refit")
            self._enter_device()
            engine.drain()
        except Exception as error:
            if channel is not None:
                channel.abort(error_text(error))
            raise
        return engine

    def merge_reports(self, parts: Sequence[RefitReport]) -> RefitReport:
        """Merges the reports of several workers."""
        return merge_reports(parts)

    def abort(self) -> None:
        """Releases peers that wait for this worker in an engine step or a refit. An idle channel or engine stays intact."""
        if self._torn is not None and self._channel is not None:
            self._channel.abort("the generation worker was aborted")
        if self._engine is not None and self._engine.interrupted and self.context.layout.tp > 1:
            self._engine.abandon()
            break_collectives()

    def _warm_up(self, engine: QuantumEngine, batch: Batch, steps: int) -> Generated:
        """Runs a batch of this shape and removes it. Replaces the ids, because those of a warm-up batch may repeat."""
        longest = engine.max_model_len - 1
        requests = [
            Request(-1 - row, request.prompt[:longest], request.seed, max(request.max_new_tokens, steps), request.greedy)
            for row, request in enumerate(_requests(batch))
        ]
        return engine.warm_up(requests, steps)

    def _enter_device(self) -> None:
        """Sets the CUDA device and stream of the current thread. Phases run on the runtime's threads.

        vLLM keeps the stream it was started on and waits only for that one before it reads sampled tokens. On a thread
        without it, vLLM's first collective would switch to a new stream in the middle of a step.
        """
        if self._device.type == "cuda":
            import torch

            torch.cuda.set_device(self._device)
            torch.cuda.set_stream(self._stream)

    def _free_bytes(self) -> int:
        import torch

        return int(torch.cuda.mem_get_info(self._device)[0])

    def _require_engine(self) -> QuantumEngine:
        if self._engine is None:
            raise RunError("the vLLM engine is not running; call setup(address) on all workers of the group first")
        return self._engine

    def _close_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = self._receiver = None


def _requests(batch: Batch) -> list[Request]:
    rows = [row for row, length in enumerate(batch["lengths"].tolist()) if length > 0]
    options = quantum_options(batch)
    return [
        Request(
            request_id=int(batch["request_ids"][row]),
            prompt=batch["tokens"][row, : int(batch["lengths"][row])].tolist(),
            seed=int(batch["seeds"][row]),
            max_new_tokens=int(batch["max_new_tokens"][row]),
            greedy=bool(batch["greedy"][row]),
            options=options.get(int(batch["request_ids"][row]), AS_CONFIGURED),
            media=batch[MEDIA][row, : int(batch["lengths"][row])].tolist() if MEDIA in batch.fields else (),
        )
        for row in rows
    ]
