"""The task of a recipe here, learned by TRL 1.16 with the same model, prompts, batch and learning rate, on one GPU.

    python -m recipes.gemma3_270m.trl_peer recipes/gemma3_270m/stories.yaml --seconds 480 --json trl.json [a.b=c ...]

Rows of the JSON file: the step, seconds since the launch of this process without held-out evaluations, the mean reward of
the step's batch, and every `grpo.val_period` steps and at the end that of one sampled completion of each held-out prompt.
Weights are float32 with bfloat16 autocast, and vLLM generates on the same GPU. Needs trl, datasets and vllm.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LAUNCH = time.time()  # before torch and TRL are imported
MICROBATCH = 64  # sequences; the fastest that fits for 270M parameters
FREE = 0.35  # the share of the GPU's memory for vLLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="a recipe of GRPO")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="as those of dagrl train")
    parser.add_argument("--seconds", type=float, default=480.0, help="stop after so many (default: 480)")
    parser.add_argument("--json", type=Path, required=True, metavar="F", help="the file to write")
    options = parser.parse_intermixed_args()

    import torch
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from dagrl.config.file import load_config
    from dagrl.config.settings import generation_config
    from dagrl.data import load_splits
    from dagrl.imports import load_callable

    config = load_config(options.config, options.overrides)
    grpo, generation, optimizer = config.grpo, generation_config(config), config.policy.optimizer
    splits, reward = load_splits(config.data), load_callable(str(config.reward.function), "reward.function")
    samples = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    on_gpu = torch.cuda.is_available()
    micro = min(MICROBATCH, samples) if on_gpu else grpo.num_generations_per_prompt
    tokenizer = AutoTokenizer.from_pretrained(config.policy.model_name)
    held_out = splits.validation[: grpo.max_val_samples]
    rows: list[dict[str, float]] = []
    paused = 0.0

    def rewards(prompts: Sequence[str], completions: Sequence[str], reference: Sequence[str], **more: Any) -> list[float]:
        return [
            _weighted(answer, config.reward.weights) for answer in reward(list(prompts), list(completions), list(reference))
        ]

    def evaluate() -> float:
        from vllm import SamplingParams

        engine = trainer.vllm_generation
        engine.sync_weights()
        ids = [{"prompt_token_ids": tokenizer(example.prompt)["input_ids"]} for example in held_out]
        sampling = SamplingParams(temperature=generation.temperature, max_tokens=generation.max_new_tokens)
        texts = [output.outputs[0].text for output in engine.llm.generate(ids, sampling, use_tqdm=False)]
        answers = rewards([example.prompt for example in held_out], texts, [example.response for example in held_out])
        return sum(answers) / len(answers)

    class Clock(TrainerCallback):  # type: ignore[misc]
        """Writes a row after every step, and ends training after `--seconds`."""

        def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, float], **rest: Any) -> None:
            if "reward" in logs:
                row = {"step": state.global_step, "seconds": time.time() - LAUNCH - paused, "reward/mean": logs["reward"]}
                row["completion_tokens"] = logs["completions/mean_length"]
                keep(row)
                control.should_training_stop = control.should_training_stop or row["seconds"] > options.seconds

        def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            if grpo.val_period and state.global_step % grpo.val_period == 0:
                validate(state.global_step)

    def validate(step: int) -> None:
        nonlocal paused
        began = time.time()
        row = {"step": step, "seconds": began - LAUNCH - paused, "validation/reward": evaluate()}
        paused += time.time() - began
        keep(row)

    def keep(row: dict[str, float]) -> None:
        rows.append(row)
        options.json.write_text(json.dumps(rows, indent=1))

    trainer = GRPOTrainer(
        model=config.policy.model_name,
        reward_funcs=rewards,
        train_dataset=_prompts(config, splits.train, grpo.max_num_steps * grpo.num_prompts_per_step),
        processing_class=tokenizer,
        callbacks=[Clock()],
        args=GRPOConfig(
            output_dir=os.path.join("/tmp", f"trl-{os.getpid()}"),  # noqa: S108  # nothing is saved
            max_steps=grpo.max_num_steps,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=samples // micro,
            num_generations=grpo.num_generations_per_prompt,
            max_completion_length=generation.max_new_tokens,
            temperature=generation.temperature,
            learning_rate=optimizer.lr,
            weight_decay=optimizer.weight_decay,
            max_grad_norm=optimizer.clip_grad,
            warmup_steps=config.policy.scheduler.lr_warmup_iters,
            lr_scheduler_type="constant_with_warmup",
            beta=0.0,
            loss_type="dapo",  # a mean over the tokens of the batch, as in dagrl
            shuffle_dataset=False,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=FREE,
            vllm_max_model_length=config.policy.max_total_sequence_length if not on_gpu else 1024,
            vllm_importance_sampling_correction=False,
            bf16=on_gpu,
            use_cpu=not on_gpu,
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": "float32"},
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=config.seed,
        ),
    )
    trainer.train()
    validate(trainer.state.global_step)


def _weighted(answer: float | Mapping[str, float], weights: Mapping[str, float]) -> float:
    return answer if isinstance(answer, float) else sum(weights.get(name, 1.0) * part for name, part in answer.items())


def _prompts(config: Any, train: Sequence[Any], count: int) -> Any:
    """Returns the prompts that a run of dagrl draws, in its order."""
    from datasets import Dataset

    from dagrl.data.sampler import Sampler

    sources: dict[str, list[int]] = {}
    for index, example in enumerate(train):
        sources.setdefault(example.task, []).append(index)
    own = {name: source.weight for name, source in config.data.mixture.items()}
    weights = {name: own.get(name) or float(len(indices)) for name, indices in sources.items()}
    drawn = [train[index] for index in Sampler(sources, weights, config.data.seed, config.data.shuffle).take(count)]
    return Dataset.from_list([{"prompt": example.prompt, "reference": example.response} for example in drawn])


if __name__ == "__main__":
    main()
