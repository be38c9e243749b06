"""The configuration that the workers of each group get.

A worker reads its model, layout and batches from `policy`. The workers of the critic and of the teacher get a configuration
in which `policy` has theirs (`role_config`), so one worker class serves all roles.
"""

from __future__ import annotations

from dagrl.config.models import CriticConfig, TeacherConfig
from dagrl.config.policy import PolicyConfig
from dagrl.config.run import Config

TRAIN, GENERATION = "train", "generation"

CRITIC, TEACHER = "critic", "teacher"
"""The roles with a model of their own. Each is the key of its section, too."""


def role_config(config: Config, role: str) -> Config:
    """Returns the configuration that the workers of `role` get."""
    section = {CRITIC: config.critic, TEACHER: config.teacher}.get(role)
    if section is None:
        return config
    return config.with_keys({"policy": _policy_of(section, config.policy)})


def _policy_of(section: CriticConfig | TeacherConfig, policy: PolicyConfig) -> PolicyConfig:
    """The policy's section with the model, layout and batches of `section`; what that leaves open is the policy's."""
    own = {name: getattr(section, name) for name in type(section).model_fields if name in PolicyConfig.model_fields}
    if isinstance(section, CriticConfig):
        own["logprob_batch_size"] = section.value_batch_size
    update = {name: value for name, value in own.items() if value is not None}
    if section.model_name is not None:
        update["random_init"] = None
    update["reference_model_name"] = None
    update["router_replay"] = False  # generation has recorded the policy's experts
    return policy.model_copy(update=update)
