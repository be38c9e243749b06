"""The configuration of a run: all of its sections."""

from dagrl.config.algorithm import (
    ALGORITHMS,
    AdvantageConfig,
    GrpoConfig,
    LossConfig,
    PreferenceConfig,
    RewardShapingConfig,
    SftConfig,
)
from dagrl.config.generation import ForcedLengths, GenerationConfig, VllmConfig
from dagrl.config.megatron import Fp8Config, MegatronConfig
from dagrl.config.models import CriticConfig
from dagrl.config.policy import PeftConfig, PolicyConfig, RandomInit, SequencePackingConfig, TokenizerConfig
from dagrl.config.run import (
    CheckpointConfig,
    ClusterConfig,
    Config,
    ExecutorConfig,
    LoggerConfig,
    TimeoutConfig,
)
from dagrl.config.section import Json
from dagrl.config.task import DataConfig, EnvironmentConfig, FunctionConfig, ProcessConfig, RewardConfig

__all__ = [
    "ALGORITHMS",
    "AdvantageConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "CriticConfig",
    "DataConfig",
    "EnvironmentConfig",
    "ExecutorConfig",
    "ForcedLengths",
    "Fp8Config",
    "FunctionConfig",
    "GenerationConfig",
    "GrpoConfig",
    "Json",
    "LoggerConfig",
    "LossConfig",
    "MegatronConfig",
    "PeftConfig",
    "PolicyConfig",
    "PreferenceConfig",
    "ProcessConfig",
    "RandomInit",
    "RewardConfig",
    "RewardShapingConfig",
    "SequencePackingConfig",
    "SftConfig",
    "TimeoutConfig",
    "TokenizerConfig",
    "VllmConfig",
]
