"""Checks of what Transformer Engine needs."""

from __future__ import annotations

from importlib import metadata

from packaging.version import Version

from dagrl.config import PolicyConfig
from dagrl.errors import ConfigError

OLDEST_ENGINE = "2.20"
"""Version of Transformer Engine from which on it has the functions in use."""

HOPPER = 9
"""The major compute capability of the GPUs on which its kernels were measured."""


def check_engine_settings(policy: PolicyConfig) -> None:
    """Raises ConfigError for settings that need Transformer Engine, next to others that it cannot compute."""
    if reason := _engine_conflict(policy):
        _require_no_engine(policy, reason)


def check_engine(policy: PolicyConfig, has_gpu: bool) -> str:
    """Returns why layers cannot compute with Transformer Engine in this environment; empty if they can.

    Raises ConfigError if the configuration needs it.
    """
    version = engine_version()
    if not has_gpu:
        reason = "there is no GPU"
    elif conflict := _engine_conflict(policy):
        reason = conflict
    elif version is None:
        reason = f"it is not installed: install transformer_engine[pytorch]>={OLDEST_ENGINE}"
    elif Version(version) < Version(OLDEST_ENGINE):
        reason = f"version {version} is installed: {OLDEST_ENGINE} is the oldest with the functions in use"
    else:
        return ""
    _require_no_engine(policy, reason)
    return reason


def _require_no_engine(policy: PolicyConfig, reason: str) -> None:
    """Raises ConfigError if the configuration needs Transformer Engine, which cannot be used for this reason."""
    if policy.megatron_cfg.transformer_engine == "always":
        raise ConfigError(
            "policy.megatron_cfg.transformer_engine is always, which needs Transformer Engine, but "
            f"{reason}. Otherwise set it to auto"
        )


def _engine_conflict(policy: PolicyConfig) -> str:
    if policy.precision != "bfloat16":
        return f"policy.precision is {policy.precision}, and the kernels in use are for bfloat16"
    return "policy.deterministic is true, and not all of its kernels are deterministic" if policy.deterministic else ""


def engine_version() -> str | None:
    """Returns the version of Transformer Engine in this environment, None if it is not installed."""
    try:
        return metadata.version("transformer-engine")
    except metadata.PackageNotFoundError:
        return None
