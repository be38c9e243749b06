"""Refit: carrying the train weights into the generation workers, by a plan made once."""

from dagrl.refit.moves import RankPlan
from dagrl.refit.plan import TIED_HEAD, RefitPlan, plan_refit
from dagrl.refit.run import RefitReceiver, RefitReport, RefitSender, merge_reports
from dagrl.refit.schedule import LinkSpeeds
from dagrl.refit.slices import Box, WeightSlice, expand
from dagrl.refit.summary import PlanSummary

__all__ = [
    "TIED_HEAD",
    "Box",
    "LinkSpeeds",
    "PlanSummary",
    "RankPlan",
    "RefitPlan",
    "RefitReceiver",
    "RefitReport",
    "RefitSender",
    "WeightSlice",
    "expand",
    "merge_reports",
    "plan_refit",
]
