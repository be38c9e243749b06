"""VllmWorker: a generation worker. One process holds one vLLM engine rank; tensor-parallel ranks run in step (SPMD)."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dagrl.config import Config, Json
from dagrl.config.settings import has_fp8_kv_cache
from dagrl.errors import ConfigError, RunError
from dagrl.generation import FinishedRequest, Generated, merge_generated, seconds_of, steps_of_shard
from dagrl.layout import ParallelLayout
from dagrl.refit.commit import one_part_of_a_refit
from dagrl.refit.slices import WeightSlice
from dagrl.shapes import Batch
from dagrl.worker import WorkerContext, in_warmup
from workers.families.keys import model_keys
from workers.families.kv_scales import check_family, derived_kv_scales, vllm_kv_scales
from workers.families.vllm import VllmRank
from workers.vllm import features
from workers.vllm.engine import QuantumEngine, Request
from workers.vllm.environment import require_generation, show_host_gpus, vllm_environment
from workers.vllm.experts import held_experts
from workers.vllm.launch import break_collectives, end_engine, meet, read_hf_config, start_engine
from workers.vllm.loader import take_loaded_parameters
from workers.vllm.peers import Peers
from workers.vllm.quantization import compute_dtype, in_fp8
from workers.vllm.update import Destinations, find_destinations
from workers.vllm.weights import derived_tensors, vllm_weight_slices

if TYPE_CHECKING:
    import torch
    from vllm import LLMEngine

    from dagrl.channels import Channel, ChannelSpec
    from dagrl.refit.moves import RankPlan
    from dagrl.refit.run import RefitReceiver, RefitReport

logger = logging.getLogger(__name__)


class VllmWorker:
    """Generates in quanta; see `dagrl.worker` for the methods a runtime calls."""

    requires = ("vllm",)

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
        """Raise LayoutError or ConfigError, before any actor starts, for a model that vLLM cannot hold in this layout."""
        compute_dtype(config, hf_config)
        if has_fp8_kv_cache(config):
            check_family(hf_config)
        VllmWorker.describe(config, hf_config, require_generation(config).vllm_cfg.layout, 0)

    @staticmethod
    def describe(
        config: Config,
        hf_config: Mapping[str, Json],
        layout: ParallelLayout,
        rank: int,
        placement: tuple[int, ...] | None = None,
    ) -> list[WeightSlice]:
        """What `rank` of `layout` will hold, without a worker; `placement`: its experts, where an engine has named them."""
        fp8, spread = in_fp8(config, hf_config), layout.ep > 1
        place = VllmRank(
            layout.tp, layout.coordinates(rank).tp, expert_parallel=spread, fp8=fp8, placement=placement if spread else None
        )
        weights = vllm_weight_slices(hf_config, place)
        return [*weights, *(vllm_kv_scales(hf_config) if has_fp8_kv_cache(config) else ())]

    @staticmethod
    def environment(config: Config) -> dict[str, str]:
        """Environment variables of the process, set before anything is imported."""
        return vllm_environment(config)

    def setup(self, address: str) -> None:
        """Start the engine together with the other ranks of the shard; `address` is the group's rendezvous.

        When that fails, groups and memory are given back before the error is raised: the worker can be set up again.
        """
        try:
            self._start(address)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they hold an engine that was begun
            self._end()
            raise

    def _start(self, address: str) -> None:
        self._hf_config = read_hf_config(self.config)
        llm = self._llm = start_engine(self.config, self.context, meet(self.context, address))
        model, self._device = llm.collective_rpc(_worker_model)[0]
        placement = held_experts(model, llm.vllm_config)
        self._slices = self.describe(self.config, self._hf_config, self.context.layout, self.context.rank, placement)
        self._destinations = self._find_destinations(model, llm)
        self._engine = QuantumEngine(llm, self.generation, _eos_token_ids(self._hf_config), self._peers(llm))
        if self._device.type == "cuda":
            import torch

            self._stream = torch.cuda.current_stream(self._device)

    def shutdown(self) -> None:
        """End the engine, leave its process group and the refit channel."""
        self._close_channel()
        if self._engine is not None:
            self._end()

    def _end(self) -> None:
        llm, self._llm, self._engine = self._llm, None, None
        end_engine(llm)

    def generate(self, batch: Batch) -> Generated:
        """One quantum: add the batch's requests, run engine steps, return what finished.

        Fields: `tokens` [n, P] prompts, `lengths` [n] (0: padding row), `request_ids`, `seeds`, `max_new_tokens`, `greedy`
        [n]. Scalars: `engine_steps`, of all shards or of each, which a warm-up may lack; with 0 the engine comes to rest.
        `seconds`, which may be lacking: an engine of one rank ends the quantum with the step in which they have passed.
        """
        engine = self._ready_engine()
        self._enter_device()
        steps = steps_of_shard(batch, self.context.coordinates.dp)
        if in_warmup():
            return self._warm_up(engine, batch, steps)
        return engine.run(_requests(batch), steps, seconds_of(batch))

    def merge_generated(self, parts: Sequence[Generated]) -> Generated:
        """One result from those of the ranks of a shard; raises RunError when they differ."""
        return merge_generated(parts)

    def abort_requests(self, request_ids: Iterable[int] | None = None) -> int:
        """Drop requests (None: all); returns how many were there."""
        engine = self._require_engine()
        self._enter_device()
        return engine.abort(request_ids)

    def sleep(self, level: int) -> int:
        """Give up the GPU's memory until `wake_up`; bytes freed, 0 where vLLM cannot (without a GPU) and nothing is done.

        At level 1 the weights go to host memory, at level 2 they are dropped: then generate() refuses until a whole refit.
        """
        engine = self._require_engine()
        self._enter_device()
        if not features.can_sleep():
            logger.debug("this vLLM cannot sleep; the generation worker keeps its memory")
            return 0
        before = self._free_bytes()
        if self._channel is not None:
            self._channel.release()
        engine.sleep(level)
        self._asleep = set(features.SLEEP_TAGS)
        if level == 2:
            self._torn = "the engine slept at level 2, which dropped them"
        return self._free_bytes() - before

    def wake_up(self, tags: Sequence[str] = features.SLEEP_TAGS) -> None:
        """Take back what `tags` name: `weights` before a refit, `kv_cache` before generation."""
        unknown = set(tags) - set(features.SLEEP_TAGS)
        if unknown:
            raise ConfigError(f"wake_up: unknown tags {sorted(unknown)}; expected: some of {', '.join(features.SLEEP_TAGS)}")
        self._enter_device()
        wanted = tuple(tag for tag in features.SLEEP_TAGS if tag in tags and tag in self._asleep)
        if wanted:
            self._require_engine().wake_up(wanted)
            self._asleep -= set(wanted)
        if "kv_cache" in wanted and not self._asleep and has_fp8_kv_cache(self.config):
            self._run_hooks()  # some releases of vLLM set the scales of a cache that wakes to 1

    def unfinished_requests(self) -> list[FinishedRequest]:
        """What the requests that have not finished have made so far, for a checkpoint; they go on."""
        engine = self._require_engine()
        self._enter_device()
        return engine.snapshot()

    def weight_slices(self) -> list[WeightSlice]:
        """What this rank holds of the Hugging Face parameters, and where; after setup()."""
        return self._slices

    def weight_config(self) -> dict[str, Json]:
        """What of the model's configuration train workers must agree with; after setup()."""
        return model_keys(self._hf_config)

    def weight_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that a refit writes, by the local names in `weight_slices()`."""
        return dict(self._destinations.tensors)

    def prepare_refit(self, plan: RankPlan, channel: ChannelSpec) -> None:
        """Join the channel of a refit; collective over all its ranks. Replaces the channel of an earlier plan."""
        from dagrl.channels import open_channel
        from dagrl.refit.run import RefitReceiver

        self._close_channel()
        self._enter_device()
        self._channel = open_channel(channel)
        refit = self.config.refit
        self._receiver = RefitReceiver(plan, self.weight_tensors(), self._channel, refit.verify, refit.cuda_graph)

    def receive_weights(self, version: int) -> RefitReport:
        """Receive `version` of the weights. From the first byte to success generate() refuses: no token from torn weights.

        Running requests go on from their KV cache. In a warm-up the version and the requests stay as they are.
        """
        if self._receiver is None:
            raise RunError("no refit is prepared on this worker; call prepare_refit(plan, channel) on all workers first")
        start = time.perf_counter()
        with self.writing_weights(version, self._channel):
            report = self._receiver.receive(version)
        return replace(report, pause_s=time.perf_counter() - start)

    @contextmanager
    def writing_weights(self, version: int, channel: Channel | None = None) -> Iterator[None]:
        """Write `weight_tensors()` inside of this: hooks run and `version` is taken up when the block ends well.

        With a channel it must have ended well on all its ranks; else this raises, and generate() refuses.
        """
        engine = self._engine_at_rest(channel)
        self._torn = f"an update of the weights to version {version} has begun and has not ended well"
        with nullcontext() if channel is None else one_part_of_a_refit(channel, wait=True):
            yield
            self._run_hooks()
        if in_warmup():
            engine.reset_prefix_cache()
        else:
            # What lies in an FP8 cache was divided by the scales of before.
            new_scales = has_fp8_kv_cache(self.config)
            recompute = new_scales or self.config.grpo.async_grpo.recompute_kv_cache_after_weight_updates
            engine.change_version(version, recompute=recompute)
            self.version = version
        self._torn = None

    def _engine_at_rest(self, channel: Channel | None) -> QuantumEngine:
        """The engine, ready to have its weights written; what forbids that is told to the refit's other ranks."""
        try:
            engine = self._require_engine()
            if "weights" in self._asleep:
                raise RunError("the engine sleeps without memory for weights; call wake_up(['weights']) before a refit")
            self._enter_device()
            engine.rest()
        except Exception as error:
            if channel is not None:
                channel.abort(f"{type(error).__name__}: {error}")
            raise
        return engine

    def _run_hooks(self) -> None:
        for hook in self._destinations.hooks:
            hook.run()
        if self._device.type == "cuda":
            import torch

            torch.cuda.synchronize(self._device)  # vLLM may run on another stream than the update did

    def merge_reports(self, parts: Sequence[RefitReport]) -> RefitReport:
        """One report from those of many workers."""
        from dagrl.refit.run import merge_reports

        return merge_reports(parts)

    def abort(self) -> None:
        """Free peers that wait for this worker in an engine step or in a refit; what is not under way stays whole."""
        if self._torn is not None and self._channel is not None:
            self._channel.abort("the generation worker was aborted")
        if self._engine is not None and self._engine.interrupted and self.context.layout.tp > 1:
            self._engine.give_up()
            break_collectives()

    def _warm_up(self, engine: QuantumEngine, batch: Batch, steps: int) -> Generated:
        """Run the batch's shape and leave nothing of it; ids are ours, as those of a warm-up batch need not differ."""
        longest = engine.max_model_len - 1
        requests = [
            Request(-1 - row, request.prompt[:longest], request.seed, max(request.max_new_tokens, steps), request.greedy)
            for row, request in enumerate(_requests(batch))
        ]
        return engine.rehearse(requests, steps)

    def _peers(self, llm: LLMEngine) -> Peers | None:
        from vllm.distributed import get_tp_group

        if self.context.layout.tp == 1:
            return None
        most = llm.vllm_config.scheduler_config.max_num_seqs
        return Peers(get_tp_group().cpu_group, most, self.context.collective_timeout_s)

    def _find_destinations(self, model: torch.nn.Module, llm: LLMEngine) -> Destinations:
        rules = derived_tensors(self._hf_config)
        rules += derived_kv_scales(self._hf_config) if has_fp8_kv_cache(self.config) else []
        return find_destinations(model, take_loaded_parameters(model), self._slices, llm.vllm_config, rules)

    def _enter_device(self) -> None:
        """Phases run on threads of the runtime's; the current CUDA device and stream are a thread's own.

        vLLM keeps the stream that it was started on, and waits for that one alone before it reads what was sampled. On a
        thread that has none, its first collective would change to a new stream in the middle of a step.
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

    def _ready_engine(self) -> QuantumEngine:
        if self._torn is not None:
            raise RunError(f"the weights may be torn: {self._torn}. Replay a whole refit before generating")
        if self._asleep:
            raise RunError(f"the engine sleeps without its {' and '.join(sorted(self._asleep))}; call wake_up() first")
        return self._require_engine()

    def _close_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = self._receiver = None


def _worker_model(worker: Any) -> tuple[torch.nn.Module, torch.device]:
    """Runs inside vLLM's worker."""
    return worker.get_model(), worker.device


def _requests(batch: Batch) -> list[Request]:
    rows = [row for row, length in enumerate(batch["lengths"].tolist()) if length > 0]
    return [
        Request(
            request_id=int(batch["request_ids"][row]),
            prompt=batch["tokens"][row, : int(batch["lengths"][row])].tolist(),
            seed=int(batch["seeds"][row]),
            max_new_tokens=int(batch["max_new_tokens"][row]),
            greedy=bool(batch["greedy"][row]),
        )
        for row in rows
    ]


def _eos_token_ids(hf_config: dict[str, Any]) -> list[int]:
    eos = hf_config.get("eos_token_id")
    return [] if eos is None else [int(token) for token in (eos if isinstance(eos, list) else [eos])]
