"""What a configuration leaves open is derived, what it sets is kept, and each derived value has a reason."""

import json
import re
from contextlib import nullcontext
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import PreTrainedTokenizerFast

from dagrl.config import Config
from dagrl.config.checks import check_settings
from dagrl.config.file import all_keys, dump_config, load_config
from dagrl.config.plan import RunPlan
from dagrl.config.settings import generation_config
from dagrl.data.chat import chat_of
from dagrl.errors import ConfigError
from dagrl.machine import Gpu
from dagrl.run import derive
from dagrl.run.model import character_tokenizer
from dagrl.workers.fsdp import FsdpWorker
from dagrl.workers.train.row_plans import pack

ROOT = Path(__file__).parents[3]
QWEN3_06B = {"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
QWEN3_06B |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960}
QWEN3_06B |= {"torch_dtype": "bfloat16"}
LORA = {"peft": {"enabled": True}}
ADAPTERS = {"peft": {"enabled": True, "refit": "adapters"}}
TEMPLATED = character_tokenizer("0123456789", "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}")
WEIGHTS = 1_503_300_328  # bytes of its published checkpoint


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    def has(count: int, gib: int = 80) -> None:
        cards = [Gpu(f"GPU-{index}", "a GPU", gib << 10, "580", (9, 0)) for index in range(count)]
        monkeypatch.setattr(derive, "gpus", lambda: cards)
        monkeypatch.setattr("dagrl.run.cluster.gpu_count", lambda: count)

    return has


def minimal(algorithm: str = "grpo", **more: Any) -> Config:
    policy = {"model_name": "m", **more.pop("policy", {})}
    return Config.model_validate({"name": "t", "algorithm": algorithm, "policy": policy, "data": {"path": "d"}, **more})


def resolve(config: Config, prompts: int = 200, demonstrations: int = 0) -> derive.Derived:
    derived = derive.derive_from_machine(config)
    derive.derive_chat(derived, has_template=True)
    if derived.generates:
        derive.derive_stops(derived, chat_of(TEMPLATED), {}, shown=True)
    rows = [range(demonstrations)] * 100 if demonstrations else []
    asked = [range(prompts)] * 3200 if config.algorithm == "grpo" else []
    derive.derive_from_data(derived, rows, asked, QWEN3_06B, WEIGHTS)
    learned = {"pairs" if config.algorithm in ("dpo", "reward_model") else "demonstrations": len(rows)}
    derive.derive_steps(derived, **learned, prompts=len(asked))
    check_settings(derived.config, RunPlan.of(derived.config))
    return derived


@pytest.mark.parametrize("part", [None, "text_config"], ids=["of a text", "that takes images"])
def test_completions_fit_a_model_with_a_short_context(part: str | None, machine: Any) -> None:
    machine(0)
    derived, short = derive.derive_from_machine(minimal()), {**QWEN3_06B, "max_position_embeddings": 64}
    derive.derive_from_data(derived, [], [range(6)] * 3200, short if part is None else {part: short}, WEIGHTS)
    generation = derived.config.policy.generation
    assert generation is not None and generation.max_new_tokens == 32
    assert "half of the 64 tokens" in derived.reasons["policy.generation.max_new_tokens"]
    assert derived.config.policy.max_total_sequence_length == 64


LENGTH, RATE = "policy.max_total_sequence_length", "policy.optimizer.lr"
BUCKETS = {LENGTH.partition(".")[2]: 1000, "sequence_buckets": [100, 300]}


@pytest.mark.parametrize(
    ("config", "rows", "expected"),
    [
        (minimal(policy=BUCKETS), 0, {"policy.generation.max_new_tokens": 150}),
        (minimal(policy={"max_total_sequence_length": 512}), 0, {"policy.generation.max_new_tokens": 256}),
        (minimal(policy=LORA), 9, {RATE: 1e-5}),
        (minimal(sft={"max_num_epochs": 1}), 300, {"sft.lr": 1e-5, "sft.max_num_steps": 1}),  # 512 a step
        (minimal("sft"), 300, {RATE: 1e-5, LENGTH: 320, "sft.max_num_steps": 4}),  # 32 a step
        (minimal("sft", policy=LORA), 9, {RATE: 1e-5}),
        (minimal("sft", sft={"max_num_epochs": 3}), 3, {"sft.max_num_steps": 10}),
        (minimal("sft"), 50_000, {LENGTH: 40960}),  # the model's
        (minimal("dpo"), 9, {RATE: 1e-6, "preference.max_num_steps": 4, "policy.train_global_batch_size": 32}),
    ],
)
def test_steps_lengths_and_rates(machine: Any, config: Config, rows: int, expected: dict[str, object], caplog: Any) -> None:
    """Of 100 demonstrations or pairs with `rows` tokens each."""
    machine(0)
    derived = resolve(config, demonstrations=rows)
    assert {key: attrgetter(key)(derived.config) for key in expected} == expected
    assert derived.reasons.get(RATE) == "LoRA" or config.policy.peft.enabled is False
    fewer = "100 examples are fewer than the 512" in caplog.text
    assert fewer == bool(caplog.messages) == (config.algorithm == "grpo" and rows > 0)


def test_a_minimal_grpo_run_on_one_gpu(machine: Any) -> None:
    machine(1)
    derived = resolve(minimal())
    config, policy = derived.config, derived.config.policy
    engine = policy.generation.vllm_cfg
    assert (policy.precision, policy.sequence_packing.enabled) == ("bfloat16", True)
    assert policy.optimizer.lr == 1e-6
    assert (config.sft.max_num_steps, config.grpo.max_num_steps) == (0, 100)  # 3200 prompts, 32 a step
    assert policy.train_global_batch_size == 32 * 16 and config.loss_fn.force_on_policy_ratio
    several = resolve(minimal(policy={"train_global_batch_size": 64})).config  # later steps of a batch have other ratios
    assert not several.loss_fn.force_on_policy_ratio
    assert policy.generation.colocated.enabled
    assert (engine.enforce_eager, engine.kv_cache_memory_bytes, engine.max_num_seqs) == (False, None, 512)
    assert policy.max_total_sequence_length == 1280  # 200 + 1024, rounded up to a multiple of 64
    assert policy.sequence_packing.train_mb_tokens is not None and policy.sequence_packing.train_mb_tokens > 8192


@pytest.mark.parametrize(("new_tokens", "fits"), [(128, True), (1024, False)])
def test_colocated_engines_cache_all_sequences_and_no_more(machine: Any, new_tokens: int, fits: bool) -> None:
    """What the cache does not take can stay on the GPU for training."""
    machine(1)
    policy = resolve(minimal(policy={"generation": {"max_new_tokens": new_tokens}})).config.policy
    engine, token = policy.generation.vllm_cfg, 2 * 28 * 8 * 128 * 2
    needed = engine.max_num_seqs * policy.max_total_sequence_length * token
    found = engine.kv_cache_memory_bytes
    assert (found is None) == (not fits) and (found is None or needed < found < 1.1 * needed)


BOTH_FIT = [(80, 128, True, True), (64, 128, True, False), (50, 128, False, False), (80, 1024, False, False)]


@pytest.mark.parametrize(("gib", "new_tokens", "together", "stay"), BOTH_FIT)
def test_engines_start_next_to_training(machine: Any, gib: int, new_tokens: int, together: bool, stay: bool) -> None:
    """Training takes 13.5 GB, 30 at its peak, and generation 31 GB with 22 GB of KV cache; that of 1,024 new tokens is not
    known. Where the peaks fit, nothing ever leaves, and training is warmed up while the engine starts."""
    machine(1, gib)
    config = resolve(minimal(policy={"generation": {"max_new_tokens": new_tokens}})).config
    start = RunPlan.of(config).start
    assert [one.after for one in start.groups] == [None, None if together else "train"]
    assert start.resident == together and start.early == stay
    assert (generation_config(config).colocated.exchange == "never") == stay
    assert (generation_config(config).vllm_cfg.kv_cache_memory_bytes is not None) == (new_tokens == 128)


def test_a_start_next_to_training_needs_a_known_cache(machine: Any) -> None:
    machine(1)
    with pytest.raises(ConfigError, match=r"start_together is true, but .*kv_cache_memory_bytes is null"):
        resolve(minimal(policy={"generation": {"colocated": {"start_together": True}}}))


@pytest.mark.parametrize(("gib", "checkpointing"), [(80, False), (24, False), (16, True)])
def test_microbatches_fit_the_memory(machine: Any, gib: int, checkpointing: bool) -> None:
    """Train state takes 13.5 GB: a 16 GiB GPU has no room left for the activations of a long sequence."""
    machine(1, gib)
    policy = resolve(minimal()).config.policy
    tokens = policy.sequence_packing.train_mb_tokens
    assert policy.megatron_cfg.activation_checkpointing == checkpointing
    assert tokens is not None and policy.max_total_sequence_length <= tokens <= 16384


LARGE = {**QWEN3_06B, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
PIPELINED = [(2, 1, 512, 128, 4), (4, 1, 512, 128, 12), (4, 2, 1024, 128, 12), (4, 1, 8, 8192, 8)]


@pytest.mark.parametrize(("pp", "dp", "sequences", "length", "count"), PIPELINED)
def test_pipelines_have_enough_microbatches(machine: Any, pp: int, dp: int, sequences: int, length: int, count: int) -> None:
    """Idle stages take (pp - 1) / (count + pp - 1): a fifth, if a shard has the sequences."""
    machine(8, 1000)
    layout = {"megatron_cfg": {"pipeline_model_parallel_size": pp, "data_parallel_size": dp}}
    for model in (LARGE, QWEN3_06B):  # launches of small kernels take longer than a bubble
        derived = derive.derive_from_machine(minimal("sft", policy={**layout, "train_global_batch_size": sequences}))
        derive.derive_from_data(derived, [range(length)] * 200, [], model, WEIGHTS)
        packing = derived.config.policy.sequence_packing
        made = len(pack([length] * (sequences // dp), packing.train_mb_tokens or 0))
        assert packing.train_mb_tokens == packing.logprob_mb_tokens
        assert made == count if model is LARGE or count < 12 else made < count
    policy = {**layout, "generation": {"max_new_tokens": 64}}
    config = resolve(minimal(policy=policy, grpo={"num_prompts_per_step": 8}), prompts=4000).config
    assert (config.policy.sequence_packing.train_mb_tokens or 0) in range(4416, 9999, 64), "all samples of a shared prompt"


RECOMPUTED = [(1, 4096, "none"), (1, 8192, "selective"), (4, 8192, "none"), (1, 45_000, "full"), (1, 100_000, "offloaded")]


@pytest.mark.parametrize(("ranks", "tokens", "recomputes"), RECOMPUTED)
def test_parts_of_a_row_take_a_part_of_its_activations(machine: Any, ranks: int, tokens: int, recomputes: str) -> None:
    """A 24 GiB GPU has room for 2,700 tokens, and for 4,900 if a quarter of the state is on it."""
    machine(ranks, 24)
    split = {"backend": "fsdp", "fsdp_cfg": {"context_parallel_size": ranks}, "max_total_sequence_length": tokens}
    policy = resolve(minimal("sft", policy=split), demonstrations=9).config.policy
    assert policy.fsdp_cfg.activation_checkpointing == recomputes


LFM2 = {"model_type": "lfm2", "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
GEMMA3 = {"model_type": "gemma3_text"}


@pytest.mark.parametrize(("model", "packs"), [(LFM2, False), ({"model_type": "mamba"}, False), (GEMMA3, True)])
def test_rows_of_a_model_with_a_state_are_not_packed(model: dict[str, Any], packs: bool, machine: Any) -> None:
    machine(1)
    for chosen in ({}, {"sequence_packing": {"enabled": True}}):
        derived = derive.derive_from_machine(minimal("sft", policy={"backend": "fsdp", **chosen}))
        derive.derive_from_data(derived, [range(9)] * 9, [], model, WEIGHTS)
        packing = derived.config.policy.sequence_packing
        assert packing.enabled is (packs or bool(chosen))  # the user's choice then is an error of the worker's check
        assert "would see each other" in derived.reasons.get("policy.sequence_packing.enabled", "") or packing.enabled


REPLICAS = [(4, 32, 16, 4), (8, 3, 5, 5), (6, 32, 8, 4), (7, 1, 8, 4), (3, 5, 5, 1), (2, 1, 2, 2)]


@pytest.mark.parametrize(("gpus", "prompts", "each", "replicas"), REPLICAS)
def test_replicas_without_a_layout_divide_a_batch(machine: Any, gpus: int, prompts: int, each: int, replicas: int) -> None:
    machine(gpus)
    policy = resolve(minimal(grpo={"num_prompts_per_step": prompts, "num_generations_per_prompt": each})).config.policy
    assert policy.generation is not None and policy.generation.colocated.enabled == (replicas > 1)
    assert (policy.megatron_cfg.layout.dp, policy.generation.vllm_cfg.layout.dp) == (replicas, replicas)
    assert policy.megatron_cfg.use_distributed_optimizer == (replicas > 1)
    chosen = {"train_global_batch_size": prompts * each}
    assert resolve(minimal("sft", policy=chosen), demonstrations=9).config.policy.megatron_cfg.layout.dp == replicas
    assert resolve(minimal("sft"), demonstrations=9).config.policy.megatron_cfg.layout.dp == gpus


def test_a_rank_of_an_engine_holds_at_least_one_kv_head(machine: Any) -> None:
    machine(16)
    sizes = {}
    for ranks in (1, 2, 8, 16):  # of a model with 8 KV heads
        generation = {"vllm_cfg": {"tensor_parallel_size": ranks, "max_num_seqs": 64}, "colocated": {"enabled": True}}
        policy = {"generation": generation, "megatron_cfg": {"data_parallel_size": ranks}}
        sizes[ranks] = generation_config(resolve(minimal(policy=policy)).config).vllm_cfg.kv_cache_memory_bytes
    head = 64 * (1280 + 16) * 2 * 28 * 128 * 2  # keys and values of 28 layers in bfloat16, with a spare block a sequence
    assert sizes == {ranks: max(1 << 30, head * max(1, 8 // ranks)) for ranks in sizes}


@pytest.mark.parametrize(
    "chosen",
    [
        {"policy": {"megatron_cfg": {"tensor_model_parallel_size": 2}}},
        {"policy": {"generation": {"colocated": {"enabled": False}}}},
        {"grpo": {"async_grpo": {"enabled": True}}},
    ],
)
def test_a_chosen_layout_is_kept(machine: Any, chosen: dict[str, Any]) -> None:
    machine(2)
    policy = resolve(minimal(**chosen)).config.policy
    assert policy.generation is not None and not policy.generation.colocated.enabled
    assert policy.megatron_cfg.data_parallel_size == 1
    assert policy.generation.vllm_cfg.gpu_memory_utilization == 0.85


def test_without_gpus(machine: Any) -> None:
    machine(0)
    derived = resolve(minimal())
    policy = derived.config.policy
    engine = policy.generation.vllm_cfg
    assert (policy.precision, policy.sequence_packing.enabled, engine.enforce_eager) == ("float32", False, True)
    token = 2 * 28 * 8 * 128 * 4
    assert engine.kv_cache_memory_bytes is not None and engine.kv_cache_memory_bytes > 1280 * token


@pytest.mark.parametrize("name", ["grpo_quickstart", "sft_quickstart"])
@pytest.mark.parametrize("gpus", [0, 1, 2])
def test_quickstarts_derive_only_backends_and_deadlines(machine: Any, name: str, gpus: int) -> None:
    """On a GPU only deadlines differ."""
    machine(gpus)
    derived = derive.derive_from_machine(load_config(ROOT / "examples" / f"{name}.yaml"))
    assert {key for key in derived.reasons if not key.startswith("timeouts.")} == {"policy.backend", "policy.worker"}


def test_a_resolved_configuration_derives_nothing_more(machine: Any, tmp_path: Path) -> None:
    machine(1)
    derived = resolve(minimal())
    text = dump_config(derived.config, derived.reasons)
    assert "  # derived: GPUs\n  precision: bfloat16\n" in text
    (tmp_path / "config.yaml").write_text(text)
    again = load_config(tmp_path / "config.yaml")
    assert again == derived.config and derive.derive_from_machine(again).reasons == {}


def test_the_reference_says_which_keys_are_derived(machine: Any) -> None:
    marked = {key for key, field in all_keys() if isinstance(field.json_schema_extra, dict)}
    fsdp, found = {"backend": "fsdp"}, set[str]()
    learning = [minimal(sft={"max_num_epochs": 1}), minimal("sft"), minimal("sft", policy=fsdp)]
    learning += [minimal(algorithm) for algorithm in ("dpo", "reward_model")]
    sampling = [minimal(), minimal(policy=ADAPTERS), minimal(grpo={"async_grpo": {"enabled": True}})]
    sampling += [minimal(policy=fsdp, models={"teacher": {"model_name": "m"}})]
    for gpus in (0, 1, 2):
        machine(gpus, 10)
        found.update(*(resolve(config, demonstrations=9).reasons for config in learning))
        found.update(*(resolve(config).reasons for config in sampling))
        found |= set(derive.derive_from_machine(minimal("ppo")).reasons)
    machine(1)
    found |= set(resolve(minimal(policy={"generation": {"max_new_tokens": 128}})).reasons)
    derive.derive_date(dated := derive.Derived(minimal()), None)
    derive.derive_images(dated, "row 1")
    found |= set(dated.reasons)
    assert {key for key in found if not key.startswith("models.")} == marked, "a key of a mapping is of no section"


def ended_by(template: str, characters: str = "0123456789ue<|>\n") -> PreTrainedTokenizerFast:
    tokenizer = character_tokenizer(characters, "{% for m in messages %}u{{ m.content }}" + template + "{% endfor %}")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    return tokenizer


def test_stops_are_what_turns_end_with_and_each_says_why(caplog: pytest.LogCaptureFixture) -> None:
    """A base model with ChatML: the template ends turns with another token than the tokenizer's `eos_token`."""
    key, tokenizer = "policy.generation.stop_token_ids", ended_by("<|im_end|>\n")
    end, eos = tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.eos_token_id
    derived = derive.Derived(minimal(policy={"generation": {"stop_token_ids": [7]}}))
    derive.derive_stops(derived, chat_of(tokenizer), {"config.json": [eos]}, shown=True)
    assert generation_config(derived.config).stop_token_ids == (7, eos, end)
    assert f"{end} '<|im_end|>': ends turns of the chat template" in derived.reasons[key]
    assert f"{eos} '<eos>': config.json" in derived.reasons[key] and "7 '3': configured" in derived.reasons[key]
    derive.derive_stops(derived, chat_of(tokenizer), {"config.json": [eos]}, shown=True)
    assert generation_config(derived.config).stop_token_ids == (7, eos, end), "a resumed run has the same"
    plain = derive.Derived(minimal(policy={"generation": {}}))
    derive.derive_stops(plain, chat_of(tokenizer), {"config.json": [eos]}, shown=False)
    assert generation_config(plain.config).stop_token_ids == (eos,)
    assert not caplog.messages


def test_an_end_of_turns_that_is_no_token_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    several = chat_of(ended_by("<|e|>\n"))
    with pytest.raises(ConfigError, match=r"ends assistant turns with '<\|e\|>', which is not a token .*stop_strings"):
        derive.derive_stops(derive.Derived(minimal(policy={"generation": {}})), several, {}, shown=True)
    for part in ("<|e", "|>"):
        half = derive.Derived(minimal(policy={"generation": {"stop_strings": [part, "<|e|>"]}}))
        with pytest.raises(ConfigError, match=rf"stop_strings has '{re.escape(part)}', a part of it"):
            derive.derive_stops(half, several, {}, shown=True)
    told = derive.Derived(minimal(policy={"generation": {"stop_strings": ["<|e|>", "\n\n"]}}))
    derive.derive_stops(told, several, {}, shown=True)
    derive.derive_stops(told, chat_of(ended_by("")), {"config.json": [2]}, shown=True)
    assert "writes no end after an assistant turn" in caplog.text and "generation ends only with '<eos>'" in caplog.text


@pytest.mark.parametrize(("string", "fits"), [("<|im_end|>", True), ("<unk>", False), ("1<|im_end|>", False), ("1|>", True)])
def test_a_stop_string_has_no_special_token(string: str, fits: bool) -> None:
    """They are left out of the text in which vLLM looks for it; one that stops anyway is no mistake."""
    derived = derive.Derived(minimal(policy={"generation": {"stop_strings": [string]}}))
    with nullcontext() if fits else pytest.raises(ConfigError, match=r"is a special token, .*stop_token_ids"):
        derive.derive_stops(derived, chat_of(ended_by("<|im_end|>\n")), {}, shown=True)


def test_each_difference_from_nemo_rl_has_a_reason() -> None:
    fields = dict(all_keys())
    for row in yaml.safe_load((ROOT / "docs" / "nemo_rl.yaml").read_text()):
        field = fields[row["key"]]
        default = field.get_default(call_default_factory=True)
        same = field.json_schema_extra is None and (list(default) if isinstance(default, tuple) else default) == row["nemo"]
        assert same != bool(row.get("why")), row


@pytest.mark.parametrize("algorithm", ["grpo", "reward_model"])
@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text"])
def test_the_backend_is_the_one_that_has_the_model(algorithm: str, model_type: str, machine: Any, tmp_path: Path) -> None:
    """On two GPUs, whose layout is that of the backend."""
    machine(2)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    derived = derive.derive_from_machine(minimal(algorithm, policy={"model_name": str(tmp_path)}))
    policy, fsdp, kind = derived.config.policy, model_type != "qwen3", "Value" * (algorithm == "reward_model")
    assert policy.worker == "dagrl.workers." + (f"fsdp:Fsdp{kind}Worker" if fsdp else f"megatron:Megatron{kind}Worker")
    assert policy.backend == ("fsdp" if fsdp else "megatron")
    assert model_type in derived.reasons["policy.backend"]
    assert (policy.fsdp_cfg.data_parallel_size, policy.megatron_cfg.data_parallel_size) == ((2, 1) if fsdp else (1, 2))
    assert RunPlan.of(derived.config).layouts["train"].dp == 2


def test_each_role_has_the_backend_of_its_model(machine: Any, tmp_path: Path) -> None:
    machine(0)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3_text"}))
    random = {"model_name": None, "random_init": {"hf_config": {"model_type": "qwen3"}, "tokenizer_characters": "01"}}
    critic = {"model_name": str(tmp_path), "fsdp_cfg": {"data_parallel_size": 2}}
    config = derive.derive_from_machine(minimal("ppo", policy=random, critic=critic)).config
    assert (config.policy.backend, config.critic.backend) == ("megatron", "fsdp")
    assert config.critic.worker == "dagrl.workers.fsdp:FsdpValueWorker"
    assert RunPlan.of(config).layouts["critic"].dp == 2


class Inheriting(FsdpWorker):
    """A user's own."""


def test_a_worker_is_of_its_backend_alone(machine: Any) -> None:
    def derived(**policy: str) -> Config:
        return derive.derive_from_machine(minimal(policy=policy)).config

    machine(0)
    own, named = derived(backend="fsdp", worker=f"{__name__}:Inheriting"), derived(worker="dagrl.workers.fsdp:FsdpWorker")
    assert own.policy.backend == named.policy.backend == "fsdp" and derived(worker="a:B").policy.worker == "a:B"
    with pytest.raises(ConfigError, match=r"inherits from FSDP workers, but policy\.backend is auto; set it to fsdp"):
        Inheriting.check(derived(worker=f"{__name__}:Inheriting"), {"model_type": "gemma3_text"})
    with pytest.raises(ConfigError, match=r"policy\.backend and policy\.worker are both set"):
        derived(backend="fsdp", worker="dagrl.examples.hf_worker:HfWorker")
