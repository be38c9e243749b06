"""Reports of refits: bytes and seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dagrl.errors import RunError


@dataclass(frozen=True)
class RefitReport:
    """The bytes that one rank or several ranks carried, and `seconds` from the start to the last verified byte, the longest.

    `pause_s` is how long a generation worker paused: with the hooks, the commit, and the state that the engine recomputes.
    """

    version: int
    bytes_sent: int
    bytes_received: int
    seconds: float
    pause_s: float = 0.0


def merge_reports(parts: Sequence[RefitReport]) -> RefitReport:
    """Merges the reports of several ranks; associative. Raises RunError if their versions differ."""
    versions = {part.version for part in parts}
    if len(versions) != 1:
        raise RunError(
            f"a refit reported the versions {sorted(versions)}; all workers of a refit must carry the same version"
        )
    return RefitReport(
        versions.pop(),
        sum(part.bytes_sent for part in parts),
        sum(part.bytes_received for part in parts),
        max(part.seconds for part in parts),
        max(part.pause_s for part in parts),
    )
