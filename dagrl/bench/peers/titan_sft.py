"""torchtitan's side of SFT in `bench peers`: its Qwen3 with compiled layers and loss, bfloat16 by autocast over float32
weights. A step is what torchtitan's Trainer does on one GPU, without its data loading, metrics and checkpoints.
"""

from __future__ import annotations

import time
from typing import Any

from dagrl.bench.peers.case import PeerCase
from dagrl.bench.peers.dagrl_sft import MICROBATCH
from dagrl.bench.turns import Told, serve, take_turns


def model_arguments(case: PeerCase) -> Any:
    """Returns torchtitan's arguments of the case's model."""
    from torchtitan.models.qwen3 import Qwen3ModelArgs

    shape: dict[str, Any] = dict(case.shape.config)
    return Qwen3ModelArgs(
        vocab_size=shape["vocab_size"],
        max_seq_len=case.length,
        dim=shape["hidden_size"],
        hidden_dim=shape["intermediate_size"],
        n_layers=shape["num_hidden_layers"],
        n_heads=shape["num_attention_heads"],
        n_kv_heads=shape["num_key_value_heads"],
        head_dim=shape["head_dim"],
        rope_theta=shape["rope_theta"],
        qk_norm=True,
        enable_weight_tying=shape["tie_word_embeddings"],
    )


def work(told: Told) -> None:
    """Builds the model as torchtitan's Trainer does, and takes turns."""
    import torch
    from torchtitan.config import JobConfig
    from torchtitan.distributed import ParallelDims, utils
    from torchtitan.protocols.train_spec import get_train_spec

    from dagrl.bench.peers.trl_turns import release

    case, device = told.order.largest, "cuda" if torch.cuda.is_available() else "cpu"
    config, spec, arguments = JobConfig(), get_train_spec("qwen3"), model_arguments(case)
    config.training.seq_len, config.optimizer.lr = case.length, 1e-5
    config.compile.enable = device == "cuda"
    config.activation_checkpoint.mode = "none"
    alone = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)
    arguments.update_from_config(config)
    with torch.device("meta"):
        model = spec.model_cls(arguments)
    model = spec.parallelize_fn(model, alone, config)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    model.train()
    loss_of = spec.build_loss_fn(config, parallel_dims=alone)
    optimizers = spec.build_optimizers_fn([model], config.optimizer, alone)
    rows = torch.randint(arguments.vocab_size, (case.sequences, case.length + 1), device=device)

    def step() -> float:
        begin = time.perf_counter()
        optimizers.zero_grad()
        for micro in torch.split(rows, min(MICROBATCH, case.sequences)):
            with utils.maybe_enable_amp(alone, "bfloat16", device):
                loss = loss_of(model(micro[:, :-1]), micro[:, 1:]) / (case.sequences * case.length)
            loss.backward()
        utils.clip_grad_norm_(list(model.parameters()), config.training.max_norm, foreach=True)
        optimizers.step()
        loss.item()  # ends with the step
        return time.perf_counter() - begin

    def take(_: PeerCase, steps: int) -> list[float]:
        seconds = [step() for _ in range(steps)]
        release()
        return seconds

    take_turns(told, take)


if __name__ == "__main__":
    serve(work)
