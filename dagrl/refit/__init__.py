"""Refit: moves the train weights into the generation workers by a plan that is made once.

A refit has six steps, in this order:

    describe    `slices.py`             what each rank holds, as boxes of the model's parameters
    plan        `plan/`                 who sends which box to whom, in which bucket and round; proves full coverage
    pack        `carry/pack.py`         gathers a bucket's boxes in staging memory, or uses them in place
    carry       `carry/endpoint.py`     sends and receives the buckets, round by round
    verify      `carry/verify.py`       compares checksums, or all bytes
    commit      `carry/commit.py`       no rank uses the new version before every rank has it

`Refit` connects two worker groups and runs all of it. `kernels/` holds the batched copies, quantization and checksums.
"""

from typing import TYPE_CHECKING

from dagrl.refit.carry.commit import commit_together as commit_together
from dagrl.refit.connect import Refit as Refit
from dagrl.refit.plan.planner import TIED_HEAD as TIED_HEAD, RefitPlan as RefitPlan, plan_refit as plan_refit
from dagrl.refit.plan.summary import PlanSummary as PlanSummary
from dagrl.refit.slices import Box as Box, WeightSlice as WeightSlice, expand as expand
from dagrl.refit.transfers import (
    RankPlan as RankPlan,
    RefitReport as RefitReport,
    Verify as Verify,
    merge_reports as merge_reports,
)

if TYPE_CHECKING:
    from dagrl.refit.carry.endpoint import RefitReceiver as RefitReceiver, RefitSender as RefitSender


def __getattr__(name: str) -> object:
    """Imports the two ends when they are first used: they need torch, which the driver does without."""
    if name not in ("RefitReceiver", "RefitSender"):
        raise AttributeError(f"module 'dagrl.refit' has no attribute {name!r}")
    from dagrl.refit.carry import endpoint

    found: object = getattr(endpoint, name)
    return found
