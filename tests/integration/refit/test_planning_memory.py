"""Refits of the largest models are planned in little memory: measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from dagrl.refit.plan.planner import BUCKET_BYTES
from tests.integration.refit.test_table import parameters
from tests.refit_mappings import LARGEST, RefitMapping

PROGRAM = """
import json, resource, sys
from tests.refit_mappings import LARGEST
from tests.integration.refit.test_table import hosts_of, plan_of
(row,) = (row for row in LARGEST if str(row) == sys.argv[1])
size = row.train.world_size + row.tp * row.dp
plan = plan_of(row, row.model, hosts=hosts_of(row))
text = str(plan.summary())
plan.for_rank(0), plan.for_rank(size - 1)
used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([used / 2**20, plan.summary().received[0], text.splitlines()[0], plan.summary().staging_bytes]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("row", LARGEST, ids=str)
def test_the_largest_models_are_planned_in_little_memory(row: RefitMapping) -> None:
    """With description, hosts, summary and the parts of two ranks, in its own process."""
    command = [sys.executable, "-c", PROGRAM, str(row)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    gib, received, title, staging = json.loads(done.stdout)
    assert gib < 4 and staging <= 2 * BUCKET_BYTES[1]
    assert f"from {row.train.world_size} to {row.tp * row.dp} ranks" in title
    share = 2 * parameters(row.model) / row.tp
    assert share < received < 1.2 * share  # norms, routers, latent projections and few key-value heads are repeated
