"""The configuration that the workers of each group get.

A worker reads its model, layout and batches from `policy`. The workers of the critic and of frozen models get a
configuration in which `policy` has theirs (`role_config`), so one worker class serves all roles.
"""

from dagrl.config.megatron import MegatronConfig
from dagrl.config.models import CriticConfig, FrozenModelConfig
from dagrl.config.policy import OptimizerConfig, PeftConfig, SchedulerConfig
from dagrl.config.run import CRITIC as CRITIC, GENERATION as GENERATION, TRAIN as TRAIN, Config

TEACHER = "teacher"
"""The frozen model that is the reference policy of shipped algorithms."""


def model_section(config: Config, role: str) -> CriticConfig | FrozenModelConfig | None:
    """Returns the section of a role with a model of its own; None for the others."""
    return config.critic if role == CRITIC else config.models.get(role)


def section_key(role: str) -> str:
    """Returns the key of that section."""
    return role if role == CRITIC else f"models.{role}"


def role_config(config: Config, role: str) -> Config:
    """Returns the configuration that the workers of `role` get; what its section does not set is as for the policy."""
    section, policy = model_section(config, role), config.policy
    if section is None:
        return config
    update: dict[str, object] = {
        "worker": section.worker,
        "backend": section.backend,
        "router_replay": False,  # generation has recorded the policy's experts
        "optimizer": OptimizerConfig(),
        "scheduler": SchedulerConfig(),
        "peft": PeftConfig(),
        "megatron_cfg": MegatronConfig().with_keys(dict(section.megatron_cfg)),
        "fsdp_cfg": policy.fsdp_cfg.with_keys(dict(section.fsdp_cfg)),
    }
    if section.model_name is not None:
        update |= {"model_name": section.model_name, "random_init": None}
    if isinstance(section, CriticConfig):
        update["optimizer"] = policy.optimizer.with_keys({**dict(section.optimizer), "min_lr": 0.0})
    return config.with_keys({"policy": policy.model_copy(update=update)})
