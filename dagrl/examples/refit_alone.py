"""A refit alone: a trainer of torchrun sends its weights to a vLLM server after each step. Neither is started by dagrl:

VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --dtype bfloat16 --weight-transfer-config '{"backend": "dagrl"}'
torchrun --nproc-per-node 2 examples/refit_alone.py MODEL http://127.0.0.1:8000 127.0.0.1:29600
"""

import sys

import torch
from torch.distributed import destroy_process_group, get_rank, get_world_size, init_process_group
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

from dagrl.workers.vllm.transfer import DagrlTrainer, DagrlTrainerInitInfo, SliceSource


def main(path: str, server: str, address: str) -> None:
    init_process_group("gloo")
    rank, size = get_rank(), get_world_size()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    source = SliceSource(model, dtype="float32")  # this rank's shards, where they are
    info = DagrlTrainerInitInfo(address, size, rank=rank, target_dtype="bfloat16", verify="checksum")
    refit = DagrlTrainer.trainer_init(info, client=HTTPVLLMWeightSyncClient(server), source=source)

    tokens = torch.arange(8)[None] + 20 * (rank + 1)  # each rank learns to count from a number of its own
    for step in range(30):
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        refit.send_weights()  # shards go from rank to rank, straight into the server's parameters
        print(f"rank {rank} step {step} loss {loss:.3f}")
    refit.shutdown()
    destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
