"""Refits of LoRA adapters alone into vLLM's slot, against the peft package and vLLM's own loading of an adapter."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from dagrl.config import Config
from tests.integration import vllm_calls
from tests.integration.test_vllm_inflight import LONG_PROMPT, check_running_requests
from tests.integration.test_vllm_refit import PROMPT, Trainer
from tests.integration.vllm_models import chosen, make_checkpoint, make_config, state_of
from tests.integration.vllm_ranks import Engine, Ranks, requests

DIM, ALPHA = 4, 6.0
TARGETS = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")  # of fused layers some parts only


def with_peft(base: Path, root: Path, seed: int) -> Path:
    """Writes random adapters with peft, and next to them, in `refit`, what a refit sends. Returns the directory."""
    import peft
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    settings = peft.LoraConfig(r=DIM, lora_alpha=ALPHA, target_modules=list(TARGETS), task_type="CAUSAL_LM")
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.15)
    model.save_pretrained(root / str(seed))
    stored = load_file(root / str(seed) / "adapter_model.safetensors")
    sent = {name: part * (ALPHA / DIM if "lora_B" in name else 1.0) for name, part in stored.items()}
    (root / str(seed) / "refit").mkdir()
    save_file(
        {name.removeprefix("base_model.model."): part for name, part in sent.items()},
        root / str(seed) / "refit" / "model.safetensors",
    )
    return root / str(seed)


class Started:
    def __init__(self, engine: Engine, config: Config, base: Path, adapters: list[Path]) -> None:
        self.engine, self.config, self.base, self.adapters = engine, config, base, adapters

    def logprobs(self, number: int, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        import peft
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32)
        model = peft.PeftModel.from_pretrained(base, self.adapters[number]).eval()
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0]
        return chosen(torch.log_softmax(logits[len(prompt) - 1 : -1].double(), -1), tokens)

    def write(self, number: int, version: int) -> None:
        self.engine.on_all(vllm_calls.write_weights, self.adapters[number] / "refit", version)


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2], ids=lambda tp: f"tp{tp}")
def started(
    request: pytest.FixtureRequest, vllm_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Started]:
    pytest.importorskip("peft")
    root = tmp_path_factory.mktemp("lora")
    base = make_checkpoint(root / "base")
    adapters = [with_peft(base, root, seed) for seed in range(3)]
    peft = {"enabled": True, "refit": "adapters", "dim": DIM, "alpha": ALPHA, "target_modules": TARGETS}
    config = make_config(base, {"vllm_cfg": {"max_num_seqs": 2, "kv_cache_memory_bytes": 16 << 20}}, length=320, peft=peft)
    with vllm_ranks.engine(config, request.param) as engine:
        yield Started(engine, config, base, adapters)


def test_log_probabilities_match_peft(started: Started) -> None:
    """The rank writes a few kilobytes; the base weights stay. Also after a refit of other adapters."""
    first = state_of(started.adapters[0] / "refit")
    trainer = Trainer(started.engine, first)
    for version, number in ((1, 0), (2, 1), (3, 0)):
        trainer.send(started.adapters[number] / "refit", version)
        [row] = started.engine.run(requests([version], [PROMPT], new=16, seed=version))
        expected = started.logprobs(number, PROMPT, row.tokens)
        assert (torch.tensor(row.logprobs).double() - expected).abs().max() < 1e-5
        assert set(row.versions) == {version}
        other = started.logprobs(1 - number, PROMPT, row.tokens)
        assert (expected - other).abs().max() > 0.1
    per_rank = max(trainer.plan.summary().received)
    assert per_rank <= sum(tensor.nbytes for tensor in first.values())


def test_running_requests_continue_with_the_new_adapters(started: Started) -> None:
    def logprobs(number: int, tokens: Sequence[int]) -> torch.Tensor:
        return started.logprobs(number, LONG_PROMPT, tokens)

    check_running_requests(started.engine, started.write, logprobs, 10)


def test_the_slot_holds_what_vllm_loads_from_peft_files(started: Started) -> None:
    engine = started.engine
    started.write(2, 20)
    written = engine.on_all(vllm_calls.tensors)
    started.write(0, 21)
    engine.on_all(vllm_calls.load_into_slot, started.adapters[2])
    for ours, theirs in zip(written, engine.on_all(vllm_calls.tensors), strict=True):
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            torch.testing.assert_close(tensor, theirs[name], atol=0, rtol=1e-6)
            assert tensor.abs().max() > 0
