"""The baseline without dagrl: a GRPO step in plain Ray actor calls, with a broadcast refit, as in NeMo-RL.

Workers, model, prompts, seeds, losses and the order of work are those of `dagrl.run.loops.grpo`. What differs is the driver.
Each phase is a `ray.get` of one actor call per worker, with its shard's batch in the object store. Engines get a whole batch
of generation in equal parts, and the driver waits for the longest sequence. Weights are gathered and broadcast
(`plain_workers.py`). `dagrl bench step` measures it next to dagrl's loops.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import ray

from dagrl.config import Config
from dagrl.config.settings import generation_config
from dagrl.data import Sampler
from dagrl.errors import DeadlineError
from dagrl.rl.advantages import group_advantages
from dagrl.rl.generation import Generated
from dagrl.rl.rewards import RewardRunner
from dagrl.rl.rollout.batches import train_batch
from dagrl.rl.rollout.episodes import RolloutGroup, new_group, request_seeds, samples_of, token_rows
from dagrl.run.checkpoint_store import TrainState
from dagrl.run.plans import grpo_plans, logprob_phases
from dagrl.run.session import Session
from dagrl.runtime.replay import ReplayTiming
from dagrl.runtime.shapes import Batch, choose_bucket
from dagrl.runtime.split import Split, split_rows
from dagrl.runtime.worker_group import WorkerGroup, free_address
from dagrl.telemetry.metrics import StepMetrics, merge_step_metrics

if TYPE_CHECKING:
    from dagrl.bench.plain_workers import Described

ALL_STEPS = 1 << 30
"""Engine steps per call of `generate`: enough to finish every sequence."""

REPORT_S = 2.0  # for late workers to report what they run

Call = tuple[WorkerGroup, str, Sequence[tuple[object, ...]]]
"""Workers, the method to call, and its arguments by rank."""


def with_plain_workers(config: Config) -> Config:
    """Returns the configuration with workers that run both loops. It must name the workers that dagrl ships."""
    generation = generation_config(config).model_copy(update={"worker": "dagrl.bench.plain_workers:PlainVllmWorker"})
    policy = {"worker": "dagrl.bench.plain_workers:PlainMegatronWorker", "generation": generation}
    return config.model_copy(update={"policy": config.policy.model_copy(update=policy)})


def train_plain(session: Session, reward: RewardRunner) -> None:
    """Runs all remaining GRPO steps, with metrics under the names of dagrl's loops."""
    driver = PlainDriver(session, reward)
    driver.refit(session.step)
    session.replays.close_step(tokens=0)
    for _ in range(session.step, session.config.grpo.max_num_steps):
        driver.step()
    driver.close()


class PlainDriver:
    """The driver of the baseline."""

    def __init__(self, session: Session, reward: RewardRunner) -> None:
        assert session.generation is not None
        self._session, self._reward = session, reward
        self._train, self._generation = self._sides = session.train, session.generation
        self._buckets = {plan.name: plan.buckets for plan in grpo_plans(session.config)}
        self._sampler = Sampler(len(session.inputs.prompts), session.config.data.seed, session.config.data.shuffle)
        self._groups = 0
        self._described = self._join_broadcast()

    def step(self) -> None:
        """Generates, rewards, computes log-probabilities, trains and refits."""
        session, started = self._session, time.perf_counter()
        groups = self._generate()
        samples = [sample for group in groups for sample in samples_of(session.inputs.tokenizer, group)]
        rewards = self._rewards(samples)
        exposed = time.perf_counter() - started
        batch = self._with_logprobs(train_batch(samples, self._advantages(rewards)))
        metrics = self._optimize(batch)
        self.refit(session.step + 1)
        tokens = float(batch["lengths"].sum())
        metrics |= {"reward/mean": float(rewards.mean()), "trained_tokens": tokens, "timing_s/exposed_generation": exposed}
        metrics |= {"staleness/policy_age_mean": 0.0, "staleness/policy_age_max": 0.0}
        metrics |= session.replays.close_step(tokens=int(tokens))
        step = session.step + 1
        session.finish_step("grpo", step, session.config.grpo.max_num_steps, metrics, TrainState(step))

    def refit(self, version: int) -> None:
        """Gathers, broadcasts and loads the weights."""
        sent = (self._train, "broadcast_weights", [()] * len(self._train.actors))
        received = (self._generation, "receive_broadcast", [(version, self._described)] * len(self._generation.actors))
        with self._session.replays.clock.measure("refit"):
            self._wait("refit", [sent, received])

    def close(self) -> None:
        """Makes all workers leave the broadcast at once, because destroying an NCCL communicator waits for all its ranks.

        After a failure they end themselves.
        """
        self._together("leave_broadcast", [(group, "leave_broadcast", [()] * len(group.actors)) for group in self._sides])

    def _join_broadcast(self) -> Described:
        joining = (self._train.call_function(free_address)[0], 1 + len(self._generation.actors))
        calls = [(group, "join_broadcast", [joining] * len(group.actors)) for group in self._sides]
        _, described = self._together("join_broadcast", calls)[0][0]
        return cast("Described", described)

    def _generate(self) -> list[RolloutGroup]:
        config = self._session.config
        groups = [self._new_group() for _ in range(config.grpo.num_prompts_per_step)]
        episodes = [episode for group in groups for episode in group.episodes]
        batch = token_rows(episodes).with_fields(
            request_ids=np.arange(len(episodes)),
            seeds=np.array([episode.seed for episode in episodes], np.int64),
            max_new_tokens=np.array([episode.max_new_tokens for episode in episodes], np.int64),
            greedy=np.zeros(len(episodes), np.int64),
        )
        batch = batch.with_scalars(engine_steps=ALL_STEPS)
        rows = np.array_split(np.arange(len(episodes), dtype=np.intp), self._generation.layout.dp)
        layout = self._generation.layout
        with self._session.replays.clock.measure("generate"):
            every = self._get("generate", self._generation, "generate", [batch.select(mine) for mine in rows])
        for generated in cast("Sequence[Generated]", [every[layout.shard(dp)[0]] for dp in range(layout.dp)]):
            for made in (generated.request(row) for row in range(len(generated))):
                episodes[made.request_id].append(made)
                episodes[made.request_id].finish_reason = made.finish_reason
        return groups

    def _new_group(self) -> RolloutGroup:
        config, number = self._session.config, self._groups
        self._groups += 1
        (key,) = self._sampler.take(1)
        seeds = request_seeds(config.seed, number, config.grpo.num_generations_per_prompt)
        return new_group(config, number, key, self._session.inputs.prompts[key], seeds)

    def _rewards(self, samples: Sequence[Any]) -> npt.NDArray[np.float32]:
        with self._session.replays.clock.measure("reward"):
            texts = zip(*[(sample.prompt.text, sample.text, sample.prompt.reference) for sample in samples], strict=True)
            return self._reward(*map(list, texts)).values

    def _advantages(self, rewards: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        grpo = self._session.config.grpo
        table = group_advantages(
            rewards.reshape(grpo.num_prompts_per_step, -1),
            leave_one_out=grpo.use_leave_one_out_baseline,
            normalize=grpo.normalize_rewards,
        )
        return table.reshape(-1).astype(np.float32)

    def _with_logprobs(self, batch: Batch) -> Batch:
        rows = Batch({"tokens": batch["tokens"], "lengths": batch["lengths"]})
        mask = batch["loss_mask"]
        fields = {"prev_logprobs": np.zeros_like(mask), "reference_logprobs": np.zeros_like(mask)}
        phases = logprob_phases(self._session.config)
        if "logprobs" in phases:
            fields["prev_logprobs"] = self._logprobs("logprobs", rows, "policy") * mask
        if "reference_logprobs" in phases:
            fields["reference_logprobs"] = self._logprobs("reference_logprobs", rows, "reference") * mask
        return batch.with_fields(**fields)

    def _logprobs(self, phase: str, rows: Batch, model: str) -> Any:
        split, shares = self._share_out(phase, rows)
        layout = self._train.layout
        with self._session.replays.clock.measure(phase):
            every = self._get(phase, self._train, "logprobs", shares, model)
            found = [next(every[rank] for rank in layout.shard(dp) if every[rank] is not None) for dp in range(layout.dp)]
        return split.restore(found)["logprobs"]

    def _optimize(self, batch: Batch) -> dict[str, float]:
        size, metrics = self._session.config.policy.train_global_batch_size, {}
        for start in range(0, batch.rows, size):
            part = batch.select(range(start, start + size))
            mask = part["loss_mask"].astype("float64")
            valid = {"global_valid_tokens": float(mask.sum()), "global_valid_sequences": float((mask.sum(axis=1) > 0).sum())}
            _, shares = self._share_out("train_step", part.with_scalars(**valid))
            with self._session.replays.clock.measure("train_step"):
                parts = self._get("train_step", self._train, "train_step", shares, "policy")
            metrics = merge_step_metrics(cast("Sequence[StepMetrics]", parts)).flat()
        return metrics

    def _share_out(self, phase: str, batch: Batch) -> tuple[Split, list[Batch]]:
        """Splits the batch into a share per shard, padded to the phase's bucket, as the scheduler does."""
        lengths = batch["lengths"].astype("int64")
        rows = split_rows(lengths, self._train.layout.dp)
        bucket = choose_bucket(self._buckets[phase], max(map(len, rows)), int(lengths.max()))
        return Split(tuple(rows), bucket, batch.tokens), [batch.select(mine).pad(bucket) for mine in rows]

    def _get(self, phase: str, group: WorkerGroup, method: str, shares: Sequence[Batch], *args: object) -> list[Any]:
        """Returns every worker's result for its shard's share, passed through the object store."""
        stored = [ray.put(share) for share in shares]
        own = [(stored[group.layout.coordinates(rank).dp], *args) for rank in range(len(group.actors))]
        return self._wait(phase, [(group, method, own)])[0]

    def _wait(self, phase: str, calls: Sequence[Call]) -> list[list[Any]]:
        """Returns results by call. Times count like those of a replay of the phase, for idle shares and overhead."""
        started = time.perf_counter()
        found = self._together(phase, calls)
        busy = tuple(seconds for results in found for seconds, _ in results)
        self._session.replays.count(phase, ReplayTiming(started, time.perf_counter(), busy, None))
        return [[result for _, result in results] for results in found]

    def _together(self, doing: str, calls: Sequence[Call]) -> list[list[tuple[float, Any]]]:
        """Starts all calls at once; returns every worker's seconds and result, by call. Raises DeadlineError when late."""
        every = [
            [actor.timed.remote(method, *mine) for actor, mine in zip(group.actors, args, strict=True)]
            for group, method, args in calls
        ]
        timeout_s = self._session.config.timeouts.replay_s
        try:
            found = iter(ray.get([ref for refs in every for ref in refs], timeout=timeout_s))
        except ray.exceptions.GetTimeoutError as error:
            late = f"plain Ray calls for {doing!r} did not finish within {timeout_s:.0f} s (timeouts.replay_s)"
            raise DeadlineError(f"{late}; workers are running:\n{self._activities()}") from error
        return [[next(found) for _ in refs] for refs in every]

    def _activities(self) -> str:
        """Returns what every worker runs, with the stack of its thread."""
        return "\n".join(
            f"{group.role.name} worker {rank}: {report.what or 'nothing'}\n{report.stack}"
            for group in self._sides
            for rank, report in group.reports(REPORT_S).items()
        )
