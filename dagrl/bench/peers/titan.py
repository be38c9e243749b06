"""torchtitan's side of SFT in `bench peers`: its Qwen3 with compiled layers and loss, bfloat16 by autocast over float32
weights. A step is what torchtitan's Trainer does on one GPU, without its data loading, metrics and checkpoints.
"""

import time
from typing import Any

from dagrl.bench.harness import answer


def work(steps: int, model: str, shape: dict[str, Any], rows: int, length: int, micro: int, packed: bool) -> list[float]:
    """Builds the model as torchtitan's Trainer does, and returns the seconds of each step."""
    import torch
    from torchtitan.config import JobConfig
    from torchtitan.distributed import ParallelDims, utils
    from torchtitan.models.qwen3 import Qwen3ModelArgs
    from torchtitan.protocols.train_spec import get_train_spec

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config, spec = JobConfig(), get_train_spec("qwen3")
    arguments = Qwen3ModelArgs(
        vocab_size=shape["vocab_size"],
        max_seq_len=length,
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
    config.training.seq_len, config.optimizer.lr = length, 1e-5
    config.compile.enable = device == "cuda"
    config.activation_checkpoint.mode = "none"
    alone = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)
    arguments.update_from_config(config)
    with torch.device("meta"):
        made = spec.model_cls(arguments)
    made = spec.parallelize_fn(made, alone, config)
    made.to_empty(device=device)
    with torch.no_grad():
        made.init_weights(buffer_device=None)
    made.train()
    loss_of = spec.build_loss_fn(config, parallel_dims=alone)
    optimizers = spec.build_optimizers_fn([made], config.optimizer, alone)
    tokens = torch.randint(arguments.vocab_size, (rows, length + 1), device=device)

    def step() -> float:
        begin = time.perf_counter()
        optimizers.zero_grad()
        for part in torch.split(tokens, micro):
            with utils.maybe_enable_amp(alone, "bfloat16", device):
                loss = loss_of(made(part[:, :-1]), part[:, 1:]) / (rows * length)
            loss.backward()
        utils.clip_grad_norm_(list(made.parameters()), config.training.max_norm, foreach=True)
        optimizers.step()
        loss.item()  # ends with the step
        return time.perf_counter() - begin

    return [step() for _ in range(steps)]


if __name__ == "__main__":
    answer(work)
