"""The refit phase. It is defined next to `dagrl.refit.Refit`, which connects the groups that it runs on."""

from dagrl.refit.connect import refit as refit
