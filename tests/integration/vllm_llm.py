"""Refits by vLLM's own weight transfers with the backend dagrl, in an engine as any user starts it."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from typing import Any

import torch

PROMPT, NEW = [5, 6, 7, 8], 12


def take_refits(first: str, second: str, tp: int, environment: Mapping[str, str]) -> None:
    """Starts an engine with the weights of `first`, and sends it those of `second` twice, changed in between."""
    gc.disable()
    os.environ.update(environment)
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # of our workers
    from transformers import AutoModelForCausalLM
    from vllm import LLM, SamplingParams
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from dagrl.runtime.store import reserve_port
    from dagrl.workers.vllm.transfer import DagrlTrainerInitInfo, SliceSource

    llm = LLM(
        first,
        weight_transfer_config={"backend": "dagrl"},
        tensor_parallel_size=tp,
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=48,
        max_num_seqs=4,
        kv_cache_memory_bytes=8 << 20,
        disable_log_stats=True,
    )

    class Client:
        def init_weight_transfer_engine(self, info: Any) -> None:
            llm.init_weight_transfer_engine({"init_info": info})

        def start_weight_update(self) -> None:
            llm.start_weight_update()

        def update_weights(self, info: Any) -> None:
            llm.update_weights({"update_info": info})

        def finish_weight_update(self, weight_version: object = None) -> None:
            llm.finish_weight_update()

    def generated() -> list[int]:
        sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
        return list(llm.generate({"prompt_token_ids": PROMPT}, sampling, use_tqdm=False)[0].outputs[0].token_ids)

    def expected(model: Any) -> list[int]:
        tokens = model.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW)
        found: list[int] = tokens[0, len(PROMPT) :].tolist()
        return found

    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (first, second)]
    for model in models:
        model.generation_config.eos_token_id = None
    assert generated() == expected(models[0])
    info = DagrlTrainerInitInfo(f"127.0.0.1:{reserve_port()}", verify="checksum", timeout_s=60, rank=0)
    source = SliceSource(models[1], dtype="float32")
    trainer = WeightTransferTrainerFactory.trainer_init(info, client=Client(), source=source)
    for _ in range(2):
        trainer.send_weights()
        llm.reset_prefix_cache()
        assert generated() == expected(models[1])
        models[1].model.layers[0].mlp.down_proj.weight.data.mul_(-1)  # the next step of the trainer
    trainer.shutdown()
    assert expected(models[0]) != expected(models[1])
