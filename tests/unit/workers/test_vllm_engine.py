"""QuantumEngine over an asynchronously scheduled engine: a step stays in flight, and none while the engine is changed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from dagrl.errors import RunError
from dagrl.rl.generation import Generated, checksum
from dagrl.workers.vllm.engine import QuantumEngine, Request
from tests.unit.workers.vllm_double import AsyncEngineDouble, state_of, states_of


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> AsyncEngineDouble:
    """vLLM's engine. Only its steps advance the clock."""
    double = AsyncEngineDouble()
    monkeypatch.setattr("dagrl.workers.vllm.engine.time", SimpleNamespace(perf_counter=lambda: double.now))
    return double


@pytest.fixture
def engine(vllm: AsyncEngineDouble) -> QuantumEngine:
    return quantum_engine(vllm)


def quantum_engine(vllm: AsyncEngineDouble, peers: Any = None) -> QuantumEngine:
    return QuantumEngine(cast("Any", vllm), cast("Any", lambda request: request.max_new_tokens), peers)


def asked(**lengths: int) -> list[Request]:
    return [Request(int(name[1:]), [1], seed=0, max_new_tokens=length, greedy=True) for name, length in lengths.items()]


def rows(made: Generated) -> list[tuple[int, int]]:
    """Ids of the finished requests and their token counts."""
    return [(row.request_id, len(row.tokens)) for row in map(made.request, range(len(made)))]


def test_a_step_stays_in_flight_between_quanta(engine: QuantumEngine, vllm: AsyncEngineDouble) -> None:
    made = engine.run(asked(r1=3, r2=5, r3=9), 5)
    assert (made.engine_steps, rows(made), len(vllm.batch_queue)) == (5, [(1, 3)], 1), (
        "the fifth step returns its tokens later"
    )
    assert rows(engine.run([], 1)) == [(2, 5)]
    assert rows(engine.run([], 100)) == [(3, 9)]
    assert not vllm.batch_queue, "no step stays in flight after the last request"


def test_a_quantum_of_zero_steps_drains_the_engine(engine: QuantumEngine, vllm: AsyncEngineDouble) -> None:
    engine.run(asked(r2=5, r3=9), 5)
    made = engine.run([], 0)
    assert (made.engine_steps, rows(made), vllm.made["3"]) == (0, [(2, 5)], 5)
    assert (len(vllm.batch_queue), vllm.paused) == (0, False)


def test_a_quantum_ends_after_the_step_that_exceeds_its_time(engine: QuantumEngine, vllm: AsyncEngineDouble) -> None:
    vllm.seconds = iter([0.25, 0.25, 1.0, 9.0, 0.25])
    assert engine.run(asked(r1=100), 8, 1.0).engine_steps == 3, "1.5 s"
    assert engine.run([], 8, 1.0).engine_steps == 1, "at least one step runs"
    made = engine.run([], 2, 1.0)
    assert (made.engine_steps, made.unfinished) == (2, 1), "no more than requested"
    vllm.seconds = iter([9.0] * 5)
    assert engine.run([], 5).engine_steps == 5, "without a time limit"


def test_tensor_parallel_ranks_ignore_the_time_limit(vllm: AsyncEngineDouble) -> None:
    compared: list[int] = []
    engine = quantum_engine(vllm, SimpleNamespace(compare=lambda step, ended: compared.append(step)))
    vllm.seconds = iter([9.0] * 4)
    assert engine.run(asked(r1=100), 4, 1.0).engine_steps == 4
    assert compared == [4]
    engine.run(asked(r2=2), 5)
    assert compared == [4, 3, 5], "also whenever a request ends"


def test_a_warm_up_returns_its_own_requests_and_keeps_the_others(engine: QuantumEngine, vllm: AsyncEngineDouble) -> None:
    """Including request 0, and requests that finish in the last step, whose tokens come while draining."""
    engine.run(asked(r0=3, r1=6, r2=50), 2)
    ours = [Request(-1 - row, [1], seed=0, max_new_tokens=length, greedy=True) for row, length in enumerate((2, 4, 50))]
    made = engine.warm_up(ours, 4)
    assert (sorted(rows(made)), made.engine_steps, made.unfinished) == ([(-2, 4), (-1, 2)], 4, 1)
    assert (vllm.aborted, vllm.caches_dropped, len(vllm.batch_queue)) == (["-3"], [False], 0)
    assert (sorted(rows(engine.run([], 1))), engine.unfinished) == ([(0, 3), (1, 6)], 1)
    assert rows(engine.run([], 100)) == [(2, 50)]


def test_an_engine_does_not_sleep_while_requests_run(engine: QuantumEngine) -> None:
    engine.run(asked(r1=3, r2=5), 3)
    with pytest.raises(RunError, match="1 requests are running; let them finish or abort them"):
        engine.sleep(1)
    engine.abort()
    engine.sleep(1)


def test_an_aborted_request_is_not_returned_even_if_it_finished(engine: QuantumEngine, vllm: AsyncEngineDouble) -> None:
    engine.run(asked(r2=5, r3=9), 5)
    assert engine.abort([2, 3]) == 2
    assert vllm.aborted == ["3"], "vLLM has already dropped finished requests"
    assert rows(engine.run([], 0)) == []


def test_tokens_have_the_version_of_the_weights_that_made_them(engine: QuantumEngine, vllm: AsyncEngineDouble) -> None:
    engine.run(asked(r1=6), 4)
    engine.drain()
    vllm.output_processor.request_states = states_of(vllm)
    engine.set_version(7)
    vllm.output_processor.request_states = {}
    assert engine.run([], 100).versions.tolist() == [[0, 0, 0, 0, 7, 7]]


@pytest.mark.parametrize("recompute", [False, True])
def test_a_new_version_restarts_requests_without_a_token(
    engine: QuantumEngine, vllm: AsyncEngineDouble, recompute: bool
) -> None:
    """Under their old cache key they would match prefixes that older weights computed."""
    engine.run(asked(r1=6, r2=3), 2)
    engine.drain()
    vllm.made["2"] = 0  # still waiting for a slot
    vllm.output_processor.request_states = states_of(vllm)
    engine.set_version(7, recompute=recompute)
    assert (vllm.aborted, vllm.salts) == (["2"], {"1": "version 0", "2": "version 7"})
    assert vllm.caches_dropped == [recompute]
    vllm.output_processor.request_states = {}
    made = engine.run([], 100)
    versions = {row.request_id: row.versions for row in map(made.request, range(len(made)))}
    assert versions == {1: [0, 0, 7, 7, 7, 7], 2: [7, 7, 7]}


def test_a_snapshot_drains_the_engine(engine: QuantumEngine, vllm: AsyncEngineDouble) -> None:
    engine.run(asked(r2=5, r3=9, r4=9), 5)
    vllm.output_processor.request_states = {"3-0": state_of("3", [5, 6, 7])}
    found = {row.request_id: row for row in engine.snapshot()}
    assert found.keys() == {3, 4}, "request 2 has finished"
    assert (found[3].tokens, found[3].logprobs, found[3].versions) == ([5, 6, 7], [-5.0, -6.0, -7.0], [0, 0, 0])
    assert {row.finish_reason for row in found.values()} == {"unfinished"}
    assert (found[4].tokens, found[4].logprobs) == ([], [])
    vllm.output_processor.request_states = {}
    assert rows(engine.run([], 1)) == [(2, 5)]


def test_progress_checksums_all_tokens_so_far(engine: QuantumEngine, vllm: AsyncEngineDouble) -> None:
    for count in (0, 2, 2, 5):
        vllm.output_processor.request_states = {"1-0": state_of("1", [7, 8, 9, 3, 4][:count])}
        made = engine.run(asked(r1=50) if not engine.unfinished else [], 1)
        assert made.running.tolist() == [[1, count, checksum([7, 8, 9, 3, 4][:count])]]


@pytest.mark.parametrize("draining", [False, True], ids=["in a quantum", "while draining"])
def test_an_engine_whose_step_failed_is_lost(engine: QuantumEngine, vllm: AsyncEngineDouble, draining: bool) -> None:
    engine.run(asked(r1=9), 2)
    assert not engine.interrupted
    vllm.broken = True
    with pytest.raises(OSError, match="a step broke"):
        engine.drain() if draining else engine.run([], 1)
    assert engine.interrupted
    vllm.broken = False
    with pytest.raises(RunError, match="an earlier quantum failed"):
        engine.run([], 1)


def test_an_abandoned_quantum_raises_after_its_step(engine: QuantumEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the step returns normally: aborted NCCL collectives end without an error."""
    step = AsyncEngineDouble.step

    def given_up(vllm: AsyncEngineDouble) -> list[Any]:
        engine.abandon()  # from another thread
        return step(vllm)

    monkeypatch.setattr(AsyncEngineDouble, "step", given_up)
    with pytest.raises(RunError, match="aborted inside an engine step"):
        engine.run(asked(r1=9), 5)
    assert engine.interrupted


def test_a_request_that_vllm_loses_raises(engine: QuantumEngine, vllm: AsyncEngineDouble) -> None:
    vllm.forgets = True
    with pytest.raises(RunError, match=r"vLLM has lost requests \['7'\]"):
        engine.run(asked(r7=3), 100)
