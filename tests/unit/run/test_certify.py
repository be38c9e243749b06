"""Certificates and counterfactual steps: a changed number is named, and recorded samples become the batch of their step."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dagrl.cli.certify import SHIPPED, certificate_text
from dagrl.cli.main import main
from dagrl.config.file import load_run_config
from dagrl.errors import ConfigError
from dagrl.rl.algorithm import algorithm_of
from dagrl.rl.generation import FinishedRequest, pack_generated
from dagrl.rl.rollout.batches import scored_batch
from dagrl.run.certify import BOUNDS, BOUNDS_FILE, END, START, TAPE, Bounds, Certificate, PhaseReport, compare, measured
from dagrl.run.checkpoint_store import CheckpointStore, TrainState
from dagrl.run.counterfactual import MinibatchComparison, newest_checkpoint, recorded_groups, replay_step, report
from dagrl.run.tape import Entry, Tape, read_tape, values_of, write_tape
from dagrl.runtime.shapes import Batch
from dagrl.telemetry.metrics import StepMetrics
from dagrl.telemetry.rollouts import read_rollouts, rollout_files
from dagrl.workers.train.digest import digest
from tests.unit.run.test_checkpoints import saving
from tests.unit.telemetry.test_view import make_run

F32 = BOUNDS["float32"]


def quantum(*requests: FinishedRequest, steps: int = 4) -> dict[str, Any]:
    return values_of([pack_generated(requests, [], steps)])


def request(number: int, tokens: list[int], logprob: float = -1.0) -> FinishedRequest:
    return FinishedRequest(number, tokens, [logprob] * len(tokens), [0] * len(tokens), "stop")


def metrics(**values: float) -> dict[str, Any]:
    return values_of((StepMetrics(sums=values), StepMetrics(shared={"timing_s/step": 1.0})))


def compared(old: list[tuple[str, Any]], new: list[Any]) -> dict[str, PhaseReport]:
    entries = [Entry(phase, None, result=result) for phase, result in old]
    return {report.phase: report for report in compare(entries, new, F32)}


def requests(*greedy: int) -> Batch:
    """The input of a quantum with requests 0, 1, ..., which take the likeliest tokens or draw them."""
    fields = {"lengths": np.ones(len(greedy)), "request_ids": np.arange(len(greedy)), "greedy": np.array(greedy)}
    return Batch({**fields, "max_new_tokens": np.full(len(greedy), 200)}, {"engine_steps": (16,)})


def generated(sent: Batch, old: dict[str, Any], new: dict[str, Any], bounds: Bounds = F32) -> PhaseReport:
    (report,) = compare([Entry("generate", sent, None, old)], [new], bounds)
    return report


def test_a_tape_is_read_back(tmp_path: Path) -> None:
    fields = {"lengths": np.array([2, 0]), "mask": np.zeros((2, 3), np.float32)}
    batch = Batch(fields, {"engine_steps": (4, 8), "seconds": 0.5})
    entries = [
        Entry("generate", batch, [[0], []], quantum(request(3, [1, 2], -1 / 3))),
        Entry("refit", 1),
        Entry("train_step", batch, None, {"loss": np.array(np.nan), "none": np.zeros((0, 4), np.int64)}),
    ]
    write_tape(tmp_path / TAPE, entries)
    versions, found = read_tape(tmp_path / TAPE)
    assert versions["torch"] in (torch.__version__.partition("+")[0], torch.__version__)
    for old, new in zip(entries, found, strict=True):
        assert (old.phase, old.rows) == (new.phase, new.rows)
        for one, other in [(old.result, new.result), *([(batch.fields, new.value.fields)] if old.phase != "refit" else [])]:
            assert one.keys() == other.keys()
            for name, column in one.items():
                assert column.dtype == other[name].dtype
                np.testing.assert_array_equal(column, other[name])
    assert found[2].value.scalars == batch.scalars
    whole = (tmp_path / TAPE).read_bytes()
    for broken in (b"x", whole[:-20], whole[:12] + b"\xff" * 8 + whole[20:]):
        (tmp_path / "broken").write_bytes(broken)
        with pytest.raises(ConfigError, match="cannot be read as a tape"):
            read_tape(tmp_path / "broken")


def test_a_quantum_takes_the_recorded_engine_steps_whatever_the_clock_says() -> None:
    batch = requests(0, 0).with_scalars(seconds=0.5)
    again = Entry("generate", batch, None, quantum(request(1, [5]), steps=7)).again({1: 1})
    assert again.scalars == {"engine_steps": (7,)}
    assert again["max_new_tokens"].tolist() == [200, 1], "a request ends at its recorded length at the latest"
    assert Entry("train_step", batch, None, metrics(loss=1.0)).again({}) is batch


def test_every_second_recorded_request_takes_the_likeliest_tokens() -> None:
    tape: Any = Tape.__new__(Tape)
    assert tape.adapted(requests(0, 0, 0, 1))["greedy"].tolist() == [1, 0, 1, 1]
    assert tape.adapted(7) == 7
    assert tape.adapted(tokens := Batch({"lengths": np.array([2])}, {})) is tokens


def test_one_bit_is_within_the_bound_and_a_changed_number_is_not() -> None:
    old = metrics(loss=0.5, grad_norm=0.02)
    one_bit, other = metrics(loss=float(np.nextafter(0.5, 1)), grad_norm=0.02), metrics(loss=0.5, grad_norm=0.0201)
    (same, near, far) = (compared([("train_step", old)], [new])["train_step"] for new in (old, one_bit, other))
    assert (same.verdict, same.first) == ("equal", "")
    assert near.verdict == "within" and near.unequal == 1 and 0 < near.largest < 1e-9
    assert far.verdict == "differs" and far.largest == pytest.approx(5)  # 0.5 % of a bound of 0.1 %
    assert far.first == "replay 1 of 1: grad_norm was 0.02, and is now 0.0201"


def test_measured_bounds_hold_the_rounding_that_they_come_from_and_little_more() -> None:
    weights = [np.array([0.0, 2.0, 2.0**-23, *[0.0] * 8]), np.array([1.0, 2.0, 2.0**-23, 1e-2, *[0.0] * 7])]
    column = np.linspace(-4, -1, 50, dtype=np.float32)

    def results(share: float) -> list[dict[str, Any]]:
        before, after = weights[0].copy(), weights[1].copy()
        before[0], after[0], after[3] = 7.0, 7.0, 1e-2 * (1 + share)
        middle = {"x": column + np.float32(share), "grad_norm": np.array(0.5 * (1 + share))}
        return [{"w": before}, middle, {"w": after}]

    old = results(0.0)
    old[0], old[2] = ({"w": one} for one in weights)
    entries = [Entry(phase, None, result=one) for phase, one in zip((START, "logprobs", END), old, strict=True)]
    bounds = measured(entries, results(1e-5), 2.0**-23)
    for share, verdict in ((3e-5, "within"), (6e-5, "differs")):
        reports = compare(entries, results(share), bounds)
        assert [report.verdict for report in reports] == ["within", verdict, verdict]
    with pytest.raises(ConfigError, match="nothing differs from the record here"):
        measured(entries, old, 2.0**-23)


def test_the_first_value_beyond_its_bound_is_named() -> None:
    column = np.full(6, -1.0, np.float32)
    near, far = column.copy(), column.copy()
    near[1] += 1e-6
    far[[1, 4]] += np.array([1e-6, 1e-2], np.float32)
    name = "prev_logprobs of row 3"
    others: list[dict[str, Any]] = [{name: near}, {name: far}, {}, {name: column[:5]}]
    close, differs, missing, short = (compared([("logprobs", {name: column})], [new])["logprobs"] for new in others)
    assert (close.verdict, close.unequal, close.values) == ("within", 1, 6)
    assert (differs.verdict, differs.unequal, short.verdict) == ("differs", 2, "differs")
    assert differs.first.startswith("replay 1 of 1: prev_logprobs of row 3 at [4] was -1.0, and is now -0.99")
    assert missing.first.endswith("was there, and is now missing")


def test_requests_are_compared_over_quanta_up_to_the_first_other_token() -> None:
    entries = [
        Entry("generate", requests(1, 1, 1), None, quantum(request(1, [5, 6, 7]))),
        Entry("generate", requests(), None, quantum(request(2, [8, 9]))),
    ]

    def again(*quanta: Any) -> PhaseReport:
        (report,) = compare(entries, quanta, F32)
        return report

    report = again(quantum(), quantum(request(2, [8, 9]), request(1, [5, 6, 7])))
    assert report.verdict == "equal" and report.values >= 5
    assert again(quantum(request(1, [5, 6, 7])), quantum()).first.startswith("number of tokens of request 2")
    drifted = again(quantum(request(1, [5, 6, 7], -1.001)), quantum(request(2, [8, 9])))
    assert drifted.first.startswith("logprobs of request 1 at [0]")


def test_another_likeliest_token_is_within_the_bound_only_if_it_is_as_likely() -> None:
    def chosen(token: int, logprob: float) -> dict[str, Any]:
        return quantum(FinishedRequest(0, [5, token, 7], [-1.0, logprob, -1.0], [0, 0, 0], "stop"))

    report = generated(requests(1), chosen(6, -2.0), chosen(4, -2.00005))
    assert (report.verdict, report.first) == ("within", "token 1 of request 0 was 6, and is now 4")
    assert report.unequal == 1, "what follows another token is not compared"
    report = generated(requests(1), chosen(6, -2.0), chosen(4, -1.9))
    assert report.verdict == "differs" and report.largest == pytest.approx(500, rel=1e-3)


@pytest.mark.parametrize(("sharpness", "verdict"), [(1.0, "within"), (8.0, "differs"), (0.2, "differs")])
def test_a_sampler_of_another_distribution_is_told_from_one_with_other_draws(sharpness: float, verdict: str) -> None:
    """A right sampler draws from p, others from p to the power of `sharpness`. The engine's log-probabilities are right."""
    generator = np.random.default_rng(0)
    logprobs = np.log(generator.dirichlet(np.ones(12), 40))
    every = [(logprobs[number], np.exp(sharpness * logprobs[number])) for number in range(40)]

    def drawn(tokens: list[int]) -> dict[str, Any]:
        likeliest = request(40, [3, 4])
        return quantum(likeliest, *(request(n, [token], float(logprobs[n, token])) for n, token in enumerate(tokens)))

    old = drawn([int(generator.choice(12, p=np.exp(row))) for row in logprobs])
    new = drawn([int(generator.choice(12, p=power / power.sum())) for _, power in every])
    report = generated(requests(*[0] * 40, 1), old, new)
    assert report.verdict == verdict
    assert "of 40 sampled requests draw other tokens" in report.draws
    assert ("less likely" in report.draws) == (sharpness < 1) or sharpness == 1
    assert report.draws in certificate_text(Certificate("mine", {}, [report]))


def test_few_other_draws_are_within_the_bound_of_rounded_log_probabilities() -> None:
    tokens = list(range(100))
    old = quantum(*(request(number, tokens) for number in range(4)))
    new = quantum(request(0, [*tokens[:-1], 7]), *(request(number, tokens) for number in range(1, 4)))
    report = generated(requests(0, 0, 0, 0), old, new, BOUNDS["bfloat16"])
    assert report.verdict == "within" and 0 < report.excess < 0.1 and "standard errors" not in report.draws
    assert "1 of 4 sampled requests" in generated(requests(0, 0, 0, 0), old, new).draws


def test_other_draws_do_not_raise_measured_bounds() -> None:
    draws = (6, -2.0), (7, -2.00001)
    old, new = (quantum(request(0, [token], -1.0), request(1, [5], logprob)) for token, logprob in draws)
    bounds = measured([Entry("generate", requests(0, 1), None, old)], [new], 2.0**-23)
    assert bounds.logprob == pytest.approx(2e-5, rel=0.02), "four times the difference, as a share of 2"


@pytest.mark.parametrize("greedy", [0, 1])
def test_a_log_probability_that_is_not_a_number_differs(greedy: int) -> None:
    for token in (0, 5):
        report = generated(requests(greedy), quantum(request(0, [5])), quantum(request(0, [token], math.nan)))
        assert report.verdict == "differs"


def test_one_changed_weight_is_shown_by_a_sum_that_it_changes() -> None:
    old = {"w": np.array(digest(torch.ones(4, 8)))}
    for changed in (1.5, math.nan):
        tensor = torch.ones(4, 8)
        tensor[2, 5] = changed
        new = {"w": np.array(digest(tensor))}
        report = compared([(START, old)], [new])[START]
        was, now = (digests["w"][3 + 5] for digests in (old, new))
        assert (report.verdict, report.first) == ("differs", f"sum 5 of the sketch of w was {was}, and is now {now}")
    tensor = torch.arange(21.0).reshape(3, 7)
    one = np.array(digest(tensor))
    tensor[1, 3] += 0.5
    two = np.array(digest(tensor))
    assert one[0] != two[0] and one[1] == pytest.approx(float(np.linalg.norm(np.arange(21))))
    assert np.abs(two[3:] - one[3:]).sum() == pytest.approx(0.5), "the sketch changes by the change of an element"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_digest_tells_rounding_from_another_update(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(40, 50, generator=generator)
    update = 1e-2 * torch.randn(40, 50, generator=generator)
    rounded = before + update * (1 + 1e-4 * torch.randn(40, 50, generator=generator))

    def verdict(after: torch.Tensor) -> str:
        digests = [{"w": np.array(digest(tensor.to(dtype)))} for tensor in (before, before + update, after)]
        bounds = BOUNDS[str(dtype).removeprefix("torch.")]
        entries = [Entry(START, None, result=digests[0]), Entry(END, None, result=digests[1])]
        start, end = compare(entries, [digests[0], digests[2]], bounds)
        assert start.verdict == "equal"
        return end.verdict

    assert verdict(before + update) == "equal"
    assert dtype != torch.float32 or verdict(rounded) == "within"
    assert verdict(before - update) == verdict(before) == "differs", "another update, and none at all"


def test_golden_runs_of_this_release_can_be_read() -> None:
    runs = sorted(path for path in SHIPPED.iterdir() if path.is_dir())
    sft, grpo = ("megatron", "fsdp", "tp2"), ("megatron", "fsdp", "async", "lora")
    assert {path.name for path in runs} == {*(f"sft_{name}" for name in sft), *(f"grpo_{name}" for name in grpo)}
    several: dict[str, bool] = {}
    for run in runs:
        assert (run / BOUNDS_FILE).exists(), "dagrl certify --measure writes it"
        config = load_run_config(run)
        _, entries = read_tape(run / TAPE)
        phases = {entry.phase for entry in entries}
        assert {START, END} < phases
        norms = [float(entry.result["grad_norm"]) for entry in entries if "grad_norm" in entry.result]
        assert len(norms) >= 3 and min(norms) > 0, "a run that learns nothing certifies nothing"
        assert (config.policy.generation is None) == ("generate" not in phases)
        results = [item for entry in entries for item in entry.result.items()]
        several[run.name] = any(name.endswith("of train worker 1") for name, _ in results)
        sent = [entry.value["greedy"] for entry in entries if entry.phase == "generate" and "greedy" in entry.value.fields]
        assert not sent or 0 < np.concatenate(sent).mean() < 1, "requests that draw, and others that do not"
        crossing = any(name.startswith("versions of") and len(set(column.tolist())) > 1 for name, column in results)
        assert crossing == (run.name == "grpo_async"), "a request across two versions of the weights"
    assert several.pop("sft_tp2") and not any(several.values())


def test_the_certificate_names_versions_phases_and_the_first_difference() -> None:
    report = PhaseReport("train_step", 12)
    report.add("replay 3 of 9: loss", 0.5, 0.6, 1000.0)
    certificate = Certificate("golden/run", {"torch": ("2.11.0", "2.13.0")}, [PhaseReport("generate", 40), report])
    text = certificate_text(certificate)
    assert "torch 2.11.0 -> 2.13.0" in text and "equal bit for bit" in text and "loss was 0.5, and is now 0.6" in text
    assert not certificate.passed and certificate.json()["passed"] is False
    assert not Certificate("golden/empty", {}, []).passed, "nothing was compared"
    report.add("replay 4 of 9: counts", 3, 4, math.inf)
    assert json.loads(json.dumps(certificate.json(), allow_nan=False))["phases"][1]["largest"] is None


def test_the_command_refuses_what_it_cannot_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before the first golden run is executed."""
    golden = shutil.copytree(SHIPPED / "sft_fsdp", tmp_path / "golden")
    (golden / BOUNDS_FILE).write_text('{"logprob": 1e-5}')
    config, report = Path(__file__).parents[3] / "examples" / "grpo_quickstart.yaml", tmp_path / "none" / "f.json"
    for words, says in (
        ((tmp_path, "--json", report), "no tape.json.gz; expected the directory of a golden run"),
        (("golden", "seed=1"), "executed as it was recorded"),
        (("--record", config), "--record takes one GOLDEN"),
        ((tmp_path, "--record", config), "exists; choose another directory"),
        (("--measure",), "--measure takes each GOLDEN"),
        ((SHIPPED / "sft_fsdp", golden), "expected numbers: logprob, gradient, update, rounding"),
    ):
        assert main(["certify", *map(str, words)]) == 2 and says in capsys.readouterr().err
    assert report.parent.is_dir(), "made before minutes of work"


CONFIG = (
    "name: run\nalgorithm: grpo\npolicy: {model_name: models/qwen, generation: {max_new_tokens: 16}}\n"
    "sft: {max_num_steps: 0}\ndata: {path: train.jsonl}\n"
    "grpo: {num_prompts_per_step: 1, num_generations_per_prompt: 4, max_num_steps: 8}\n"
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = make_run(tmp_path, "run")
    (directory / "config.yaml").write_text(CONFIG)
    return directory


def test_recorded_samples_are_the_batch_of_their_step(run: Path) -> None:
    config, rows = load_run_config(run), read_rollouts(rollout_files(run / "rollouts")[2])
    batch = scored_batch(algorithm_of(config), recorded_groups(config, rows))
    assert batch["row_ids"].tolist() == [8, 9, 10, 11], "group 2, four samples each"
    for row, sample in enumerate(rows):
        length = len(sample["prompt_tokens"]) + len(sample["tokens"])
        assert batch["tokens"][row, :length].tolist() == sample["prompt_tokens"] + sample["tokens"]
        assert batch["loss_mask"][row, 3:length].tolist() == [float(one) for one in sample["sampled"]]
        logprobs = np.where(sample["sampled"], sample["logprobs"], 0)
        assert batch["generation_logprobs"][row, 3:length] == pytest.approx(logprobs)
    rewards = np.array([0, 0.25, 0.5, 0.75])
    others = np.array([np.delete(rewards, place) for place in range(4)])
    expected = (rewards - others.mean(1)) / (others.std(1, ddof=1) + 1e-6)  # NeMo-RL's leave-one-out baseline
    np.testing.assert_allclose(batch["advantages"].max(1) + batch["advantages"].min(1), expected, rtol=1e-5)


def test_another_filter_and_shaping_apply_to_recorded_samples(run: Path) -> None:
    rows = [dict(row) for row in read_rollouts(rollout_files(run / "rollouts")[1])]
    rows[1] |= {"finish_reason": "length", "dropped": "overlong"}
    rows[2] |= {"dropped": "no_reward"}
    trained = {}
    for override in ("false", "true"):
        config = load_run_config(run, [f"grpo.overlong_filtering={override}"])
        batch = scored_batch(algorithm_of(config), recorded_groups(config, rows))
        trained[override] = batch["loss_mask"].any(axis=1).tolist()
    assert trained == {"false": [True, True, False, True], "true": [True, False, False, True]}
    shaped = load_run_config(run, ["grpo.reward_shaping.enabled=true", "grpo.reward_shaping.overlong_buffer_length=10"])
    (group,) = recorded_groups(shaped, rows)
    assert group.values[0] == pytest.approx(-0.5), "11 tokens of 16, of which the last 10 cost up to 1"


def test_a_replay_rejects_what_it_cannot_do_before_anything_starts(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.yaml; expected the directory of a run"):
        replay_step(tmp_path, 1, [])
    with pytest.raises(ConfigError, match=r"--step 3: .* has samples of 1 to 2"):
        replay_step(run, 3, [])
    with pytest.raises(ConfigError, match="policy cannot differ in a replay"):
        replay_step(run, 2, ["policy.precision=bfloat16"])
    with pytest.raises(ConfigError, match=r"grpo\.num_generations_per_prompt cannot differ in a replay"):
        replay_step(run, 2, ["grpo.num_generations_per_prompt=2"])
    with pytest.raises(ConfigError, match="algorithm ppo needs values of a critic"):
        replay_step(run, 2, ["algorithm=ppo"])
    (run / "config.yaml").write_text(CONFIG + "loss_fn: {reference_policy_kl_penalty: 0}\n")
    with pytest.raises(ConfigError, match="needs the column reference_logprobs"):
        replay_step(run, 2, ["loss_fn.reference_policy_kl_penalty=0.1"])
    rollout_files(run / "rollouts")[1].unlink()
    with pytest.raises(ConfigError, match="no samples of step 1; choose a step behind a later checkpoint"):
        replay_step(run, 2, [])
    (run / "config.yaml").write_text(CONFIG.replace("grpo\n", "sft\n", 1))
    with pytest.raises(ConfigError, match="steps of runs that learn from samples are replayed"):
        replay_step(run, 2, [])


def test_a_replay_starts_from_the_newest_checkpoint_before_its_step(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    for step in (2, 4, 6):
        with saving(store, TrainState(step)):
            pass
    roots = (tmp_path / "moved", tmp_path / "checkpoints")
    found = [newest_checkpoint(roots, range(step)) for step in (2, 3, 6, 9)]
    assert [start and start.state.step for start in found] == [None, 2, 4, 6]


def test_the_table_has_the_metrics_of_the_whole_step() -> None:
    def side(tokens: float, loss: float, norm: float) -> StepMetrics:
        return StepMetrics(sums={"loss": loss, "valid_tokens": tokens}, shared={"grad_norm": norm})

    first = MinibatchComparison(side(30.0, 1.0, 2.0), side(30.0, 3.0, 1.0), 0.5)
    second = MinibatchComparison(side(10.0, 2.0, 4.0), side(10.0, 5.0, 3.0), 0.5)
    rows = {line[:40].strip(): line[40:].split() for line in report(7, [first, second]).splitlines()}
    assert rows["loss"] == ["1.25", "3.5"], "means over tokens, as in metrics.jsonl"
    assert rows["tokens in the loss"] == ["40", "40"] and rows["gradient norm"] == ["4", "3"], "the largest norm"
    assert rows["cosine of the two gradients"] == ["0.500000,", "0.500000"]
