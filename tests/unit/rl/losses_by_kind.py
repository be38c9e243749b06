"""The losses that phases name, as functions of a `LossConfig`."""

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from dagrl.config import Config, LossConfig
from dagrl.rl.algorithm import algorithm_for
from dagrl.rl.losses import Denominators, LossOutput, batch_loss


def config_of(loss_fn: LossConfig) -> Config:
    return Config.model_validate({"name": "t", "algorithm": "grpo", "data": {}, "policy": {}, "loss_fn": loss_fn})


def _loss(
    kind: str, logprobs: Tensor, data: Mapping[str, Tensor], loss_fn: LossConfig, denominators: Denominators
) -> LossOutput:
    return batch_loss(algorithm_for(kind, config_of(loss_fn)), logprobs, data, denominators)


LOSSES = {kind: partial(_loss, kind) for kind in ("policy", "likelihood")}
