"""Phases, their graphs, and replays of these on Ray actors.

The way of one replay, from a phase to a worker's method and back:

    phase.py          `Phase.trace` runs the phase's function once and records a `PhaseGraph` (`graph.py`)
    compile.py        `compile_phase` makes each shard's graph ready on its actors, by an executor (`executors/`)
    schedule.py       `Scheduler.replay` shares the input out over the graphs (`split.py`), takes the tickets of the workers
                      (`tickets.py`) and sends each graph one packet
    dagrl_engine.py   `DagrlGraph.submit` writes the packet to the input's edge (`executors/edge.py`, `edges/`)
    loop.py           the loop of a worker reads it, runs its nodes and writes their results to further edges
    node.py           `run_node` waits for the worker's turn and calls the method
    dagrl_engine.py   `Outputs.read` reads what the driver gets; `passes.py` puts lists together
    failures.py       `collect_outcome` waits for the graphs, and makes one error of what went wrong
    replay.py         `Replay.result` joins the shards' results
"""
