"""Which cases `dagrl bench overhead` measures."""

from __future__ import annotations

from dagrl.bench.overhead import Plan, _cases
from dagrl.bench.variants import ARITY


def test_reduce_is_measured_for_all_arities_and_divisor_shards() -> None:
    plan = Plan(shapes=("scatter-gather", "multiple args", "reduce"), arities=(2, 8), shards=(1, 2, 4))
    assert _cases(plan, 6) == [
        ("scatter-gather", ARITY, 1),
        ("multiple args", ARITY, 6),
        ("reduce", 2, 1),
        ("reduce", 2, 2),
        ("reduce", 8, 1),
        ("reduce", 8, 2),
    ]
