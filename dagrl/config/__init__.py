"""The configuration of a run: all of its sections."""

from dagrl.config.algorithm import (
    ALGORITHMS as ALGORITHMS,
    AdvantageConfig as AdvantageConfig,
    GrpoConfig as GrpoConfig,
    LossConfig as LossConfig,
    PreferenceConfig as PreferenceConfig,
    RewardShapingConfig as RewardShapingConfig,
    SftConfig as SftConfig,
)
from dagrl.config.fsdp import FsdpConfig as FsdpConfig, FsdpLayoutConfig as FsdpLayoutConfig
from dagrl.config.generation import (
    ForcedLengths as ForcedLengths,
    GenerationConfig as GenerationConfig,
    VllmConfig as VllmConfig,
)
from dagrl.config.megatron import MegatronConfig as MegatronConfig
from dagrl.config.models import CriticConfig as CriticConfig
from dagrl.config.policy import (
    OptimizerConfig as OptimizerConfig,
    PeftConfig as PeftConfig,
    PolicyConfig as PolicyConfig,
    RandomInit as RandomInit,
    SequencePackingConfig as SequencePackingConfig,
    TokenizerConfig as TokenizerConfig,
)
from dagrl.config.run import (
    CheckpointConfig as CheckpointConfig,
    ClusterConfig as ClusterConfig,
    Config as Config,
    ExecutorConfig as ExecutorConfig,
    LoggerConfig as LoggerConfig,
    TimeoutConfig as TimeoutConfig,
)
from dagrl.config.section import Json as Json
from dagrl.config.task import (
    DataConfig as DataConfig,
    EnvironmentConfig as EnvironmentConfig,
    EvaluationConfig as EvaluationConfig,
    FunctionConfig as FunctionConfig,
    ImagesConfig as ImagesConfig,
    ProcessConfig as ProcessConfig,
    RewardConfig as RewardConfig,
    RewardFunctionConfig as RewardFunctionConfig,
)
