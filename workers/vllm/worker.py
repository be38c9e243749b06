"""VllmWorker: a generation worker. One process holds one vLLM engine rank; tensor-parallel ranks run in step (SPMD)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dagrl.config import Config
from dagrl.errors import RunError
from dagrl.generation import Generated, merge_generated
from dagrl.shapes import Batch
from dagrl.worker import WorkerContext, in_warmup
from workers.vllm.engine import QuantumEngine, Request
from workers.vllm.environment import require_generation, vllm_environment
from workers.vllm.launch import meet, read_hf_config, start_engine


class VllmWorker:
    """Generates in quanta; see `dagrl.worker` for the methods a runtime calls."""

    def __init__(self, context: WorkerContext, config: Config) -> None:
        self.context = context
        self.config = config
        self.generation = require_generation(config)
        self._engine: QuantumEngine | None = None
        self.version = 0

    @staticmethod
    def environment(config: Config) -> dict[str, str]:
        """Environment variables of the process, set before anything is imported."""
        return vllm_environment(config)

    def setup(self, address: str) -> None:
        """Start the engine together with the other ranks of the shard; `address` is the group's rendezvous."""
        self._hf_config = read_hf_config(self.config)
        self._llm = start_engine(self.config, self.context, meet(self.context, address))
        self._engine = QuantumEngine(self._llm, self.generation, _eos_token_ids(self._hf_config))

    def shutdown(self) -> None:
        """End the engine and leave its process group."""
        if self._engine is not None:
            self._engine = None
            self._llm.engine_core.shutdown()

    def generate(self, batch: Batch) -> Generated:
        """One quantum: add the batch's requests, run engine steps, return what finished.

        Fields: `tokens` [n, P] prompts, `lengths` [n] (0: padding row), `request_ids`, `seeds`, `max_new_tokens`, `greedy`
        [n]. Scalars: `engine_steps`, by default `policy.generation.quantum_engine_steps`.
        """
        engine = self._ready_engine()
        steps = int(batch.scalars.get("engine_steps", self.generation.quantum_engine_steps))
        if in_warmup():
            return self._warm_up(engine, batch, steps)
        return engine.run(_requests(batch), steps)

    def merge_generated(self, parts: Sequence[Generated]) -> Generated:
        """One result from those of the ranks of a shard; raises RunError when they differ."""
        return merge_generated(parts)

    def abort_requests(self, request_ids: Iterable[int] | None = None) -> int:
        """Drop requests (None: all); returns how many were there."""
        return self._require_engine().abort(request_ids)

    def _warm_up(self, engine: QuantumEngine, batch: Batch, steps: int) -> Generated:
        """Run the batch's shape and leave nothing of it; ids are ours, as those of a warm-up batch need not be unique."""
        longest = engine.max_model_len - 1
        requests = [
            Request(-1 - row, request.prompt[:longest], request.seed, max(request.max_new_tokens, steps), request.greedy)
            for row, request in enumerate(_requests(batch))
        ]
        generated = engine.run(requests, steps)
        engine.abort(request.request_id for request in requests)
        engine.reset_prefix_cache()
        return generated

    def _require_engine(self) -> QuantumEngine:
        if self._engine is None:
            raise RunError("the vLLM engine is not running; call setup(address) on all workers of the group first")
        return self._engine

    def _ready_engine(self) -> QuantumEngine:
        return self._require_engine()


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
