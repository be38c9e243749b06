"""TrainWorker: one rank of a train group, whatever computes its model.

Its methods implement the phases `train_step`, `logprobs` and `refit`, and what the training loops call between them. A
subclass names its `Backend`, which has the model, its passes and its files. Heavy imports happen in `prepare` and `setup`,
so the driver can import the classes to trace phases.
"""

from __future__ import annotations

import gc
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from dagrl.channels import Channel, ChannelSpec, open_channel
from dagrl.config import Config, Json
from dagrl.config.plan import load_algorithm, reference_role
from dagrl.data.media import MediaStore, with_fullest
from dagrl.errors import ConfigError, RunError
from dagrl.files import FileEntry
from dagrl.imports import gc_paused
from dagrl.machine import DeviceMemory
from dagrl.refit import RankPlan, RefitReport, commit_together
from dagrl.refit.slices import WeightSlice
from dagrl.rl.algorithm import POLICY, Algorithm, LossName, algorithm_for
from dagrl.rl.routed_experts import with_empty_record
from dagrl.run.worker_protocols import OPTIONAL_SETTINGS
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.shapes import Array, Batch
from dagrl.runtime.worker import WorkerContext, current_replay, in_warmup
from dagrl.telemetry.metrics import GRAD_NORM, StepMetrics, merge_step_metrics
from dagrl.telemetry.record import RunPaths
from dagrl.workers.families.hf_config import model_keys, with_scalar_head
from dagrl.workers.train.backend import Backend, Model, ModelSpec, Score
from dagrl.workers.train.groups import start_checkpoint_group
from dagrl.workers.train.hf_load import read_hf_config
from dagrl.workers.train.identity import identity_of, read_worker_file
from dagrl.workers.train.kept_logprobs import KeptLogprobs
from dagrl.workers.train.throughput import throughput_metrics

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from dagrl.refit import RefitSender
    from dagrl.workers.train.checkpoint import Saving
    from dagrl.workers.train.losses import MicrobatchLoss
    from dagrl.workers.train.microbatches import Microbatch, Microbatches
    from dagrl.workers.train.offload import Offloader, StatePart
    from dagrl.workers.train.reference import ReferencePolicy

ModelName = Literal["policy", "reference"]

RECORDED = ("prev_logprobs", "reference_logprobs", "entropy")
"""Kept columns that the driver reads for `rollouts/`."""


class TrainWorker:
    """Steps, log-probabilities, refits and files of one rank's part of the policy, by `context.layout`.

    `dagrl.runtime.worker` documents the methods that the runtime calls, `Backend` those that only pass on.
    """

    backend_class: ClassVar[type[Backend]]
    trains: ClassVar[bool] = True
    """Whether the model has gradients and an optimizer. A teacher has none, so a GPU holds a much larger one."""

    supports: ClassVar[frozenset[str]] = frozenset(OPTIONAL_SETTINGS) - {"worker_args"}
    """The settings of `policy` that the class has, of those that not every train worker has."""

    reads: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **dict.fromkeys(("logprobs", "top_logprobs"), ("tokens",)),
        **{"keep_logprobs": ("tokens", "row_ids"), "answer_sums": ("tokens", "loss_mask")},
    }
    """The fields that methods for columns read: the `inputs` of a phase that calls one must have them."""

    scalar: ClassVar[bool] = False
    """Whether the model gives one number per token: see `ValueWorker`."""

    def __init__(self, context: WorkerContext, config: Config) -> None:
        self.context = context
        self.config = config
        self._backend: Backend | None = None
        self._hf_config: Mapping[str, Json] = {}
        self._files_group: ProcessGroup | None = None  # in which workers wait for each other's files
        self._offloader: Offloader | None = None
        self._reference: ReferencePolicy | None = None
        self._kept = KeptLogprobs()
        self._channel: Channel | None = None
        self._sender: RefitSender | None = None
        self._saving: Saving | None = None
        self._warm_widths: dict[str, set[int]] = {}  # widths of packed microbatches, by phase
        self._stream: torch.cuda.Stream | None = None  # None: the default stream
        self._aborted = False
        self._sending = False

    # ---- class methods, which need no model

    @classmethod
    def check(cls, config: Config, hf_config: Mapping[str, Json]) -> None:
        cls.backend_class.check(config, cls.model_config(hf_config))

    @classmethod
    def check_checkpoint(cls, config: Config, hf_config: Mapping[str, Json], directory: str) -> None:
        """Raises CheckpointError if the model, its precision or its adapters differ from those of a checkpoint."""
        backend, identity = cls.backend_class, identity_of(config.policy, cls.model_config(hf_config))
        read_worker_file(Path(directory), backend.checkpoint_format, identity, backend.computed)

    @classmethod
    def describe(cls, config: Config, hf_config: Mapping[str, Json], layout: ParallelLayout, rank: int) -> list[WeightSlice]:
        return list(cls.backend_class.describe(config, hf_config, layout, rank))

    @classmethod
    def model_config(cls, hf_config: Mapping[str, Json]) -> Mapping[str, Json]:
        """Returns the configuration of the model that the class builds from a checkpoint with this `config.json`."""
        return with_scalar_head(hf_config) if cls.scalar else hf_config

    @classmethod
    def environment(cls, config: Config) -> dict[str, str]:
        threads = os.environ.get("OMP_NUM_THREADS", "1")  # the workers of a host share its cores
        local = config.policy.model_name is not None and Path(config.policy.model_name).is_dir()
        hub = {"HF_HUB_OFFLINE": "1"} if local else {}  # nothing to look up
        cublas = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if config.policy.deterministic else {}  # as torch requires
        return {"OMP_NUM_THREADS": threads, **hub, **cublas, **cls.backend_class.environment(config)}

    @classmethod
    def imports(cls, config: Config) -> Callable[[], object]:
        return cls.backend_class.prepare

    # ---- lifecycle

    def prepare(self) -> None:
        with warnings.catch_warnings(), gc_paused():
            warnings.simplefilter("ignore")  # Megatron warns of every missing optional extension
            self.backend_class.prepare()

    def setup(self, address: str) -> None:
        """Joins the group at `address`, builds this rank's part of the model and loads its weights.

        On failure it frees groups and memory before raising, so the worker can be set up again.
        """
        import torch

        from dagrl.workers.train.offload import Offloader

        if self.config.policy.model_name is None:
            raise ConfigError("policy.model_name is not set; the worker needs a Hugging Face directory")
        source = Path(self.config.policy.model_name)
        self._hf_config = self.model_config(read_hf_config(source))
        spec = ModelSpec(
            self.context, self.config, source, self._hf_config, self._device, trains=self.trains, scalar=self.scalar
        )
        backend = self.backend_class(spec)
        self._backend = backend
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron warns of every missing optional extension
            try:
                torch.use_deterministic_algorithms(self.config.policy.deterministic)
                torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs time
                gc.freeze()  # full collections skip all imports; they run at different times on each worker
                with self._running():
                    backend.setup(address)
                    if torch.distributed.is_initialized():
                        self._files_group = start_checkpoint_group(self.config.timeouts.checkpoint_s)
                self._offloader = Offloader(self._device, backend.model.state)
            except BaseException as error:
                traceback.clear_frames(error.__traceback__)  # frames hold the model, and with it groups and threads
                self.shutdown()
                raise

    def abort(self) -> None:
        if self._channel is not None:
            self._channel.abort(f"train worker {self.context.rank} was aborted")
        if self._sending:  # no peer waits in the backend's groups; training can continue, refits with a new channel
            return
        self._aborted = True
        if self._backend is not None:
            self._backend.abort()

    def reset(self) -> bool:
        """Restores the state before `setup`. Returns false after NCCL was aborted: its process cannot join new groups."""
        reusable = not (self._aborted and self._device.type == "cuda")
        self.shutdown()
        type(self).__init__(self, self.context, self.config)
        return reusable

    def shutdown(self) -> None:
        if self._channel is not None:
            self._channel.close()
        backend, self._backend = self._backend, None
        self._sender = self._channel = self._offloader = self._reference = self._saving = None
        self._files_group = None
        if backend is not None:
            backend.shutdown()

    def backend(self, *needs: StatePart) -> Backend:
        """Returns the backend. Raises RunError if the worker cannot run, or a needed part of the state is offloaded."""
        if self._backend is None or self._offloader is None:
            raise RunError("the worker is not set up; call setup(address) on all workers of the group first")
        self._check_aborted()
        if needs:
            self._offloader.require(needs, f"train worker {self.context.rank}")
        return self._backend

    @property
    def offloader(self) -> Offloader:
        """Moves weights, gradients and optimizer between device and host."""
        self.backend()
        assert self._offloader is not None
        return self._offloader

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Runs a phase: sets the thread's CUDA device and stream, and waits for the launched work.

        Waiting attributes a failure to its phase. It does not cover copies of offloaded state, which have their own stream.
        Aborted NCCL collectives end without raising, so the abort is checked afterwards. With CUDA graphs
        everything runs on the worker's own stream, as capture requires.
        """
        import torch

        self._sending = False
        if torch.cuda.is_available():
            torch.cuda.set_device(self._device)
            if self._backend is not None and self._backend.captures and self._stream is None:
                self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            yield
            if torch.cuda.is_available():
                torch.cuda.current_stream().synchronize()
        self._check_aborted()
        self._sending = False

    def _check_aborted(self) -> None:
        if self._aborted:
            raise RunError(f"train worker {self.context.rank} was aborted; restart the group")

    @property
    def _device(self) -> torch.device:
        """This worker's device. With several visible GPUs: `LOCAL_RANK`, otherwise by rank."""
        import torch

        if not torch.cuda.is_available():
            return torch.device("cpu")
        visible = torch.cuda.device_count()
        local = self.context.rank if visible > 1 else 0
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", local)) % visible)

    # ---- training

    def train_step(self, batch: Batch, loss: LossName) -> StepMetrics:
        """Runs one optimizer step on the shard's rows: `tokens`, `lengths`, `loss_mask`, and what the loss reads.

        `loss` names the algorithm (`algorithm_for`). `batch.scalars`: `global_valid_tokens` and `global_valid_sequences` of
        the global batch; optional `lr` replaces the schedule's. A warm-up replay does everything except the update.
        """
        from dagrl.workers.train.losses import read_reports

        backend, rate = self.backend("weights", "gradients"), batch.number("lr") if "lr" in batch.scalars else None
        algorithm = algorithm_for(loss, self.config)
        last = self.context.coordinates.pp == self.context.layout.pp - 1  # the stage that computes the loss
        batch = self._kept.join(batch, algorithm.columns, required=last and not in_warmup())
        started = time.perf_counter()
        with self._running():
            for microbatches in self._microbatches(batch, "train"):
                self.offloader.begin_due()
                backend.model.zero_gradients()
                reports = backend.model.run(microbatches, self._loss(algorithm, batch), backward=True)
            self.offloader.require(("optimizer",), "an optimizer step")
            shared = backend.model.steps.take(backend.model, rate, apply=not in_warmup())
            metrics = merge_step_metrics([read_reports(reports, microbatches), StepMetrics(shared=shared)])
            model_metrics = backend.model.step_metrics()
        seconds = time.perf_counter() - started
        tflop = backend.train_tflop(batch["lengths"]) - backend.train_tflop(microbatches.saved)
        throughput = throughput_metrics(
            self.config.policy, self.context, self._device, tflop=tflop, tokens=int(batch["lengths"].sum()), seconds=seconds
        )
        return merge_step_metrics([metrics if self._reports else StepMetrics(), model_metrics, throughput])

    def evaluate(self, batch: Batch, loss: LossName) -> StepMetrics:
        """Computes the losses of `train_step` without a step."""
        import torch

        from dagrl.workers.train.losses import read_reports

        model, algorithm = self.backend("weights").model, algorithm_for(loss, self.config)
        with self._running(), torch.no_grad():
            for microbatches in self._microbatches(batch, "train"):
                reports = model.run(microbatches, self._loss(algorithm, batch), backward=False)
            metrics = read_reports(reports, microbatches)
        return metrics if self._reports else StepMetrics()

    def compare_gradients(
        self, batches: Sequence[Batch], others: Sequence[Batch], other: Config
    ) -> tuple[StepMetrics, StepMetrics, float]:
        """Computes the gradients of the run's loss on `batches[dp]` and of `other`'s on `others[dp]`, without a step.

        Returns the metrics of both, with `grad_norm`, and the norm of the difference of the two gradients.
        """
        import torch

        model, shard = self.backend("weights", "gradients").model, self.context.coordinates.dp
        with self._running():
            ours = self._gradient(batches[shard], self.config)
            kept = [gradient.clone() for gradient in model.gradients()]
            theirs = self._gradient(others[shard], other)
            torch._foreach_sub_(model.gradients(), kept)
            distance = float(model.gradient_norm())
            model.zero_gradients()
        return ours, theirs, distance

    def _gradient(self, batch: Batch, config: Config) -> StepMetrics:
        from dagrl.workers.train.losses import read_reports

        model, algorithm = self.backend().model, algorithm_for(POLICY, config)
        last = self.context.coordinates.pp == self.context.layout.pp - 1
        batch = self._kept.join(batch, algorithm.columns, required=last)
        model.zero_gradients()
        for microbatches in self._microbatches(batch, "train"):
            reports = model.run(microbatches, self._loss(algorithm, batch), backward=True)
        norm = StepMetrics(shared={GRAD_NORM: float(model.gradient_norm())})
        return merge_step_metrics([norm, *([read_reports(reports, microbatches)] if self._reports else [])])

    def merge_metrics(self, parts: list[StepMetrics]) -> StepMetrics:
        """Merges the metrics of several workers."""
        return merge_step_metrics(parts)

    def reset_optimizer(self) -> None:
        """Resets moments and schedule, as if training started with the current weights."""
        backend = self.backend()
        with self._running():
            self.offloader.require(("weights", "optimizer"), "resetting the optimizer")
            backend.model.reset_optimizer()
            backend.model.steps.taken = 0

    def _loss(self, algorithm: Algorithm, batch: Batch) -> MicrobatchLoss:
        from dagrl.rl.losses import Denominators
        from dagrl.workers.train.losses import MicrobatchLoss

        backend = self.backend()
        denominators = Denominators(batch.number("global_valid_tokens"), batch.number("global_valid_sequences"))
        head = backend.model.head(self._temperature if algorithm.learns_from == "samples" else 1.0)
        group = backend.place.context_group if self.context.layout.cp > 1 else None
        return MicrobatchLoss(algorithm, denominators, head, group)

    @property
    def _temperature(self) -> float:
        """The temperature of the distribution that the policy learns from: generation's for samples, 1 for data."""
        generation = self.config.policy.generation
        if generation is None or load_algorithm(self.config).learns_from != "samples":
            return 1.0
        return generation.temperature

    @property
    def _reports(self) -> bool:
        """Whether this worker reports metrics: losses are known on the last stage, and equal on its tp workers."""
        where = self.context.coordinates
        return where.pp == self.context.layout.pp - 1 and where.tp == 0

    def _microbatches(self, batch: Batch, purpose: Literal["train", "logprob"]) -> Iterator[Microbatches]:
        """Yields the batch's microbatches; in a warm-up some of every shape that its phase has not run at."""
        from dagrl.workers.train.microbatches import split_batch, warmup_batches
        from dagrl.workers.train.row_plans import SplitRule

        backend = self.backend()
        rule = SplitRule.of(self.config.policy, purpose, shares=backend.shares)
        if not in_warmup():
            yield split_batch(batch, rule, backend.place, backend.routed)
            return
        batch = with_empty_record(batch)  # warm-up ids are made up
        on_cpu = backend.place.device.type == "cpu"
        mask = batch.fields.get("loss_mask")
        if on_cpu and mask is not None and mask.all():  # made up; all logits of a large vocabulary take long
            batch = batch.with_fields(loss_mask=mask * (np.arange(batch.tokens) == batch.tokens - 1))
        images = self.config.data.images
        fullest = MediaStore(RunPaths.of(self.config).media, images).fullest() if images.enabled else None
        seen = self._warm_widths.setdefault(current_replay().phase, set())
        for shape in warmup_batches(batch, rule, backend.place, seen):
            item = with_fullest(shape, fullest)
            for _ in range(2 if backend.captures else 1):
                # On a GPU all tokens are scored, which needs the most memory.
                whole = split_batch(item, rule, backend.place, backend.routed, masked=on_cpu)
                yield whole.for_warmup()

    # ---- log-probabilities

    def logprobs(self, batch: Batch, model: ModelName = "policy", column: str | None = None) -> Batch | None:
        """Returns `logprobs` and `entropy` [rows, tokens] float32 of the batch's tokens; 0 at entry 0 and in padding. With
        `column` it returns the log-probabilities alone, under this name.

        One worker of the shard returns them (last stage, tp 0, cp 0); the others return None. Both are of the distribution
        that generation samples from: logits divided by its temperature.
        """
        return self._result(batch, self._logprobs(batch, model), *(("logprobs", "entropy") if column is None else (column,)))

    def top_logprobs(self, batch: Batch, count: int, model: ModelName = "policy") -> Batch | None:
        """Returns the `count` likeliest tokens in place of each token, likeliest first: `top_ids_0`, `top_logprobs_0`, ...
        [rows, tokens] float32.

        One worker of the shard returns them, as for `logprobs`. Ids are exact below 2**24.
        """
        with self._running(), self._model(model) as chosen:
            head = chosen.head(self._temperature)

            def score(microbatch: Microbatch, output: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
                assert head is not None, "the last pipeline stage has the output layer"
                return output.new_zeros(()), tuple(column.float() for pair in head.top(output, count) for column in pair)

            columns = self._columns(batch, chosen, score)
        names = (f"top_{what}_{place}" for place in range(count) for what in ("ids", "logprobs"))
        return self._result(batch, columns, *names)

    def answer_sums(self, batch: Batch, model: ModelName = "policy") -> Batch | None:
        """Returns `sums` [rows] float64: of the log-probabilities of each row's tokens in `loss_mask`.

        One worker of the shard returns them, as for `logprobs`.
        """
        rows = self.logprobs(batch, model)
        return None if rows is None else _sums_of(batch, rows["logprobs"])

    def keep_logprobs(self, batch: Batch, model: ModelName = "policy", renew_every: int = 0) -> None:
        """Computes `logprobs` and keeps them for the `train_step` of the rows with the same `row_ids`.

        With `renew_every` the current weights first become the reference policy, in every step after such a number of steps.
        """
        if renew_every and not in_warmup() and batch.number("step") % renew_every == 1 % renew_every:
            self.snapshot_reference()
        columns = self._logprobs(batch, model)
        names = ("prev_logprobs", "entropy") if model == "policy" else ("reference_logprobs",)
        if columns and not in_warmup():
            self._kept.keep(batch, **{name: column.cpu().numpy() for name, column in zip(names, columns, strict=False)})

    def keep_columns(self, batch: Batch) -> None:
        """Keeps the token fields of `batch` for the `train_step` of the rows with the same `row_ids`."""
        if not in_warmup():
            self._kept.keep(batch, **{name: field for name, field in batch.fields.items() if field.ndim == 2})

    def kept_logprobs(self) -> dict[str, dict[int, Array]]:
        """Returns log-probabilities and entropy that this worker keeps for the current step, by name and row id: float32
        [tokens]. Other columns stay here.

        One worker of the shard returns them (last stage, tp 0, cp 0); on the others the result is empty.
        """
        place, kept = self.context.coordinates, self._kept.columns()
        return {} if place.tp or place.cp else {name: kept[name] for name in RECORDED if name in kept}

    def merge_rows(self, parts: list[Batch | None]) -> Batch | None:
        """Returns the only part that is not None."""
        batches = [part for part in parts if part is not None]
        assert len(batches) <= 1, f"{len(batches)} workers of one shard gave rows"
        return batches[0] if batches else None

    def _logprobs(self, batch: Batch, model: ModelName) -> list[Tensor]:
        """Returns log-probabilities and entropy [rows, tokens] on the last stage (0 in padding), else an empty list."""
        with self._running(), self._model(model) as chosen:
            head = chosen.head(self._temperature)

            def score(microbatch: Microbatch, output: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
                assert head is not None, "the last pipeline stage has the output layer"
                return output.new_zeros(()), head(output, microbatch.labels)

            return self._columns(batch, chosen, score)

    def _columns(self, batch: Batch, model: Model, score: Score) -> list[Tensor]:
        """Returns the columns [rows, tokens] of which `score` reports parts, on the last stage; else an empty list.

        A report is one or more [b, s], whose entry at a token belongs to the next one.
        """
        import torch

        with torch.no_grad():
            for microbatches in self._microbatches(batch, "logprob"):
                parts = model.run(microbatches, score, backward=False)
                columns = [microbatches.assemble(column) for column in zip(*parts, strict=True)]
        return columns

    def _result(self, batch: Batch, columns: Sequence[Tensor], *names: str) -> Batch | None:
        """Returns the columns under these names on the worker that returns the shard's results; None on the others."""
        if not columns or self.context.coordinates.tp or self.context.coordinates.cp:
            return None
        fields = {name: column.cpu().numpy() for name, column in zip(names, columns, strict=False)}
        return Batch({"lengths": batch["lengths"], **fields}, batch.scalars)

    # ---- reference policy

    def snapshot_reference(self) -> None:
        """Keeps a copy of the current weights as the reference policy, where `policy.reference_weights` says.

        With LoRA there is no copy: the reference policy is the base model, also after earlier steps.
        """
        if self.backend("weights").base_model() is None:
            with self._running():
                self._keep_reference(self.weight_tensors())

    def _keep_reference(self, weights: Mapping[str, Tensor]) -> None:
        from dagrl.workers.train.reference import ReferencePolicy

        self._reference = None  # free its memory before allocating
        self._reference = ReferencePolicy(weights, self.config.policy.reference_weights, self._device)

    @contextmanager
    def _model(self, name: ModelName) -> Iterator[Model]:
        """Puts the weights of a model in place for the block."""
        backend = self.backend("weights")
        if name == "policy":
            yield backend.model
        elif (base := backend.base_model()) is not None:
            with base:
                yield backend.model
        elif self._reference is not None:
            with self._reference.in_place_of(backend.model.weights()):
                yield backend.model
        else:
            raise RunError("there is no reference policy; call snapshot_reference() on all train workers first")

    # ---- refits

    def weight_slices(self) -> list[WeightSlice]:
        """Returns the boxes of HF parameters, or of their adapters, that a refit sends."""
        return list(self.backend().weight_slices())

    def weight_tensors(self) -> dict[str, Tensor]:
        """Returns live local tensors by name. An overlapped parameter gathering may be pending in them."""
        return {name: weight.data for name, weight in self.backend("weights").model.weights().items()}

    def weight_config(self) -> dict[str, Json]:
        """Returns the model configuration that generation workers must agree with."""
        return model_keys(self._hf_config)

    def prepare_refit(self, plan: RankPlan, channel: ChannelSpec) -> None:
        """Opens the channel to the generation workers and prepares to send by `plan`."""
        from dagrl.refit import RefitSender

        if self._channel is not None:
            self._channel.close()
        self._channel = self._sender = None  # free its staging buffers first
        with self._running():
            self._channel = open_channel(channel)
            self._sender = RefitSender(plan, self.backend("weights").sent_tensors(), self._channel, lends=True)

    def send_weights(self, version: int) -> RefitReport:
        """Sends the current weights as policy version `version`."""
        backend = self.backend("weights")
        if self._sender is None or self._channel is None:
            raise RunError("send_weights before prepare_refit; give every worker its plan and channel first")
        with self._running(), backend.sending(), commit_together(self._channel, wait=False):
            self._sending = True  # also after a failure, until the next phase
            return self._sender.send(version)

    # ---- memory

    def offload(self, what: tuple[str, ...]) -> None:
        """Moves some of `weights`, `gradients` and `optimizer` to host memory and frees the GPU memory.

        Weights and optimizer state come back unchanged, gradients as zeros. Using an offloaded part raises RunError.
        """
        if self._channel is not None:
            self._channel.release()
        if self._sender is not None and "weights" in what:
            self._sender.reclaim()
        backend = self.backend()
        with self._running():
            if what:
                backend.model.before_offload(what)
            self.offloader.offload(what)

    def reload(self, what: tuple[str, ...]) -> None:
        with self._running():
            self.offloader.reload(what)

    def prepare_for_logprobs(self, step: int) -> None:
        """Starts moving the optimizer's state to the host while log-probabilities are computed."""
        with self._running():
            self.offloader.offload(("optimizer",), wait=False)
            if in_warmup():  # allocate the host memory, but keep the state on the device
                self.offloader.reload(("optimizer",))

    def prepare_for_training(self, step: int) -> None:
        """Schedules the optimizer's state to come back while the next step's gradients are computed."""
        self.offloader.reload_soon(("optimizer",))

    def device_memory(self) -> DeviceMemory | None:
        """Returns the memory of this worker's GPU; None without one. The parts are those of `offload`."""
        import torch

        from dagrl.workers.train.offload import STATE_PARTS

        if self._device.type != "cuda":
            return None
        with self._running():
            free, total = torch.cuda.mem_get_info(self._device)
            return DeviceMemory(free, total, {part: self.offloader.nbytes(part) for part in STATE_PARTS})

    # ---- files

    def save_checkpoint(self, directory: str, background: bool = False) -> Mapping[str, FileEntry] | None:
        """Writes everything the next step depends on to `directory`; all workers together.

        Returns size and checksum of the files that this worker wrote. With `background` the state is copied and still being
        written on return; `finish_checkpoint` returns the files then.
        """
        from dagrl.workers.train.train_state import start_saving

        backend, identity = self.backend("weights", "optimizer"), self._identity
        with self._running():
            self._finish_saving()
            reference = None if self._reference is None else self._reference.tensors
            where = directory, backend, self._files_group, self.context.rank
            self._saving = start_saving(*where, reference, identity, background=background)
            return None if background else self._finish_saving()

    def checkpoint_written(self) -> bool:
        """Whether a background checkpoint is written by all workers."""
        return self._saving is None or self._saving.is_written

    def finish_checkpoint(self) -> Mapping[str, FileEntry] | None:
        """Waits for a background checkpoint, at most `timeouts.checkpoint_s`; all workers together."""
        self.backend()
        with self._running():
            return self._finish_saving()

    def _finish_saving(self) -> Mapping[str, FileEntry] | None:
        saving, self._saving = self._saving, None
        return None if saving is None else saving.finish(self.config.timeouts.checkpoint_s)

    def load_checkpoint(self, directory: str) -> None:
        """Loads a checkpoint of the same model from any layout. Raises CheckpointError."""
        from dagrl.workers.train.train_state import load_checkpoint

        backend, identity = self.backend("weights", "optimizer"), self._identity
        with self._running():
            self._finish_saving()
            where = directory, backend, self._files_group, self.context.rank
            reference, self._reference = load_checkpoint(*where, identity), None
            holds_reference = reference_role(self.config, load_algorithm(self.config)) == "train"
            if reference is not None and holds_reference:
                self._keep_reference(reference)

    @property
    def _identity(self) -> dict[str, Json]:
        return identity_of(self.config.policy, self._hf_config)

    def weight_digests(self) -> dict[str, list[float]]:
        """Returns the digest of each tensor that a refit sends (`dagrl.workers.train.digest`)."""
        from dagrl.workers.train.digest import digest

        backend = self.backend("weights")
        with self._running(), backend.sending():
            return {name: digest(tensor.detach()) for name, tensor in backend.sent_tensors().items()}

    def export_hf(self, directory: str) -> None:
        """Writes the policy as a Hugging Face directory that transformers can load; all workers together.

        With LoRA the weights are merged, and `adapter/` has the adapters in PEFT's format.
        """
        backend = self.backend("weights")
        with self._running():
            backend.export_hf(directory, self._files_group)


class ValueWorker(TrainWorker):
    """A critic or a reward model: values of tokens, and steps on them.

    The model has a scalar head in place of the vocabulary's. It starts from a language model with a fresh head, or from a
    checkpoint that has one.
    """

    scalar = True

    def values(self, batch: Batch) -> Batch | None:
        """Returns `values` [rows, tokens] float32: at each token that of the state before it; 0 at entry 0 and in padding.

        One worker of the shard returns them (last stage, tp 0, cp 0); the others return None.
        """
        model = self.backend("weights").model
        with self._running():
            columns = self._columns(batch, model, lambda _, values: (values.new_zeros(()), (values,)))
        return self._result(batch, columns, "values")

    def answer_sums(self, batch: Batch, model: ModelName = "policy") -> Batch | None:
        """Returns `sums` [rows] float64: of the values of each row's tokens in `loss_mask`, for a reward model one."""
        rows = self.values(batch)
        return None if rows is None else _sums_of(batch, rows["values"])


def _sums_of(batch: Batch, column: Array) -> Batch:
    """Returns `sums` [rows] float64: of `column` [rows, tokens] over the tokens in `loss_mask`."""
    sums = (column.astype("float64") * batch["loss_mask"]).sum(axis=1)
    return Batch({"lengths": batch["lengths"], "sums": sums}, batch.scalars)
