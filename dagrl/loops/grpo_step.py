"""What a GRPO step consists of, for both loops: batches of scored groups, log-probabilities, the optimizer step, records."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from dagrl.checkpoint import TrainState
from dagrl.config import Config, Json
from dagrl.config.settings import bucket_widths, generation_config, has_fp8_kv_cache, samples_per_step
from dagrl.generation import FIRST_QUANTUM
from dagrl.loops.batches import sample_keys, scored_batch, with_columns
from dagrl.loops.calibration import PHASE, calibrate, calibrate_on_prompts
from dagrl.loops.early import Early
from dagrl.loops.experience import Experience
from dagrl.loops.logprobs import Columns, chunk_buckets, logprob_phases, logprobs_of
from dagrl.loops.rollout import request_slots
from dagrl.loops.scoring import ScoredGroup
from dagrl.loops.session import Session
from dagrl.loops.sft import sft_plans, train_buckets
from dagrl.loops.start import REFERENCE, PhasePlan
from dagrl.refit.run import RefitReport
from dagrl.shapes import Batch, Bucket, Scalar
from dagrl.telemetry.metrics import ENTROPY, EXPOSED, MASKED_MINIBATCHES, UPDATE, UPDATE_PAUSE, join_optimizer_steps

Metrics = dict[str, float]

logger = logging.getLogger(__name__)


def begin_step() -> Metrics:
    """Metrics of a step in which nothing has happened yet."""
    return {EXPOSED: 0.0}


def start_policy(session: Session, experience: Experience) -> None:
    """Make the current weights the reference policy and give them to generation; after a resume, go on where it stood."""
    config, first, total = session.config, session.config.sft.max_num_steps, session.config.grpo.max_num_steps
    resumed = session.resumed is not None and "grpo_sampler" in session.state.counters
    if not resumed:
        session.hold("train", keep_generation_weights=True)
        if config.loss_fn.reference_policy_kl_penalty:
            session.train.call("snapshot_reference", deadline=config.timeouts.replay)
        session.train.call("reset_optimizer", deadline=config.timeouts.replay)
        session.state = replace(session.state, counters={**session.state.counters, **_counters(config, experience)})
    calibrate_on_prompts(session)
    refit(session, experience, session.step)
    session.progress.step(session.step - first, total, {}, stage="grpo")
    if session.step == first and config.grpo.val_at_start:
        session.validated_at_start("grpo", experience.validate(may_stop=not resumed))
    if resumed:
        assert session.resumed is not None
        experience.restore(session.state.counters, session.resumed.directory)
    session.lap(tokens=0)  # none of this is of the first step


def _counters(config: Config, experience: Experience) -> dict[str, Json]:
    """What the driver's state in a checkpoint says of GRPO."""
    return {**experience.state(), REFERENCE: config.loss_fn.reference_policy_kl_penalty > 0}


def learn(session: Session, groups: Sequence[ScoredGroup], step: int, early: Early) -> Metrics:
    """One training step on a batch of groups, up to the new weights in the train workers.

    `early`: what has been done of it with the present weights.
    """
    keys = sample_keys(groups)
    known = [early.known.get(key) for key in keys]
    batch, metrics = with_logprobs(session, scored_batch(session.config, groups, step), known)
    session.stop.check()  # the last point at which the weights are those of the last finished step
    assert early.learned <= {group for group, _ in keys}, "gradients of a group that is not of the batch"
    rest = [row for row, (group, _) in enumerate(keys) if group not in early.learned]
    metrics |= optimize(session, batch, rest, early.parts)
    return metrics | calibrate(session, batch) | {"trained_tokens": float(batch["lengths"].sum())}


def update(session: Session, experience: Experience, ended: float) -> Metrics:
    """Give generation the weights that training `ended` with, between two quanta; how long that took, and the pause."""
    version = session.step + 1
    metrics = refit(session, experience, version)
    metrics[UPDATE] = time.perf_counter() - ended
    experience.advance(version)
    return metrics


def refit(session: Session, experience: Experience, version: int) -> Metrics:
    """Give generation the train workers' weights as `version`; how long its workers stood still for it.

    What generates next is asked for before the end is known, so that engines go on at once; not where they share their GPUs
    with training, as they have no memory for it before the end.
    """
    replay = session.submit("refit", version)
    if session.shared is None:
        experience.rollouts.look_ahead()
    pauses = _pauses(session.collect("refit", replay, busy_s=_mean_pause)[0])
    return {UPDATE_PAUSE: max(pauses)} if pauses else {}


def _mean_pause(result: object) -> float | None:
    """How long a refit took of each generation worker; its senders wait until the quanta before it have ended."""
    pauses = _pauses(result)
    return sum(pauses) / len(pauses) if pauses else None


def _pauses(result: object) -> list[float]:
    """Seconds that each generation worker stood still; where one does not say, those of its receiving alone."""
    return [report.pause_s or report.seconds for report in _reports(result) if report.bytes_received]


def _reports(result: object) -> Iterator[RefitReport]:
    """The reports in what a refit phase returned, however it joined them."""
    if isinstance(result, RefitReport):
        yield result
    elif isinstance(result, Iterable):
        for part in result:
            yield from _reports(part)


def finish_step(session: Session, experience: Experience, metrics: Metrics) -> None:
    """Validate if it is time to, and record the step."""
    config, first = session.config, session.config.sft.max_num_steps
    position, total = session.step + 1 - first, config.grpo.max_num_steps
    if position == total or (config.grpo.val_period and position % config.grpo.val_period == 0):
        metrics |= experience.validate()
    metrics |= session.lap(tokens=int(metrics["trained_tokens"]))
    step = session.step + 1
    state = TrainState(step, counters=_counters(config, experience), metric=session.metric("grpo", metrics))
    session.finish_step("grpo", position, total, metrics, state)


@contextmanager
def exposed(metrics: Metrics) -> Iterator[None]:
    """Count the time of the block as generation that training waits for."""
    start = time.perf_counter()
    yield
    metrics[EXPOSED] += time.perf_counter() - start


def with_logprobs(
    session: Session, batch: Batch, known: Sequence[Columns | None] | None = None
) -> tuple[Batch, dict[str, float]]:
    """The batch with the policy's and the reference's log-probabilities, and the policy's mean entropy, if it is known.

    `known`: those of each row that are there already, else None.
    """
    rows = Batch({"tokens": batch["tokens"], "lengths": batch["lengths"]})
    columns = logprobs_of(session, rows, known or [None] * batch.rows)
    mask = batch["loss_mask"]
    computed = "logprobs" in logprob_phases(session.config) and bool(mask.any())  # else the step itself finds it
    entropy = {ENTROPY: float((columns["entropy"] * mask).sum() / mask.sum())} if computed else {}
    return with_columns(batch, columns), entropy


def optimize(session: Session, batch: Batch, rest: Sequence[int] | None = None, parts: int = 0) -> dict[str, float]:
    """One optimizer step for each `policy.train_global_batch_size` rows; metrics of all of them.

    A minibatch may hold rows without a token in the loss alone, as completions cut off under `grpo.overlong_filtering`;
    it is left out and counted. Where gradients are accumulated, in `parts`, of all rows but the `rest`, there is one step.
    """
    size = session.config.policy.train_global_batch_size
    minibatches = [batch.select(range(start, start + size)) for start in range(0, batch.rows, size)]
    learned = [minibatch for minibatch in minibatches if minibatch["loss_mask"].any()]
    masked = len(minibatches) - len(learned)
    if masked:
        logger.warning("%d of %d minibatches have no token in the loss: left out", masked, len(minibatches))
    assert not parts or len(minibatches) == 1
    steps = [session.step_on("train_step", minibatch, rest if parts else None, parts) for minibatch in learned]
    return {**(join_optimizer_steps(steps).flat() if steps else {}), MASKED_MINIBATCHES: float(masked)}


def grpo_plans(config: Config) -> list[PhasePlan]:
    """The phases of GRPO (and of its SFT phase), at the shapes they will meet."""
    samples = samples_per_step(config)
    chunks = chunk_buckets(config, early=config.grpo.overlap_training)
    steps = chunks if config.grpo.overlap_training else train_buckets(config, config.policy.train_global_batch_size)
    rows = chunk_buckets(config, early=config.grpo.overlap_logprobs)
    generation = generation_config(config)
    requests = request_slots(generation.vllm_cfg.max_num_seqs)
    widest = bucket_widths(config.policy)[-1]
    steps_each = (FIRST_QUANTUM,) * generation.vllm_cfg.layout.dp
    quantum: dict[str, Scalar] = {"engine_steps": steps_each, "seconds": generation.quantum_seconds}
    answers = requests * (generation.max_new_tokens * 3 * 8 + 256) + (1 << 16)  # ids, log-probabilities, versions
    plans = [
        PhasePlan("train_step", steps),
        *(PhasePlan(name, rows, result_bytes=_rows_bytes(rows)) for name in logprob_phases(config)),
        PhasePlan("generate", _request_buckets(requests, widest), answers, scalars=quantum),
        PhasePlan("refit", value=0),
    ]
    if config.grpo.overlap_training:
        plans.append(PhasePlan("accumulate_gradients", chunks))
    if config.policy.offload_optimizer_for_logprob:
        plans += [PhasePlan("logprob_inference_prep", value=0), PhasePlan("training_prep", value=0)]
    if has_fp8_kv_cache(config):
        plans.append(PhasePlan(PHASE, train_buckets(config, samples)))
    return [*sft_plans(config), *plans] if config.sft.max_num_steps else plans


def _request_buckets(requests: int, widest: int) -> tuple[Bucket, ...]:
    """None, a few or many new requests: quanta differ in how many they bring, and padding is copied."""
    sizes = sorted({min(4, requests), min(32, requests), requests})
    return (Bucket(1, 1), *(Bucket(size, widest) for size in sizes))


def _rows_bytes(buckets: Sequence[Bucket]) -> int:
    """Room for log-probabilities and entropy of the largest bucket."""
    return max(bucket.sequences * (bucket.tokens * 8 + 8) for bucket in buckets) + (1 << 16)
