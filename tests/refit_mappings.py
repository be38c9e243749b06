"""Full-size models and the mappings of NeMo-RL's pull request 2413, without weights."""

from collections import abc
from dataclasses import dataclass
from typing import Any

from dagrl.bench.models import SHAPES
from dagrl.config import Config, Json
from dagrl.runtime.layout import ParallelLayout
from dagrl.workers.megatron import MegatronWorker

Hf = dict[str, Any]

QWEN3_4B: Hf = dict(SHAPES["qwen3-4b"].config)
QWEN3_30B: Hf = dict(SHAPES["qwen3-30b-a3b"].config)
QWEN3_235B: Hf = {**QWEN3_30B, "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64}
QWEN3_235B |= {"intermediate_size": 12288, "moe_intermediate_size": 1536}
DEEPSEEK_V3: Hf = {"model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "vocab_size": 129280}
DEEPSEEK_V3 |= {"num_attention_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "v_head_dim": 128}
DEEPSEEK_V3 |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "intermediate_size": 18432, "moe_intermediate_size": 2048}
DEEPSEEK_V3 |= {"n_routed_experts": 256, "n_shared_experts": 1, "first_k_dense_replace": 3, "topk_method": "noaux_tc"}


class PlannedWorker(MegatronWorker):
    @staticmethod
    def check(config: Config, hf_config: abc.Mapping[str, Json]) -> None:
        """Accepts every model."""


@dataclass(frozen=True)
class RefitMapping:
    """One row: a model, the train layout, and the generation side's tensor-parallel size, replicas and FP8."""

    model: Hf
    train: ParallelLayout
    tp: int
    dp: int
    fp8: bool = False

    def __str__(self) -> str:
        name = {2560: "4b", 2048: "30b", 4096: "235b", 7168: "dsv3"}[self.model["hidden_size"]]
        return f"{name}-{self.train.describe()}-to-tp{self.tp}dp{self.dp}{'-fp8' if self.fp8 else ''}".replace(" ", "")


_DP8, _TP2DP4 = ParallelLayout(dp=8), ParallelLayout(tp=2, dp=4)
_PP2DP4, _PP4DP2 = ParallelLayout(pp=2, dp=4), ParallelLayout(pp=4, dp=2)
_EP4TP2DP2 = ParallelLayout(tp=2, dp=4, ep=4, etp=1)
_EP4TP2PP2 = ParallelLayout(tp=2, pp=2, dp=2, ep=4, etp=1)
_EP8PP2 = ParallelLayout(pp=2, dp=8, ep=8, etp=1)
_EP8DP2 = ParallelLayout(dp=16, ep=8, etp=1)
_EP16TP4PP8 = ParallelLayout(tp=4, pp=8, dp=4, ep=16, etp=1, first_stage_layers=11, last_stage_layers=11)
_EP16PP16 = ParallelLayout(pp=16, dp=16, ep=16, etp=1, first_stage_layers=3, last_stage_layers=2)
LARGEST = [RefitMapping(QWEN3_235B, _EP16TP4PP8, 8, 16), RefitMapping(DEEPSEEK_V3, _EP16PP16, 32, 8)]
TABLE = [
    *(RefitMapping(QWEN3_4B, _DP8, tp, dp) for tp, dp in ((1, 8), (8, 1))),
    *(RefitMapping(QWEN3_4B, train, 4, 2) for train in (_PP2DP4, _PP4DP2, ParallelLayout(tp=2, pp=2, dp=2), _TP2DP4)),
    *(RefitMapping(QWEN3_30B, train, tp, 16 // tp) for train in (_EP4TP2DP2, _EP4TP2PP2, _EP8PP2) for tp in (4, 2, 8)),
    RefitMapping(QWEN3_4B, _DP8, 1, 8, fp8=True),
    *(RefitMapping(QWEN3_4B, train, 4, 2, fp8=True) for train in (_DP8, _TP2DP4, _PP2DP4, _PP4DP2)),
    # Without expert parallelism, 128 divides the experts' 768 rows only in halves.
    *(RefitMapping(QWEN3_30B, train, 2, 8, fp8=True) for train in (_EP4TP2DP2, _EP4TP2PP2, _EP8PP2, _EP8DP2)),
    *LARGEST,
]


def configuration(case: RefitMapping) -> dict[str, Any]:
    """Returns the run configuration of a mapping, as in a configuration file."""
    train = case.train
    megatron = {
        "data_parallel_size": train.dp,
        "tensor_model_parallel_size": train.tp,
        "pipeline_model_parallel_size": train.pp,
        "expert_model_parallel_size": train.ep,
        "expert_tensor_parallel_size": train.etp,
        "num_layers_in_first_pipeline_stage": train.first_stage_layers,
        "num_layers_in_last_pipeline_stage": train.last_stage_layers,
    }
    vllm = {"tensor_parallel_size": case.tp, "data_parallel_size": case.dp, "precision": "fp8" if case.fp8 else None}
    policy = {
        "worker": "tests.refit_mappings:PlannedWorker",
        "precision": "bfloat16",
        "random_init": {"tokenizer_characters": "0123456789+=", "hf_config": case.model},
        "megatron_cfg": megatron,
        "generation": {"vllm_cfg": vllm},
    }
    return {"name": str(case), "algorithm": "grpo", "policy": policy, "data": {"task": "dagrl.rl.tasks:arithmetic"}}
