"""FSDP workers without other ranks: logits, experts, copies in half precision, and what is checked before a run."""

import copy
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from dagrl.config import Config, FsdpConfig, Json, PeftConfig
from dagrl.errors import CheckpointError, ConfigError, UserError
from dagrl.examples.hf_worker import HfWorker
from dagrl.workers.fsdp import FsdpWorker, copies
from dagrl.workers.fsdp.context import _of_heads
from dagrl.workers.fsdp.copies import ComputeCopies
from dagrl.workers.fsdp.experts import GROUPED_PERMUTED, use_permutations
from dagrl.workers.fsdp.lora import Adapters, add_adapters, whole_factors
from dagrl.workers.fsdp.model import HiddenStates, prepare_layer
from dagrl.workers.fsdp.output import LogitTransform
from dagrl.workers.fsdp.sent import SentWeights
from dagrl.workers.fsdp.separation import check_separation, unseparated
from dagrl.workers.fsdp.trainer import make_optimizer
from dagrl.workers.train.adapters import check_adapters, write_adapters
from dagrl.workers.train.logprobs import OutputLayer, VocabularyShard, token_logprobs
from tests.integration.megatron_reference import SIZES

HEADS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "gemma2": {"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 32},
    "granite": {"logits_scaling": 3.0},
    "cohere2": {"logit_scale": 0.25},
    "minicpm3": {"dim_model_base": 16, "num_key_value_heads": 4},
    "phi": {"head_dim": 16},
}


def tiny(kind: str, **keys: Any) -> Any:
    """Returns the same model at each call."""
    torch.manual_seed(3)
    config = AutoConfig.for_model(
        kind, **{**SIZES, "num_hidden_layers": 2, "pad_token_id": 0, **HEADS.get(kind, {}), **keys}
    )
    return AutoModelForCausalLM.from_config(config).float()


@pytest.mark.parametrize("kind", HEADS)
def test_logprobs_and_gradients_are_those_of_the_models_own_logits(kind: str) -> None:
    model = tiny(kind)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)  # beyond the linear part of a soft cap
    transform, head = LogitTransform(model), model.get_output_embeddings()
    tokens, labels = torch.randint(0, 200, (2, 9)), torch.randint(0, 200, (2, 9))
    hidden = model.base_model(input_ids=tokens).last_hidden_state.detach().requires_grad_()
    layer = OutputLayer(
        head.weight,
        VocabularyShard(0, 200),
        temperature=0.7 / transform.scale,
        chunk_tokens=5,
        transform=transform.after if transform.shapes else None,
    )
    inputs = transform.before(hidden.flatten(0, 1))
    bias = getattr(head, "bias", None)
    if bias is None:
        found = token_logprobs(inputs, labels.flatten(), layer)[0].view(labels.shape)
    else:  # the trainer joins it to the weight
        found = ((inputs @ head.weight.T + bias) / 0.7).log_softmax(-1).gather(-1, labels.view(-1, 1)).view(labels.shape)
    gradients = torch.autograd.grad(found.sum(), [hidden, head.weight])
    logits = model(input_ids=tokens).logits
    expected = (logits / 0.7).log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    (wanted,) = torch.autograd.grad(expected.sum(), [head.weight], retain_graph=True)
    if not model.config.tie_word_embeddings:  # a tied weight has the embedding's gradient too
        torch.testing.assert_close(gradients[1], wanted, atol=1e-5, rtol=1e-4)
    assert gradients[0].abs().sum() > 0
    kept = (*vars(transform._base).values(), *vars(transform._head).values())
    assert not any(one.numel() for one in kept if isinstance(one, torch.Tensor))  # which would stay in a GPU's memory
    assert (transform.shapes, transform.scale == 1.0) == (kind == "gemma2", kind not in ("granite", "cohere2"))


def config_of(policy: dict[str, Any]) -> Config:
    content = {"name": "test", "algorithm": "sft", "data": {}, "policy": {"backend": "fsdp", **policy}}
    return Config.model_validate(content)


QWEN3: dict[str, Json] = {"model_type": "qwen3", **SIZES}
LFM2: dict[str, Json] = {**QWEN3, "model_type": "lfm2", "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
TP2, TP3, CP2, CP3 = ({"fsdp_cfg": {f"{kind}_parallel_size": size}} for kind in ("tensor", "context") for size in (2, 3))
PACKED = {"sequence_packing": {"enabled": True}}
SGD = {"optimizer": {"name": "torch.optim:SGD", "args": {"momentum": "lots"}}}
ADAFACTOR = {"optimizer": {"name": "torch.optim:Adafactor"}}
RPROP = {"optimizer": {"name": "torch.optim:Rprop"}}
OWN = {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "modeling.Own"}}
IMAGES = {"model_type": "qwen2_5_vl", "text_config": {**SIZES, "model_type": "qwen2_5_vl_text"}}
WINDOWS = {**QWEN3, "model_type": "mimo_v2_flash", "swa_num_attention_heads": 4, "swa_num_key_value_heads": 1}
BLOOM = {"model_type": "bloom", "n_layer": 1, "n_head": 2, "hidden_size": 64, "vocab_size": 200}
GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 64, "vocab_size": 200}
OLMO2 = {"model_type": "olmo2", **SIZES}
BERT = {"model_type": "bert", "architectures": ["BertForMaskedLM"], **SIZES}
GPT_OSS = {"model_type": "gpt_oss", **SIZES, "num_local_experts": 4}
HEADS_OF_ROWS = "context_parallel_size is 3, over which 4 attention heads with 2 key/value heads .* cannot be split"
NO_FLASH = "attn_implementation is flash_attention_3, which Qwen3ForCausalLM cannot use here: ImportError.* Choose another"
NO_EXPERTS = "expert_parallel_size is 2, but Qwen3ForCausalLM has no expert-parallel plan in transformers; set it to 1"
NO_TOWER = "freeze_vision_tower is true, but Qwen3ForCausalLM has no vision tower; set it to false"
OF_MEGATRON = "policy.megatron_cfg has tensor_model_parallel_size, which policy.backend fsdp does not read"
REPLICAS = "data_parallel_replicas is 3, which does not divide data_parallel_size 2"
BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"model_type": "bert2"}, "transformers does not know model_type 'bert2'"),
    ({}, OWN, r"its code in its directory; if you trust it, set policy\.fsdp_cfg\.trust_remote_code=true"),
    ({}, {"model_type": "vit"}, "no class of 'vit' with a causal language model's head"),
    (TP3, QWEN3, "num_attention_heads = 4, which .* 3 does not divide"),
    (TP3, IMAGES, "num_attention_heads = 4, which .* 3 does not divide"),
    (TP2, WINDOWS, "swa_num_key_value_heads = 1, which .* 2 does not divide"),
    (CP3, QWEN3, HEADS_OF_ROWS),
    (CP2, LFM2, "layers of type conv, which need whole rows; set"),
    (CP2, BLOOM, "BloomForCausalLM computes attention itself"),
    (TP2 | {"peft": {"enabled": True}}, OLMO2, r"for .*q_proj too, .* to other layers, such as \[down_proj, gate_proj, up_"),
    ({}, BERT, "is an encoder, .* is_decoder = false, for BertLMHeadModel; expected a causal language model"),
    (TP2, GPT2, "GPT2LMHeadModel has no tensor-parallel plan"),
    ({"fsdp_cfg": {"data_parallel_size": 2, "expert_parallel_size": 2}}, QWEN3, NO_EXPERTS),
    ({"fsdp_cfg": {"attn_implementation": "flash_attention_3"}}, QWEN3, NO_FLASH),
    ({"optimizer": {"name": "torchbo.optim:AdamW8bit"}}, QWEN3, "policy.optimizer.name: there is no module 'torchbo'"),
    ({"optimizer": {"args": {"beta": 1}}}, QWEN3, r"args=.*'beta': 1}: TypeError.* or other args \(.*betas"),
    ({"optimizer": {"args": {"lr": 1e-3}}}, QWEN3, "args has lr, which policy.optimizer.lr would overwrite; set that"),
    ({"optimizer": {"name": "torch.nn:Linear"}}, QWEN3, "torch.nn:Linear, which is not an optimizer; expected: a class"),
    (SGD | {"fsdp_cfg": {"data_parallel_size": 2}}, QWEN3, "torch.optim:SGD, .*args={'momentum': 'lots'}: TypeError"),
    ({"optimizer": {"name": "torch.optim:LBFGS"}}, QWEN3, "torch.optim:LBFGS, whose steps need a closure.*; choose one"),
    (
        ADAFACTOR | {"fsdp_cfg": {"data_parallel_size": 2}},
        QWEN3,
        "torch.optim:Adafactor, .* of this layout .*: RuntimeError",
    ),
    (RPROP | TP2, QWEN3, "torch.optim:Rprop, which cannot update the weights of this layout .*: RuntimeError"),
    ({"fsdp_cfg": {"freeze_vision_tower": True}}, QWEN3, NO_TOWER),
    (PACKED, LFM2, "see each other in the model, which has layers of type conv"),
    (PACKED, GPT_OSS, r"which has masks that are not made from positions \(attn_implementation eager\); set it to false"),
    ({"megatron_cfg": {"tensor_model_parallel_size": 2}}, QWEN3, OF_MEGATRON),
    ({"fsdp_cfg": {"data_parallel_size": 2, "data_parallel_replicas": 3}}, QWEN3, REPLICAS),
]


OPTIMIZERS = "AdamW Adam SGD Adadelta Adafactor Adagrad Adamax ASGD Muon NAdam RAdam RMSprop Rprop".split()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_begin_as_torchs_do(name: str) -> None:
    kind = getattr(torch.optim, name)
    config = config_of({"optimizer": {"name": f"torch.optim:{name}", "lr": 0.01, "weight_decay": 0.1}})
    FsdpWorker.check(config, QWEN3)
    weight, plain = (torch.randn(4, 4, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    optimizer = make_optimizer(kind, [weight], config.policy.optimizer, {})
    own = kind([plain], lr=0.01, **({} if name == "Rprop" else {"weight_decay": 0.1}))
    for step in range(4):
        weight.grad = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
        plain.grad = weight.grad.clone()
        optimizer.param_groups[0]["lr"] = 0.01
        for one in (optimizer, own):
            one.step()
        torch.testing.assert_close(weight, plain)


class Lion(torch.optim.SGD):
    """Refuses a rate of 0, as Lion of `lion-pytorch` does."""

    def __init__(self, params: Any, lr: float = 1e-4, **args: Any) -> None:
        assert lr > 0
        super().__init__(params, lr=lr, **args)


@pytest.mark.parametrize("optimizer", [{"name": f"{__name__}:Lion"}, {"args": {"foreach": True}}])
def test_optimizers_need_no_rate_of_0_nor_fused_steps(optimizer: dict[str, Any]) -> None:
    config = config_of({"optimizer": {**optimizer, "lr": 0.01, "weight_decay": 0.1}})
    FsdpWorker.check(config, QWEN3)
    weight = torch.ones(2, 2)
    kind = Lion if "name" in optimizer else torch.optim.AdamW
    made = make_optimizer(kind, [weight], config.policy.optimizer, config.policy.optimizer.args)
    assert weight.equal(torch.ones(2, 2)) and made.param_groups[0]["lr"] == 0 and made.param_groups[0]["weight_decay"] == 0.1


def test_the_worker_of_the_examples_decays_what_the_backends_do() -> None:
    config = config_of({"optimizer": {"lr": 0.01, "weight_decay": 0.1}})
    worker = HfWorker(Mock(), config)
    worker.model = model = nn.Sequential(nn.Linear(2, 2), nn.RMSNorm(2))
    worker.reset_optimizer()
    optimizers = worker.optimizer, make_optimizer(torch.optim.AdamW, [*model.parameters()], config.policy.optimizer, {})
    decays = [{one: group["weight_decay"] for group in made.param_groups for one in group["params"]} for made in optimizers]
    assert decays[0] == decays[1] and sorted(decays[0].values()) == [0, 0, 0.1]


def test_exchanges_are_not_compiled_on_gpus() -> None:
    config = config_of({"fsdp_cfg": {"context_parallel_size": 2, "torch_compile": True}})
    FsdpWorker.check(config.with_keys({"cluster.gpus_per_worker": 0.0}), QWEN3)
    expected = "torch_compile is true and context_parallel_size is 2, but gradients .* wrong on GPUs; set torch_compile to"
    with pytest.raises(UserError, match=expected):
        FsdpWorker.check(config.with_keys({"cluster.gpus_per_worker": 1.0}), QWEN3)


@pytest.mark.parametrize(("policy", "hf_config", "message"), BAD)
def test_bad_input_is_one_error_before_the_start(policy: dict[str, Any], hf_config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        FsdpWorker.check(config_of(policy), hf_config)


@pytest.mark.parametrize(
    ("kind", "attention", "reason"),
    [
        ("gemma2", "sdpa", ""),
        ("gemma2", "eager", ""),
        ("bloom", "eager", "masks that are not made from positions"),
        ("opt", "sdpa", "masks that are not made from positions"),
        ("afmoe", "sdpa", "masks that are not made from positions"),
        ("afmoe", "torch_varlen", ""),  # takes no masks
        ("nemotron", "sdpa", ""),
        ("nemotron", "torch_varlen", "attention that is not handed cu_seq_lens_q"),
    ],
)
def test_code_tells_as_outputs_do_whether_packed_sequences_see_each_other(kind: str, attention: str, reason: str) -> None:
    model = tiny(kind).eval()
    assert unseparated(type(model), model.config, attention, images=False).partition(" (")[0] == reason
    if attention != "torch_varlen":  # whose kernel CPUs lack
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)  # so that attention is seen
        model.set_attn_implementation(attention)
        root = HiddenStates(model)
        with nullcontext() if not reason else pytest.raises(ConfigError, match="see each other"):
            check_separation(root, torch.device("cpu"))


def test_an_old_transformers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagrl.workers.fsdp.checks.version", lambda name: "5.17.0")
    with pytest.raises(UserError, match=r"need transformers 5.19 or newer; found 5.17.0; upgrade it"):
        FsdpWorker.check(config_of({}), {"model_type": "gemma3_text"})


def test_adapters_without_peft_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny("qwen3").save_pretrained(tmp_path)
    monkeypatch.setattr("dagrl.workers.fsdp.checks.find_spec", lambda name: None)
    config = config_of({"model_name": str(tmp_path), "peft": {"enabled": True}})
    with pytest.raises(UserError, match=r"peft.enabled is true, but PEFT is not installed; install dagrl\[peft\]"):
        FsdpWorker.check(config, json.loads((tmp_path / "config.json").read_text()))


def test_files_that_do_not_fit_the_configuration_are_refused(tmp_path: Path) -> None:
    config = config_of({"model_name": str(tmp_path)})
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"cannot read the weights in .*; expected model\.safetensors, or"):
        FsdpWorker.check(config, QWEN3)
    save_file({"model.norm.weight": torch.ones(32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' has shape \[32\], expected \[64\]"):
        FsdpWorker.check(config, QWEN3)


@pytest.mark.parametrize(
    ("kind", "lost", "found"),
    [
        ("qwen3", "model.layers.1.mlp.up_proj.weight", "lacks 'model.layers.1.mlp.up_proj.weight', wholly"),
        ("qwen3", ("model.norm.weight", "lm_head.weight"), "lacks 'lm_head.weight' and 1 other parameters"),
        ("gemma2", (), None),  # with a tied head
        ("gemma2", "model.embed_tokens.weight", "lacks 'lm_head.weight' and 1 other parameters"),
        ("gpt_neox", (), None),  # which has is_decoder = false
        ("mixtral", (), None),  # joins the experts' matrices under other names
        ("mixtral", "model.layers.0.block_sparse_moe.experts.3.w1.weight", "'model.layers.0.mlp.experts.gate_up_proj'"),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.2.w2.weight", "shape .7, 64, 128., .* or experts are missing"),
    ],
)
def test_a_checkpoint_has_all_parameters_under_names_that_transformers_reads(
    kind: str, lost: str | tuple[str, ...], found: str | None, tmp_path: Path
) -> None:
    tiny(kind).save_pretrained(tmp_path)
    hf_config, weights = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    for name in [lost] if isinstance(lost, str) else lost:
        del weights[name]
    save_file(weights, tmp_path / "model.safetensors")
    config = config_of({"model_name": str(tmp_path)})
    with nullcontext() if found is None else pytest.raises(CheckpointError, match=found):
        FsdpWorker.check(config, hf_config)
    with nullcontext() if found is None else pytest.raises(CheckpointError, match=r"is quantized \(gptq\); .* dequantize"):
        FsdpWorker.check(config, {**hf_config, "quantization_config": {"quant_method": "gptq"}})


@pytest.mark.parametrize("layout", [{"data_parallel_size": 4, "data_parallel_replicas": 2}, {"tensor_parallel_size": 2}])
def test_a_checkpoint_is_checked_in_every_layout(layout: dict[str, int], tmp_path: Path, caplog: Any) -> None:
    tiny("qwen3").save_pretrained(tmp_path)
    hf_config = json.loads((tmp_path / "config.json").read_text())
    config = config_of({"model_name": str(tmp_path), "fsdp_cfg": layout})
    with caplog.at_level("WARNING", "dagrl"):
        FsdpWorker.check(config, hf_config)
        assert not caplog.text
        FsdpWorker.check(config, {**hf_config, "num_hidden_layers": 1, "layer_types": ["full_attention"]})
    assert "has 11 parameters that the model of its config.json does not have, such as 'model.layers.1." in caplog.text


@pytest.mark.parametrize("size", ["data_parallel_size", "context_parallel_size"])
def test_a_rank_is_described_without_the_others(size: str) -> None:
    """Both shards of a tied model with an odd number of rows cover each parameter once."""
    config = config_of({"fsdp_cfg": {size: 2}})
    hf_config: dict[str, Json] = {**QWEN3, "tie_word_embeddings": True, "vocab_size": 199}
    ranks = [FsdpWorker.describe(config, hf_config, config.policy.train_layout, rank) for rank in range(2)]
    rows = [one.box[0] for rank in ranks for one in rank if one.name == "model.embed_tokens.weight"]
    assert rows == [(0, 100), (100, 199)]
    assert not any(one.name == "lm_head.weight" for rank in ranks for one in rank)


def test_models_are_equal_if_transformers_completes_them_to_the_same() -> None:
    backend, short = FsdpWorker.backend_class, {key: QWEN3[key] for key in QWEN3 if key != "rms_norm_eps"}
    assert backend.computed({**short, "eos_token_id": 3}) == backend.computed({**short, "rms_norm_eps": 1e-6})
    assert backend.computed(short) != backend.computed({**short, "rms_norm_eps": 1e-5})


CONFIGURATION = "from transformers import Qwen3Config\nclass OwnConfig(Qwen3Config):\n    model_type = 'own'\n"
MODEL = """
from transformers import Qwen3ForCausalLM
from .configuration_own import OwnConfig
class OwnForCausalLM(Qwen3ForCausalLM):
    config_class = OwnConfig
"""


def test_the_code_of_a_models_directory_runs_if_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.path", [*sys.path])
    tiny("qwen3").save_pretrained(tmp_path)
    (tmp_path / "configuration_own.py").write_text(CONFIGURATION)
    (tmp_path / "modeling_own.py").write_text(MODEL)
    hf_config = json.loads((tmp_path / "config.json").read_text())
    code = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    hf_config |= {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": code}
    (tmp_path / "config.json").write_text(json.dumps(hf_config))
    trusted = config_of({"model_name": str(tmp_path), "fsdp_cfg": {"trust_remote_code": True}})
    FsdpWorker.check(trusted, hf_config)
    with pytest.raises(UserError, match="if you trust it"):
        FsdpWorker.check(config_of({"model_name": str(tmp_path)}), hf_config)
    computed = FsdpWorker.backend_class.computed
    assert computed(hf_config) == computed(dict(hf_config)) != computed(hf_config | {"num_hidden_layers": 3})
    (tmp_path / "configuration_own.py").unlink()
    with pytest.raises(ConfigError, match=r"cannot read the code of .*configuration_own.py.* Copy its Python files there"):
        FsdpWorker.check(trusted, hf_config)


class Operators(TorchDispatchMode):
    """Records the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kind", "attentions"), [("none", 2), ("full", 4), ("selective", 2), ("offloaded", 4)])
def test_recomputation_changes_no_gradient(kind: Any, attentions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "LEAST_BYTES", 1)
    plain, model, before = tiny("qwen3"), tiny("qwen3"), None
    for layer in model.model.layers:
        before = prepare_layer(layer, FsdpConfig(activation_checkpointing=kind), before, compiles=False)
    tokens = torch.randint(0, 200, (2, 9))
    with Operators() as operators:
        model(input_ids=tokens, use_cache=False).logits.square().mean().backward()
    plain(input_ids=tokens, use_cache=False).logits.square().mean().backward()
    assert operators.names.count("_scaled_dot_product_flash_attention_for_cpu") == attentions
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)


class Tied(nn.Module):
    """An embedding that is the head, too, a frozen layer, and a weight in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.inner, self.frozen = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
        self.narrow = nn.Linear(8, 8, bias=False).bfloat16()
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.head(self.narrow(self.frozen(self.inner(self.embedding(tokens)))))
        return hidden


@pytest.mark.parametrize("microbatches", [1, 3])
def test_passes_are_those_of_half_precision_and_gradients_add_up_in_float32(microbatches: int) -> None:
    """Copies have the latest values, and memory only while they are gathered."""
    torch.manual_seed(0)
    model = Tied()
    copies = ComputeCopies(model, torch.bfloat16)
    with torch.no_grad():
        model.inner.weight.mul_(2)
    plain = copy.deepcopy(model).bfloat16()
    before = {name: (id(one), one.dtype) for name, one in model.named_parameters()}
    sums: dict[str, torch.Tensor] = {}
    for part in torch.randint(11, (microbatches, 2, 5)):
        copies.gather()
        assert model.head.weight is model.embedding.weight
        gathered, output = model.inner.weight, model(part)
        torch.testing.assert_close(output, plain(part), atol=0, rtol=0)
        (output.float() ** 2).sum().backward()
        plain.zero_grad()
        (plain(part).float() ** 2).sum().backward()
        for name, one in plain.named_parameters():
            if one.grad is not None:
                sums[name] = sums.get(name, torch.zeros(())) + one.grad.float()
    copies.free()
    assert gathered.untyped_storage().nbytes() == 0
    assert before == {name: (id(one), one.dtype) for name, one in model.named_parameters()}
    for name, one in model.named_parameters():
        if name == "narrow.weight":  # has no copy, and adds up as it is
            continue
        assert (one.grad is None) == name.startswith("frozen")
        if one.grad is not None:
            torch.testing.assert_close(one.grad, sums[name], atol=0, rtol=0)


KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 3},  # transposed weights, biases
    "nemotron_h": {  # without a gate
        **{"layers_block_type": ["attention", "moe"], "n_routed_experts": 4, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "moe_latent_size": None},
    },
}


def experts_of(kind: str, dtype: torch.dtype) -> Any:
    experts = next(part for part in tiny(kind, **KINDS[kind]).to(dtype).modules() if hasattr(part, "_is_expert_parallel"))
    generator = torch.Generator().manual_seed(1)
    for weight in experts.parameters():
        weight.data.copy_(torch.randn(weight.shape, generator=generator) / 4)
    return experts


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_a_loop_over_experts(kind: str) -> None:
    experts = experts_of(kind, torch.float32)
    loop = copy.deepcopy(experts)
    loop.config._experts_implementation_internal = "eager"
    use_permutations(experts)
    assert experts.config._experts_implementation == GROUPED_PERMUTED
    hidden, count = torch.randn(9, 64), experts.num_experts
    found, expected = [], []
    for module, results in ((experts, found), (loop, expected)):
        inputs = hidden.clone().requires_grad_()
        scores = torch.linspace(-1, 1, 9 * count).view(9, count).sin().requires_grad_()
        weights, chosen = scores.softmax(-1).topk(KINDS[kind]["num_experts_per_tok"])
        output = module(inputs, chosen, weights)
        gradients = torch.autograd.grad((output**2).sum(), [inputs, scores, *module.parameters()])
        results += [output, *gradients]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_half_precision_takes_grouped_products_and_adds_up_no_rows() -> None:
    experts = experts_of("qwen3_moe", torch.bfloat16)
    use_permutations(experts)
    hidden = torch.randn(9, 64, dtype=torch.bfloat16, requires_grad=True)
    with Operators() as operators:
        output = experts(hidden, torch.randint(5, (9, 2)), torch.rand(9, 2, dtype=torch.bfloat16))
        torch.autograd.backward(output, torch.ones_like(output))
    assert operators.names.count("_grouped_mm") == 6  # two, and two more for each one's gradients
    assert not [name for name in operators.names if name in ("mm", "bmm") or "index_put" in name]


def test_only_numbers_of_heads_are_split_over_context_parallel_ranks() -> None:
    """Three sequences of a packed row have as many offsets as the model has heads."""
    sinks, offsets = torch.arange(4.0), torch.tensor([0, 5, 9, 12], dtype=torch.int32)
    assert _of_heads(sinks, 4, slice(2, 4)).tolist() == [2, 3]
    assert _of_heads(offsets, 4, slice(2, 4)) is offsets


# Adapters are those of peft, also of experts; those of another model are refused before the start.

Q, UP = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"
SHAPES = {"model.embed_tokens.weight": (32, 8), Q: (16, 8), UP: (24, 8), "model.norm.weight": (8,)}


def write(directory: Path, shapes: dict[str, tuple[int, int]], **settings: Any) -> None:
    (directory / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8, **settings}))
    tensors = {f"base_model.model.{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    save_arrays(tensors, directory / "adapter_model.safetensors")


def settings(directory: Path) -> PeftConfig:
    return PeftConfig(enabled=True, dim=4, alpha=8, target_modules=("q_proj",), adapter_path=str(directory))


PAIR = {"model.layers.0.self_attn.q_proj.lora_A": (4, 8), "model.layers.0.self_attn.q_proj.lora_B": (16, 4)}


@pytest.mark.parametrize(
    ("shapes", "more", "message"),
    [
        ({**PAIR, "model.layers.0.self_attn.q_proj.lora_B": (32, 4)}, {}, r"shape \(32, 4\), expected \(16, 4\)"),
        ({**PAIR, "model.layers.1.self_attn.q_proj.lora_A": (4, 8)}, {}, r"shape \(4, 8\), expected none"),
        (dict(list(PAIR.items())[:1]), {}, r"lora_B.weight' has shape none, expected \(16, 4\)"),
        (PAIR, {"r": 16}, r"has r 16, but .*peft.dim is 4; set .*peft.dim=16"),
        (PAIR, {"use_rslora": True}, "use_rslora, which dagrl does not train"),
        (PAIR, {"use_dora": True}, "use_dora, which dagrl does not train"),
        (PAIR, {"rank_pattern": {"q_proj": 2}}, "rank_pattern, which dagrl does not train"),
        (PAIR, {}, ""),
    ],
    ids=["shape", "layer", "incomplete", "rank", "rslora", "dora", "ranks", "fitting"],
)
def test_others_are_refused(shapes: dict[str, tuple[int, int]], more: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path, shapes, **more)
    with pytest.raises(CheckpointError, match=message) if message else nullcontext():
        check_adapters(settings(tmp_path), SHAPES)


ROPE = {"rope_type": "default", "rope_theta": 1e4}
MODELS: dict[str, dict[str, Any]] = {  # GPT-OSS has its weights transposed, and biases
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, "mlp_only_layers": [1], "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "intermediate_size": 32, "rope_parameters": ROPE, "num_experts_per_tok": 2},
}
EXPERTS = "experts.gate_up_proj", "experts.down_proj"


def base_of(kind: str) -> Any:
    return tiny(kind, **MODELS[kind]).eval()


def adapted(kind: str, settings: PeftConfig) -> tuple[Any, Any]:
    pytest.importorskip("peft")
    model = base_of(kind)
    use_permutations(model)
    add_adapters(model, settings)
    adapters = Adapters(model, settings)
    adapters.fill(5)
    return model, adapters


@pytest.mark.parametrize("targets", [EXPERTS, EXPERTS[1:]], ids=len)
@pytest.mark.parametrize("kind", MODELS)
def test_adapters_of_experts_are_those_of_peft(kind: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    """Files both ways, logits, gradients, merged weights, and the base model."""
    peft = pytest.importorskip("peft")
    wanted = peft.LoraConfig(r=4, lora_alpha=6.0, target_modules=["q_proj"], target_parameters=list(targets))
    theirs = peft.get_peft_model(base_of(kind), wanted)
    with torch.no_grad():
        for name, factor in theirs.named_parameters():
            if "lora_B" in name:
                factor.normal_(std=0.05)
    theirs.save_pretrained(tmp_path / "theirs")
    keys = {"target_modules": ("q_proj",), "target_parameters": targets, "adapter_path": str(tmp_path / "theirs")}
    settings = PeftConfig(enabled=True, dim=4, alpha=6.0, **keys)  # type: ignore[arg-type]
    model, adapters = adapted(kind, settings)
    tokens = torch.randint(0, 200, (2, 9))
    logits, expected = (one(input_ids=tokens, use_cache=False).logits for one in (model, theirs))
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    base = base_of(kind)(input_ids=tokens, use_cache=False).logits
    assert (logits - base).abs().max() > 1e-2
    with adapters.disabled():
        torch.testing.assert_close(model(input_ids=tokens, use_cache=False).logits, base, atol=1e-6, rtol=0)
    write_adapters(tmp_path / "ours", "base", settings, {name: whole_factors(one) for name, one in adapters.held.items()})
    read = peft.PeftModel.from_pretrained(base_of(kind), tmp_path / "ours")
    torch.testing.assert_close(read(input_ids=tokens, use_cache=False).logits, expected, atol=1e-6, rtol=0)
    sent, merged = SentWeights(model, "float32", torch.device("cpu"), adapters), base_of(kind)
    sent.update()
    assert not any("lora" in part.name for part in sent.slices)
    merged.load_state_dict(dict(sent.tensors), strict=False)
    torch.testing.assert_close(merged(input_ids=tokens, use_cache=False).logits, expected, atol=1e-5, rtol=0)
    for one in (logits, expected):
        one.logsumexp(-1).square().mean().backward()
    for name, adapter in adapters.held.items():
        if ".experts." not in name:
            continue
        module, _, own = name.rpartition(".")
        inner = len(targets) == 2 and own == "gate_up_proj"  # PEFT wraps one parameter after the other
        wrapper: Any = theirs.base_model.model.get_submodule(module + ".base_layer" * inner)
        a, b = (factor.grad for factor in adapter.factors)
        for found, factor in ((a.flatten(0, 1), wrapper.lora_A), (b.movedim(0, -1).flatten(1), wrapper.lora_B)):
            torch.testing.assert_close(found, factor["default"].weight.grad, atol=1e-6, rtol=1e-4, msg=name)
            assert found.abs().sum() > 0


def test_linear_layers_next_to_experts_have_adapters_and_experts_none() -> None:
    """PEFT takes `up_proj` of this model type for experts."""
    _, adapters = adapted("qwen3_moe", PeftConfig(enabled=True, dim=4, target_modules=("q_proj", "up_proj")))
    assert set(adapters.held) == {f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)} | {
        "model.layers.1.mlp.up_proj.weight"
    }
