"""The plan of a run: its roles and layouts, the roles that share GPUs, the reference policy, and the order of the start.

`RunPlan.of` is asked when every key has its value. Everything after that reads the plan, not the configuration's switches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, cast

from dagrl.config.algorithm import ALGORITHMS
from dagrl.config.fsdp import FsdpConfig
from dagrl.config.generation import VllmConfig
from dagrl.config.megatron import MegatronConfig
from dagrl.config.policy import PolicyConfig
from dagrl.config.roles import CRITIC, GENERATION, TRAIN, model_section, role_config, section_key
from dagrl.config.run import Config
from dagrl.config.settings import generation_config, phase_path, samples_per_step
from dagrl.errors import ConfigError, LayoutError
from dagrl.imports import load_attribute, load_class, running
from dagrl.runtime.layout import ParallelLayout

LearnsFrom = Literal["samples", "demonstrations", "preferences"]
"""The kinds of data that algorithms learn from."""


class AlgorithmTraits(Protocol):
    """The part of an algorithm that decides a run's layout; `dagrl.rl.algorithm` has the whole class."""

    @property
    def learns_from(self) -> LearnsFrom: ...

    @property
    def columns(self) -> Mapping[str, str]: ...

    @property
    def critic(self) -> bool: ...


def load_algorithm(config: Config) -> AlgorithmTraits:
    """Returns the run's algorithm. Raises ConfigError if `algorithm` names no class of one."""
    algorithm = load_class(ALGORITHMS.get(config.algorithm, config.algorithm), "algorithm")
    if not all(hasattr(algorithm, name) for name in ("learns_from", "columns", "advantages", "loss")):
        raise ConfigError(f"algorithm: {config.algorithm} is not an algorithm; derive the class from dagrl.Algorithm")
    with running(config.algorithm, "algorithm"):
        made = cast(AlgorithmTraits, algorithm(config))
        columns: object = made.columns
    if not isinstance(columns, Mapping):
        raise ConfigError(
            f"algorithm: the `columns` of {config.algorithm} are {columns!r}; expected: a dictionary of each column and the "
            "phase that computes it, such as {'prev_logprobs': 'logprobs'}"
        )
    return made


@dataclass(frozen=True)
class GroupStart:
    """The start of a group. All groups import at once; on shared GPUs they may have to take memory one after the other.

    `after`: the role whose train state must have left the GPU before this one takes memory. `leaves`: its own train state
    moves to the host once it has started.
    """

    role: str
    after: str | None = None
    leaves: bool = False


@dataclass(frozen=True)
class StartPlan:
    """The order in which groups start, generation last.

    `resident`: train states on generation's GPUs are there at the end of the start; those that left come back. `early`:
    whether training is warmed up while generation starts: where nothing has to leave its GPU.
    """

    groups: tuple[GroupStart, ...]
    resident: bool = False
    early: bool = True


@dataclass(frozen=True)
class RunPlan:
    """A run: `layouts` of its worker groups by role, `sharing` roles on the train workers' GPUs (these among them; empty if
    there are none), and `start`.

    `reference` is the role that computes the column `reference_logprobs`: `train` if the train workers hold the reference
    policy, None if the algorithm has no such column. `takes_turns`: colocated workers may have to move state off
    their GPU while another role works.
    """

    algorithm: AlgorithmTraits
    layouts: Mapping[str, ParallelLayout]
    reference: str | None
    sharing: tuple[str, ...]
    takes_turns: bool
    start: StartPlan

    @classmethod
    def of(cls, config: Config) -> RunPlan:
        """Imports the user's algorithm. Raises ConfigError if it is none, LayoutError for a layout that cannot be."""
        algorithm = load_algorithm(config)
        generates, reference = algorithm.learns_from == "samples", reference_role(config, algorithm)
        own = ((CRITIC,) if algorithm.critic else ()) + tuple(config.models)
        layouts = {TRAIN: _train_layout("policy", config.policy)}
        if generates:
            layouts[GENERATION] = _layout("policy.generation.vllm_cfg", generation_config(config).vllm_cfg)
        layouts |= {role: _train_layout(section_key(role), role_config(config, role).policy) for role in own}
        colocated = generates and generation_config(config).colocated.enabled
        together = (role for role in own if (section := model_section(config, role)) and section.colocated)
        others = (*together, *((GENERATION,) if colocated else ()))
        takes_turns = colocated and generation_config(config).colocated.exchange != "never"
        return cls(
            algorithm=algorithm,
            layouts=layouts,
            reference=reference,
            sharing=(TRAIN, *others) if others else (),
            takes_turns=takes_turns,
            start=_start_plan(config, tuple(layouts), (TRAIN, *others) if colocated else (), takes_turns),
        )

    @property
    def learns_from(self) -> LearnsFrom:
        return self.algorithm.learns_from

    @property
    def generates(self) -> bool:
        """Whether the algorithm learns from completions that generation workers make."""
        return GENERATION in self.layouts

    @property
    def critic(self) -> bool:
        """Whether a critic learns next to the policy."""
        return CRITIC in self.layouts

    @property
    def colocated(self) -> bool:
        """Whether train and generation workers share their GPUs."""
        return GENERATION in self.sharing

    @property
    def model_roles(self) -> tuple[str, ...]:
        """The roles with a model of their own, next to the policy."""
        return tuple(role for role in self.layouts if role not in (TRAIN, GENERATION))

    @property
    def devices(self) -> int:
        """GPUs of the run, or workers if there are no GPUs. Roles that share theirs count once."""
        sizes = {role: layout.world_size for role, layout in self.layouts.items()}
        together = max((sizes[role] for role in self.sharing), default=0)
        return together + sum(size for role, size in sizes.items() if role not in self.sharing)


def reference_role(config: Config, algorithm: AlgorithmTraits) -> str | None:
    """Returns the role that computes `reference_logprobs`, or None if the algorithm has no such column."""
    phase = algorithm.columns.get("reference_logprobs")
    if phase is None:
        return None
    roles = getattr(load_attribute(phase_path(config, phase), "algorithm"), "roles", ())
    return TRAIN if TRAIN in roles or not roles else str(roles[0])


def _train_layout(key: str, policy: PolicyConfig) -> ParallelLayout:
    """Returns the layout of a role's train workers; `policy` is its `role_config`'s."""
    fsdp = policy.backend == "fsdp"
    return _layout(f"{key}.{'fsdp_cfg' if fsdp else 'megatron_cfg'}", policy.fsdp_cfg if fsdp else policy.megatron_cfg)


def _layout(key: str, section: MegatronConfig | FsdpConfig | VllmConfig) -> ParallelLayout:
    try:
        return section.layout
    except LayoutError as error:
        raise LayoutError(f"{key}: {error}") from error


def _start_plan(config: Config, roles: tuple[str, ...], shared: tuple[str, ...], takes_turns: bool) -> StartPlan:
    """Returns the order of the start. `shared`: all roles on generation's GPUs, itself included; empty if it has its own."""
    order = sorted(roles, key=GENERATION.__eq__)
    if not shared:
        return StartPlan(tuple(map(GroupStart, order)), early=GENERATION in roles)
    together, resident = starts_together(config), not takes_turns
    if together:
        resident |= generation_config(config).colocated.exchange == "auto" and set(shared) == {TRAIN, GENERATION}
    groups: list[GroupStart] = []
    before: str | None = None
    for role in order:
        has_state = role in shared and role != GENERATION
        leaves = has_state and not (together and resident)
        groups.append(GroupStart(role, before if role in shared and not together else None, leaves))
        before = role if has_state else before
    return StartPlan(tuple(groups), resident, early=together and not takes_turns)


def starts_together(config: Config) -> bool:
    """Returns whether colocated roles may take memory at once: it fits, and vLLM need not measure what is free."""
    generation = config.policy.generation
    if generation is None or not generation.colocated.enabled or generation.vllm_cfg.kv_cache_memory_bytes is None:
        return False
    return generation.colocated.start_together or generation.colocated.exchange == "never"


def optimizer_steps(config: Config) -> int:
    """Returns the optimizer steps of the run, without those of a stage before its algorithm: the schedule restarts there."""
    learns_from = load_algorithm(config).learns_from
    if learns_from == "preferences":
        return config.preference.max_num_steps
    if learns_from == "demonstrations":
        return config.sft.max_num_steps
    return config.grpo.max_num_steps * math.ceil(samples_per_step(config) / config.policy.train_global_batch_size)
