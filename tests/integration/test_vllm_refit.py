"""A vLLM worker receives a planned refit. This process sends whole checkpoints as the only train rank."""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from dagrl.channels import Channel, ChannelSpec, open_channel
from dagrl.channels.base import PendingMessage
from dagrl.errors import ChannelError, RunError
from dagrl.refit import RefitPlan, RefitReport, RefitSender, plan_refit
from dagrl.runtime.store import reserve_port
from tests.integration import vllm_calls
from tests.integration.vllm_models import chosen, hf_logprobs, make_checkpoint, make_config, state_of, whole_model
from tests.integration.vllm_ranks import Engine, Ranks, call, requests

PROMPT = [5, 6, 7, 8]
TIMEOUT_S = 60.0  # no test waits for it

Messages = Sequence[tuple[torch.Tensor, int]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [make_checkpoint(root / str(seed), seed=seed, tied=True) for seed in range(3)]


@pytest.fixture(scope="module", params=[1, 2], ids=lambda tp: f"tp{tp}")
def engine(request: pytest.FixtureRequest, vllm_ranks: Ranks, checkpoints: list[Path]) -> Iterator[Engine]:
    with vllm_ranks.engine(make_config(checkpoints[0]), request.param) as engine:
        yield engine


class Trainer:
    """The sender: whole tensors on channel rank 0, followed by the vLLM ranks."""

    def __init__(self, engine: Engine, state: Mapping[str, torch.Tensor]) -> None:
        self.engine, self.tensors = engine, dict(state)
        self.plan = plan_refit([whole_model(state)], engine.on_all(vllm_calls.weight_slices), dtype="float32")
        self.channel = self._join(self.plan)
        self.sender = RefitSender(self.plan.for_rank(0, "checksum"), self.tensors, self.channel)
        self.thread = ThreadPoolExecutor(1)

    def _join(self, plan: RefitPlan) -> Channel:
        address = f"127.0.0.1:{reserve_port()}"
        specs = [ChannelSpec("gloo", address, rank, plan.size, TIMEOUT_S) for rank in range(plan.size)]
        calls = [("prepare_refit", plan.for_rank(spec.rank, "checksum"), spec) for spec in specs[1:]]
        with ThreadPoolExecutor(1) as thread:
            joined = thread.submit(open_channel, specs[0])
            self.engine.on_each(call, calls)
            return joined.result()

    def send(self, checkpoint: Path, version: int, refusal: str = "", late_s: float = 0.0) -> None:
        """Sends a checkpoint, then commits or rejects it; `late_s` delays that."""
        for name, tensor in state_of(checkpoint).items():
            self.tensors[name].copy_(tensor)
        sent = self.thread.submit(self._send, version, refusal, late_s)
        received = self.engine.on_all(call, "receive_weights", version)
        reports = [sent.result(), *received]
        assert {report.version for report in reports} == {version}
        assert sum(report.bytes_received for report in received) == reports[0].bytes_sent
        assert all(report.pause_s > max(late_s, report.seconds) for report in received)  # engines wait for the commit

    def spoil(self, monkeypatch: pytest.MonkeyPatch) -> str:
        """Flips one bit of the next bucket to the last rank. Returns the parameter it belongs to."""
        receiver, exchange = self.plan.size - 1, self.channel.exchange
        bucket = next(one for one in self.plan.for_rank(0).sends if one.destination == receiver)
        message = bucket.messages[-1]
        at = message.offsets[-1] + 5

        def flip(sends: Messages, receives: Messages) -> Sequence[PendingMessage]:
            of_it = [
                place for place, (tensor, peer) in enumerate(sends) if (peer, tensor.nbytes) == (receiver, message.nbytes)
            ]
            if of_it:
                monkeypatch.undo()
                tensor, _ = sends[of_it[0]]
                tensor = tensor.clone()
                tensor[at] ^= 4
                sends = [*sends[: of_it[0]], (tensor, receiver), *sends[of_it[0] + 1 :]]
            return exchange(sends, receives)

        monkeypatch.setattr(self.channel, "exchange", flip)
        return bucket.moves[-1].name

    def _send(self, version: int, refusal: str, late_s: float) -> RefitReport:
        report = self.sender.send(version)
        time.sleep(late_s)
        self.channel.agree(refusal, wait=False)
        return report


def check_against_hf(engine: Engine, checkpoint: Path, version: int) -> None:
    [row] = engine.run(requests([1], [PROMPT], new=16, seed=version))
    expected = chosen(hf_logprobs(checkpoint, PROMPT, row.tokens), row.tokens)
    assert (torch.tensor(row.logprobs).double() - expected).abs().max() < 1e-5
    assert set(row.versions) == {version}


def test_each_rank_receives_its_share_repeatedly(engine: Engine, checkpoints: list[Path]) -> None:
    trainer = Trainer(engine, state_of(checkpoints[0]))
    for version in (1, 2, 3):
        trainer.send(checkpoints[version % 3], version, late_s=0.5 if version == 3 else 0)
        check_against_hf(engine, checkpoints[version % 3], version)


def test_a_failed_refit_disables_the_shard_until_a_complete_one(engine: Engine, checkpoints: list[Path]) -> None:
    trainer = Trainer(engine, state_of(checkpoints[0]))
    trainer.channel.abort("the train worker died")
    with pytest.raises(ChannelError):
        engine.on_all(call, "receive_weights", 4)
    with pytest.raises(RunError, match="torn"):
        engine.generate(requests([1], [PROMPT]))
    Trainer(engine, state_of(checkpoints[0])).send(checkpoints[1], 5)
    check_against_hf(engine, checkpoints[1], 5)


def test_no_rank_commits_what_one_rank_rejects(engine: Engine, checkpoints: list[Path]) -> None:
    """The train rank rejects after all bytes are transferred, so the channel stays usable."""
    trainer = Trainer(engine, state_of(checkpoints[0]))
    trainer.send(checkpoints[0], 6)
    with pytest.raises(ChannelError, match="rank 0 failed: a train rank lost its optimizer"):
        trainer.send(checkpoints[1], 7, "a train rank lost its optimizer")
    with pytest.raises(RunError, match="torn"):
        engine.generate(requests([1], [PROMPT]))
    trainer.send(checkpoints[2], 8)
    check_against_hf(engine, checkpoints[2], 8)


def test_a_wrong_byte_is_named_and_generates_no_token(
    engine: Engine, checkpoints: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank has a wrong bit: no rank generates, neither for new nor for running requests."""
    trainer = Trainer(engine, state_of(checkpoints[0]))
    trainer.send(checkpoints[0], 9)
    assert engine.generate(requests([1], [PROMPT], new=16)).unfinished == 1
    name = trainer.spoil(monkeypatch)
    found = rf"refit to version 10: parameter '{re.escape(name)}' .* differs from what rank 0 sent"
    with pytest.raises((RunError, ChannelError), match=found):
        trainer.send(checkpoints[1], 10)
    for batch in (requests([], []), requests([2], [PROMPT])):
        with pytest.raises(RunError, match="torn"):
            engine.generate(batch)
    trainer.send(checkpoints[2], 11)
    [row] = engine.run(requests([], []))
    assert len(row.tokens) == 16 and set(row.versions) == {9, 11}
    check_against_hf(engine, checkpoints[2], 11)


def test_calls_out_of_order_are_errors(checkpoints: list[Path]) -> None:
    from dagrl.runtime.layout import ParallelLayout
    from dagrl.runtime.worker import WorkerContext
    from dagrl.workers.vllm import VllmWorker

    worker = VllmWorker(WorkerContext("generation", 0, ParallelLayout()), make_config(checkpoints[0]))
    with pytest.raises(RunError, match="prepare_refit"):
        worker.receive_weights(1)
    with pytest.raises(RunError, match="setup"):
        worker.generate(requests([1], [PROMPT]))
