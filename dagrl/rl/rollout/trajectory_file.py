"""Untrained groups in a checkpoint: `trajectories.json` describes them, `trajectories.npz` holds their tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dagrl.config import Config, Json
from dagrl.config.settings import bucket_widths, generation_config
from dagrl.data.media import RowMedia
from dagrl.data.tokenization import Prompt
from dagrl.rl.rollout.episodes import TOKEN_FIELDS, Episode, RolloutGroup

INDEX, ARRAYS = "trajectories.json", "trajectories.npz"
NO_PROMPT = Prompt("", np.zeros(0, np.int64), "", "")
"""Stands for a prompt of the data, which the group's key names. Only prompts given by an environment are saved."""
EXPERTS = "experts"
KEPT_FIELDS = (
    "seed", "max_new_tokens", "finish_reason", "turns", "turn_start", "opened", "awaiting", "failure", "turn_rewards",
    "replies",
)  # fmt: skip


@dataclass(frozen=True)
class SavedGroup:
    """A group and the version it was started with. With `whole` its tokens are saved, else only its prompt."""

    group: RolloutGroup
    version: int
    whole: bool


@dataclass(frozen=True)
class SavedTrajectories:
    """The groups of a checkpoint, and the data position and `continued_settings` of the run that saved them."""

    groups: list[SavedGroup]
    state: Mapping[str, Json]
    settings: Mapping[str, Json]


def write_trajectories(
    directory: Path, groups: Sequence[SavedGroup], state: Mapping[str, Json], settings: Mapping[str, Json]
) -> None:
    """Writes both files into the directory of a checkpoint. See `SavedTrajectories`."""
    episodes = [episode for saved in groups if saved.whole for episode in saved.group.episodes]
    arrays = {
        name: np.concatenate([getattr(episode, name) for episode in episodes] or [np.zeros(0, dtype)])
        for name, dtype in TOKEN_FIELDS.items()
    }
    records = [np.zeros((0, 0), np.uint8) if episode.experts is None else episode.experts for episode in episodes]
    arrays[EXPERTS] = np.concatenate([record.reshape(-1) for record in records] or [np.zeros(0, np.uint8)])
    np.savez(directory / ARRAYS, allow_pickle=False, **arrays)
    index = {"state": state, "settings": settings, "groups": [_describe(saved) for saved in groups]}
    (directory / INDEX).write_text(json.dumps(index, default=str), encoding="utf-8")


def read_trajectories(directory: Path) -> SavedTrajectories | None:
    """Reads what `write_trajectories` wrote, without prompts; None if the checkpoint has no such files."""
    if not (directory / INDEX).is_file():
        return None
    index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
    with np.load(directory / ARRAYS, allow_pickle=False) as file:
        columns = {name: file[name] for name in TOKEN_FIELDS}
        recorded = file[EXPERTS]
    groups, start, read = [], 0, 0
    for item in index["groups"]:
        episodes = []
        for described in item["episodes"]:
            end = start + described.pop("length")
            arrays = {name: column[start:end] for name, column in columns.items()}
            shape = described.pop(EXPERTS)
            size = shape[0] * shape[1]
            record = recorded[read : read + size].reshape(shape) if size else None
            prompt = NO_PROMPT
            if (given := described.pop("prompt")) is not None:
                media = given["media"] and RowMedia((), np.array(given["media"], np.int64))
                prompt = Prompt(given["text"], np.array(given["tokens"], np.int64), "", "", given["messages"], media=media)
            episodes.append(Episode(prompt, **described, **arrays, experts=record))
            start, read = end, read + size
        group = RolloutGroup(item["number"], item["key"], episodes, item["cohort"])
        groups.append(SavedGroup(group, item["version"], item["whole"]))
    return SavedTrajectories(groups, index["state"], index["settings"])


def continued_settings(config: Config) -> dict[str, Json]:
    """Returns the values that must be equal in a run that continues unfinished groups."""
    return {
        "grpo.num_generations_per_prompt": config.grpo.num_generations_per_prompt,
        "policy.generation.max_new_tokens": generation_config(config).max_new_tokens,
        "policy.router_replay": config.policy.router_replay,
        "the largest bucket": bucket_widths(config.policy)[-1],
    }


def spans_versions(config: Config, version: int, group: RolloutGroup) -> bool:
    """Whether a sequence of the group has tokens of two versions, or would if continued, although this run allows none."""
    if config.grpo.async_grpo.in_flight_weight_updates:
        return False
    versions = [
        set(episode.versions.tolist()) | (set() if episode.finish_reason else {version}) for episode in group.episodes
    ]
    return any(len(item) > 1 for item in versions)


def _describe(saved: SavedGroup) -> dict[str, Json]:
    group = saved.group
    episodes: list[Json] = []
    for episode in group.episodes if saved.whole else ():
        own = episode.prompt
        given = {"text": own.text, "tokens": own.tokens.tolist(), "messages": [dict(turn) for turn in own.messages]}
        given["media"] = None if own.media is None else own.media.tokens.tolist()
        episodes.append(
            {
                **{name: getattr(episode, name) for name in KEPT_FIELDS},
                "length": len(episode.tokens),
                "prompt": given if episode.opened else None,  # else it is that of the data
                EXPERTS: [0, 0] if episode.experts is None else list(episode.experts.shape),
            }
        )
    return {
        "number": group.number,
        "key": group.key,
        "cohort": group.cohort,
        "version": saved.version,
        "whole": saved.whole,
        "episodes": episodes,
    }
