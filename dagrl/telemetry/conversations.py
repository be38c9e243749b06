"""Shows in a run's trace what was said, and when: the turns of one group of samples of each training step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dagrl.telemetry.trace import TraceEvent

PROCESS = "conversations"
LONGEST_TEXT = 2000
"""Characters of a turn that an event has. Longer texts have their middle cut out; `rollouts/` has all of them."""


class ConversationTrace:
    """Makes events of rows of `dagrl.telemetry.rollouts`. Conversations at the same time are on different threads."""

    def __init__(self) -> None:
        self._ends_ns: list[int] = []  # of the last turn on each thread

    def events(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[TraceEvent]:
        """Yields an event for each turn, with a known time, of the samples of the first group in `rows`."""
        for row in rows:
            if row["group"] == rows[0]["group"]:
                yield from self._turns(row)

    def _turns(self, row: Mapping[str, Any]) -> Iterator[TraceEvent]:
        turns = [turn for turn in row["turns"] if turn["began_ns"] is not None and turn["ended_ns"] is not None]
        if not turns:
            return
        thread = self._thread(turns[0]["began_ns"], turns[-1]["ended_ns"])
        about = {"step": row["step"], "group": row["group"], "sample": row["place"], "reward": float(row["reward"])}
        for number, turn in enumerate(turns):
            prompt = {"prompt": _shortened(row["prompt"])} if number == 0 else {}
            yield TraceEvent(
                turn["role"],
                "conversation",
                turn["began_ns"],
                turn["ended_ns"] - turn["began_ns"],
                PROCESS,
                f"conversation {thread}",
                {**prompt, "text": _shortened(turn["text"]), **about},
            )

    def _thread(self, began_ns: int, ended_ns: int) -> int:
        """Returns the first thread that is free from `began_ns` on, and occupies it until `ended_ns`."""
        free = (number for number, end in enumerate(self._ends_ns) if end <= began_ns)
        thread = next(free, len(self._ends_ns))
        self._ends_ns[thread : thread + 1] = [ended_ns]
        return thread


def _shortened(text: str) -> str:
    half = LONGEST_TEXT // 2
    return text if len(text) <= LONGEST_TEXT else f"{text[:half]} ... {text[-half:]}"
