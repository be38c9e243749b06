"""Bad input exits with code 2 and one clear message, without a traceback and before Ray starts."""

import dataclasses
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping
from datetime import date, timedelta
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch  # noqa: F401  # its logger keeps the standard error of its import, which a test would close
import yaml

from dagrl.cli.main import main
from dagrl.config import Config, Json, PolicyConfig, RandomInit
from dagrl.config.file import load_config
from dagrl.data import Example, Message, Splits, open_sampler
from dagrl.data.tokenization import digest_of
from dagrl.errors import UserError
from dagrl.graphs.phases import SAMPLES, logprobs, train_step
from dagrl.run.checkpoint_store import CheckpointStore, TrainState
from dagrl.run.fleet import Fleet
from dagrl.run.model import character_tokenizer, load_tokenizer, write_random_model
from dagrl.run.preflight import preflight
from dagrl.run.resume import REFERENCE
from dagrl.runtime.phase import Input, Shard, Value, phase
from dagrl.runtime.shapes import Field
from dagrl.telemetry.record import RunPaths, lock_run, prepare_run_directory
from dagrl.workers.megatron import MegatronWorker
from dagrl.workers.megatron.backend import MegatronBackend
from dagrl.workers.train.hf_load import read_hf_config
from dagrl.workers.train.identity import WORKER, identity_of
from tests.unit.run.test_checkpoints import saving

MODEL: dict[str, Json] = {"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
MODEL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64}


def configuration(data: str) -> dict[str, Any]:
    init = {"hf_config": MODEL, "tokenizer_characters": "0123456789+="}
    sizes = {"train_global_batch_size": 16, "max_total_sequence_length": 16, "generation": {"max_new_tokens": 4}}
    return {
        "name": "bad",
        "algorithm": "grpo",
        "policy": {"random_init": init, **sizes},
        "grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 4},
        "data": {"path": data},
        "cluster": {"num_cpus": 2},
    }


def good_lines() -> list[str]:
    return [json.dumps({"prompt": f"{a}+{b}=", "response": str(a + b)}) for a in range(5) for b in range(5)]


def asks_for_more(prompts: list[str], completions: list[str], references: list[str], level: list[int]) -> list[float]:
    """Asks for a column that the data do not have."""
    return [float(value) for value in level]


class Gym:
    def reset(self, *, seed: int | None = None) -> str: ...

    def step(self, action: str) -> tuple[str, float, bool]: ...


def half(number: int) -> int:
    """Halves a number.

    Args:
        number: an even number
    """
    return number // 2


LONG = json.dumps({"prompt": "1" * 30, "response": "2"})
MIXTURE = (
    "policy.random_init.hf_config={architectures: [Qwen3MoeForCausalLM], model_type: qwen3_moe, "
    "hidden_size: 64, intermediate_size: 128, moe_intermediate_size: 64, num_experts: 4, "
    "num_experts_per_tok: 2, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, "
    "head_dim: 16, vocab_size: 64, max_position_embeddings: 256}"
)
INIT = "random_init: " + json.dumps(configuration("")["policy"]["random_init"])  # its lengths follow from the data
MEGATRON = "policy.megatron_cfg"
WORDS = {
    "HERE": __name__,
    "INIT": INIT,
    "GRAPHS": f"{MEGATRON}.cuda_graphs=true",
    "MEGATRON": MEGATRON,
    "DDP": f"{MEGATRON}.distributed_data_parallel_config",
    "LORA": "policy.peft",
    "TASK": f"data.path=null; data.task={__name__}:strange; data.task_args",
    "MIXTURE": MIXTURE,
    "OWN": "policy.worker=dagrl.examples.hf_worker:HfWorker",
    "FSDP_CFG": "policy.fsdp_cfg",
    "FSDP": "policy.backend=fsdp",
    "USER": '{"role": "user", "content": "1"}',
}


def rows(table: str) -> list[tuple[str, str]]:
    """Returns what is left and right of each arrow, where SAME is the first key. A row may go on in an indented line."""
    pattern = re.compile(rf"\b({'|'.join(WORDS)})\b")
    lines = pattern.sub(lambda word: WORDS[word[0]], table.strip().replace("\n    ", " ")).splitlines()
    parts = [line.partition(" -> ") for line in lines]
    return [(left, right.replace("SAME", left.partition("=")[0])) for left, _, right in parts]


OVERRIDES = r"""
algorithm=my_algorithms:Mine -> algorithm: there is no module 'my_algorithms'
policy.precison=float32 -> policy.precison ... did you mean 'policy.precision'
grpo.temperature=1 -> did you mean 'policy.generation.temperature'
policy.reference_model_name=x -> unknown key policy.reference_model_name (command line); known here: model_name,
seed=many -> seed (command line) ... found 'many' ... integer
grpo.max_num_steps=true -> grpo.max_num_steps (command line): found True; expected: a number
grpo.max_num_steps=99999999999999999999999 -> grpo.max_num_steps (command line) ... expected: an integer below 2**63
policy.peft.enabled=true; policy.peft.dim=0 -> policy.peft.dim (command line) ... found 0 ... greater than 0
policy.peft={enabled: true, target_modules: [linear_qkv]} -> SAME.target_modules has 'linear_qkv' ... expected q_proj, k_proj
policy.peft={enabled: true, target_modules: [q_proj, layers.2.mlp.up_proj]} ->
    has 'layers.2.mlp.up_proj' ... or the end of a longer name such as 'model.layers.0.self_attn.q_proj'
policy.peft={enabled: true, adapter_path: nowhere} ->
    cannot read ... adapter_config.json ... policy.peft.adapter_path must be a directory that PEFT or dagrl wrote
seed=4294967296 -> seed (command line) ... expected: less than 4294967296
policy.scheduler.lr_warmup_init=1; sft.lr=2 -> SAME is 1, above policy.optimizer.lr 1e-06 ... or less
policy.optimizer.min_lr=2e-3 -> policy.optimizer.min_lr is 0.002, above lr 1e-06 ... or less
data.path=null; data.path.0=1 -> data.path (command line): found {'0': 1}
seed -> 'seed' ... KEY=VALUE
name.x=1 -> override 'name.x=1' ... expected: a section
checkpointing.metric_name=validation/reward; data.val_fraction=0 ->
    checkpointing.metric_name is 'validation/reward' ... nothing is held out ... data.val_fraction
policy.model_name=somewhere -> policy.model_name and policy.random_init: found both
policy.generation.vllm_cfg.tensor_parallel_size=3 ->
    generation workers: the model's 4 attention heads are not divisible by tensor_parallel_size 3
MEGATRON.data_parallel_size=3 ->
    train_global_batch_size 16 ... data_parallel_size 3 ... change grpo.num_prompts_per_step, or change
grpo.num_prompts_per_step=3 -> = 12 samples ... train_global_batch_size 16
MEGATRON.expert_model_parallel_size=3 -> ep 3 ... does not divide ... or 1 and 1 for a model without experts
MEGATRON.data_parallel_size=16 -> 17 workers, 16 train (dp16) + 1 generation (single) ... 2 CPU cores hold 16
cluster.num_cpus=1; policy.generation.vllm_cfg.data_parallel_size=8 -> 9 workers ... 1 CPU cores hold 8
policy.random_init=null; policy.model_name=no/model -> policy.model_name ... 'no/model'
policy.generation.max_new_tokens=14; sft.max_num_steps=0 -> room for 2 (the largest bucket less SAME 14)
policy.generation.max_new_tokens=14; sft.max_num_steps=0; data.too_long=drop ->
    room for 2 ... Raise policy.max_total_sequence_length, or shorten the data
policy.generation.max_new_tokens=16 -> SAME is 16 ... bucket has 16 tokens: no room for a prompt. Lower it, or raise
policy={INIT, generation: {max_new_tokens: 64}} -> max_new_tokens is 64 ... have 64 positions: no room for a prompt. Lower it
policy.max_total_sequence_length=128 -> 64 positions ... 128 tokens; lower policy.max_total_sequence_length
policy.sequence_buckets=[8, 32] -> sequence_buckets has 32 ... length 16
policy.sequence_packing.enabled=true; policy.sequence_packing.train_mb_tokens=12 ->
    policy.sequence_packing.train_mb_tokens is 12 ... largest bucket of 16 tokens ... set it to 16 or more
policy.sequence_packing.shared_prefix=true ->
    shared_prefix is true for train workers ... enabled is false; set it to true, or set shared_prefix=auto
policy.sequence_packing={enabled: true, shared_prefix: true}; MEGATRON.context_parallel_size=2 ->
    shared_prefix is true for train workers ... context_parallel_size is 2 ... set it to 1
policy.worker=here -> policy.worker: 'here' ... module:attribute
policy.worker=no_such.module:Worker -> policy.worker: there is no module 'no_such'
policy.worker=dagrl.workers.megatron:MegatronWorkr ->
    policy.worker: module 'dagrl.workers.megatron' has no 'MegatronWorkr' ... did you mean 'MegatronWorker'
policy.worker=dagrl.rl.rewards:exact_match -> policy.worker:  ... a class is expected
FSDP; policy.optimizer.name=no_such:Adam -> policy.optimizer.name: there is no module 'no_such'
FSDP; policy.random_init.hf_config.model_type=gpt9 -> model_type
FSDP; FSDP_CFG.tensor_parallel_size=3; cluster.num_cpus=8 ->
    num_attention_heads = 4, which policy.fsdp_cfg.tensor_parallel_size 3 does not divide
FSDP; FSDP_CFG.attn_implementation=flash_attention_3 -> attn_implementation is flash_attention_3, ... ImportError
FSDP; FSDP_CFG.attn_implementation=fast -> attn_implementation is fast, ... ValueError ... leave it out
FSDP; FSDP_CFG={data_parallel_size: 2, expert_parallel_size: 2} -> Qwen3ForCausalLM has no expert-parallel plan
OWN; LORA.enabled=true -> policy.peft.enabled is set, but HfWorker (policy.worker) does not support it; remove it
OWN; policy.sequence_packing.enabled=true -> policy.sequence_packing.enabled is set, but HfWorker
OWN; policy.deterministic=true -> policy.deterministic is set, but HfWorker
OWN; policy.worker_args={a: 1} -> policy.worker_args is set, but HfWorker
OWN; policy.optimizer.name=torch.optim:SGD -> policy.optimizer.name is set, but HfWorker
OWN; FSDP_CFG.data_parallel_size=2 -> policy.fsdp_cfg is set, but HfWorker
OWN; MEGATRON.activation_checkpointing=true -> policy.megatron_cfg is set, but HfWorker
policy.worker_args={a: 1} -> policy.worker_args is set, but MegatronWorker
FSDP; FSDP_CFG={data_parallel_size: 2, data_parallel_replicas: 3} -> data_parallel_replicas is 3
FSDP; FSDP_CFG.pipeline_parallel_size=2 -> policy.fsdp_cfg.pipeline_parallel_size ... unknown
FSDP; MEGATRON.pipeline_model_parallel_size=2 ->
    policy.megatron_cfg has pipeline_model_parallel_size, which policy.backend fsdp does not read
FSDP; LORA.enabled=true; MIXTURE; FSDP_CFG={data_parallel_size: 2, expert_parallel_size: 2}; cluster.num_cpus=4 ->
    policy.peft.enabled is true ... workers have no adapters next to expert parallelism
reward.function=dagrl.rl.rewards:exact_match; reward.functions={a: {function: 'dagrl.rl.rewards:exact_match'}} ->
    reward.function and reward.functions are both set ... move the first into reward.functions
reward.functions={a: {function: 'my_rewards:score'}} -> reward.functions.a.function: there is no module
reward.function=HERE:asks_for_more -> SAME: HERE:asks_for_more has the parameters level ... expected, after prompts
reward.max_concurrency=2 -> SAME is 2 ... not a coroutine function of single samples ... reward.batched=false
data.mixture={a: {path: a.jsonl}} -> data.mixture is set, and so is data.path ... move the latter into data.mixture
reward.functions={a: {function: 'dagrl.rl.rewards:exact_match', tasks: [sums]}} ->
    reward.functions.a.tasks has 'sums' ... not in data.mixture
reward.weights.x=1 -> reward.weights: no part has the name 'x'; the reward has no named parts. Correct or remove it
algorithm=sft; sft.max_num_steps=0 -> sft.max_num_steps is 0, so algorithm sft would train nothing; set it to 1 or more
reward.function=null -> reward.function is null, and there is no environment ... set one of them
data.response_key=null; sft.max_num_steps=1 -> data.response_key is null, but SFT learns responses ... sft.max_num_steps=0
data.response_key=null; sft.max_num_steps=0 ->
    data.response_key is null, but reward.function dagrl.rl.rewards:exact_match compares with a reference
reward.function=my_rewards:score -> reward.function: there is no module
phases.train_step=dagrl.graphs.phases:go -> phases.train_step: module 'dagrl.graphs.phases' has no
phases.refit=dagrl.rl.rewards:exact_match -> phases.refit:  ... @phase
phases.train_step=HERE:misspelt -> SAME: the `inputs` of HERE:misspelt lack advantages and have advantage; expected: all of
phases.train_step=HERE:unknown_loss -> node train.train_step is called with loss='polcy'; choose one of 'likelihood', '
phases.logprobs=HERE:without_ids -> SAME: the `inputs` of HERE:without_ids lack row_ids and have rows; expected: some
phases.mine=my:phase -> phases (command line) ... names of phases, which 'mine' is not: demonstration_step
policy.worker=HERE:Worker ->
    policy.worker: the worker class ... it has no method save_checkpoint; expected save_checkpoint(directory: str
data.path=null; data.task=dagrl.rl.tasks:sums -> data.task: module 'dagrl.rl.tasks' has no
data.path=null; data.task=dagrl.rl.tasks:arithmetic; data.task_args={digit: 2} -> data.task_args:  ... 'digit' ... digits
data.path=null; data.task=dagrl.rl.tasks:arithmetic; data.task_args={digits: 7} -> digits is 7; expected: 1 or 2
data.path=null; data.task=builtins:dict -> data.task builtins:dict returned dict; expected: dagrl.data.Splits
policy.generation.temperature=0.005 -> SAME (command line): found 0.005; expected: 0.01 or more: vLLM raises what is below
policy.generation.temperature=0 ->
    policy.generation.temperature (command line): found 0; expected: 0.01 or more ... completions of a prompt are equal at 0
policy.tokenizer.chat_template="{% for m in messages %}" ->
    policy.tokenizer.chat_template is not valid: Unexpected end of template ... (line 1); correct it
policy.tokenizer.chat_template="1\n{{ messages | sums }}" -> SAME is not valid: No filter named 'sums'. (line 2)
policy.tokenizer.chat_template="{% for m in messages %}1+1{% endfor %}=" ->
    policy.tokenizer.chat_template writes '1+1=' for both '1 + 1' and '2 + 2', so all prompts would be equal
sft.max_num_steps=1; policy.generation.stop_token_ids=[4, 5, 6, 7, 8, 9, 10, 11, 12, 13] ->
    line 1: the response goes on after stop token 4 '0', where generation would end, as do all others
policy.generation.stop_token_ids=[3, 16, -1] -> SAME has 16, -1, which the model does not have ... 0 to 15
loss_fn.truncated_importance_sampling_ratio=2 -> use_importance_sampling_correction=true
loss_fn.truncated_importance_sampling_type=icepop -> upper bound
grpo.async_grpo={enabled: true, recompute_kv_cache_after_weight_updates: true} ->
    recompute_kv_cache_after_weight_updates ... in_flight_weight_updates=true
reward.function=HERE:half ->
    test_bad_input:half takes (number:  ... ; expected: prompts, completions and references by position
policy.generation.colocated.enabled=true; grpo.async_grpo.enabled=true -> policy.generation.colocated.enabled ... take turns
loss_fn.name=distill; loss_fn.reference_policy_kl_penalty=0 ->
    loss_fn.name ... there is no reference policy ... models.teacher.model_name
grpo.num_generations_per_prompt=1; grpo.num_prompts_per_step=16 -> SAME is 1, but algorithm grpo compares the completions
algorithm=ppo; grpo.num_generations_per_prompt=1; grpo.num_prompts_per_step=16; grpo.use_dynamic_sampling=true ->
    grpo ( ... num_generations_per_prompt is 1, but use_dynamic_sampling drops
algorithm=ppo; policy.train_global_batch_size=8; critic.megatron_cfg.data_parallel_size=3 ->
    policy.train_global_batch_size 8 is not divisible by data_parallel_size 3 of the critic workers
algorithm=ppo; critic.megatron_cfg.tensor_model_parallel_size=3 ->
    critic workers: layout ... 4 attention heads are not divisible by tp 3
algorithm=ppo; policy.worker=dagrl.workers.megatron:MegatronValueWorker; policy.peft.enabled=true ->
    train workers:  ... peft.enabled is true, but adapters alone would leave
algorithm=ppo; critic.model_name=no/such/critic -> critic.model_name ... 'no/such/critic' is not a directory
algorithm=sft; models.teacher.model_name=a -> models.teacher is set, but algorithm sft learns from demonstrations
models.tutor.model_name=a -> models.tutor is set, but no phase of the run has a Shard named 'tutor'
models.train.model_name=a -> models (command line) ... names of roles, which 'train' cannot be
models.teacher.model_name=no/such/teacher -> models.teacher.model_name ... 'no/such/teacher' is not a directory
loss_fn.force_on_policy_ratio=true; policy.train_global_batch_size=4 ->
    loss_fn.force_on_policy_ratio is true ... several optimizer steps ... Set policy.train_global_batch_size=
policy.generation.colocated.enabled=true; policy.reference_weights=device ->
    policy.reference_weights is 'device' ... set policy.reference_weights to host
policy.generation.vllm_kwargs={enforce_eager: true} -> vllm_kwargs sets enforce_eager ... vllm_cfg
policy.generation.vllm_kwargs={speculative_config: {method: ngram}} -> vllm_kwargs sets speculative_config
cluster.gpus_per_worker=0.5; MEGATRON.tensor_model_parallel_size=2 -> SAME is 0.5 ... 2 train workers ... set it to 1
cluster.gpus_per_worker=1; cluster.num_gpus=0 -> this machine has 0 GPUs and a worker takes 1 ... or set SAME=0
MEGATRON.cuda_graphs=true; cluster.num_gpus=0 -> MEGATRON.cuda_graphs is true, but this machine has no GPUs; set it to false
output_dir=/proc/x -> output_dir /proc/x: cannot write in /proc
environment.function=dagrl.data:Example -> SAME: dagrl.data:Example has no method reset or step ... docs/rewards.md
environment.function=HERE:Gym -> SAME: too many positional ... Gym.reset takes self, seed, and is given self, example
environment.function=tests.integration.unigram_task:SaysNines; environment.args={size: 3} ->
    environment.args: got an unexpected keyword argument 'size' ... SaysNines takes no arguments
environment.tools=['json:dumps']; environment.function=tests.integration.unigram_task:SaysNines ->
    environment.tools is set, and so is environment.function; leave one
environment.tools=['my_tools:search'] -> environment.tools: there is no module
environment.function=my_task:answer -> environment.function ... my_task
environment.agent=my_agent:solve -> environment.agent: there is no module
environment.agent=HERE:half -> environment.agent: too many positional ... half takes number, and is given example, endpoint
environment.agent=tests.integration.agent_task:adds_twice; environment.tools=['json:dumps'] ->
    environment.agent is set, and so is environment.tools; leave one
environment.agent=tests.integration.agent_task:adds_twice; policy.router_replay=true ->
    policy.router_replay is true, but the experts of an agent's conversations
environment.agent=tests.integration.agent_task:adds_twice; environment.max_conversations=2; algorithm=ppo ->
    environment.max_conversations is 2, but the algorithm has a critic
policy.random_init.hf_config.model_type=gpt9 -> model_type
policy.random_init.hf_config.initializer_range=abc ->
    policy.random_init.hf_config: transformers cannot make ... 'initializer_range' expected float, got str
policy.random_init.tokenizer_characters="121" -> tokenizer_characters ... '1' more than once
LORA={enabled: true, refit: adapters, dim: 600} -> dim is 600, but ... set LORA.refit=merged
LORA={enabled: true, refit: adapters}; policy.generation.vllm_cfg.precision=fp8 ->
    vllm_cfg.precision is fp8 ... set LORA.refit=merged
LORA={enabled: true, target_modules: [layers.0.mlp.experts.1.up_proj]}; MIXTURE ->
    has 'layers.0.mlp.experts.1.up_proj', which no linear layer outside of experts is called
LORA={enabled: true, refit: adapters}; MIXTURE ->
    vLLM's kernels for experts on CPUs run in no model with LoRA; set it to merged
seed=-1 -> seed (command line): found -1; expected: greater
policy.tokenizer.chat_template=templates/chat.jinja ->
    chat_template (command line): found 'templates/chat.jinja'; expected: Jinja text ... not the name of its file
data.split=test -> data.split is 'test' ... data.jsonl' has no splits ... leave it out
name="a\0b" -> name (command line): found 'a\x00b' ... expected: a  ... name
data.path="a\0b" -> data.path (command line): found 'a\x00b' ... expected: a  ... without null bytes
name=a/b; --dry-run -> name (command line): found 'a/b' ... without slashes
name=.. -> name (command line): found '..' ... without slashes
name=𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞𝄞 -> name (command line): found ... at most 240 bytes
name="\ud800" -> name (command line): found ... surrogates not allowed
TASK={made: words} -> HERE:strange ... Splits.demonstrations[0] is 'a'; expected: a dagrl.data.Example
TASK={made: prompts of numbers} -> HERE:strange ... Splits.train[0]: 'prompt' is 1; expected: text
TASK={made: messages of words} -> HERE:strange ... Splits.demonstrations[0]: message 2 is 'b'; expected: a dagrl.data.Message
MEGATRON.moe_aux_loss_coeff=0.01 -> moe_aux_loss_coeff is set, but the model has no experts; set it to 0
policy.router_replay=true; algorithm=sft; MIXTURE -> policy.router_replay is true, but algorithm 'sft' generates nothing
GRAPHS; MEGATRON.pipeline_model_parallel_size=2 -> MEGATRON.cuda_graphs is true ... pipeline_model_parallel_size is 2
GRAPHS; MEGATRON.activation_checkpointing=true -> activation_checkpointing
GRAPHS; policy.generation.colocated.enabled=true -> colocated.enabled
GRAPHS; policy.sequence_packing.enabled=true -> 'float32' ... bfloat16 only
GRAPHS; cluster.num_gpus=2; MIXTURE; policy.precision=float32; policy.sequence_packing.enabled=false ->
    the model has experts in float32 ... policy.precision=bfloat16
GRAPHS; cluster.num_gpus=4; MIXTURE; MEGATRON.data_parallel_size=2; MEGATRON.expert_model_parallel_size=2 ->
    the model has experts on several workers ... expert_model_parallel_size=1
"""
"""Overrides of a valid configuration, and parts of the message."""

LINES = r"""
{oops -> not valid JSON ... '{oops'
[1, 2] -> found a JSON list
{"prompt": "1"} -> no key 'response' ... data.response_key
{"prompt": "1", "response": ""} -> 'response' is empty
{"prompt": "1", "response": 2} -> 'response' is 2
{"prompt": "1\ud800", "response": "2"} -> 'prompt' ... \ud800 ... at character 1
{"messages": [{"role": "user", "content": "1\ud800"}, {"role": "assistant", "content": "2"}]} ->
    'content' ... \ud800 ... at character 1
{"messages": [{"content": "1"}]} -> message 1 of 'messages'
{"messages": [{"role": "user", "content": "1"}]} -> 'messages' has the roles user
{"messages": [USER, {"role": "assistant", "content": "2"}]} -> is a conversation ... policy.tokenizer.chat_template
{"messages": [USER, {"role": "assistant", "content": ["a"]}]} -> message 2 of 'messages' is {'role'
{"messages": [USER, {"role": "assistant", "content": null, "function_call": {"name": "f", "arguments": "{}"}}]} ->
    message 2 of 'messages' has 'function_call' or the role 'function'; expected: 'tool_calls' and the role 'tool'
{"messages": [USER, {"role": "assistant", "content": null, "tool_calls": [{"type": "custom", "custom": {"name": "f"}}]}]} ->
    message 2 of 'messages' calls a tool that is no function; expected: 'tool_calls' of the type 'function'
{"messages": [USER, {"role": "assistant", "content": "2", "weight": 0.5}]} ->
    message 2 of 'messages' has the weight 0.5; expected: 1, or 0
{"messages": [USER, {"role": "assistant", "content": "2", "tool_calls": ["\ud800"]}]} -> message 2 of 'messages' has half
{"messages": [USER, {"role": "assistant", "content": "2"}], "tools": [1]} -> 'tools' is [1]; expected: a list of objects
{"messages": [USER, {"role": "assistant", "content": "2"}], "tools": "none"} -> 'tools' is 'none', which is not valid JSON
"""
"""A data file's only line, and parts of the message about it."""


class Worker:
    """A worker class without methods."""


class Checked(MegatronWorker):
    @staticmethod
    def check(config: Config, hf_config: Mapping[str, Json]) -> None:
        raise KeyError("hidden")


@phase
def broken(train: Shard, batch: Input) -> Value:
    raise ZeroDivisionError("while traced")


misspelt = dataclasses.replace(train_step, inputs={name.replace("ages", "age"): field for name, field in SAMPLES.items()})
without_ids = dataclasses.replace(logprobs, inputs={"tokens": Field("int64"), "rows": Field("int64", "row")})
unknown_loss = dataclasses.replace(train_step, function=lambda train, batch: train.map("train_step", batch, loss="polcy"))


def failing() -> Splits:
    raise RuntimeError("no disk")


def leaving() -> Splits:
    sys.exit("enough")


def strange(made: str) -> Splits:
    example: Any = Example("1", "2")
    parts: dict[str, Any] = {
        "words": (("a",), (example,), ()),
        "prompts of numbers": ((example,), (Example(cast(str, 1), "2"),), ()),
        "messages of words": ((Example("", "b", (Message("user", "a"), cast(Message, "b"))),), (example,), ()),
    }
    return Splits(*parts[made])


Run = Callable[..., tuple[int, str]]


@pytest.fixture(autouse=True)
def _nothing_begins_early(monkeypatch: pytest.MonkeyPatch) -> None:
    for begin in ("begin_imports", "begin_cluster"):
        monkeypatch.setattr(Fleet, begin, lambda *_: None)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `dagrl train` in this process with a valid data file; starting Ray raises, and the Hub is not asked."""

    monkeypatch.setattr("ray.init", MagicMock(side_effect=AssertionError("Ray was started")))
    monkeypatch.setattr("dagrl.run.cluster.ProcessGroup", MagicMock())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def train(*arguments: str, lines: tuple[str, ...] | None = None) -> tuple[int, str]:
        data = tmp_path / "data.jsonl"
        data.write_text("".join(f"{line}\n" for line in (good_lines() if lines is None else lines)))
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(configuration(str(data))))
        code = main(["train", str(tmp_path / "config.yaml"), f"output_dir={tmp_path / 'runs'}", *arguments])
        return code, capsys.readouterr().err

    return train


def check(result: tuple[int, str], message: str, runs: Path) -> None:
    """Checks that a run ended before it began, with one message that has these parts."""
    code, errors = result
    assert code == 2, errors
    assert errors.count("dagrl: error: ") == 1 and "Traceback" not in errors
    for part in message.split(" ... "):
        assert part in errors
    assert not runs.exists()


@pytest.mark.parametrize(("overrides", "message"), rows(OVERRIDES))
def test_bad_overrides(overrides: str, message: str, run: Run, tmp_path: Path) -> None:
    check(run(*overrides.split("; ")), message, tmp_path / "runs")


@pytest.mark.parametrize(("line", "message"), rows(LINES))
def test_bad_lines(line: str, message: str, run: Run, tmp_path: Path) -> None:
    """Validation examples are not held out, so that the line is not too few."""
    check(run("data.val_fraction=0", lines=(line,)), f"data.jsonl, line 1 ... {message}", tmp_path / "runs")


@pytest.mark.parametrize(
    ("lines", "overrides", "message"),
    [
        ((good_lines()[0], "", "{oops"), (), "data.jsonl, line 3: not valid JSON"),
        (("{oops", "[]"), ("data.invalid=drop",), "data.jsonl: all 2 examples are invalid; the first error ... line 1: not"),
        (("[" * 100_000,), (), "data.jsonl, line 1: not valid JSON ... '[[["),
        ((), (), "data.jsonl' is empty"),
        ((good_lines()[0],), (), "has 1 example(s) ... data.val_path"),
        ((*good_lines(), LONG), ("sft.max_num_steps=1",), "data.jsonl, line 26: 3 ... room for 16 (the largest bucket)"),
        (None, ("seed=" + "[" * 1000 + "]" * 1000,), "override 'seed=[[[ ... nested too deeply"),
    ],
    ids=["an empty line", "all invalid", "a deep line", "no line", "all held out", "too long", "a deep override"],
)
def test_bad_files_of_data(lines: Any, overrides: tuple[str, ...], message: str, run: Run, tmp_path: Path) -> None:
    check(run(*overrides, lines=lines), message, tmp_path / "runs")


@pytest.mark.parametrize(
    ("package", "overrides", "message"),
    [
        ("tensorboard", (), "logger.tensorboard_enabled ... dagrl[tracking]"),
        ("megatron", (), "policy.worker ... dagrl[megatron]"),
        ("math_verify", ("reward.function=dagrl.rl.rewards:math_answer",), "reward.function ... dagrl[math]"),
        ("vllm", (), "policy.generation.worker ... dagrl[vllm] ... dagrl[cpu]"),
    ],
)
def test_missing_packages(package: str, overrides: Any, message: str, run: Run, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    check(run(*overrides), message, tmp_path / "runs")


@pytest.mark.parametrize(
    ("overrides", "message", "function"),
    [
        (("data.path=null", "data.task={}:failing"), "data.task: {}:failing raised RuntimeError: no disk", "failing"),
        (("data.path=null", "data.task={}:leaving"), "data.task: {}:leaving raised SystemExit: enough", "leaving"),
        (("phases.refit={}:broken",), "phases.refit: {}:broken raised ZeroDivisionError: while traced", "broken"),
        (("policy.worker={}:Checked",), "policy.worker: {}:Checked.check raised KeyError: 'hidden'", "check"),
    ],
)
def test_errors_in_user_code(overrides: tuple[str, ...], message: str, function: str, run: Run) -> None:
    """The message names the key and is followed by the location in the user's code."""
    code, errors = run(*(word.format(__name__) for word in overrides))
    assert code == 2 and errors.startswith(f"dagrl: error: {message.format(__name__)}")
    assert errors.count("Traceback") == 1 and "test_bad_input.py" in errors and f", in {function}\n" in errors
    with pytest.raises(UserError):
        run(*(word.format(__name__) for word in overrides), "--debug")


def test_a_teacher_with_another_vocabulary(run: Run, tmp_path: Path) -> None:
    teacher, other = tmp_path / "teacher", "other numbers for 10 of the policy's 16 tokens, such as '0'"
    for characters, found in (("9876543210+=", other), ("01", "rows")):
        init = RandomInit(hf_config=MODEL, tokenizer_characters=characters)
        write_random_model(init, character_tokenizer(characters), teacher)
        for key, *others in (("models.teacher.model_name",), ("critic.model_name", "algorithm=ppo")):
            code, errors = run(f"{key}={teacher}", *others)
            assert code == 2 and key in errors and found in errors, errors


@pytest.mark.parametrize("key", ["policy.model_name", "policy.peft.adapter_path", "data.val_path"])
def test_inputs_in_a_directory_that_would_be_renamed(key: str, run: Run, tmp_path: Path, capsys: Any) -> None:
    """`policy.model_name=runs/bad/final_model` of a run named `bad`. One that resumes renames nothing, nor an evaluation."""
    earlier, own = tmp_path / "runs" / "bad", "policy.random_init=null" if key == "policy.model_name" else "seed=0"
    (earlier / "final_model").mkdir(parents=True)
    (earlier / "config.yaml").write_text("name: bad")
    for words in (("--dry-run",), ()):
        code, errors = run(f"{key}={earlier / 'final_model'}", own, *words)
        assert code == 2 and f"{key}: {earlier / 'final_model'} is in {earlier}, which is renamed when another" in errors
    assert "is renamed" not in run(f"{key}={earlier / 'final_model'}", own, "checkpointing.resume=true", "--dry-run")[1]
    assert "is renamed" not in run(f"{key}={earlier / 'final_model'}", own, "name=other", "--dry-run")[1]
    assert [path.name for path in (tmp_path / "runs").iterdir() if path.is_dir()] == ["bad"]
    keys = (f"{key}={earlier / 'final_model'}", f"output_dir={tmp_path / 'runs'}")
    assert main(["evaluate", str(tmp_path / "config.yaml"), own, *keys]) and "is renamed" not in capsys.readouterr().err


def test_a_directory_that_is_not_a_run_is_left_alone(run: Run, tmp_path: Path) -> None:
    (tmp_path / "runs" / "bad").mkdir(parents=True)
    (tmp_path / "runs" / "bad" / "thesis.tex").touch()
    for words in (("--dry-run",), ()):
        code, errors = run(*words)
        assert code == 2 and "exists and is not a run" in errors
    assert [path.name for path in (tmp_path / "runs" / "bad").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("file", "content", "found"),
    [
        ("config.json", "[1]", "holds a JSON list; expected an object"),
        ("config.json", "{", "cannot be read"),
        ("tokenizer.json", "[]", "holds a JSON list; expected an object"),
        ("tokenizer_config.json", "[]", "holds a JSON list; expected an object"),
    ],
)
@pytest.mark.parametrize("command", ["train", "inspect"])
def test_invalid_model_files(command: str, file: str, content: str, found: str, tmp_path: Path, capsys: Any) -> None:
    model = tmp_path / "model"
    character_tokenizer("0123456789+=").save_pretrained(model)
    (model / "config.json").write_text(json.dumps(MODEL))
    (model / file).write_text(content)
    path, data = tmp_path / "config.yaml", tmp_path / "data.jsonl"
    data.write_text("\n".join(good_lines()))
    path.write_text(yaml.safe_dump(configuration(str(data))))
    assert main([command, str(path), f"output_dir={tmp_path}", "policy.random_init=null", f"policy.model_name={model}"]) == 2
    errors = capsys.readouterr().err
    assert f"policy.model_name: {model / file} {found}" in errors and "Traceback" not in errors


OPEN = "generation: {vllm_cfg: {max_model_len: 40}}, sequence_packing: {enabled: true, train_mb_tokens: 48}"


@pytest.mark.parametrize("more", [*(f".generation.top_k={k}" for k in (20, "null", 0, -1)), f"={{{INIT}, {OPEN}}}"])
def test_valid_input_passes_all_checks(more: str, run: Run) -> None:
    assert run("--dry-run", f"policy{more}") == (0, "")


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("sys.exit(0)", 2, "dagrl: error: reward.function: importing 'user_module' raised SystemExit: 0"),
        ("raise ValueError('no')", 2, "dagrl: error: reward.function: importing 'user_module' raised ValueError: no"),
        ("raise KeyboardInterrupt", 130, "dagrl: error: interrupted"),
    ],
)
def test_a_module_that_raises(line: str, code: int, message: str, run: Run, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "user_module.py").write_text(f"import sys\n{line}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert (result := run("reward.function=user_module:score"))[0] == code and message in result[1]


def test_a_model_without_tokenizer_or_with_truncated_weights(run: Run, tmp_path: Path) -> None:
    init = RandomInit.model_validate(configuration("")["policy"]["random_init"])
    write_random_model(init, load_tokenizer(PolicyConfig(random_init=init)), tmp_path / "model")
    words = ("policy.random_init=null", f"policy.model_name={tmp_path / 'model'}", "--dry-run")
    assert run(*words) == (0, "")
    weights, index = (tmp_path / "model" / f"model.safetensors{end}" for end in ("", ".index.json"))
    for metadata, code in (({}, 2), ({"metadata": {}}, 0)):  # which transformers reads
        index.write_text(json.dumps({**metadata, "weight_map": {"model.norm.weight": weights.name}}))
        found, errors = run(*words, "policy.backend=fsdp", "policy.megatron_cfg={}")
        assert found == code and (f'{index} has no "metadata"' in errors) == (code == 2), errors
    index.unlink()
    weights.write_bytes(weights.read_bytes()[:-1])
    code, errors = run(*words)
    assert code == 2 and f"dagrl: error: train workers: cannot read {weights}: " in errors
    for file in weights.parent.glob("*token*"):
        file.unlink()
    code, errors = run(*words)
    assert code == 2 and "policy.model_name: " in errors and "has no tokenizer, such as tokenizer.json; save" in errors


def test_valid_input_starts_ray(run: Run) -> None:
    """The rows above fail for their own reasons: without them the run reaches Ray."""
    assert (result := run())[0] == 1 and "Ray was started" in result[1]


def test_directories_of_a_running_run_are_locked(run: Run, tmp_path: Path) -> None:
    """Against a run of the same name, and one that resumes it."""
    run()
    metrics = tmp_path / "runs" / "bad" / "metrics.jsonl"
    metrics.write_text("{}\n")
    paths = RunPaths(metrics.parent)
    with lock_run(paths):
        for words in ((), ("checkpointing.resume=true",)):
            code, errors = run(*words)
            assert code == 2 and f"dagrl: error: {paths.directory} is in use by pid {os.getpid()} on " in errors
        assert run("--dry-run") == (0, "")
    assert metrics.read_text() == "{}\n"
    assert [path.name for path in sorted((tmp_path / "runs").iterdir()) if path.is_dir()] == ["bad"]
    assert run()[0] == 1
    assert (tmp_path / "runs" / "bad.1" / "metrics.jsonl").exists()


def save_checkpoint(config: Config, model: Path) -> None:
    """Saves step 3 of the run as its train workers would: with the identity of the model in the `config.json` of `model`."""
    inputs, paths = preflight(config), RunPaths.of(config)
    identity = identity_of(inputs.config.policy, read_hf_config(model))
    head = {"format": MegatronBackend.checkpoint_format, "identity": identity}
    position = open_sampler(inputs.prompts, inputs.config.data).state()
    with saving(CheckpointStore(paths.checkpoints), TrainState(3, {"grpo_sampler": position, REFERENCE: False})) as part:
        (part / "train").mkdir()
        (part / "train" / WORKER).write_text(json.dumps(head))
    paths.config.write_text("name: bad\n")


PPO = ("algorithm=ppo", "advantage.name=gae", "reward.function=dagrl.rl.rewards:exact_match")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("policy.random_init.hf_config.num_hidden_layers=4",), "model layers = 2 (this run: 4)"),
        (("policy.precision=bfloat16",), "precision float32, this run has bfloat16"),
        (("policy.peft={enabled: true, dim: 4}",), "LoRA adapters none, this run has {"),
        (("policy.random_init.tokenizer_characters=+=0123456789",), "use the same data, data.mixture, data.seed"),
        (("data.seed=7",), "the data position was saved with {'counts': "),
        (("loss_fn.reference_policy_kl_penalty=0.1",), "needs a reference policy"),
        (("sft.max_num_steps=4",), "sft.max_num_steps is 4, but"),
        (PPO, "has no state of the critic workers: it was saved by a run without them"),
    ],
)
def test_a_run_rejects_a_checkpoint_that_it_cannot_resume(overrides: Any, message: str, run: Run, tmp_path: Path) -> None:
    """It is refused before anything starts or changes, by a dry run too. Another layout is not."""
    same = ("policy.precision=float32", "loss_fn.reference_policy_kl_penalty=0", "checkpointing.resume=true")
    assert run("--dry-run", *same[:2]) == (0, "")
    config = load_config(tmp_path / "config.yaml", (f"output_dir={tmp_path / 'runs'}", *same[:2]))
    init = config.policy.random_init
    write_random_model(init, load_tokenizer(config.policy), tmp_path / "model")
    save_checkpoint(config, tmp_path / "model")
    before = sorted(tmp_path.rglob("*"))
    for words in (("--dry-run",), ()):
        code, errors = run(*same, *overrides, *words)
        assert code == 2 and errors.count("dagrl: error: ") == 1 and message in errors
        assert str(tmp_path / "runs" / "bad" / "checkpoints" / "step_00000003") in errors
    assert sorted(tmp_path.rglob("*")) == before
    other = (f"{MEGATRON}.data_parallel_size=1", f"{MEGATRON}.tensor_model_parallel_size=2")
    assert run("--dry-run", *same, *other) == (0, "")


def test_a_run_that_resumes_keeps_its_date(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its chat template writes the date, so on the next day the data would have other tokens."""
    assert run("--dry-run") == (0, "")  # writes the files
    template = "{{ strftime_now('%Y-%m-%d %H') }}={% for m in messages %}{{ m.content }}{% endfor %}"
    words = (f"policy.tokenizer.chat_template={json.dumps(template)}", "policy.max_total_sequence_length=64")
    characters = "policy.random_init.tokenizer_characters=' -+=0123456789'"
    config = load_config(tmp_path / "config.yaml", (f"output_dir={tmp_path / 'runs'}", characters, *words))
    first = preflight(config)
    day = date.today()
    assert first.config.policy.tokenizer.date == day and "date" in first.derived["policy.tokenizer.date"]
    assert first.prompts[0].text.startswith(f"{day} 00=")
    prepare_run_directory(first.config, first.derived)
    monkeypatch.setattr("dagrl.run.derive.date", MagicMock(**{"today.return_value": day + timedelta(1)}))
    assert preflight(config).prompts[0].text.startswith(f"{day + timedelta(1)} 00=")
    resumed = preflight(config.with_keys({"checkpointing.resume": True}))
    assert resumed.config.policy.tokenizer.date == day
    assert digest_of(resumed.prompts) == digest_of(first.prompts) != digest_of(preflight(config).prompts)


def test_the_saved_configuration_equals_the_given_one(run: Run, tmp_path: Path) -> None:
    """It has the derived values too, as a dry run shows them."""
    for algorithm, other in (("grpo", "sft"), ("sft", "grpo")):
        words = (f"algorithm={algorithm}", f"{algorithm}.max_num_epochs=3", f"{other}.max_num_steps=7")
        run(*words)
        given = load_config(tmp_path / "config.yaml", (f"output_dir={tmp_path / 'runs'}", *words))
        assert load_config(tmp_path / "runs" / "bad" / "config.yaml") == preflight(given).config


def test_sigterm_while_ray_starts_interrupts(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own handler, installed by then, exits."""

    def init(*args: object, **kwargs: object) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("ray.init", init)
    code, errors = run()
    assert code == 130 and "dagrl: error: interrupted" in errors


def test_settings_that_bias_the_gradient_are_warned_about(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    correction, truncated = "loss_fn.use_importance_sampling_correction=true", "policy.generation.top_p=0.9"
    with caplog.at_level("WARNING", "dagrl"):
        assert run("--dry-run", "grpo.async_grpo={enabled: true, max_trajectory_age_steps: 2}")[0] == 0
        assert "every update waits until all running requests finish" in caplog.text
        assert "use_importance_sampling_correction is false" in caplog.text
        assert run("--dry-run", correction)[0] == 0 and "too small for every token" not in caplog.text
        assert run("--dry-run", correction, truncated)[0] == 0
    assert "top_p 0.9 or top_k None truncates the sampling distribution" in caplog.text
    assert "too small for every token" in caplog.text


def test_conversations_that_the_template_rejects_are_dropped(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """What differs in the rows that stay is said once."""
    template = "{% for m in messages %}{{ m.content if m.role != 'tool' else raise_exception('no tools') }}{% endfor %}"
    question, result = {"role": "user", "content": "1+1="}, {"role": "tool", "content": "2"}
    answer = {"role": "assistant", "content": "2", "reasoning_content": "2=1+1"}
    rows = [json.dumps({"messages": turns}) for turns in [[question, answer]] * 3 + [[question, result, answer]]]
    words = ("--dry-run", "algorithm=sft", f"policy.tokenizer.chat_template={json.dumps(template)}", "data.val_fraction=0")
    assert "line 4: the chat template rejects" in run(*words, lines=rows)[1] and not caplog.text
    assert run(*words, "data.invalid=drop", lines=rows)[0] == 0
    assert "the chat template: dropped 1 of 4 examples" in caplog.text and "line 4: the chat template rej" in caplog.text
    assert caplog.text.count("other conversations: ") == 1 and "line 1 and 2 other conversations: " in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "contains None"),
        ("- a\n", "contains ['a']"),
        ("a: [1\n", "is not valid YAML"),
        ("name: x\nname: y\n", "name (CONFIG, line 2) is a duplicate key"),
        ("name: &x {precison: a}\n\npolicy:\n  {<<: *x, precison: b}\n", "unknown key policy.precison (CONFIG, line 4)"),
        ("name: x\n", "missing key algorithm (CONFIG)"),
        ("name: " + "[\n " * 1000, "CONFIG is nested too deeply to parse"),
        (None, "no configuration file 'CONFIG'"),
    ],
)
def test_bad_files(text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    assert main(["train", str(path)]) == 2
    assert message.replace("CONFIG", str(path)) in capsys.readouterr().err
