"""ShardedModel: a transformers model under FSDP2 with its passes, gradients and optimizer.

FSDP2 gathers each layer's weights where it runs, and sums gradients over the data-parallel ranks in the backward pass. Every
microbatch is therefore a collective. Imported only where torch is.
"""

import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.utils import get_total_norm
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dagrl.config import Config, OptimizerConfig
from dagrl.errors import ConfigError, error_line
from dagrl.imports import load_class
from dagrl.refit.sources import held_boxes, local_of
from dagrl.rl.routed_experts import RoutedLayers
from dagrl.telemetry.metrics import StepMetrics
from dagrl.workers.fsdp.lora import is_adapter
from dagrl.workers.fsdp.model import SCALAR_HEAD, HiddenStates, find_layers, reshard, sharded_modules
from dagrl.workers.fsdp.routers import Routers
from dagrl.workers.train.backend import Score
from dagrl.workers.train.checkpoint import Piece
from dagrl.workers.train.logprobs import OutputLayer, TokenHead, VocabularyShard
from dagrl.workers.train.microbatches import Microbatch, Microbatches
from dagrl.workers.train.offload import StatePart
from dagrl.workers.train.optimizer import CLIP_EPSILON, OptimizerSteps


class ShardedModel:
    """A `TrainedModel`; with `trains` false, one that only runs forward."""

    def __init__(
        self, root: HiddenStates, config: Config, device: torch.device, routed: RoutedLayers | None = None, *, trains: bool
    ) -> None:
        self.root, self.net, self.device = root, root.net, device
        balance = config.policy.fsdp_cfg.moe_aux_loss_coeff
        self._routers = None if routed is None else Routers(root.net, routed, balance, device)
        self._metrics = StepMetrics()
        settings = config.policy.fsdp_cfg
        self._replicated = settings.data_parallel_replicas > 1
        layout = settings.layout
        self._sharded = bool(sharded_modules(root))
        self._whole = self._sharded and settings.data_parallel_replicas == layout.dp and layout.tp == layout.cp == 1
        self.steps, self._config = OptimizerSteps(config), config
        self._scalar = getattr(root.net, SCALAR_HEAD, None)
        self.parameters: dict[str, Any] = dict(self.net.named_parameters())  # each a DTensor, if sharded
        self._updated: dict[str, Tensor] = {}  # what the optimizers have of each
        self.optimizers = self._make_optimizers() if trains else []
        plain = [type(one) for one in self.optimizers] == [torch.optim.AdamW] and not config.policy.optimizer.args
        fits = (one.is_cuda and one.dtype is torch.float32 and one.is_contiguous() for one in self._updated.values())
        self._fused = plain and all(fits)  # clipping and AdamW
        if self._fused:
            from dagrl.workers.fsdp.kernels import compile_step

            compile_step(device)
        self._factor = 1.0  # by which the fused update multiplies gradients
        self._loaded: list[tuple[Tensor, Tensor]] = []  # quantized moments, and their values in a checkpoint

    # ---- passes

    def run(self, microbatches: Microbatches, score: Score, *, backward: bool) -> list[Any]:
        """Runs the microbatches one by one. Returns the reports of `score`."""
        reports, routers = [], self._routers
        if routers is not None:
            routers.begin(microbatches, counting=backward)
        if self.root.media is not None:
            self.root.media.prepare(item.media for item in microbatches.items)
        for number, item in enumerate(microbatches.items, start=1):
            with nullcontext() if routers is None else routers.running(item.routed):
                output = self._outputs(item)
            loss, report = score(item, output)
            if backward:
                self._set_last(number == len(microbatches.items))
                (loss if routers is None else loss + routers.loss()).backward()  # type: ignore[no-untyped-call]
            reports.append(report)
        if not (backward and self._sharded):  # FSDP2 does after a backward pass
            reshard(self.root)
        if routers is not None:
            self._metrics = routers.metrics()
        return reports

    def _set_last(self, last: bool) -> None:
        """Says whether a microbatch is a step's last one. Replicas add up the sum of all microbatches.

        A rank that holds all weights keeps them gathered until then, and adds up gradients without FSDP2's copies.
        """
        root = cast(FSDPModule, self.root)
        if self._replicated:
            root.set_requires_all_reduce(last)
        if self._whole:
            root.set_requires_gradient_sync(last)
            root.set_reshard_after_backward(last)

    def _outputs(self, item: Microbatch) -> Tensor:
        """Returns the last hidden states [b, s, hidden size], or the numbers [b, s] of a scalar head.

        Padding follows the tokens of a row, so the causal mask alone keeps it out of sight. Sequences of a packed row are
        told apart by positions that start at 0.
        """
        hidden: Tensor = self.root(item.tokens, item.positions, item.segments, item.row_positions, item.media)
        if self._scalar is None:
            return hidden
        numbers: Tensor = (hidden.float() @ self._scalar.weight.float().T).squeeze(-1)
        return numbers

    def head(self, temperature: float) -> TokenHead | None:
        transform = self.root.logits
        if transform is None:
            return None
        chunk, shaped = self._config.policy.logprob_chunk_size, transform.after if transform.shapes else None

        def prepare(hidden: Tensor) -> tuple[Tensor, OutputLayer]:
            shape, inputs = hidden.shape, transform.before(hidden.flatten(0, -2))
            module: Any = self.net.get_output_embeddings()
            weight, bias = module.weight, getattr(module, "bias", None)
            shard = VocabularyShard(0, len(weight))
            if isinstance(weight, DTensor):  # sharded over the tensor-parallel ranks, as `from_local` does the input
                shard = _vocabulary_shard(weight)
                inputs = DTensor.from_local(inputs, weight.device_mesh, [Replicate()], run_check=False)
                inputs = inputs.to_local(grad_placements=[Partial()])
            weight = local_of(weight)
            if bias is not None:
                inputs = torch.cat([inputs, inputs.new_ones(len(inputs), 1)], dim=1)
                weight = torch.cat([weight, local_of(bias)[:, None]], dim=1)
            layer = OutputLayer(weight, shard, temperature / transform.scale, chunk, transform=shaped)
            return inputs.view(*shape[:-1], -1), layer

        return TokenHead(prepare)

    def train_tflop(self, lengths: Iterable[int]) -> float:
        """Returns the TFLOPs of training on sequences of these lengths: three times the forward pass's matrix products.

        Each weight of a layer multiplies each token, except that a token visits `num_experts_per_tok` experts only.
        """
        config = self.net.config.get_text_config()
        content = config.to_dict()

        def size(name: str) -> int:
            found = content.get(config.attribute_map.get(name, name))
            return found if isinstance(found, int) else 0

        experts, chosen = size("num_local_experts") or 1, size("num_experts_per_tok") or 1
        weights = sum(
            weight.numel() * (chosen / experts if ".experts." in name else 1.0)
            for name, weight in self.parameters.items()
            if weight.ndim > 1
        )
        if not size("tie_word_embeddings"):
            weights -= self.net.get_input_embeddings().weight.numel()
        width = size("num_attention_heads") * size("head_dim") or size("hidden_size")
        attention = 2 * width * size("num_hidden_layers")  # causal, half of the square
        return 3e-12 * float(sum(2 * weights * length + attention * length * length for length in map(int, lengths)))

    def step_count(self) -> float:
        """Returns 0: the pieces of a checkpoint have the counts of the optimizer."""
        return 0.0

    def set_step_count(self, count: float) -> None:
        """Quantizes moments that were loaded; the counts are among the pieces."""
        for state, values in self._loaded:
            state.copy_(values)
        self._loaded = []

    def step_metrics(self) -> StepMetrics:
        return self._metrics

    # ---- gradients and optimizer

    def zero_gradients(self) -> None:
        self._factor = 1.0
        if self.root.copies is not None:
            self.root.copies.first_gradients.clear()
        for tensor in (*self.parameters.values(), *self._updated.values()):
            tensor.grad = None

    def gradients(self) -> list[Tensor]:
        return [local_of(one.grad) for one in self.parameters.values() if one.grad is not None]

    def gradient_norm(self) -> Tensor:
        shards = defaultdict[tuple[dist.ProcessGroup, ...], list[Tensor]](list)
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                shards[_sharing(parameter)].append(local_of(parameter.grad))
        total = torch.zeros((), device=self.device)
        for groups, gradients in shards.items():  # in the order of the parameters, which is that of all ranks
            square = get_total_norm(gradients).to(self.device).square()
            for group in groups:
                dist.all_reduce(square, group=group)
            total += square
        return total.sqrt()

    def clip(self, limit: float, norm: Tensor) -> None:
        factor = (limit / (norm + CLIP_EPSILON)).clamp(max=1.0)
        if self._fused:
            self._factor = float(factor)
            return
        gradients = self.gradients()
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))

    def update(self, rate: float) -> None:
        for name, updated in self._updated.items():
            if updated is not self.parameters[name] and self.parameters[name].grad is not None:
                updated.grad = local_of(self.parameters[name].grad)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                _set_rate(group, rate)
            if self._fused:
                from dagrl.workers.fsdp.kernels import clipped_step

                clipped_step(optimizer, self._factor)
            else:
                optimizer.step()
        self.zero_gradients()

    def reset_optimizer(self) -> None:
        first = _first_values(self._config.policy.optimizer)
        for state in self.optimizer_state().values():
            for name, value in state.items():
                local_of(value).copy_(torch.tensor(first.get(name, 0.0)).expand(local_of(value).shape))

    def optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """Returns the optimizer's tensors of each parameter, by its name and theirs."""
        states = {updated: state for optimizer in self.optimizers for updated, state in optimizer.state.items()}
        return {name: states[updated] for name, updated in self._updated.items() if updated in states}

    @torch.no_grad()
    def pieces(self, reference: Mapping[str, Tensor] | None, *, loads: bool = False) -> Iterator[Piece]:
        """Yields this rank's boxes of weights, optimizer state and `reference` policy, for a checkpoint.

        Of ranks with the same box DCP lets one write it. Quantized moments are in float32 in files, because their blocks
        depend on the layout. `loads`: the model gets their values when its step count is set.
        """
        states = self.optimizer_state()
        for name, parameter in self.parameters.items():
            if not parameter.requires_grad:  # the base model of adapters
                continue
            tensors = {"model": parameter, **{f"optimizer.{key}": value for key, value in states.get(name, {}).items()}}
            parts = {kind: local_of(tensor.detach()) for kind, tensor in tensors.items()}
            for kind, part in parts.items():
                if is_quantized(part):
                    parts[kind] = part.dequantize()
                    self._loaded += [(part, parts[kind])] * loads
            if reference is not None:
                parts["reference"] = reference[name]
            boxes = list(held_boxes(name, parameter))
            for kind, part in parts.items():
                if not part.ndim:  # a count of steps, the same on all ranks
                    yield Piece(f"{kind}.{name}", part.view(1), (0,), (1,))
                    continue
                for box, at in boxes:
                    view = part[tuple(slice(start, stop) for start, stop in at)]
                    yield Piece(f"{kind}.{name}", view, tuple(start for start, _ in box), tuple(parameter.shape))

    def _make_optimizers(self) -> list[torch.optim.Optimizer]:
        """Returns optimizers of all weights, with all of their state, so that the first step is not slower."""
        wanted = self._config.policy.optimizer
        kind, args = load_class(wanted.name, "policy.optimizer.name"), dict(wanted.args)
        layers = {id(one) for layer in find_layers(self.net) for one in layer.parameters() if one.ndim == 2}
        trained = [name for name, one in self.parameters.items() if one.requires_grad]
        if kind is not torch.optim.Muon:
            return [self._optimizer(kind, trained, args)]
        matrices = [name for name in trained if id(self.parameters[name]) in layers]
        others = [name for name in trained if id(self.parameters[name]) not in layers]
        made = [self._optimizer(kind, matrices, args)]
        return [*made, self._optimizer(torch.optim.AdamW, others, {})] if others else made

    def _optimizer(self, kind: Any, names: Sequence[str], args: dict[str, Any]) -> torch.optim.Optimizer:
        """Returns an optimizer. AdamW gets local tensors, on which it computes with less work for the host."""
        for name in names:
            parameter = self._updated[name] = self.parameters[name]
            if kind is torch.optim.AdamW and isinstance(parameter, DTensor):
                self._updated[name] = nn.Parameter(local_of(parameter.detach()))
        return make_optimizer(kind, [self._updated[name] for name in names], self._config.policy.optimizer, args)

    # ---- state

    def weights(self) -> dict[str, Tensor]:
        return {name: local_of(weight.detach()) for name, weight in self.parameters.items() if not is_adapter(name)}

    def state(self, part: StatePart) -> list[Tensor]:
        if part == "weights":
            return [local_of(parameter.detach()) for parameter in self.parameters.values()]
        if part == "gradients":
            return []
        values = [local_of(value) for state in self.optimizer_state().values() for value in state.values() if value.ndim]
        return [part for value in values for part in _parts(value)]

    def before_offload(self, what: Sequence[str]) -> None:
        """Drops gradients that a warm-up left."""
        if "gradients" in what:
            self.zero_gradients()


def make_optimizer(
    kind: Any, parameters: Sequence[Tensor], wanted: OptimizerConfig, args: Mapping[str, Any], *, steps: bool = True
) -> torch.optim.Optimizer:
    """Returns an optimizer after a step without gradients at a rate of 0: with its state. Vectors have no weight decay.

    Without `steps`, makes it alone. Raises ConfigError if it cannot be made with these `args`, or cannot take a step.
    """
    groups = defaultdict[tuple[Any, bool], list[Any]](list)  # of one mesh, as fused kernels require
    for parameter in parameters:
        groups[getattr(parameter, "device_mesh", None), parameter.ndim > 1].append(parameter)
        parameter.grad = torch.zeros_like(parameter)
    decays = [wanted.weight_decay * matrices for _, matrices in groups]
    first = [0.0] * len(groups) if is_torchs(kind) else decays  # Adam's moments have it; others may compile it in
    sections = [{"params": some, "weight_decay": decay} for some, decay in zip(groups.values(), first, strict=True)]
    known = inspect.signature(kind).parameters
    usual: dict[str, Any] = {"betas": (wanted.adam_beta1, wanted.adam_beta2), "eps": wanted.adam_eps}
    if "betas" not in known:  # `eps` is another number in Adadelta, Muon and Adafactor
        usual = {}
    usual = {name: usual[name] for name in usual if name in known and type(known[name].default) in (type(usual[name]), type)}
    if issubclass(kind, torch.optim.Adam) and not args.get("foreach"):  # AdamW is one; DTensors have no other fused kernels
        usual["fused"] = True
    try:
        optimizer: torch.optim.Optimizer = kind(sections, lr=wanted.lr, **{**usual, **args})  # some refuse a rate of 0
        for group in optimizer.param_groups:
            _set_rate(group, 0.0)
        if steps:
            optimizer.step()
    except Exception as error:  # of a class of anyone's
        raise ConfigError(
            f"policy.optimizer.name is {wanted.name}, which cannot update the weights of this layout with policy.optimizer."
            f"args={wanted.args}: {error_line(error)} Choose another optimizer, or other args ({', '.join(known)})"
        ) from error
    optimizer.zero_grad()
    for group, decay in zip(optimizer.param_groups, decays, strict=True):
        group["weight_decay"] = decay
    values = _first_values(wanted)
    for state in optimizer.state.values():
        for name in state.keys() & values:
            local_of(state[name]).fill_(values[name])
    return optimizer


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], Tensor):  # of compiled steps
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def is_torchs(kind: type[object]) -> bool:
    """Whether a class of optimizers comes with torch."""
    return kind.__module__.split(".")[:2] == ["torch", "optim"]  # Muon's and Adafactor's is `torch.optim`


def _first_values(wanted: OptimizerConfig) -> dict[str, float]:
    """Returns numbers in the state before a first step, of NAdam, ASGD and Rprop; other tensors are zeros."""
    return {"step": 0.0, "mu_product": 1.0, "mu": 1.0, "eta": wanted.lr, "step_size": wanted.lr}


def is_quantized(tensor: Tensor) -> bool:
    """Whether a local tensor is made of several, as moments of 8 bits are."""
    return is_traceable_wrapper_subclass(tensor)


def _parts(tensor: Tensor) -> list[Tensor]:
    """Returns the tensors that hold the content of a local tensor."""
    if not is_quantized(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return [getattr(tensor, name) for name in names]


def _vocabulary_shard(weight: DTensor) -> VocabularyShard:
    """Returns the rows of an output layer that this tensor-parallel rank has."""
    rows = weight.to_local().shape[0]
    if rows == len(weight):
        return VocabularyShard(0, rows)
    mesh = weight.device_mesh
    most = -(-len(weight) // mesh.size())  # rows of a rank, as DTensor shards them; the last ranks may have fewer
    return VocabularyShard(min(mesh.get_local_rank() * most, len(weight)), rows, mesh.get_group())


def _sharing(parameter: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Returns the groups over which a parameter is sharded."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh, placements = parameter.device_mesh, parameter.placements
    sharded = (dim for dim, place in enumerate(placements) if not place.is_replicate() and mesh.size(dim) > 1)
    return tuple(mesh.get_group(dim) for dim in sharded)
