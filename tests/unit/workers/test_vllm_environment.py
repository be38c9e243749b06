"""Parts of the vLLM worker: its installation, GPU, images, disagreeing ranks, recorded experts, FP8 loading, quanta."""

import re
import sys
import threading
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import make_dataclass
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.distributed import HashStore, ProcessGroupGloo  # type: ignore[attr-defined]

from dagrl.config import Config as Settings
from dagrl.errors import ConfigError, RunError
from dagrl.machine import VISIBLE
from dagrl.rl.generation import Generated, checksum
from dagrl.rl.routed_experts import MISSING, Record, RoutedLayers
from dagrl.workers.megatron import MegatronWorker, cpu
from dagrl.workers.vllm import VllmWorker
from dagrl.workers.vllm.bursts import _joined
from dagrl.workers.vllm.engine import Peers, QuantumEngine, Request
from dagrl.workers.vllm.environment import show_host_gpus, vllm_environment
from dagrl.workers.vllm.expert_recorder import ExpertRecorder
from dagrl.workers.vllm.launch import _compilation, capture_sizes
from dagrl.workers.vllm.media import media_spans
from dagrl.workers.vllm.quantization import quantization_arguments, quantize_checkpoint, quantizes
from tests.families import FAMILIES
from tests.integration.vllm_models import make_config
from tests.unit.refit.fp8_reference import is_quantized, quantized, random_weights
from tests.unit.refit.test_bad_input import BLOCKS, engine_config
from tests.unit.refit.weight_reference import Config, hf_weights, model_config
from tests.unit.workers.vllm_double import AsyncEngineDouble, state_of, states_of


@pytest.mark.parametrize(("before", "after"), [({}, "0,1,2"), ({VISIBLE: ""}, "0,1,2"), ({VISIBLE: "1"}, "1")])
def test_all_gpus_are_visible_or_those_chosen(monkeypatch: pytest.MonkeyPatch, before: dict[str, str], after: str) -> None:
    monkeypatch.setattr("dagrl.workers.vllm.environment.gpu_count", lambda: 3)
    environment = dict(before)
    show_host_gpus(environment)
    assert environment[VISIBLE] == after


def test_heads_that_vllm_cannot_attend_with_are_an_error_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs alone. DeepSeek-V3's latent attention has a size of its own, and Qwen3 has a default in transformers."""
    backend = SimpleNamespace(CPUAttentionBackend=SimpleNamespace(get_supported_head_sizes=lambda: [32, 64, 512]))
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.cpu_attn", backend)
    values = {"name": "t", "algorithm": "grpo", "data": {}, "policy": {"model_name": "x", "generation": {}}}
    config = Settings.model_validate(values).with_keys({"cluster.gpus_per_worker": 0.0})
    small = {**FAMILIES["qwen3"], "head_dim": 24}
    expected = r"heads have a size of 24 \(head_dim\), .* CPUs lacks; it has 32, 64, 512. Choose"
    with pytest.raises(ConfigError, match=expected):
        VllmWorker.check(config, small)
    VllmWorker.check(config.with_keys({"cluster.gpus_per_worker": 1.0}), small)
    del small["head_dim"]
    for others in (small, {**small, "head_dim": 512}, FAMILIES["deepseek_v3"], {**small, "model_type": "own"}):
        VllmWorker.check(config, others)


@pytest.mark.parametrize("most", [1, 8, 100, 128, 500, 4096])
def test_captured_steps_have_little_padding(most: int) -> None:
    sizes = capture_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == min(2 * most, 1024) and len(sizes) < 31
    for tokens in range(1, sizes[-1] + 1):
        padded = next(size for size in sizes if size >= tokens)
        assert padded - tokens < max(8, tokens / 4)
    assert most in sizes or most > 1024


def test_a_chosen_compilation_keeps_its_sizes() -> None:
    def compilation(on_gpu: bool = False, **chosen: Any) -> dict[str, Any]:
        generation = {"vllm_cfg": {"enforce_eager": False, "max_num_seqs": 8}, "vllm_kwargs": chosen}
        values = {"name": "x", "algorithm": "grpo", "data": {}, "policy": {"generation": generation}}
        return _compilation(Settings.model_validate(values), {}, on_gpu)

    sizes = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
    assert compilation() == {"compilation_config": sizes}
    full = {"cudagraph_mode": "FULL"}
    assert compilation(compilation_config=full) == {"compilation_config": {**sizes, **full}}
    chosen = {"max_cudagraph_capture_size": 4, "inductor_compile_config": {"combo_kernels": False}}
    assert compilation(on_gpu=True, compilation_config=chosen) == {"compilation_config": chosen}
    untimed = {"combo_kernels": True, "benchmark_combo_kernel": False}
    assert compilation(on_gpu=True) == {"compilation_config": {**sizes, "inductor_compile_config": untimed}}
    assert compilation(compilation_config=3) == {}


images = st.lists(st.tuples(st.integers(1, 3), st.lists(st.booleans(), max_size=4), st.integers(0, 2)), max_size=5)
"""Each with its id, which tokens after its first stand for it (others are between its tiles), and the text after it."""


@given(st.integers(0, 2), images)
def test_spans_are_those_of_the_images(before: int, given: list[tuple[int, list[bool], int]]) -> None:
    media, expected = [0] * before, []
    for medium, inside, after in given:
        tokens = [-medium, *(medium if stands else 0 for stands in [*inside, True])]
        expected.append((medium, len(media), len(media) + len(tokens)))
        media += [*tokens, *[0] * after]
    assert media_spans(media) == expected


Ended = list[tuple[int, list[int]]]  # the comparisons of one rank: engine steps, and the requests that ended in them


def outcome(rank: int, store: HashStore, ended: Ended, timeout_s: float, found_out: threading.Event) -> str:
    peers = Peers(ProcessGroupGloo(store, rank, 2, timedelta(seconds=30)), 4, timeout_s)
    try:
        for step, requests in ended:
            peers.compare(step, requests)
    except RunError as error:
        found_out.set()
        return str(error)
    if timeout_s < 1:  # this rank would run on
        assert found_out.wait(20), "the other waits as long as its group does"
    return ""


def outcomes(one: Ended, other: Ended, timeout_s: float = 30.0) -> list[str]:
    store, found_out = HashStore(), threading.Event()
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(outcome, rank, store, ended, timeout_s, found_out) for rank, ended in enumerate((one, other))]
        return [future.result() for future in running]


def test_ranks_that_end_the_same_requests_continue() -> None:
    same: Ended = [(1, [7]), (4, [3, -1, 9]), (8, [])]
    assert outcomes(same, [(step, requests[::-1]) for step, requests in same]) == ["", ""]


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ([3, 7], [3], r"request 7 ended in engine step 2 on rank \[0\] of 2 only"),
        ([3], [5], r"request 3 ended in engine step 2 on rank \[0\]"),
        ([], [8], r"request 8 ended in engine step 2 on rank \[1\]"),
        ([3, 5, 7, 9], [3, 5, 7], r"request 9 ended in engine step 2 on rank \[0\]"),  # as many as can end in a step
    ],
)
def test_all_ranks_name_the_request_they_disagree_on(one: list[int], other: list[int], message: str) -> None:
    for found in outcomes([(1, [1]), (2, one)], [(1, [1]), (2, other)]):
        assert re.search(message, found)


def test_waiting_for_a_rank_that_runs_on_ends_at_the_deadline() -> None:
    waited, ran_on = outcomes([(2, [7])], [], timeout_s=0.2)
    said = "requests [7] ended on rank 0 in engine step 2, but not on all other ranks within timeouts.collective_s = 0.2 s"
    assert said in waited
    assert not ran_on


BLOCK, EXPERTS = 4, 100


class RunnerDouble:
    """Runs steps: a token's only expert, in one layer, is its position plus a hundred times the step, modulo 97."""

    def __init__(self, recorder: ExpertRecorder) -> None:
        self.recorder, self.steps = recorder, 0
        self.input_batch: Any = None
        router = SimpleNamespace(set_capture_fn=lambda function: setattr(self, "told", function))
        layer = torch.nn.Linear(1, 1)
        vars(layer).update(router=router, layer_id=0, _quant_method=SimpleNamespace(is_monolithic=False))
        caches, scheduler = SimpleNamespace(block_size=BLOCK), SimpleNamespace(max_num_batched_tokens=64)
        recorder.attach(layer, SimpleNamespace(cache_config=caches, scheduler_config=scheduler))
        recorder.cache_holds(16)

    def step(self, **spans: tuple[int, int]) -> dict[str, list[int]]:
        """Runs the positions `start` to `end` of each request. Returns the ids by request."""
        self.steps += 1
        made = {name: [(place + 100 * self.steps) % 97 for place in range(*span)] for name, span in spans.items()}
        counts = {name: end - start for name, (start, end) in spans.items()}
        ids = [number for numbers in made.values() for number in numbers]
        self.told(torch.tensor([*ids, 1, 1])[:, None])  # padded
        starts = np.array([start for start, _ in spans.values()])
        self.input_batch = SimpleNamespace(req_ids=list(spans), num_computed_tokens_cpu=starts)
        self.recorder.step(self, SimpleNamespace(total_num_scheduled_tokens=len(ids), num_scheduled_tokens=counts))
        return made


@pytest.fixture
def recorder() -> ExpertRecorder:
    return ExpertRecorder(RoutedLayers(1, EXPERTS, 1))


def ids(record: Record) -> list[int]:
    return record[:, 0].tolist()


def test_rows_are_attributed_to_their_requests(recorder: ExpertRecorder) -> None:
    runner = RunnerDouble(recorder)
    recorder.follow("a", [5, 6, 7], 0)
    first = runner.step(a=(0, 3))
    recorder.follow("b", [8, 9], 0)
    second = runner.step(b=(0, 2), a=(3, 4))
    third = runner.step(a=(4, 5), b=(2, 3))
    assert ids(recorder.take("a", [20, 21, 22])) == first["a"] + second["a"] + third["a"]
    runner.step(b=(3, 4), a=(5, 6))  # a step that was prepared before the end of `a` was known
    assert ids(recorder.take("b", [30, 31])) == second["b"] + third["b"]


def test_cached_blocks_have_the_record_of_the_request_that_computed_them(recorder: ExpertRecorder) -> None:
    runner = RunnerDouble(recorder)
    prompt = [5, 6, 7, 8, 9, 10]
    recorder.follow("a", prompt, 0)
    computed = runner.step(a=(0, 6))["a"]
    recorder.follow("b", prompt, 0)
    recorder.follow("other", [5, 6, 7, 1, 9, 10], 0)  # another block
    recorder.follow("later", prompt, 1)  # another version of the weights
    rest = runner.step(b=(4, 6), other=(4, 6), later=(4, 6))
    for name, found in (("b", computed[:4]), ("other", [MISSING] * 4), ("later", [MISSING] * 4)):
        assert ids(recorder.take(name, [20])) == found + rest[name]
    made = runner.step(a=(6, 8))["a"]
    recorder.take("a", [20, 21, 22])  # the block of 9, 10, 20, 21 is kept at the end of its request
    recorder.follow("next turn", [*prompt, 20, 21, 22, 40], 0)
    last = runner.step(**{"next turn": (8, 10)})
    assert ids(recorder.take("next turn", [50])) == computed + made + last["next turn"]


def test_a_prefix_cache_that_was_emptied_is_not_used(recorder: ExpertRecorder) -> None:
    runner = RunnerDouble(recorder)
    recorder.follow("a", [5, 6, 7, 8, 9], 0)
    runner.step(a=(0, 5))
    recorder.forget_prefixes()
    recorder.follow("b", [5, 6, 7, 8, 9], 0)
    rest = runner.step(b=(4, 5))["b"]
    assert ids(recorder.take("b", [20])) == [MISSING] * 4 + rest


def test_tokens_computed_again_keep_their_first_record(recorder: ExpertRecorder) -> None:
    """A preempted request starts again; its first tokens were sampled from the first run."""
    runner = RunnerDouble(recorder)
    recorder.follow("a", [5, 6], 0)
    first = runner.step(a=(0, 2))["a"]
    second = runner.step(a=(2, 3))["a"]
    again = runner.step(a=(0, 4))["a"]
    assert ids(recorder.take("a", [20, 21, 22])) == first + second + again[3:]


KINDS = ["qwen3", "qwen3_moe", "deepseek_v3"]


def config_of(kind: str) -> Config:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128}
    latent = {"qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64, "q_lora_rank": 256, "kv_lora_rank": 192}
    config = model_config(kind, hidden_size=128, num_hidden_layers=2, intermediate_size=256, **heads)
    return config | {"moe_intermediate_size": 128} | (latent if kind == "deepseek_v3" else {})


@pytest.mark.parametrize("kind", KINDS)
def test_only_linear_layers_are_quantized_while_loading(kind: str) -> None:
    config = config_of(kind)
    weights = random_weights(config, torch.bfloat16)
    names = {name for name, tensor in weights.items() if is_quantized(name, tensor)}
    given = quantize_checkpoint(iter(weights.items()), names, torch.device("cpu"))
    for name, tensor in weights.items():
        parts = zip((name, f"{name}_scale_inv"), quantized(tensor), strict=True) if name in names else [(name, tensor)]
        for expected, wanted in parts:
            found_name, found = next(given)
            assert found_name == expected
            assert found.dtype == wanted.dtype and torch.equal(found.float(), wanted.float()), name
    assert not list(given)


@pytest.mark.parametrize("kind", KINDS)
def test_vllms_arguments_name_the_unquantized_matrices(kind: str) -> None:
    """Routers, by all names that they may have: vLLM knows that embedding and head are not linear layers."""
    config = config_of(kind)
    weights = hf_weights(config)
    routers = {name.removesuffix(".weight") for name in weights if name.endswith("gate.weight")}
    assert bool(routers) == (kind != "qwen3")
    arguments = quantization_arguments(engine_config("float32", precision="fp8"), config)
    kept = arguments["hf_overrides"]["quantization_config"].pop("modules_to_not_convert")
    assert {name for name in kept if f"{name}.weight" in weights} == routers
    assert arguments["hf_overrides"] == {"quantization_config": BLOCKS}
    assert arguments["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("settings", "form", "dtype"),
    [
        (engine_config("float32"), None, "float32"),
        (engine_config("float32"), BLOCKS, "bfloat16"),
        (engine_config(precision="fp8"), BLOCKS, "bfloat16"),
    ],
)
def test_other_checkpoints_are_loaded_unchanged(settings: Settings, form: object, dtype: str) -> None:
    config = config_of("qwen3") | ({} if form is None else {"quantization_config": form})
    assert not quantizes(settings, config)
    assert quantization_arguments(settings, config) == {"dtype": dtype}


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> AsyncEngineDouble:
    """vLLM's engine. Only its steps advance the clock."""
    double = AsyncEngineDouble()
    monkeypatch.setattr("dagrl.workers.vllm.engine.time", SimpleNamespace(perf_counter=lambda: double.now))
    return double


@pytest.fixture
def engine(vllm: AsyncEngineDouble) -> QuantumEngine:
    return quantum_engine(vllm)


def quantum_engine(vllm: AsyncEngineDouble, peers: Any = None) -> QuantumEngine:
    return QuantumEngine(cast("Any", vllm), cast("Any", lambda request: request.max_new_tokens), peers)


def asked(**lengths: int) -> list[Request]:
    return [Request(int(name[1:]), [1], seed=0, max_new_tokens=length, greedy=True) for name, length in lengths.items()]


def rows(made: Generated) -> list[tuple[int, int]]:
    """Ids of the finished requests and their token counts."""
    return [(row.request_id, len(row.tokens)) for row in map(made.request, range(len(made)))]


def test_a_step_stays_in_flight_between_quanta(engine: QuantumEngine, vllm: AsyncEngineDouble) -> None:
    made = engine.run(asked(r1=3, r2=5, r3=9), 5)
    assert (made.engine_steps, rows(made)) == (5, [(1, 3)])
    assert len(vllm.batch_queue) == 1, "the fifth step returns its tokens later"
    assert rows(engine.run([], 1)) == [(2, 5)]
    assert rows(engine.run([], 100)) == [(3, 9)]
    assert not vllm.batch_queue, "no step stays in flight after the last request"


def test_a_quantum_of_zero_steps_drains_the_engine(engine: QuantumEngine, vllm: AsyncEngineDouble) -> None:
    engine.run(asked(r2=5, r3=9), 5)
    made = engine.run([], 0)
    assert (made.engine_steps, rows(made), vllm.made["3"]) == (0, [(2, 5)], 5)
    assert (len(vllm.batch_queue), vllm.paused) == (0, False)


def test_a_quantum_ends_after_the_step_that_exceeds_its_time(engine: QuantumEngine, vllm: AsyncEngineDouble) -> None:
    vllm.seconds = iter([0.25, 0.25, 1.0, 9.0, 0.25])
    assert engine.run(asked(r1=100), 8, 1.0).engine_steps == 3, "1.5 s"
    assert engine.run([], 8, 1.0).engine_steps == 1, "at least one step runs"
    made = engine.run([], 2, 1.0)
    assert (made.engine_steps, made.unfinished) == (2, 1), "no more than requested"
    vllm.seconds = iter([9.0] * 5)
    assert engine.run([], 5).engine_steps == 5, "without a time limit"


def test_tensor_parallel_ranks_ignore_the_time_limit(vllm: AsyncEngineDouble) -> None:
    compared: list[int] = []
    engine = quantum_engine(vllm, SimpleNamespace(compare=lambda step, ended: compared.append(step)))
    vllm.seconds = iter([9.0] * 4)
    assert engine.run(asked(r1=100), 4, 1.0).engine_steps == 4
    assert compared == [4]
    engine.run(asked(r2=2), 5)
    assert compared == [4, 3, 5], "also whenever a request ends"


def test_a_warm_up_returns_its_own_requests_and_keeps_the_others(engine: QuantumEngine, vllm: AsyncEngineDouble) -> None:
    """Including request 0, and requests that finish in the last step, whose tokens come while draining."""
    engine.run(asked(r0=3, r1=6, r2=50), 2)
    ours = [Request(-1 - row, [1], seed=0, max_new_tokens=length, greedy=True) for row, length in enumerate((2, 4, 50))]
    made = engine.warm_up(ours, 4)
    assert (sorted(rows(made)), made.engine_steps, made.unfinished) == ([(-2, 4), (-1, 2)], 4, 1)
    assert (vllm.aborted, vllm.caches_dropped, len(vllm.batch_queue)) == (["-3"], [False], 0)
    assert (sorted(rows(engine.run([], 1))), engine.unfinished) == ([(0, 3), (1, 6)], 1)
    assert rows(engine.run([], 100)) == [(2, 50)]


def test_an_engine_does_not_sleep_while_requests_run(engine: QuantumEngine) -> None:
    engine.run(asked(r1=3, r2=5), 3)
    with pytest.raises(RunError, match="1 requests are running; let them finish or abort them"):
        engine.sleep(1)
    engine.abort()
    engine.sleep(1)


def test_an_aborted_request_is_not_returned_even_if_it_finished(engine: QuantumEngine, vllm: AsyncEngineDouble) -> None:
    engine.run(asked(r2=5, r3=9), 5)
    assert engine.abort([2, 3]) == 2
    assert vllm.aborted == ["3"], "vLLM has already dropped finished requests"
    assert rows(engine.run([], 0)) == []


def test_tokens_have_the_version_of_the_weights_that_made_them(engine: QuantumEngine, vllm: AsyncEngineDouble) -> None:
    engine.run(asked(r1=6), 4)
    engine.drain()
    vllm.output_processor.request_states = states_of(vllm)
    engine.set_version(7)
    vllm.output_processor.request_states = {}
    assert engine.run([], 100).versions.tolist() == [[0, 0, 0, 0, 7, 7]]


@pytest.mark.parametrize("recompute", [False, True])
def test_a_version_restarts_requests_without_tokens(engine: QuantumEngine, vllm: AsyncEngineDouble, recompute: bool) -> None:
    """Under their old cache key they would match prefixes that older weights computed."""
    engine.run(asked(r1=6, r2=3), 2)
    engine.drain()
    vllm.made["2"] = 0  # still waiting for a slot
    vllm.output_processor.request_states = states_of(vllm)
    engine.set_version(7, recompute=recompute)
    assert (vllm.aborted, vllm.salts) == (["2"], {"1": "version 0", "2": "version 7"})
    assert vllm.caches_dropped == [recompute]
    vllm.output_processor.request_states = {}
    made = engine.run([], 100)
    versions = {row.request_id: row.versions for row in map(made.request, range(len(made)))}
    assert versions == {1: [0, 0, 7, 7, 7, 7], 2: [7, 7, 7]}


def test_progress_checksums_all_tokens_so_far(engine: QuantumEngine, vllm: AsyncEngineDouble) -> None:
    for count in (0, 2, 2, 5):
        vllm.output_processor.request_states = {"1-0": state_of("1", [7, 8, 9, 3, 4][:count])}
        made = engine.run(asked(r1=50) if not engine.unfinished else [], 1)
        assert made.running.tolist() == [[1, count, checksum([7, 8, 9, 3, 4][:count])]]


@pytest.mark.parametrize("draining", [False, True], ids=["in a quantum", "while draining"])
def test_an_engine_whose_step_failed_is_lost(engine: QuantumEngine, vllm: AsyncEngineDouble, draining: bool) -> None:
    engine.run(asked(r1=9), 2)
    assert not engine.interrupted
    vllm.broken = True
    with pytest.raises(OSError, match="a step broke"):
        engine.drain() if draining else engine.run([], 1)
    assert engine.interrupted
    vllm.broken = False
    with pytest.raises(RunError, match="an earlier quantum failed"):
        engine.run([], 1)


def test_an_abandoned_quantum_raises_after_its_step(engine: QuantumEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the step returns normally: aborted NCCL collectives end without an error."""
    step = AsyncEngineDouble.step
    monkeypatch.setattr(AsyncEngineDouble, "step", lambda vllm: engine.abandon() or step(vllm))  # from another thread
    with pytest.raises(RunError, match="aborted inside an engine step"):
        engine.run(asked(r1=9), 5)
    assert engine.interrupted


def test_a_request_that_vllm_loses_raises(engine: QuantumEngine, vllm: AsyncEngineDouble) -> None:
    vllm.forgets = True
    with pytest.raises(RunError, match=r"vLLM has lost requests \['7'\]"):
        engine.run(asked(r7=3), 100)


FIELDS = ("logprob_token_ids", "logprobs", "sampled_token_ranks", "cu_num_generated_tokens")  # of vLLM's `LogprobsLists`
Logprobs = namedtuple("Logprobs", FIELDS, defaults=[None])
Output = make_dataclass("Output", ["req_ids", "sampled_token_ids", "logprobs"])


def test_replayed_steps_join_like_others() -> None:
    tokens = np.arange(12).reshape(4, 3) * 7  # and their own ranks, which nothing reads
    logprobs = (-np.arange(12) / 8).astype(np.float32).reshape(4, 3)
    steps: list[Any] = [
        Output(["a", "b", "c"], row[:, None].tolist(), Logprobs(row[:, None], logprobs[step][:, None], row))
        for step, row in enumerate(tokens)
    ]
    replayed: Any = SimpleNamespace(arrays=lambda: [tokens[1:], logprobs[1:]])
    found: Any = _joined(steps[:1], replayed)
    expected: Any = _joined(steps, None)
    assert found.sampled_token_ids == expected.sampled_token_ids == tokens.T.tolist()
    assert found.logprobs.cu_num_generated_tokens == [0, 4, 8, 12] == expected.logprobs.cu_num_generated_tokens
    for name in FIELDS[:3]:
        assert getattr(found.logprobs, name).tolist() == getattr(expected.logprobs, name).tolist()
    assert found.logprobs.logprobs[:, 0].tolist() == logprobs.T.ravel().tolist()


def test_an_installation_that_does_not_import_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(cpu.importlib, "import_module", lambda name: pytest.fail(f"{name} was imported"))
        cpu.import_engine()
    monkeypatch.setattr(metadata, "version", lambda name: "2.20.2")
    monkeypatch.setattr(cpu.importlib, "import_module", Mock(side_effect=OSError("undefined symbol: cudnnFoo")))
    with pytest.raises(ConfigError, match=r"2\.20\.2 is installed, but its import fails: undefined symbol.*this torch, "):
        cpu.import_engine()


def test_the_cudnn_of_torch_is_loaded_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDNN_HOME", "")  # so that the test leaves it as it was
    monkeypatch.delenv("CUDNN_HOME")
    loaded: list[str] = []
    monkeypatch.setattr(cpu.ctypes, "CDLL", loaded.append)
    cpu._keep_cudnn(tmp_path / "absent")
    assert not loaded and "CUDNN_HOME" not in cpu.os.environ
    (tmp_path / "lib").mkdir()
    for name in ("libcudnn.so.9", "libcudnn_ops.so.9", "other.so"):
        (tmp_path / "lib" / name).touch()
    cpu._keep_cudnn(tmp_path)
    assert loaded == [str(tmp_path / "lib" / name) for name in ("libcudnn.so.9", "libcudnn_ops.so.9")]
    assert cpu.os.environ["CUDNN_HOME"] == str(tmp_path)


@pytest.mark.parametrize(("on", "gpus"), [(False, 1), (True, 1), (False, 0), (True, 0)])
def test_deterministic_runs_set_variables(on: bool, gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of a CPU share a sequence by what else is in the batch, so there is one."""
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    made = make_config(tmp_path).with_keys({"policy.deterministic": on, "cluster.gpus_per_worker": gpus})
    generation, train = vllm_environment(made), MegatronWorker.environment(made)
    assert ("VLLM_BATCH_INVARIANT" in generation) == bool(on and gpus)
    assert generation["OMP_NUM_THREADS"] == ("1" if on and not gpus else "4")
    assert ("CUBLAS_WORKSPACE_CONFIG" in train) == on
