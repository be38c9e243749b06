"""MegatronTeacherWorker: one rank of a frozen model that gives log-probabilities, such as a teacher.

It has no gradients and no optimizer, so a GPU holds a much larger model than in training.
"""

from __future__ import annotations

from dagrl.workers.megatron.worker import MegatronWorker


class MegatronTeacherWorker(MegatronWorker):
    """A worker that computes log-probabilities under the weights of `model_name`, and never changes them."""

    trains = False
