"""PlainBackend: a test double of `Backend`, a transformers model in one process, and the workers that run on it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dagrl.config import Config, Json
from dagrl.refit.slices import WeightSlice
from dagrl.refit.sources import slices_of, tensors_of
from dagrl.runtime.layout import ParallelLayout
from dagrl.telemetry.metrics import StepMetrics
from dagrl.workers.train.backend import ModelSpec, Score
from dagrl.workers.train.checkpoint import Piece, whole
from dagrl.workers.train.logprobs import TokenHead
from dagrl.workers.train.microbatches import Microbatches
from dagrl.workers.train.offload import StatePart
from dagrl.workers.train.optimizer import OptimizerSteps
from dagrl.workers.train.row_plans import ParallelRank
from dagrl.workers.train.worker import TrainWorker, ValueWorker


class PlainModel:
    """A `TrainedModel`: packed rows are told apart by their positions."""

    def __init__(self, directory: Path, config: Config, scalar: bool = False) -> None:
        from transformers import AutoModelForCausalLM

        self.net = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        if scalar:
            self.net.lm_head = torch.nn.Linear(self.net.config.hidden_size, 1, bias=False)
        self._scalar, self.steps = scalar, OptimizerSteps(config)
        wanted = config.policy.optimizer
        of = [[part for part in self.weights().values() if (part.ndim > 1) is matrices] for matrices in (True, False)]
        groups = [{"params": of[0], "weight_decay": wanted.weight_decay}, {"params": of[1], "weight_decay": 0.0}]
        self.adam = torch.optim.AdamW(groups, betas=(wanted.adam_beta1, wanted.adam_beta2), eps=wanted.adam_eps)
        self.reset_optimizer()

    def run(self, microbatches: Microbatches, score: Score, *, backward: bool) -> list[Any]:
        reports = []
        for item in microbatches.items:
            output = self.net.model(input_ids=item.tokens, position_ids=item.positions, use_cache=False).last_hidden_state
            loss, report = score(item, self.net.lm_head(output)[..., 0] if self._scalar else output)
            if backward:
                loss.backward()
            reports.append(report)
        return reports

    def head(self, temperature: float) -> TokenHead | None:
        def logprobs(hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            distribution = (self.net.lm_head(hidden) / temperature).log_softmax(-1)
            entropy = -(distribution.exp() * distribution).sum(-1).detach()
            return distribution.gather(-1, labels[..., None])[..., 0], entropy

        return None if self._scalar else logprobs

    def weights(self) -> dict[str, Tensor]:
        return dict(self.net.named_parameters())

    def zero_gradients(self) -> None:
        for part in self.weights().values():
            part.grad = torch.zeros_like(part)

    def gradient_norm(self) -> Tensor:
        return torch.nn.utils.get_total_norm(self.state("gradients"))

    def clip(self, limit: float, norm: Tensor) -> None:
        torch.nn.utils.clip_grads_with_norm_(self.weights().values(), limit, norm)

    def update(self, rate: float) -> None:
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()

    def reset_optimizer(self) -> None:
        for part in self.weights().values():
            moments = {name: torch.zeros_like(part) for name in ("exp_avg", "exp_avg_sq")}
            self.adam.state[part] = {"step": torch.zeros(()), **moments}

    def step_count(self) -> float:
        return max(float(state["step"]) for state in self.adam.state.values())

    def set_step_count(self, count: float) -> None:
        for state in self.adam.state.values():
            state["step"].fill_(count)

    def state(self, part: StatePart) -> list[Tensor]:
        weights = self.weights().values()
        if part == "weights":
            return [weight.data for weight in weights]
        if part == "gradients":
            return [weight.grad for weight in weights if weight.grad is not None]
        return [value for state in self.adam.state.values() for value in state.values() if value.ndim]

    def before_offload(self, what: Sequence[str]) -> None:
        pass

    def settle(self) -> None:
        pass

    def step_metrics(self) -> StepMetrics:
        return StepMetrics()


class PlainBackend:
    """A `Backend` of one process. It knows neither layouts nor adapters."""

    captures = False
    checkpoint_format: ClassVar[str] = "plain-1"

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec

    @staticmethod
    def check(config: Config, hf_config: Mapping[str, Json]) -> None:
        pass

    @staticmethod
    def computed(hf_config: Mapping[str, Json]) -> Mapping[str, Json]:
        return hf_config

    @staticmethod
    def describe(config: Config, hf_config: Mapping[str, Json], layout: ParallelLayout, rank: int) -> list[WeightSlice]:
        raise NotImplementedError

    @staticmethod
    def environment(config: Config) -> dict[str, str]:
        return {}

    @staticmethod
    def prepare() -> None:
        import transformers  # noqa: F401

    def setup(self, address: str) -> None:
        self.model = PlainModel(self._spec.source, self._spec.config, self._spec.scalar)

    def abort(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    @property
    def place(self) -> ParallelRank:
        context = self._spec.context
        return ParallelRank(context.layout, context.coordinates, None, None, self._spec.device)

    @property
    def routed(self) -> None:
        return None

    def train_tflop(self, lengths: Iterable[int]) -> float:
        return 6e-12 * sum(lengths) * sum(part.numel() for part in self.model.weights().values())

    def base_model(self) -> None:
        return None

    def frozen_model(self, directory: Path) -> PlainModel:
        return PlainModel(directory, self._spec.config)

    # ---- refits and files

    def weight_slices(self) -> list[WeightSlice]:
        return slices_of(self.model.net, dtype="float32")

    def sent_tensors(self) -> Mapping[str, Tensor]:
        return tensors_of(self.model.net, dtype="float32")

    def sending(self) -> nullcontext[None]:
        return nullcontext()

    def pieces_to_save(self, reference: Mapping[str, Tensor] | None) -> Iterator[Piece]:
        for name, weight in self.model.weights().items():
            moments = {key: value for key, value in self.model.adam.state[weight].items() if value.ndim}
            copies = {} if reference is None else {"reference": reference[name]}
            for key, tensor in {"weight": weight.data, **moments, **copies}.items():
                yield whole(f"{key}.{name}", tensor)

    pieces_to_load = pieces_to_save

    def export_hf(self, directory: str, group: ProcessGroup | None) -> None:
        self.model.net.save_pretrained(directory)


class PlainWorker(TrainWorker):
    """A train worker without Megatron."""

    backend_class = PlainBackend


class PlainValueWorker(ValueWorker):
    """A critic without Megatron."""

    backend_class = PlainBackend
