"""Refit: carrying the train weights into the generation workers, by a plan made once."""

from dagrl.refit.plan import TIED_HEAD, RankPlan, RefitPlan, plan_refit
from dagrl.refit.run import RefitReceiver, RefitReport, RefitSender, merge_reports
from dagrl.refit.slices import Box, WeightSlice

__all__ = [
    "TIED_HEAD",
    "Box",
    "RankPlan",
    "RefitPlan",
    "RefitReceiver",
    "RefitReport",
    "RefitSender",
    "WeightSlice",
    "merge_reports",
    "plan_refit",
]
