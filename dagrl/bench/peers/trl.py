"""TRL's side of `bench peers`: GRPOTrainer with vLLM colocated, or SFTTrainer; bfloat16 over float32 weights."""

import os
import random
import tempfile
import time
from collections.abc import Iterator
from itertools import count, islice, pairwise
from pathlib import Path
from typing import Any

import torch

from dagrl.bench import workloads
from dagrl.bench.generate.vllm import engine_arguments
from dagrl.bench.harness import answer
from dagrl.bench.workloads import GROUP, SEED, RolloutCase
from dagrl.data.media import load_processor
from dagrl.errors import RunError
from dagrl.rl.rollout.episodes import forced_lengths, request_seeds
from dagrl.runtime.store import reserve_port
from dagrl.workers.vllm.launch import import_vllm

ROWS = 512  # rows of SFT's data set, which the trainer repeats
RECOMPUTED = 16384  # tokens of a microbatch above which layers are recomputed, TRL's default, as activations do not fit


def work(steps: int, model: str, **order: Any) -> list[float]:
    """Returns the seconds of each step, which includes drawing and preparing its batch."""
    from transformers import TrainerCallback

    times: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        """Notes when training begins and when each step ends."""

        def on_train_begin(self, *args: Any, **rest: Any) -> None:
            times.append(time.perf_counter())

        def on_step_end(self, *args: Any, **rest: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times.append(time.perf_counter())

    common = {"callbacks": [Clock()], "model": model}
    with tempfile.TemporaryDirectory() as output:
        make = grpo_trainer if "case" in order else sft_trainer
        make(output, steps, common, **order).train()
    return [end - start for start, end in pairwise(times)]


def trainer_arguments(output: str, steps: int, micro: int, sequences: int) -> dict[str, Any]:
    """Returns the arguments that both of TRL's configurations get: microbatches, float32 weights, and no files or logs."""
    return {
        "output_dir": output,
        "max_steps": steps,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": sequences // micro,
        "bf16": torch.cuda.is_available(),
        "use_cpu": not torch.cuda.is_available(),
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "model_init_kwargs": {"dtype": "float32"},
        "disable_tqdm": True,
        "seed": 0,
    }


def sft_trainer(
    output: str, steps: int, common: dict[str, Any], shape: dict[str, Any], rows: int, length: int, micro: int, packed: bool
) -> Any:
    """Returns a trainer on rows of random digits, one token each, with a prompt of one; the end of the text is one token."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    common["processing_class"] = AutoTokenizer.from_pretrained(common["model"])
    draw = random.Random(0)  # noqa: S311  # not cryptography
    texts = ("".join(draw.choices("0123456789", k=length - 1)) for _ in range(ROWS))
    data = Dataset.from_list([{"prompt": text[:1], "completion": text[1:]} for text in texts])
    arguments = trainer_arguments(output, steps, micro, rows)
    config = SFTConfig(packing=packed, max_length=length, learning_rate=1e-5, **arguments)
    return SFTTrainer(args=config, train_dataset=data, **common)


def grpo_trainer(output: str, steps: int, common: dict[str, Any], case: dict[str, Any]) -> Any:
    """Returns a trainer whose engine has the memory of dagrl's."""
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(reserve_port()))
    mine = RolloutCase(**case)
    model, images = Path(common["model"]), mine.shape.images
    set_engine(mine)
    processor: Any = load_processor(model) if images else AutoTokenizer.from_pretrained(model)  # without torchvision, too
    (processor.tokenizer if images else processor).padding_side = "left"
    common["processing_class"] = processor
    # A sampled placeholder would be an image without pixels to TRL; dagrl takes it as text.
    never = {"logit_bias": {6: -100.0, 7: -100.0}} if images else {}
    arguments = trainer_arguments(output, steps, mine.micro, mine.sequences) | {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": engine_share(mine, model),
        "vllm_max_model_length": mine.prompt + mine.completion + 8,
        "num_generations": GROUP,
        "max_completion_length": mine.completion,
        "gradient_checkpointing": mine.micro * (mine.prompt + mine.completion) > RECOMPUTED,
        "temperature": 1.0,
        "beta": 0.0,
        "learning_rate": 1e-6,
        "loss_type": "grpo",
        "vllm_importance_sampling_correction": False,
        "generation_kwargs": {"ignore_eos": True, **never},
        "shuffle_dataset": False,
    }
    return GRPOTrainer(reward_funcs=alternating, args=GRPOConfig(**arguments), train_dataset=prompts(mine), **common)


def prompts(case: RolloutCase) -> Any:
    """Returns the data set of dagrl's side, in its order; files of images are decoded when they are asked for."""
    from datasets import Dataset, Image

    name, arguments = case.task
    train = getattr(workloads, name)(**arguments).train
    if not case.shape.images:
        return Dataset.from_list([{"prompt": example.prompt} for example in train])
    rows = []
    for question in (example.messages[0] for example in train):
        text = [{"role": "user", "content": question.content[1]["text"]}]
        rows.append({"prompt": text, "image": {"bytes": question.media[0].data, "path": None}})
    return Dataset.from_list(rows).cast_column("image", Image())


def alternating(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Returns 0 and 1 in turn, as dagrl's side does."""
    return [float(number % 2) for number in range(len(completions))]


def engine_share(case: RolloutCase, model: Path) -> float:
    """Returns the part of the GPU's memory that gives the engine its weights and `kv_bytes`, with 2 GiB to compute in."""
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    memory: int = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 8 << 30
    return (weights + case.kv_bytes + (2 << 30)) / memory


def set_engine(case: RolloutCase) -> None:
    """Gives TRL's engine the attention, dtype and KV cache of dagrl's side, for which GRPOConfig has no keys."""
    import_vllm(case.shape.config)  # without torchvision, too
    import trl.generation.vllm_generation as generation
    import vllm

    names = "attention_config dtype kv_cache_memory_bytes enforce_eager limit_mm_per_prompt skip_mm_profiling".split()
    own = {name: value for name, value in engine_arguments(case, "").items() if name in names}
    image = case.shape.config.get("image_token_id")
    groups = count()

    class Engine(vllm.LLM):  # type: ignore[misc]
        """Takes TRL's prompts, whose images are expanded; vLLM would expand them again (huggingface/trl#6294).

        Completions get the lengths of dagrl's side.
        """

        def generate(self, prompts: list[dict[str, Any]], sampling_params: Any, **settings: Any) -> Any:
            ids = [prompt["prompt_token_ids"] for prompt in prompts]
            short = [prompt | {"prompt_token_ids": unexpanded(prompt["prompt_token_ids"], image)} for prompt in prompts]
            each = [sampling_params.clone() for _ in prompts]
            for parameters, tokens in zip(each, lengths(case, groups, len(prompts) // GROUP), strict=True):
                parameters.max_tokens = tokens
            outputs = super().generate(short, each, **settings)
            if [output.prompt_token_ids for output in outputs] != ids:
                raise RunError("vLLM ran other prompts than TRL trains on: their processors expand images differently")
            return outputs

    generation.LLM = lambda *arguments, **settings: Engine(*arguments, **(settings | own))


def lengths(case: RolloutCase, numbers: Iterator[int], groups: int) -> list[int]:
    """Returns the lengths of the completions of the next `groups` groups, as dagrl draws them."""
    each = ((number, request_seeds(SEED, number, GROUP)) for number in islice(numbers, groups))
    return [
        tokens for number, seeds in each for tokens in forced_lengths(case.lengths, SEED, number, seeds, case.completion)
    ]


def unexpanded(tokens: list[int], placeholder: Any) -> list[int]:
    """Returns the tokens with one placeholder for each run of them."""
    return [token for before, token in pairwise([-1, *tokens]) if not before == token == placeholder]


if __name__ == "__main__":
    answer(work)
