"""The phases of a run over one shard, each an entry of `phases` in the configuration. `dagrl.refit.connect` has `refit`."""

from __future__ import annotations

from dagrl.runtime.phase import Input, Shard, Value, join, phase
from dagrl.runtime.shapes import Field

TOKENS = {"tokens": Field("int64"), "lengths": Field("int64", "row")}
NAMED_ROWS = {**TOKENS, "row_ids": Field("int64", "row")}  # row_ids key the log-probabilities kept on the workers
ROWS = {**TOKENS, "loss_mask": Field("float32")}
SAMPLES = {**ROWS, **NAMED_ROWS, "advantages": Field("float32"), "generation_logprobs": Field("float32")}
REQUESTS = {**TOKENS, **{name: Field("int64", "row") for name in ("request_ids", "seeds", "max_new_tokens", "greedy")}}


@phase(inputs=ROWS)
def demonstration_step(train: Shard, batch: Input) -> Value:
    """Takes one optimizer step on demonstrations."""
    metrics = train.map("train_step", batch, loss="likelihood")
    return train.reduce("merge_metrics", metrics)


@phase(inputs=SAMPLES)
def train_step(train: Shard, batch: Input) -> Value:
    """Takes one optimizer step on generated sequences, by the run's algorithm."""
    metrics = train.map("train_step", batch, loss="policy")
    return train.reduce("merge_metrics", metrics)


@phase(inputs=ROWS)
def evaluate(train: Shard, batch: Input) -> Value:
    """Computes the loss of held-out demonstrations, without training."""
    metrics = train.map("evaluate", batch, loss="likelihood")
    return train.reduce("merge_metrics", metrics)


@phase(inputs=REQUESTS)
def generate(generation: Shard, requests: Input) -> Value:
    """Adds requests, runs a bounded number of engine steps and returns what finished. Raises if the ranks differ."""
    finished = generation.map("generate", requests)
    return generation.reduce("merge_generated", finished) if len(generation) > 1 else finished


@phase(inputs=NAMED_ROWS)
def logprobs(train: Shard, batch: Input) -> Value:
    """Computes log-probabilities and entropy under the current weights. They stay on the workers for `train_step`."""
    return join(train.map("keep_logprobs", batch, model="policy"))


@phase(inputs=NAMED_ROWS)
def reference_logprobs(train: Shard, batch: Input) -> Value:
    """Computes log-probabilities under the reference policy's weights. They stay on the workers for `train_step`."""
    return join(train.map("keep_logprobs", batch, model="reference"))


@phase(inputs=TOKENS)
def teacher_logprobs(teacher: Shard, batch: Input) -> Value:
    """Returns log-probabilities under the frozen model `teacher` to the driver, as those of the reference policy."""
    return teacher.reduce("merge_rows", teacher.map("logprobs", batch, column="reference_logprobs"))


@phase(inputs={"lengths": Field("int64", "row"), "row_ids": Field("int64", "row")})
def keep_columns(train: Shard, batch: Input) -> Value:
    """Stores columns that other groups computed, for `train_step`; a run adds them to the inputs."""
    return join(train.map("keep_columns", batch))


@phase(inputs=TOKENS)
def critic_values(critic: Shard, batch: Input) -> Value:
    """Returns the value of the state before each token to the driver."""
    return critic.reduce("merge_rows", critic.map("values", batch))


@phase(inputs={**ROWS, "values": Field("float32"), "returns": Field("float32")})
def critic_step(critic: Shard, batch: Input) -> Value:
    """Takes one optimizer step of the critic towards `returns`; `values` are those before the step."""
    return critic.reduce("merge_metrics", critic.map("train_step", batch, loss="value"))


@phase(inputs=ROWS)
def answer_sums(train: Shard, batch: Input) -> Value:
    """Returns to the driver the sum over each answer's tokens of their log-probabilities under the current weights."""
    return train.reduce("merge_rows", train.map("answer_sums", batch, model="policy"))


@phase(inputs=ROWS)
def reference_answer_sums(train: Shard, batch: Input) -> Value:
    """Returns the same sums under the reference policy's weights."""
    return train.reduce("merge_rows", train.map("answer_sums", batch, model="reference"))


@phase(inputs={**ROWS, "answer_weights": Field("float32", "row")})
def preference_step(train: Shard, batch: Input) -> Value:
    """Takes one optimizer step on answers, each with a weight."""
    metrics = train.map("train_step", batch, loss="policy")
    return train.reduce("merge_metrics", metrics)


@phase
def logprob_inference_prep(train: Shard, step: Input) -> Value:
    """Starts moving the optimizer's state off the GPUs before log-probabilities; the next phase that needs it waits."""
    return join(train.map("prepare_for_logprobs", step))


@phase
def training_prep(train: Shard, step: Input) -> Value:
    """Schedules the optimizer's state to return while the next step computes gradients."""
    return join(train.map("prepare_for_training", step))
