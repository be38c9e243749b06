"""Checks of what Transformer Engine and FP8 products need."""

from __future__ import annotations

from importlib import metadata

from packaging.version import Version

from dagrl.config import PolicyConfig
from dagrl.errors import ConfigError

OLDEST_ENGINE = "2.20"
"""Version of Transformer Engine from which on it has the functions in use."""

HOPPER = 9
"""The major compute capability of the GPUs on which its kernels were measured, and its FP8 blocks are native."""


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
    megatron = policy.megatron_cfg
    text = "policy.megatron_cfg.{0} is {1}, which needs Transformer Engine, but " + reason + ". Otherwise set {0}={2}"
    if megatron.transformer_engine == "always":
        raise ConfigError(text.format("transformer_engine", "always", "auto"))
    if megatron.fp8_cfg.enabled and megatron.fp8_cfg.fp8_recipe == "blockwise":
        raise ConfigError(text.format("fp8_cfg.fp8_recipe", "blockwise", "tensorwise"))


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


def check_float8(recipe: str, gpu: str, capability: tuple[int, int]) -> None:
    """Checks that a GPU, by its name and compute capability, multiplies FP8 matrices that are scaled by `recipe`."""
    found = f"{gpu} has {capability[0]}.{capability[1]}"
    if capability < (8, 9):
        raise ConfigError(
            "policy.megatron_cfg.fp8_cfg.enabled is true, which needs GPUs of compute capability 8.9 or more (Ada, Hopper, "
            f"Blackwell); {found}. Set it to false, or use other GPUs"
        )
    if recipe == "blockwise" and capability[0] != HOPPER:
        raise ConfigError(
            "policy.megatron_cfg.fp8_cfg.fp8_recipe is blockwise, which needs GPUs of compute capability 9.0 (Hopper); "
            f"{found}. Set it to tensorwise, or use other GPUs"
        )
