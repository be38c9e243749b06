"""Engine options: sampling, stopping, shared memory. Each test starts its own engines."""

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dagrl.config import EnvironmentConfig
from dagrl.errors import ConfigError, RunError
from dagrl.rl.generation import RequestOptions, options_text
from dagrl.run.model import character_tokenizer
from dagrl.runtime.store import reserve_port
from tests.integration import vllm_calls
from tests.integration.vllm_models import add_tokenizer, chosen, hf_logprobs, make_checkpoint, make_config
from tests.integration.vllm_ranks import Ranks, call, requests
from tests.unit.rl.test_environment import CHARACTERS

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12, 13]]


def test_a_gpu_without_the_kernels_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from dagrl.workers.vllm import features

    features.require_batch_invariance()  # nothing to require of a CPU
    found = {"is_available": lambda: True, "get_device_capability": lambda: (8, 0), "get_device_name": lambda: "A100"}
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(**found))
    with pytest.raises(ConfigError, match=r"policy\.deterministic is true.*9\.0; A100 has compute capability 8\.0"):
        features.require_batch_invariance()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_checkpoint(tmp_path_factory.mktemp("model"))
    add_tokenizer(path)
    return path


@pytest.mark.parametrize(
    "fails",
    [
        "dagrl.workers.vllm.worker.find_destinations",
        pytest.param("vllm.v1.core.sched.scheduler.Scheduler.__init__", marks=pytest.mark.slow),
    ],
)
def test_a_rank_can_be_set_up_again_after_a_failed_start(fails: str, vllm_ranks: Ranks, checkpoint: Path) -> None:
    """After a start, and in the middle of one: groups, threads and memory are freed.

    No engine has shared memory or sockets, which a killed process could leave.
    """
    with vllm_ranks.engine(make_config(checkpoint), 2) as engine:
        expected = [row.tokens for row in engine.run(requests([1], PROMPTS[:1]))]
        assert engine.on_all(vllm_calls.shared_memory) == engine.on_all(vllm_calls.socket_files) == [[], []]
        found = engine.on_all(vllm_calls.start_again, fails, f"127.0.0.1:{reserve_port()}", f"127.0.0.1:{reserve_port()}")
        assert [row.tokens for row in engine.run(requests([1], PROMPTS[:1]))] == expected
    assert engine.on_all(vllm_calls.shared_memory) == engine.on_all(vllm_calls.socket_files) == [[], []]
    for error, grouped, before, after in found:
        assert error == "RuntimeError: not today" and not grouped and after <= before


def test_abort_frees_a_rank_whose_peer_is_missing(vllm_ranks: Ranks, checkpoint: Path) -> None:
    with vllm_ranks.engine(make_config(checkpoint), 2) as engine:
        engine.run(requests([1], PROMPTS[:1]))
        waited, _ = engine.on_ranks(
            [(vllm_calls.generate_then_abort, (requests([2], PROMPTS[:1]), 0.5)), (vllm_calls.nothing, ())]
        )
        assert waited < 30  # half of the deadline of a collective
        with pytest.raises(RunError, match="restart"):
            engine.on_ranks([(call, ("generate", requests([3], PROMPTS[:1]))), (vllm_calls.nothing, ())])


def test_a_request_that_ends_on_one_rank_only_is_named(vllm_ranks: Ranks, checkpoint: Path) -> None:
    """The rank where it ended reports it while the other runs the next step, before the collective deadline."""
    with vllm_ranks.engine(make_config(checkpoint), 2) as engine:
        batches = [requests([1, 2], PROMPTS[:2], new=8, steps=8) for _ in range(2)]
        batches[1].fields["max_new_tokens"][0] = 2  # as if its second token ended the sequence there
        started = time.monotonic()
        errors = engine.on_each(vllm_calls.generate_apart, [(batch, 1.0) for batch in batches])
        assert time.monotonic() - started < 30
    assert (
        "requests [1] ended on rank 1 in engine step 2, but not on all other ranks within timeouts.collective_s = 1 s"
        in errors[1]
    )


AGENT = EnvironmentConfig(agent="my_agent:solve")
SAMPLING = {"temperature": 0.7, "top_p": 0.8, "top_k": 12}


def test_logprobs_are_of_the_distribution_sampled_from(vllm_ranks: Ranks, checkpoint: Path) -> None:
    with vllm_ranks.engine(make_config(checkpoint, SAMPLING), 1) as engine:
        rows = engine.run(requests([1, 2, 3], PROMPTS, new=20))
    for row, prompt in zip(rows, PROMPTS, strict=True):
        expected = chosen(truncated(hf_logprobs(checkpoint, prompt, row.tokens)), row.tokens)
        assert (torch.tensor(row.logprobs).double() - expected).abs().max() < 1e-5


def truncated(logprobs: torch.Tensor) -> torch.Tensor:
    """Applies temperature, then `top_k`, then `top_p`, and renormalizes."""
    scaled, order = torch.log_softmax(logprobs / SAMPLING["temperature"], -1).sort(-1, descending=True)
    scaled[:, int(SAMPLING["top_k"]) :] = -torch.inf
    probabilities = scaled.softmax(-1)
    scaled[probabilities.cumsum(-1) - probabilities >= SAMPLING["top_p"]] = -torch.inf
    return torch.full_like(scaled, -torch.inf).scatter(-1, order, torch.log_softmax(scaled, -1))


def test_engines_compile_the_sampling_kernels_of_the_run(vllm_ranks: Ranks, checkpoint: Path) -> None:
    """Not those of every feature, unless an agent's requests choose their own parameters."""
    with vllm_ranks.engine(make_config(checkpoint, SAMPLING), 1) as engine:
        [(own, later)] = engine.on_all(vllm_calls.sampling_warm_up, {}, f"127.0.0.1:{reserve_port()}")
        agent = {"environment": AGENT}
        [(with_agent, _)] = engine.on_all(vllm_calls.sampling_warm_up, agent, f"127.0.0.1:{reserve_port()}")
    parameters, grammars = own
    assert parameters == {**SAMPLING, "logprobs": 0, "seed": 0} and not any(grammars)
    assert with_agent == later and any(later[1])
    assert later[0].keys() > {"min_p", "frequency_penalty", "prompt_logprobs"}


def last_new(tokens: Sequence[int]) -> int:
    """Returns the position of the last token that is new in the sequence; not the start."""
    at = max(index for index, token in enumerate(tokens) if token not in tokens[:index])
    assert at > 0
    return at


LONG = [PROMPTS[0], [20, 21], [40, 41]]
"""Prompts whose 20 likeliest tokens have no end of a sequence, and end in tokens that the others do not have."""


def test_requests_with_options_of_their_own(vllm_ranks: Ranks, tmp_path: Path) -> None:
    """Stop strings and sampling; then what ends all requests of a run."""
    checkpoint = make_checkpoint(tmp_path / "model")
    tokenizer = character_tokenizer(CHARACTERS)
    tokenizer.save_pretrained(checkpoint)
    with vllm_ranks.engine(make_config(checkpoint).model_copy(update={"environment": AGENT}), 2) as engine:
        whole_rows = engine.run(requests([1, 5, 6], LONG, new=20, greedy=True))
        free = whole_rows[0]
        at = last_new(free.tokens)
        options = {
            2: RequestOptions(temperature=0.0, stop=(tokenizer.decode([free.tokens[at]]),)),
            3: RequestOptions(temperature=0.0),
            4: RequestOptions(top_p=1e-6),
        }
        batch = requests(list(options), PROMPTS[:1] * 3, new=20)
        rows = engine.run(batch.with_scalars(options=options_text(options)))
    own, whole, likeliest = rows
    assert (own.tokens, own.finish_reason) == (free.tokens[: at + 1], "stop"), "a request's own stop string"
    assert whole.tokens == likeliest.tokens == free.tokens and whole.logprobs == free.logprobs
    # One engine with all that ends a request: a string, a token, and the end of a sequence.
    string, token, eos = ends = [row.tokens[last_new(row.tokens)] for row in whole_rows]
    ended = make_checkpoint(tmp_path / "ended", eos_token_id=eos)
    tokenizer.save_pretrained(ended)
    stops = {"stop_strings": [tokenizer.decode([string])], "stop_token_ids": [token]}
    with vllm_ranks.engine(make_config(ended, stops), 1) as engine:
        rows = engine.run(requests([1, 5, 6], LONG, new=20, greedy=True))
    for row, before in zip(rows, whole_rows, strict=True):
        first = min(before.tokens.index(end) for end in ends if end in before.tokens)
        assert (row.tokens, row.finish_reason) == (before.tokens[: first + 1], "stop")
    assert {row.tokens[-1] for row in rows} == set(ends)
