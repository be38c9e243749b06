"""vLLM's loaders and LoRA layers place every family's weights where our slices say, bit for bit, on every rank."""

import subprocess

import pytest

from dagrl.errors import ConfigError
from dagrl.workers.vllm.described import describe_ranks
from tests.families import FAMILIES
from tests.integration.vllm_loads import CASES, FP8_CASES, check_all
from tests.integration.vllm_ranks import Ranks


def test_slices_and_lora_slots_are_what_vllm_loads_and_fills(vllm_ranks: Ranks) -> None:
    """In one process, because importing all families takes longest."""
    shown = vllm_ranks.apart(check_all)
    assert shown.count("agrees:") == len(CASES) + len(FP8_CASES)
    assert shown.count("slots agree:") == len(CASES)


def test_a_model_that_cannot_be_described_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the end of what the process says; `vllm_loads` has models that vLLM cannot build, without the process."""
    ended = subprocess.CompletedProcess([], 1, "", "a traceback\n" * 20 + "AssertionError: 30 is not divisible by 4\n")
    monkeypatch.setattr("dagrl.workers.vllm.described.subprocess.run", lambda *_, **__: ended)
    with pytest.raises(ConfigError, match=r"(?s)no refit plan before an engine runs:\na trace.*30 is not divisible by 4$"):
        describe_ranks({**FAMILIES["llama"], "intermediate_size": 30}, 4, {"dtype": "bfloat16"})
