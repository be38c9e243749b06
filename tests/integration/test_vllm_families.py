"""vLLM's loaders and LoRA layers place every family's weights where our slices say, bit for bit, on every rank."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def test_slices_and_lora_slots_are_what_vllm_loads_and_fills() -> None:
    """In one process, because importing vLLM and all families takes longest."""
    pytest.importorskip("vllm")
    from tests.integration.vllm_loads import CASES, FP8_CASES

    command = [sys.executable, "-m", "tests.integration.vllm_slots"]
    plain = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}  # vLLM's quantizer is compiled, which takes a third of the time
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=plain)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("agrees:") == len(CASES) + len(FP8_CASES)
    assert done.stdout.count("slots agree:") == len(CASES)
