"""vLLM's own weight transfers with the backend dagrl, in engines as any user starts them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dagrl.runtime.store import reserve_port
from tests.integration.main_job import ROOT, of_session
from tests.integration.vllm_llm import take_refits
from tests.integration.vllm_models import add_tokenizer, make_checkpoint
from tests.integration.vllm_ranks import Ranks

ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


def test_any_llm_takes_refits(vllm_ranks: Ranks, tmp_path: Path) -> None:
    models = [str(make_checkpoint(tmp_path / str(seed), "qwen3", seed=seed)) for seed in range(2)]
    vllm_ranks.apart(take_refits, *models, 1, {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"})


@pytest.mark.slow
@pytest.mark.timeout(500)  # imports vLLM four times
def test_an_llm_with_processes_of_its_own_takes_refits(tmp_path: Path) -> None:
    """An engine and two workers."""
    pytest.importorskip("vllm")
    models = [str(make_checkpoint(tmp_path / str(seed), "qwen3", seed=seed)) for seed in range(2)]
    code = "import sys; from tests.integration.vllm_llm import take_refits; take_refits(*sys.argv[1:], 2, {})"
    own = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    command = [sys.executable, "-c", code, *models]
    with subprocess.Popen(command, env=own, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            _, errors = process.communicate()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # its engine would live on
    assert process.returncode == 0, errors[-4000:]


EXAMPLE = ROOT / "examples" / "refit_alone.py"
RANKS, FIRST = 2, (20, 40)  # the token that each trainer rank counts from
SERVED = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_SERVER_DEV_MODE": "1"}
OPTIONS = (
    *("--host", "127.0.0.1", "--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "48", "--max-num-seqs", "4"),
    *("--kv-cache-memory-bytes", str(8 << 20), "--no-enable-prefix-caching", "--disable-uvicorn-access-log"),
    *("--weight-transfer-config", '{"backend": "dagrl"}'),
)  # fmt: skip


def asked(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310  # our own server
    with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
        return json.loads(answer.read() or "null")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """A running vLLM server: the directory of its model, and its address."""
    pytest.importorskip("vllm")
    model = str(make_checkpoint(tmp_path / "model", "qwen3"))
    add_tokenizer(Path(model))
    url = f"http://127.0.0.1:{(port := reserve_port())}"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port), *OPTIONS]
    with (tmp_path / "server.log").open("w") as log:
        process = subprocess.Popen(command, env=os.environ | SERVED, stdout=log, stderr=log, start_new_session=True)
        try:
            until = time.monotonic() + 200
            while True:
                try:
                    asked(f"{url}/health")
                    break
                except OSError:
                    ended = process.poll() is not None or time.monotonic() > until
                    assert not ended, (tmp_path / "server.log").read_text()[-4000:]
                    time.sleep(0.2)
            yield model, url
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            until = time.monotonic() + 60  # its engine ends, and then the process that frees their shared memory
            while (left := of_session(process.pid)) and time.monotonic() < until:
                time.sleep(0.1)
            if left:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)


def counted(model: str, url: str, first: int) -> list[int]:
    """Returns what the server writes after the first two tokens of a rank's sequence."""
    body = {"model": model, "prompt": [first, first + 1], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    return [int(word.removeprefix("t")) for word in asked(f"{url}/v1/completions", body)["choices"][0]["text"].split()]


@pytest.mark.slow  # five processes that import torch, two of them vLLM; test_vllm_transfer.py has the transfers in one
def test_a_server_gets_what_each_trainer_rank_has_learnt(server: tuple[str, str]) -> None:
    model, url = server
    learnt = [[first + number for number in range(2, 8)] for first in FIRST]
    assert [counted(model, url, first) for first in FIRST] != learnt
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}"]
    command = [*torchrun, f"--master-port={reserve_port()}", EXAMPLE, model, url, f"127.0.0.1:{reserve_port()}"]
    done = subprocess.run(command, env=os.environ | SERVED, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    assert [counted(model, url, first) for first in FIRST] == learnt


def test_the_example_is_thirty_lines_and_stands_in_the_documentation() -> None:
    _, _, program = EXAMPLE.read_text().partition('"""\n\n')
    page = (ROOT / "docs" / "embed.md").read_text()
    assert f"```python\n{program}```" in page
    lines = [line for line in program.splitlines() if line.strip() and not line.startswith(("import ", "from "))]
    assert len(lines) <= 30
