"""The smallest language model there is, as workers: the next token's distribution is the same after any text.

Its logits are one vector, so the loops run end to end in milliseconds a step, with real phases, a real refit, real losses,
and truths that a test can compute: the log-probability of any token under any policy version.
"""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dagrl.channels import open_channel
from dagrl.config import Config
from dagrl.refit import RefitReceiver, RefitSender
from dagrl.refit.slices import WeightSlice
from dagrl.rl.algorithm import algorithm_for
from dagrl.rl.generation import (
    FinishedRequest,
    Generated,
    RequestProgress,
    merge_generated,
    pack_generated,
    quantum_seconds,
    quantum_steps,
)
from dagrl.rl.losses import Denominators, batch_loss
from dagrl.runtime.shapes import Batch
from dagrl.runtime.worker import WorkerContext, in_warmup
from dagrl.telemetry.metrics import ENTROPY, StepMetrics, merge_step_metrics
from dagrl.workers.train.kept_logprobs import KeptLogprobs

SIZE = 16  # token numbers 0 to 15; EOS ends a sequence
TAUGHT = 11  # the token that the teacher prefers: the digit 7
TRUTH = "truth.jsonl"  # next to the run: the logits of each version, as generation received them
EXCHANGES = "exchanges.jsonl"  # next to the run: what each role gave up and took back, in order


class UnigramWorker:
    """What train and generation workers have in common: `logits` [SIZE] and the refit's methods."""

    def __init__(self, context: WorkerContext, config: Config) -> None:
        self.context, self.config = context, config

    def setup(self, address: str) -> None:
        torch.set_num_threads(1)
        self.logits = torch.linspace(-0.5, 0.5, SIZE, dtype=torch.float32)
        self.held = {"weights", "kv_cache"} if self.context.role == "generation" else {"weights", "gradients", "optimizer"}

    def exchanged(self, what: str, parts: list[str]) -> None:
        if self.context.rank == 0:
            path = Path(self.config.output_dir) / self.config.name / EXCHANGES
            with path.open("a") as file:
                file.write(json.dumps([self.context.role, what, sorted(parts), sorted(self.held)]) + "\n")

    def need(self, *parts: str) -> None:
        assert self.held >= set(parts), f"{self.context.role} computes without its {set(parts) - self.held}"

    def weight_slices(self) -> list[WeightSlice]:
        return [WeightSlice("logits", ((0, SIZE),), "logits", ((0, SIZE),))]

    def prepare_refit(self, plan: Any, channel: Any) -> None:
        end = RefitSender if self.context.role == "train" else RefitReceiver
        self.end = end(plan, {"logits": self.logits}, open_channel(channel))


class UnigramState(UnigramWorker):
    """A worker with a train state, which it gives up and takes back."""

    def offload(self, parts: tuple[str, ...]) -> None:
        self.need(*parts)
        self.held -= set(parts)
        self.exchanged("offload", list(parts))

    def reload(self, parts: tuple[str, ...]) -> None:
        assert not self.held & set(parts)
        self.held |= set(parts)
        self.exchanged("reload", list(parts))

    def device_memory(self) -> None:
        """It has no GPU."""

    def merge_rows(self, parts: list[Batch]) -> Batch:
        (part,) = parts
        return part


class UnigramLearner(UnigramState):
    """One optimizer step is one step of plain gradient descent on `dagrl.rl.losses`. `saved`: what checkpoints have."""

    saved: dict[str, Tensor]

    def counts(self, batch: Batch) -> Denominators:
        """Returns those of a step, for which it needs all of its state."""
        self.need("weights", "gradients", "optimizer")
        return Denominators(*(batch.number(f"global_valid_{unit}") for unit in ("tokens", "sequences")))

    def merge_metrics(self, parts: list[StepMetrics]) -> StepMetrics:
        return merge_step_metrics(parts)

    def save_checkpoint(self, directory: str) -> None:
        self.need("weights", "optimizer")
        Path(directory).mkdir(parents=True, exist_ok=True)
        torch.save(self.saved, Path(directory) / "tensors.pt")

    def load_checkpoint(self, directory: str) -> None:
        self.need("weights", "optimizer")
        for name, tensor in torch.load(Path(directory) / "tensors.pt").items():
            self.saved[name].copy_(tensor)


class UnigramTrainer(UnigramLearner):
    def setup(self, address: str) -> None:
        super().setup(address)
        self.kept, self.reference = KeptLogprobs(), self.logits.clone()
        self.saved = {"logits": self.logits, "reference": self.reference}

    def train_step(self, batch: Batch, loss: str) -> StepMetrics:
        gradient, metrics = self._gradient(batch, loss, self.counts(batch))
        time.sleep(0.0 if in_warmup() else float(self.config.data.task_args.get("train_s", 0.0)))  # type: ignore[arg-type]
        if not in_warmup():
            self.logits -= self.config.policy.optimizer.lr * gradient
        return metrics

    def evaluate(self, batch: Batch, loss: str) -> StepMetrics:
        valid = float(batch["loss_mask"].sum())
        return self._gradient(batch, loss, Denominators(valid, float(np.count_nonzero(batch["lengths"]))))[1]

    def _gradient(self, batch: Batch, loss: str, counts: Denominators) -> tuple[Any, StepMetrics]:
        algorithm = algorithm_for(loss, self.config)
        batch = self.kept.join(batch, algorithm.columns, required=not in_warmup())
        data = {name: torch.tensor(array if array.ndim == 2 else array[:, None]) for name, array in batch.fields.items()}
        leaf = self.logits.clone().requires_grad_()
        logprobs = torch.log_softmax(leaf, 0)[data["tokens"] % SIZE]
        output = batch_loss(algorithm, logprobs, data, counts)
        output.loss.backward()
        sums = {name: float(value) for name, value in output.sums.items()}
        if "entropy" in data:
            sums[ENTROPY] = float((data["entropy"] * data["loss_mask"]).sum() / counts.tokens)
        return leaf.grad, StepMetrics(sums)

    def _table(self, model: str) -> Any:
        self.need("weights")
        return torch.log_softmax(self.logits if model == "policy" else self.reference, 0).numpy()

    def answer_sums(self, batch: Batch, model: str) -> Batch:
        table = self._table(model).astype(np.float64)
        sums = (table[np.array(batch["tokens"]) % SIZE] * batch["loss_mask"]).sum(axis=1)
        return Batch({"lengths": batch["lengths"], "sums": sums}, batch.scalars)

    def keep_logprobs(self, batch: Batch, model: str) -> None:
        table = self._table(model)
        values = table[np.array(batch["tokens"]) % SIZE]
        entropy = np.full_like(values, -(np.exp(table) * table).sum())
        if in_warmup():
            return
        if model == "policy":
            self.kept.keep(batch, prev_logprobs=values, entropy=entropy)
        else:
            self.kept.keep(batch, reference_logprobs=values)

    def keep_columns(self, batch: Batch) -> None:
        if not in_warmup():
            self.kept.keep(batch, **{name: field for name, field in batch.fields.items() if field.ndim == 2})

    def kept_logprobs(self) -> dict[str, dict[int, Any]]:
        return self.kept.columns()

    def snapshot_reference(self) -> None:
        self.reference.copy_(self.logits)

    def reset_optimizer(self) -> None:
        pass

    def send_weights(self, version: int) -> Any:
        self.need("weights")
        return self.end.send(version)


class UnigramCritic(UnigramLearner):
    """The value of a state depends on its last token alone: `values` [SIZE]."""

    def setup(self, address: str) -> None:
        super().setup(address)
        self.table = torch.zeros(SIZE)
        self.saved = {"values": self.table}

    def values(self, batch: Batch) -> Batch:
        self.need("weights")
        return Batch({"lengths": batch["lengths"], "values": self._values(self.table, batch).numpy()}, batch.scalars)

    def _values(self, table: Tensor, batch: Batch) -> Tensor:
        return table[torch.tensor(np.pad(batch["tokens"][:, :-1], ((0, 0), (1, 0)))) % SIZE]

    def train_step(self, batch: Batch, loss: str) -> StepMetrics:
        data = {name: torch.tensor(array) for name, array in batch.fields.items()}
        leaf = self.table.clone().requires_grad_()
        output = batch_loss(algorithm_for(loss, self.config), self._values(leaf, batch), data, self.counts(batch))
        output.loss.backward()
        if not in_warmup():
            self.table -= self.config.policy.optimizer.lr * leaf.grad
        return StepMetrics({name: float(value) for name, value in output.sums.items()})


class UnigramTeacher(UnigramState):
    """It prefers sevens (token 11), whatever the policy learns."""

    def setup(self, address: str) -> None:
        super().setup(address)
        self.logits[TAUGHT] = 3.0

    def logprobs(self, batch: Batch, column: str) -> Batch:
        self.need("weights")
        values = torch.log_softmax(self.logits, 0).numpy()[np.array(batch["tokens"]) % SIZE]
        return Batch({"lengths": batch["lengths"], column: values}, batch.scalars)


class UnigramGenerator(UnigramWorker):
    """One engine step makes one token of every running request, drawn by its seed and the token's place, as by vLLM."""

    def setup(self, address: str) -> None:
        super().setup(address)
        self.version = 0
        self.running: dict[int, dict[str, Any]] = {}

    def sleep(self, level: int) -> int:
        assert self.held == {"weights", "kv_cache"} and not self.running, "vLLM sleeps as a whole, at rest"
        self.held = set()
        if level == 2:
            self.logits.fill_(float("nan"))
        self.exchanged("sleep", [str(level)])
        return 0

    def wake_up(self, tags: tuple[str, ...]) -> None:
        assert not self.held & set(tags)
        self.held |= set(tags)
        self.exchanged("wake_up", list(tags))

    def generate(self, batch: Batch) -> Generated:
        self.need("weights", "kv_cache")
        assert not self.logits.isnan().any(), "the weights were dropped in sleep, and no refit followed"
        if in_warmup():
            return pack_generated([], [], 0)
        generation = self.config.policy.generation
        assert generation is not None
        for row, length in enumerate(batch["lengths"].tolist()):
            if length:
                names = ("request_ids", "seeds", "max_new_tokens")
                request, seed, limit = (int(batch[name][row]) for name in names)
                self.running[request] = {"seed": seed, "limit": limit, "made": []}
        finished: list[FinishedRequest] = []
        table = torch.log_softmax(self.logits, 0).numpy().astype(np.float64)
        steps, step_s = 0, float(self.config.data.task_args.get("engine_step_s", 0.0))  # type: ignore[arg-type]
        started = time.perf_counter()
        while steps < quantum_steps(batch, self.context.coordinates.dp) and self.running:
            steps += 1
            time.sleep(max(0.0, started + steps * step_s - time.perf_counter()))  # with what the step itself took
            for request in list(self.running)[: generation.vllm_cfg.max_num_seqs]:
                if reason := self._step(self.running[request], table):
                    finished.append(self._as_finished(request, reason))
                    del self.running[request]
            if time.perf_counter() - started >= quantum_seconds(batch):
                break
        return pack_generated(finished, map(RequestProgress, self.running), steps)

    def _step(self, request: dict[str, Any], table: Any) -> str:
        drawn = np.random.default_rng((request["seed"], len(request["made"]))).random()
        token = min(int(np.searchsorted(np.cumsum(np.exp(table)), drawn)), SIZE - 1)
        request["made"].append((token, float(table[token]), self.version))
        if token == 1 and self.config.policy.generation.forced_lengths is None:  # type: ignore[union-attr]
            return "stop"
        return "length" if len(request["made"]) == request["limit"] else ""

    def _as_finished(self, request: int, reason: str) -> FinishedRequest:
        tokens, logprobs, versions = zip(*self.running[request]["made"], strict=True)
        return FinishedRequest(request, list(tokens), list(logprobs), list(versions), reason)

    def merge_generated(self, parts: list[Generated]) -> Generated:
        return merge_generated(parts)

    def abort_requests(self, requests: list[int]) -> int:
        return sum(self.running.pop(request, None) is not None for request in requests)

    def receive_weights(self, version: int) -> Any:
        self.need("weights")
        report = self.end.receive(version)
        if not in_warmup():
            self.version = version
            if self.context.rank == 0:
                path = Path(self.config.output_dir) / self.config.name / TRUTH
                with path.open("a") as file:
                    file.write(json.dumps({"version": version, "logits": self.logits.tolist()}) + "\n")
        return report
