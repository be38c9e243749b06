"""The configuration of a run: all of its sections."""

from dagrl.config.algorithm import (
    ALGORITHMS,
    AdvantageConfig,
    GrpoConfig,
    LossConfig,
    PpoConfig,
    PreferenceConfig,
    RewardShapingConfig,
    SftConfig,
)
from dagrl.config.generation import ForcedLengths, GenerationConfig, VllmConfig
from dagrl.config.megatron import (
    Fp8Config,
    MegatronConfig,
    OptimizerConfig,
    PeftConfig,
)
from dagrl.config.models import CriticConfig
from dagrl.config.policy import (
    DynamicBatchingConfig,
    PolicyConfig,
    RandomInit,
    SequencePackingConfig,
    TokenizerConfig,
)
from dagrl.config.run import (
    CheckpointConfig,
    ClusterConfig,
    Config,
    ExecutorConfig,
    LoggerConfig,
    PhasesConfig,
    SparesConfig,
    TimeoutConfig,
)
from dagrl.config.section import Json
from dagrl.config.task import (
    DataConfig,
    EnvironmentConfig,
    FunctionConfig,
    ProcessConfig,
    RewardConfig,
)

__all__ = [
    "ALGORITHMS",
    "AdvantageConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "CriticConfig",
    "DataConfig",
    "DynamicBatchingConfig",
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
    "OptimizerConfig",
    "PeftConfig",
    "PhasesConfig",
    "PolicyConfig",
    "PpoConfig",
    "PreferenceConfig",
    "ProcessConfig",
    "RandomInit",
    "RewardConfig",
    "RewardShapingConfig",
    "SequencePackingConfig",
    "SftConfig",
    "SparesConfig",
    "TimeoutConfig",
    "TokenizerConfig",
    "VllmConfig",
]
