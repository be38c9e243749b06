"""Records which experts process each token, for `policy.router_replay`.

Routers of vLLM pass the ids that they choose to a callback, which writes them to a buffer on the device: inside a CUDA graph
this is one more copy. After each engine step the buffer is copied to the host, and rows are attributed to requests by the
model runner's batch. vLLM's own `enable_return_routed_experts` is not used: releases differ in what it needs, it does not
exist without the second model runner, and only the first of several tensor-parallel ranks has its result.

Tokens found in the prefix cache are not computed again. Their record is that of the request that computed the block.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dagrl.errors import ConfigError
from dagrl.rl.routed_experts import MISSING, Record, RoutedLayers

if TYPE_CHECKING:
    import torch


@dataclass
class _Followed:
    """A request in the engine. `pieces` are its computed rows, in the order of steps: first position, and ids."""

    prompt: Sequence[int]
    version: int
    pieces: list[tuple[int, Record]] = field(default_factory=list)


class ExpertRecorder:
    """Create one per engine; attach it to the loaded model before the engine captures CUDA graphs."""

    def __init__(self, sizes: RoutedLayers) -> None:
        self._sizes = sizes
        self._followed: dict[str, _Followed] = {}
        self._blocks: OrderedDict[bytes, Record] = OrderedDict()

    def attach(self, model: torch.nn.Module, vllm_config: Any) -> None:
        """Registers the callbacks. Raises ConfigError if a kernel of the model chooses experts without telling."""
        import torch

        self._block, self._most_blocks = int(vllm_config.cache_config.block_size), 0
        needed = ("router", "layer_id", "_quant_method")  # other modules may wrap what has them
        layers: list[Any] = [module for module in model.modules() if all(hasattr(module, name) for name in needed)]
        for layer in layers:
            kernel = layer._quant_method
            if kernel.is_monolithic or not hasattr(layer.router, "set_capture_fn"):
                raise ConfigError(
                    f"policy.router_replay is true, but vLLM's {type(kernel).__name__} does not tell which experts it "
                    "chooses. Use another kernel (policy.generation.vllm_kwargs.moe_backend=triton), or set "
                    "policy.router_replay=false"
                )
        if not layers:
            raise ConfigError("policy.router_replay is true, and vLLM's model has no expert layers; set it to false")
        most = int(vllm_config.scheduler_config.max_num_batched_tokens)
        shape, missing = (most, self._sizes.layers, self._sizes.chosen), MISSING if self._sizes.dtype.itemsize == 1 else -1
        self._buffer = torch.full(shape, missing, dtype=torch.int32, device=next(model.parameters()).device)
        for layer in layers:
            layer.router.set_capture_fn(partial(self._capture, layer.layer_id))

    def _capture(self, layer: int, chosen: torch.Tensor) -> None:
        """Writes what a router chose, [tokens, top k] with padding, to the buffer."""
        self._buffer[: len(chosen), layer] = chosen

    def follow(self, name: str, prompt: Sequence[int], version: int) -> None:
        """Records a request from now on, under vLLM's `name` for it. Its cached prefixes are those of `version`."""
        self._followed[name] = _Followed(prompt, version)

    def step(self, runner: Any, scheduled: Any) -> None:
        """Attributes the rows of the step that vLLM's model `runner` has just launched to its requests."""
        tokens = int(scheduled.total_num_scheduled_tokens)
        if not tokens:
            return
        batch, starts = _batch(runner)
        rows = self._to_host(tokens)
        first, counts = 0, scheduled.num_scheduled_tokens
        for name, start in zip(list(batch.req_ids), starts.tolist(), strict=False):
            part = rows[first : first + counts[name]]
            first += counts[name]
            followed = self._followed.get(name)
            if followed is not None:
                followed.pieces.append((start, part))
                if start < len(followed.prompt):  # for requests with the same prefix
                    self._keep(followed, followed.prompt, start, part)

    def _to_host(self, tokens: int) -> Record:
        """Copies the ids of a step's tokens to the host, [tokens, bytes].

        The copy from a GPU is complete when the step's sampled tokens have arrived, which are computed after it.
        """
        import torch

        ids = self._buffer[:tokens].to(torch.uint8 if self._sizes.dtype.itemsize == 1 else torch.int16)
        host = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=ids.is_cuda).copy_(ids, non_blocking=True)
        rows: Record = host.numpy().reshape(tokens, -1).view(np.uint8)
        return rows

    def take(self, name: str, tokens: Sequence[int]) -> Record:
        """Stops recording a request that made these tokens. Returns the bytes of every token except the last, which the
        model has not seen."""
        followed = self._followed.pop(name)
        record = self._record(followed, len(followed.prompt) + len(tokens) - 1)
        self._keep(followed, [*followed.prompt, *tokens], 0, record)
        return record

    def drop(self, names: Sequence[str]) -> None:
        """Forgets requests."""
        for name in names:
            self._followed.pop(name, None)

    def forget_prefixes(self) -> None:
        """Forgets the blocks of the prefix cache, which has been emptied."""
        self._blocks.clear()

    def _record(self, followed: _Followed, length: int) -> Record:
        record = np.full((length, self._sizes.token_bytes), MISSING, np.uint8)
        cached = min((start for start, _ in followed.pieces), default=0)
        for number, key in enumerate(self._keys(followed, followed.prompt[:cached])):
            block = self._blocks.get(key)
            if block is not None:
                record[number * self._block : (number + 1) * self._block] = block[: length - number * self._block]
        for start, rows in reversed(followed.pieces):  # what is computed again later does not count
            record[start : start + len(rows)] = rows[: max(length - start, 0)]
        return record

    def _keep(self, followed: _Followed, tokens: Sequence[int], start: int, rows: Record) -> None:
        """Keeps the blocks of `tokens` that `rows`, from position `start` on, have whole."""
        end = min(start + len(rows), len(tokens))
        for number, key in enumerate(self._keys(followed, tokens[:end])):
            low = number * self._block
            if low >= start and key not in self._blocks:
                self._blocks[key] = rows[low - start : low - start + self._block]
        while len(self._blocks) > self._most_blocks:
            self._blocks.popitem(last=False)

    def _keys(self, followed: _Followed, tokens: Sequence[int]) -> list[bytes]:
        """Returns a key for each whole block, of its tokens, those before it, and the version of the cache."""
        keys, key = [], f"version {followed.version}".encode()
        values = np.asarray(tokens, np.int64)
        for low in range(0, len(values) - self._block + 1, self._block):
            key = hashlib.blake2b(key + values[low : low + self._block].tobytes(), digest_size=16).digest()
            keys.append(key)
        return keys

    def cache_holds(self, blocks: int) -> None:
        """Sets how many blocks to keep: as many as vLLM's KV cache has."""
        self._most_blocks = blocks


def _batch(runner: Any) -> tuple[Any, Any]:
    """Returns the runner's batch and the tokens of each request that were computed before this step."""
    state = getattr(runner, "execute_model_state", None)
    second = getattr(state, "input_batch", None)  # of the second model runner
    if second is not None:
        return second, second.num_computed_tokens_np
    return runner.input_batch, runner.input_batch.num_computed_tokens_cpu
