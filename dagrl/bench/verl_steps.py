"""verl's own training on the CPU: its `TrainingWorker` with FSDP2 over Gloo, a tiny model, and batches for it.

`dagrl bench embed` measures its steps, and `make test-peers` compares their losses.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensordict import TensorDict

ON_CPU = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "dagrl.bench.verl_cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    "VERL_ENGINE_VENDOR": "nvidia",
}
"""The environment of the driver and of all workers. verl reads it when it is imported."""

VOCABULARY = 512
LENGTHS = (5, 9, 12, 7, 8, 6, 11, 10)
ENGINE: dict[str, Any] = {
    "strategy": "fsdp2",
    "use_dynamic_bsz": False,
    "micro_batch_size_per_gpu": 2,
    "use_remove_padding": False,
    "max_token_len_per_gpu": 512,
    "use_torch_compile": False,
    "dtype": "float32",
}


def write_model(path: Path) -> str:
    """Writes a tiny Qwen3 with random weights, and a tokenizer of one token per word. Returns the path."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    config = Qwen3Config(
        vocab_size=VOCABULARY, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False, **sizes
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0"))  # noqa: S106
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w1", eos_token="w2")  # noqa: S106
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer.save_pretrained(path)
    return str(path)


def training_group(model: str, workers: int) -> Any:
    """verl's `RayWorkerGroup` of `TrainingWorker`s, whose engines are initialized and train with verl's SFT loss."""
    import ray
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig
    from verl.workers.utils.losses import sft_loss

    config = TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(path=model, use_remove_padding=False, override_config={"attn_implementation": "sdpa"}),
        engine_config=FSDPEngineConfig(
            forward_only=False, infer_max_token_len_per_gpu=512, infer_micro_batch_size_per_gpu=2, **ENGINE
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=1000),
        checkpoint_config=None,
    )
    worker = RayClassWithInitArgs(ray.remote(TrainingWorker), config=config)
    group = RayWorkerGroup(RayResourcePool([workers], use_gpu=False), worker, device_name="cpu")
    group.reset()
    group.set_loss_fn(loss_fn=partial(sft_loss, config=None))
    return group


def training_batch(seed: int, rows: int = len(LENGTHS)) -> TensorDict:
    """Sequences of different lengths, as verl's SFT trainer makes them."""
    import torch
    from tensordict.tensorclass import NonTensorData
    from verl.utils import tensordict_utils as tu

    generator = torch.Generator().manual_seed(seed)
    lengths = [LENGTHS[row % len(LENGTHS)] for row in range(rows)]
    fields = {
        "input_ids": [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in lengths],
        "position_ids": [torch.arange(length) for length in lengths],
        "loss_mask": [torch.ones(length, dtype=torch.int64) for length in lengths],
    }
    tensors = {name: torch.nested.as_nested_tensor(values, layout=torch.jagged) for name, values in fields.items()}
    settings = {
        "use_remove_padding": False,
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": 2,
        "max_token_len_per_gpu": 512,
        "temperature": 1.0,
        "global_batch_size": rows,
        "pad_mode": "no_padding",
        "pad_token_id": 1,
    }
    made: TensorDict = tu.get_tensordict(tensors, settings)
    tu.assign_non_tensor(made, update_lr_scheduler=True, global_token_num=NonTensorData(lengths))
    return made


def train(group: Any, batch: TensorDict) -> tuple[float, float]:
    """One training step, as verl's SFT trainer takes it. Returns its loss and the norm of its gradient."""
    from verl.utils import tensordict_utils as tu

    metrics = tu.get(group.train_batch(batch).get(), "metrics")
    return metrics["loss"], metrics["grad_norm"]


def infer_and_train(group: Any, batch: TensorDict) -> tuple[float, float]:
    """The calls of a policy's step in verl's PPO trainer: log-probabilities of the samples, then a training step."""
    group.infer_batch(batch).get()
    return train(group, batch)
