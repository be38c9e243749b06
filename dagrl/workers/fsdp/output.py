"""What a transformers model computes between its last hidden states and its logits, besides the product with its head.

Models scale or cap their logits in the `forward` of their own class (Gemma's soft cap, Granite's and Cohere's scales). Here
that `forward` runs on stand-ins of the two modules that it calls, so no model is known by name.
"""

from __future__ import annotations

import copy
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from dagrl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _Output(MoeModelOutputWithPast):  # type: ignore[misc]
    """The base model's output: None in place of all that is not hidden states."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Base(nn.Module):
    """Stands in for the base model: gives `hidden`. Other attributes are those of the model (Falcon-H1's multiplier)."""

    hidden: Tensor

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = [model]  # which is not a part

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_model"][0], name)

    @property
    def decoder(self) -> _Base:
        """The part of the base model that some models call (OPT)."""
        return self

    def forward(self, *_: Any, **__: Any) -> Any:
        return _Output(last_hidden_state=self.hidden)


class _Head(nn.Module):
    """Stands in for the head: keeps its input and gives `logits`."""

    logits: Tensor
    given: Tensor

    @property
    def weight(self) -> Tensor:
        """A tensor of the head's dtype, to which some models convert hidden states."""
        return self.logits

    def forward(self, hidden: Tensor) -> Tensor:
        self.given = hidden
        return self.logits


def base_of(model: PreTrainedModel) -> nn.Module:
    """Returns the part below the head. Llama 4's text model does not have it under the name of its class."""
    base, head = model.base_model, model.get_output_embeddings()
    parts: list[nn.Module] = [part for part in model.children() if part is not head]
    return parts[0] if base is model else base


class LogitTransform:
    """The `forward` of a causal language model around its base model and its head.

    `scale` is a factor of the logits. Without `shapes`, it is all that happens to them.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        base = base_of(model)
        self._base, self._head = _Base(base), _Head()
        stands_in = {base: self._base, model.get_output_embeddings(): self._head}
        self._model = copy.copy(model)
        self._model._modules = {name: stands_in.get(child, child) for name, child in model._modules.items()}
        self._whole = {"logits_to_keep": 0} if "logits_to_keep" in inspect.signature(type(model).forward).parameters else {}
        probe = torch.linspace(-300.0, 300.0, 240).view(1, 4, 60)
        with torch.no_grad():
            found, part = self.after(probe), self.after(probe[..., 7:31])
        if found.shape != probe.shape or not torch.equal(found[..., 7:31], part):
            raise ConfigError(
                f"{type(model).__name__}.forward computes more of logits than a function of each one, which the FSDP worker "
                "does not have; use a model whose output layer is a matrix, or a worker of your own (policy.worker)"
            )
        factor = float(self.after(torch.ones(1, 1, 1)))
        self.shapes = not torch.allclose(found, factor * probe, rtol=1e-5)
        self.scale = 1.0 if self.shapes else factor

    def before(self, hidden: Tensor) -> Tensor:
        """Returns the head's input for last hidden states [n, hidden size]."""
        self._base.hidden = self._head.logits = hidden[None]
        return self._run()[0][0]

    def after(self, logits: Tensor) -> Tensor:
        """Returns the model's logits for those of the head, in the same shape [b, n, columns]."""
        self._base.hidden = self._head.logits = logits
        return self._run()[1]

    def _run(self) -> tuple[Tensor, Tensor]:
        """Returns the head's input and the model's logits, and keeps neither."""
        tokens = torch.zeros(self._base.hidden.shape[:2], dtype=torch.int64, device=self._base.hidden.device)
        output: Any = type(self._model).forward(self._model, input_ids=tokens, use_cache=False, **self._whole)
        given = self._head.given
        self._head.logits = self._head.given = self._base.hidden = torch.empty(0)
        return given, output.logits
