"""Groups not yet trained on, in a checkpoint: `trajectories.json` says which, `trajectories.npz` has their tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dagrl.config import Json
from dagrl.data.tokenization import Prompt
from dagrl.loops.episodes import Episode, RolloutGroup

INDEX, ARRAYS = "trajectories.json", "trajectories.npz"
NO_PROMPT = Prompt("", np.zeros(0, np.int64), "", "")  # prompts are not saved; the group's key finds them in the data
TOKEN_FIELDS = {"tokens": np.int64, "logprobs": np.float32, "versions": np.int64, "sampled": np.bool_}


@dataclass(frozen=True)
class SavedGroup:
    """A group, the version it was started with, and whether its tokens are kept (`whole`) or only its prompt."""

    group: RolloutGroup
    version: int
    whole: bool


@dataclass(frozen=True)
class SavedTrajectories:
    """What a checkpoint holds; `state` is the data's position at that moment."""

    groups: list[SavedGroup]
    state: Mapping[str, Json]


def write_trajectories(directory: Path, groups: Sequence[SavedGroup], state: Mapping[str, Json]) -> None:
    """Write both files into a checkpoint's directory."""
    episodes = [episode for saved in groups if saved.whole for episode in saved.group.episodes]
    arrays = {
        name: np.concatenate([np.array(getattr(episode, name), dtype) for episode in episodes] or [np.zeros(0, dtype)])
        for name, dtype in TOKEN_FIELDS.items()
    }
    np.savez(directory / ARRAYS, allow_pickle=False, **arrays)
    index = {"state": dict(state), "groups": [_describe(saved) for saved in groups]}
    (directory / INDEX).write_text(json.dumps(index), encoding="utf-8")


def read_trajectories(directory: Path) -> SavedTrajectories | None:
    """What `write_trajectories` wrote, prompts aside; None when the checkpoint has none."""
    if not (directory / INDEX).is_file():
        return None
    index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
    with np.load(directory / ARRAYS, allow_pickle=False) as arrays:
        columns = {name: arrays[name] for name in TOKEN_FIELDS}
    groups, start = [], 0
    for item in index["groups"]:
        episodes = []
        for described in item["episodes"]:
            end = start + described.pop("length")
            made = {name: column[start:end].tolist() for name, column in columns.items()}
            episodes.append(Episode(NO_PROMPT, **described, **made))
            start = end
        group = RolloutGroup(item["number"], item["key"], episodes, item["cohort"])
        groups.append(SavedGroup(group, item["version"], item["whole"]))
    return SavedTrajectories(groups, index["state"])


def _describe(saved: SavedGroup) -> dict[str, Json]:
    group = saved.group
    episodes: list[Json] = [
        {
            "length": len(episode.tokens),
            "seed": episode.seed,
            "max_new_tokens": episode.max_new_tokens,
            "finish_reason": episode.finish_reason,
            "turns": episode.turns,
            "turn_start": episode.turn_start,
            "awaiting": episode.awaiting,
            "failure": episode.failure,
        }
        for episode in (group.episodes if saved.whole else ())
    ]
    return {
        "number": group.number,
        "key": group.key,
        "cohort": group.cohort,
        "version": saved.version,
        "whole": saved.whole,
        "episodes": episodes,
    }
