"""The SFT loop: draw demonstrations, replay one optimizer step, validate from time to time. Read it from top to bottom.

It is the whole run of an algorithm that learns from demonstrations, and the stage `sft` before others.
"""

from dagrl.config import Config
from dagrl.config.plan import RunPlan
from dagrl.config.settings import algorithm_name
from dagrl.data import open_sampler
from dagrl.data.tokenization import Demonstration, collate
from dagrl.run.loops.optimizer_step import replay_batch
from dagrl.run.session import Session, Stage
from dagrl.run.stop import given_up
from dagrl.telemetry.metrics import VALIDATION


def train_sft(session: Session) -> None:
    """Runs the SFT steps that are left. They are steps 1 to `sft.max_num_steps` of the run."""
    config, state = session.config, session.checkpoints.state
    stage = Stage.of("sft" if session.plan.generates else algorithm_name(config), config.sft)
    train, validation = session.inputs.demonstrations, session.inputs.validation_demonstrations
    sampler = open_sampler(train, config.data)
    if "sft_sampler" in state.counters:
        sampler.restore(state.counters["sft_sampler"])
    session.begin(stage)
    if session.step == 0 and stage.val_at_start and validation:
        session.record_initial_validation(stage, evaluate(session, validation, may_stop=True))
        session.replays.close_step(tokens=0)  # not part of the first step
    while session.step < stage.last:
        step = session.step + 1
        rows = [train[index] for index in sampler.take(config.policy.train_global_batch_size)]
        batch = collate(rows, media=session.config.data.images.enabled)
        batch = batch.with_scalars(**learning_rate(config, session.plan))
        metrics = replay_batch(session.replays, "demonstration_step", batch, step=step).flat()
        if validation and stage.validates(step):
            metrics |= evaluate(session, validation)
        metrics |= session.replays.close_step(tokens=int(batch["lengths"].sum()))
        session.finish_step(stage, step, metrics, {"sft_sampler": sampler.state()})


def evaluate(session: Session, validation: list[Demonstration], *, may_stop: bool = False) -> dict[str, float]:
    """Returns the mean negative log-likelihood of the response tokens of held-out demonstrations.

    A stop request ends it: it then returns nothing. With `may_stop` it raises StopRequestedError instead; pass it only where
    every step taken is recorded.
    """
    session.recorder.progress.status("validating")
    size = session.config.policy.train_global_batch_size
    loss = tokens = 0.0
    for start in range(0, len(validation), size):
        if session.stop.requested:
            return given_up(session.stop, may_stop)
        batch = collate(validation[start : start + size], media=session.config.data.images.enabled)
        part = replay_batch(session.replays, "evaluate", batch, step=session.step).flat()
        loss += part["loss"] * part["valid_tokens"]
        tokens += part["valid_tokens"]
    return {VALIDATION + "loss": loss / tokens}


def learning_rate(config: Config, plan: RunPlan) -> dict[str, float]:
    """Returns the fixed SFT learning rate as a scalar of the batch; empty if the schedule sets the rate.

    The schedule spans the steps of the run's algorithm, so an SFT stage before it has a fixed rate.
    """
    if config.sft.lr is not None:
        return {"lr": config.sft.lr}
    return {"lr": config.policy.optimizer.lr} if plan.generates else {}
