"""vLLM's own weight transfers with the backend dagrl, in engines as any user starts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.vllm_models import make_checkpoint

SCRIPT = """
import gc, sys
gc.disable()
import torch
from transformers import AutoModelForCausalLM

def main():
    first, second, tp = sys.argv[1], sys.argv[2], int(sys.argv[3])
    from vllm import LLM, SamplingParams
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from dagrl.runtime.store import reserve_port
    from dagrl.workers.vllm.transfer import DagrlTrainerInitInfo, SliceSource

    llm = LLM(first, weight_transfer_config={"backend": "dagrl"}, tensor_parallel_size=tp, dtype="float32",
              skip_tokenizer_init=True, enforce_eager=True, max_model_len=48, max_num_seqs=4,
              kv_cache_memory_bytes=8 << 20, disable_log_stats=True)

    class Client:
        def init_weight_transfer_engine(self, info):
            llm.init_weight_transfer_engine({"init_info": info})
        def start_weight_update(self):
            llm.start_weight_update()
        def update_weights(self, info):
            llm.update_weights({"update_info": info})
        def finish_weight_update(self, weight_version=None):
            llm.finish_weight_update()

    def generated():
        sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
        return list(llm.generate({"prompt_token_ids": [5, 6, 7, 8]}, sampling, use_tqdm=False)[0].outputs[0].token_ids)

    def expected(model):
        tokens = model.generate(torch.tensor([[5, 6, 7, 8]]), do_sample=False, max_new_tokens=12, min_new_tokens=12)
        return tokens[0, 4:].tolist()

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
    print("transferred")

if __name__ == "__main__":
    main()
"""


@pytest.mark.timeout(500)  # imports vLLM four times with two ranks
@pytest.mark.parametrize(("tp", "multiprocess"), [(1, "0"), pytest.param(2, "1", marks=pytest.mark.slow)])
def test_any_llm_takes_refits(tp: int, multiprocess: str, tmp_path: Path) -> None:
    """In this process with one rank; with engine and two workers in processes of their own."""
    pytest.importorskip("vllm")
    models = [make_checkpoint(tmp_path / str(seed), "qwen3", seed=seed) for seed in range(2)]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": multiprocess, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), *map(str, models), str(tp)]
    piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(command, env={**os.environ, **own}, **piped) as process:
        try:
            output, errors = process.communicate()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # its engine would live on
    assert "transferred" in output, output[-2000:] + errors[-4000:]
