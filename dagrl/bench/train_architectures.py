"""Trains every text architecture that transformers and the installed vLLM build at tiny size, and compares with plain torch.

    python -m dagrl.bench.train_architectures --json F                     the rows that F lacks
    python -m dagrl.bench.train_architectures --json F --names Gemma3ForCausalLM    some of them, again

For each architecture transformers builds a tiny model with random float32 weights. FSDP workers take three SFT steps and two
GRPO steps with it, on two data-, tensor-, context- or expert-parallel ranks (`--layouts`), with padded rows and with packed
ones where the model can be packed. Losses and gradient norms must be those of transformers and AdamW in one process, row by
row without padding: to 1e-5, relative to values above 1. Before and after each GRPO step a refit sends the weights to a vLLM
engine, whose samples must have a `gen_kl_error` of at most 1e-6. Each architecture has its own processes, and a deadline. On
a machine with GPUs each process has one, for engines whose kernels CPUs lack; of two, vLLM shares the second.
"""

import argparse
import json
import multiprocessing
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import yaml
from torch import Tensor

from dagrl.bench.forked import own_threads, reason_of, run_forked
from dagrl.bench.tiny_configs import tiny_model, transformers_class
from dagrl.channels import ChannelSpec
from dagrl.channels.spec import ChannelKind
from dagrl.cli.numbers import positive
from dagrl.config import Config, OptimizerConfig
from dagrl.machine import gpu_count
from dagrl.refit import TIED_HEAD, plan_refit
from dagrl.rl.losses import kl_estimate
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.shapes import Batch
from dagrl.runtime.split import split_rows
from dagrl.runtime.store import reserve_port
from dagrl.runtime.worker import WorkerContext
from dagrl.telemetry.metrics import merge_step_metrics
from dagrl.workers.fsdp import FsdpWorker
from dagrl.workers.train.hf_load import read_hf_config
from dagrl.workers.vllm import VllmWorker
from dagrl.workers.vllm.environment import vllm_environment
from dagrl.workers.vllm.launch import import_vllm

LAYOUTS: Mapping[str, Mapping[str, int]] = {
    "dp2": {"data_parallel_size": 2},
    "tp2": {"tensor_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "ep2": {"data_parallel_size": 2, "expert_parallel_size": 2},
}
STEPS = ("likelihood",) * 3 + ("policy",) * 2
COMPARED = (0, 3, 4, 5)
"""The numbers of steps after which samples are compared: with the weights that vLLM has loaded itself, then after refits."""
WIDTH, NEW_TOKENS, TEMPERATURE = 22, 8, 0.7
LARGEST_KL = 1e-6
TOLERANCE = 1e-5
REASONS = Path(__file__).with_suffix(".yaml")  # which no error on a CPU tells
PACKED = {"enabled": True, "train_mb_tokens": 44, "logprob_mb_tokens": 44}
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class TrainRow:
    """One architecture in one layout: whether it trains as plain torch and generates as it trains, otherwise the reason.

    `loss_difference`, `norm_difference` (of norms above 1 relative) and `gen_kl`: the largest ones.
    """

    architecture: str
    layout: str
    passed: bool
    reason: str = ""
    loss_difference: float | None = None
    norm_difference: float | None = None
    gen_kl: float | None = None


class MemberError(Exception):
    """A worker raised this: class, message, and place in the code."""


@dataclass(frozen=True)
class Case:
    """What rows of an architecture share: directory, batch, plain torch's steps of these kinds, and what it can do."""

    model: Path
    batch: Batch
    truth: Sequence[tuple[float, float]]
    kinds: Sequence[str]
    packing: Mapping[str, Any]
    keys: Mapping[str, Any] = field(default_factory=dict)
    generates: bool = True
    layouts: Mapping[str, Mapping[str, int]] = field(default_factory=lambda: LAYOUTS)

    def config(self, layout: str, packing: Mapping[str, Any]) -> Config:
        """Returns the configuration of a run in a layout."""
        return make_config(self.model, self.layouts[layout], packing).with_keys(self.keys)


Prepare = Callable[[str, Path], Case]
"""Writes an architecture's tiny model below a directory. Raises NoTinyConfigError if there is none."""


def main() -> None:
    """Tries all text architectures."""
    os.environ.update(vllm_environment(make_config(Path(), {}, {})))
    import_vllm({})
    run_table(str(__doc__), text_architectures(), list(LAYOUTS), _text_case)


def text_architectures() -> list[str]:
    """Returns the names of transformers' models that vLLM has too, and of those that it serves by transformers' modules."""
    from transformers.models.auto import modeling_auto as auto
    from vllm.model_executor.models import registry

    known, served = registry._TEXT_GENERATION_MODELS, registry._TRANSFORMERS_SUPPORTED_MODELS
    names = [*known, *(name for name, (_, built) in served.items() if "MultiModal" not in built)]
    images = set(auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values())
    for config, built in auto.MODEL_FOR_CAUSAL_LM_MAPPING.items():
        part = hasattr(config, "is_decoder") or "Assistant" in built.__name__  # of a model with an encoder, or a draft model
        other = part or built.__name__ in registry._VLLM_MODELS
        names += [built.__name__] if not other and built.is_backend_compatible() else []
    return [name for name in names if name not in images and transformers_class(name) is not None]


def run_table(document: str, names: Sequence[str], layouts: Sequence[str], prepare: Prepare) -> None:
    """Reads the command line, and writes a row for each architecture and layout as soon as it is done."""
    parser = argparse.ArgumentParser(description=document.partition("\n")[0])
    parser.add_argument("--names", nargs="+", choices=names, metavar="NAME")
    parser.add_argument("--layouts", nargs="+", choices=layouts, default=layouts)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=positive, default=300.0)
    options = parser.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    torch.set_num_threads(1)
    known = json.loads(options.json.read_text()) if options.json and options.json.exists() else []
    rows = {name: [TrainRow(**row) for row in known if row["architecture"] == name] for name in names}
    for name in options.names or names:
        wanted = [layout for layout in options.layouts if options.names or layout not in {row.layout for row in rows[name]}]
        if not wanted:
            continue
        tried = try_architecture(name, wanted, options.seconds, prepare)
        kept = [row for row in rows[name] if row.layout not in wanted]
        rows[name] = sorted((*kept, *tried), key=lambda row: [*LAYOUTS].index(row.layout))
        for row in tried:
            sys.stdout.write(f"{'passed' if row.passed else 'FAILED'} {row.architecture} {row.layout} {row.reason}\n")
        sys.stdout.flush()
        if options.json:
            text = ",\n".join(json.dumps(asdict(row)) for some in rows.values() for row in some)
            options.json.write_text(f"[\n{text}\n]\n")
    done = [row for some in rows.values() for row in some]
    sys.stdout.write(f"{sum(row.passed for row in done)} of {len(done)} passed\n")


def try_architecture(name: str, layouts: Sequence[str], seconds: float, prepare: Prepare) -> list[TrainRow]:
    """Returns a row for each layout. A crash or a hang is a reason like any other."""
    with tempfile.TemporaryDirectory() as root:
        reason = run_forked(_train_all, (name, layouts, Path(root), prepare), seconds)
        report = Path(root, "rows.json")
        rows = [TrainRow(**row) for row in json.loads(report.read_text())] if report.exists() else []
    done = {row.layout for row in rows}
    return rows + [TrainRow(name, layout, False, reason) for layout in layouts if reason and layout not in done]


def _train_all(name: str, layouts: Sequence[str], root: Path, prepare: Prepare) -> None:
    """Writes `rows.json` in `root`, with a row for each layout as soon as it is done.

    The plain steps are a process's own: a backward pass counts the GPUs, after which forked processes cannot use them.
    """
    reason = run_forked(lambda: (root / "case").write_bytes(pickle.dumps(prepare(name, root))), ())
    case: Case | None = None if reason else pickle.loads((root / "case").read_bytes())  # noqa: S301
    rows: list[TrainRow] = []
    for layout in layouts if case is None else [layout for layout in layouts if layout in case.layouts]:
        rows.append(TrainRow(name, layout, False, reason) if case is None else _row(name, layout, case))
        (root / "rows.json").write_text(json.dumps([asdict(row) for row in rows]))


def _text_case(name: str, root: Path) -> Case:
    from dagrl.workers.fsdp.model import DISPATCH

    model, layouts, built = root / "model", {**LAYOUTS}, tiny_model(name, seed=0).float()
    built.save_pretrained(model)  # type: ignore[operator]
    if not any(hasattr(part, "experts") for part in built.modules()):
        del layouts["ep2"]
    elif built.ep_plan and DISPATCH not in built.ep_plan.values():  # type: ignore[operator]
        layouts["ep2"] = {"tensor_parallel_size": 2, "expert_parallel_size": 2}  # each with all tokens
    return Case(model, make_batch(), plain_steps(model), STEPS, PACKED, layouts=layouts)


def _row(name: str, layout: str, case: Case) -> TrainRow:
    losses, norms, divergences, reason = 0.0, 0.0, [], ""
    notes = {kind: f"; {known[name]}" for kind, known in yaml.safe_load(REASONS.read_text()).items() if name in known}
    for packing in ({}, case.packing):
        config = case.config(layout, packing)
        if refusal := run_forked(FsdpWorker.check, (config, read_hf_config(case.model))):  # apart: DTensor keeps its mesh
            if packing and "sequence_packing" in refusal:
                reason = f"padded rows alone: {refusal.partition('which has ')[2].partition(';')[0]}"
                break
            return TrainRow(name, layout, False, refusal)
        try:
            steps, kl = sharded_steps(config, case, generates=case.generates and not packing)
        except MemberError as error:
            return TrainRow(name, layout, False, str(error))
        (loss, norm), wrong = compare(steps, case.truth)
        losses, norms = max(losses, loss), max(norms, norm)
        if wrong:
            wrong = f"{'packed' if packing else 'padded'}: {wrong}{notes.get('losses', '')}"
            return TrainRow(name, layout, False, wrong, losses, norms)
        if isinstance(kl, str):
            return TrainRow(name, layout, False, f"trains; does not generate: {kl}{notes.get('samples', '')}", losses, norms)
        divergences += kl
    before, *after = divergences or (0.0, 0.0)
    if max(after) > LARGEST_KL:
        reason = f"gen_kl_error is {max(after):.1e} after refits, {before:.1e} with the weights that vLLM has loaded itself"
        reason += notes.get("samples", "")
    return TrainRow(name, layout, max(after) <= LARGEST_KL, reason, losses, norms, max(after) if divergences else None)


def compare(steps: Sequence[tuple[float, float]], truth: Sequence[tuple[float, float]]) -> tuple[list[float], str]:
    """Returns the largest differences of a loss and of a norm, and the first step that is not right; empty if all are."""
    found, expected = np.array(steps), np.array(truth)  # [steps, 2]
    differences, sizes = abs(found - expected), np.maximum(abs(expected), 1.0)
    wrong = [
        f"step {number} has loss {loss:.6f} and norm {norm:.5f}, expected {true_loss:.6f} and {true_norm:.5f}"
        for number, ((loss, norm), (true_loss, true_norm)) in enumerate(zip(steps, truth, strict=True), 1)
        if not (differences[number - 1] < TOLERANCE * sizes[number - 1]).all()
    ]
    return [differences[:, 0].max(), (differences / sizes)[:, 1].max()], next(iter(wrong), "")


def make_config(model: Path, layout: Mapping[str, int], packing: Mapping[str, Any]) -> Config:
    """Returns the configuration of a run."""
    engine = {"max_num_seqs": 8, "kv_cache_memory_bytes": 64 << 20, "gpu_memory_utilization": 0.02, "enforce_eager": True}
    policy = {
        "model_name": str(model),
        "backend": "fsdp",
        "fsdp_cfg": dict(layout),
        "train_micro_batch_size": 2,
        "max_total_sequence_length": 32,
        "optimizer": {"lr": 1e-3, "adam_eps": 1e-6},
        "generation": {"temperature": TEMPERATURE, "vllm_cfg": engine},
        "sequence_packing": dict(packing),
    }
    loss = {"reference_policy_kl_penalty": 0.0}
    return Config.model_validate({"name": "tiny", "algorithm": "grpo", "data": {}, "policy": policy, "loss_fn": loss})


def make_batch() -> Batch:
    """Returns rows of very different lengths, for both kinds of steps."""
    generator = np.random.default_rng(11)
    lengths = np.array([22, 5, 17, 3, 21, 9, 4, 13], dtype=np.int64)
    inside = np.arange(WIDTH) < lengths[:, None]
    mask = (inside & (np.arange(WIDTH) >= 1)).astype(np.float32)
    shape = len(lengths), WIDTH
    fields: dict[str, Any] = {
        "tokens": generator.integers(8, 250, shape) * inside,
        "lengths": lengths,
        "loss_mask": mask,
        "advantages": generator.normal(size=(len(lengths), 1)).astype(np.float32) * mask,
        "generation_logprobs": generator.normal(-5.5, 0.3, shape).astype(np.float32) * mask,
        "prev_logprobs": generator.normal(-5.5, 0.3, shape).astype(np.float32) * mask,
    }
    return Batch(fields, {"global_valid_tokens": float(mask.sum()), "global_valid_sequences": float(len(lengths))})


def plain_steps(directory: Path) -> list[tuple[float, float]]:
    """Returns loss and gradient norm of each step of transformers' model with AdamW, in one process."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    losses = [partial(_plain_loss, model, make_batch(), kind) for kind in STEPS]
    return adam_steps(model, make_config(directory, {}, {}).policy.optimizer, losses)


def adam_steps(model: Any, wanted: OptimizerConfig, losses: Sequence[Callable[[], Tensor]]) -> list[tuple[float, float]]:
    """Returns loss and gradient norm of each step of AdamW."""
    groups = [
        {"params": [one for one in model.parameters() if (one.ndim > 1) is matrices], "weight_decay": decay}
        for matrices, decay in ((True, wanted.weight_decay), (False, 0.0))
    ]
    adam = torch.optim.AdamW(groups, lr=wanted.lr, betas=(wanted.adam_beta1, wanted.adam_beta2), eps=wanted.adam_eps)
    found = []
    for loss_of in losses:
        adam.zero_grad()
        loss = loss_of()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), wanted.clip_grad)
        adam.step()
        found.append((loss.item(), norm.item()))
    return found


def _plain_loss(model: Any, batch: Batch, kind: str) -> Tensor:
    total = torch.zeros(())
    for row, length in enumerate(batch["lengths"].tolist()):
        tokens = torch.tensor(batch["tokens"][row, :length])
        logits = model(tokens[None], use_cache=False).logits[0, :-1].float() / (TEMPERATURE if kind == "policy" else 1.0)
        logprobs = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        if kind == "likelihood":
            total = total - logprobs.sum()
            continue
        before, advantages = (torch.tensor(batch[name][row, 1:length]) for name in ("prev_logprobs", "advantages"))
        ratio = (logprobs - before).exp()
        total = total - torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()
    return total / batch.number("global_valid_tokens")


class Member:
    """A worker in a forked process."""

    def __init__(self, kind: Any, config: Config, layout: ParallelLayout, rank: int, device: int) -> None:
        fork = multiprocessing.get_context("fork")
        self._pipe, theirs = fork.Pipe()
        context = WorkerContext("worker", rank, layout, config.seed, TIMEOUT_S)
        self.process = fork.Process(target=_serve, args=(theirs, kind, context, config, device), daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, method: str, *arguments: Any) -> Self:
        """Calls a method of the worker."""
        self._pipe.send((method, arguments))
        return self

    def result(self) -> Any:
        """Waits for the call. Raises MemberError if it failed."""
        try:
            result = self._pipe.recv()
        except EOFError:
            self.process.join()
            raise MemberError(f"the process ended with {self.process.exitcode}") from None
        if isinstance(result, MemberError):
            raise result
        return result


def _serve(pipe: Connection, kind: Any, context: WorkerContext, config: Config, device: int) -> None:
    own_threads()
    os.environ["LOCAL_RANK"] = str(device)
    worker = kind(context, config)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(getattr(worker, method)(*arguments))
        except Exception as error:
            pipe.send(MemberError(reason_of(error)))


@contextmanager
def members(kind: Any, config: Config, layout: ParallelLayout, first: int = 0) -> Iterator[list[Member]]:
    """Context of the workers of a group, set up. `first`: the first one's GPU, if there are some."""
    started = [Member(kind, config, layout, rank, first + rank) for rank in range(layout.world_size)]
    try:
        together(started, "prepare", [()] * len(started))
        together(started, "setup", [(f"127.0.0.1:{reserve_port()}",)] * len(started))
        yield started
    finally:
        for member in started:
            member.process.kill()
            member.process.join()


def together(called: Sequence[Member], method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Calls a method of several workers at the same time."""
    for member, own in zip(called, arguments, strict=True):
        member.begin(method, *own)
    results, errors = [], []
    for member in called:
        try:
            results.append(member.result())
        except MemberError as error:
            errors.append(error)
    if errors:  # peers of a rank that failed have lost a connection
        raise min(errors, key=lambda error: "gloo" in str(error).lower())
    return results


def sharded_steps(config: Config, case: Case, *, generates: bool) -> tuple[list[tuple[float, float]], list[float] | str]:
    """Returns the same numbers of the steps of FSDP workers, and `gen_kl_error` in `COMPARED`, or why there is none."""
    layout, batch = config.policy.train_layout, case.batch
    shards = [batch.select(rows) for rows in split_rows(batch["lengths"], layout.dp)]
    steps: list[tuple[float, float]] = []
    divergences: list[float] | str = []
    with ExitStack() as stack:
        ranks = stack.enter_context(members(FsdpWorker, config, layout))
        engine: Member | None = None
        for number, kind in enumerate(("", *case.kinds)):
            if kind:
                own = [(shards[layout.coordinates(rank).dp], kind) for rank in range(layout.world_size)]
                step = merge_step_metrics(together(ranks, "train_step", own)).flat()
                steps.append((step["loss"], step["grad_norm"]))
            if not generates or number not in COMPARED or isinstance(divergences, str):
                continue
            try:
                if engine is None:
                    device = min(layout.world_size, max(gpu_count(), 1) - 1)
                    [engine] = stack.enter_context(members(VllmWorker, config, ParallelLayout(), device))
                    _connect(ranks, engine, config)
                else:
                    engine.begin("receive_weights", number)
                    together(ranks, "send_weights", [(number,)] * len(ranks))
                    engine.result()
                divergences.append(_divergence(ranks, engine, layout))
            except MemberError as error:
                divergences = str(error)
    return steps, divergences


def _connect(ranks: Sequence[Member], engine: Member, config: Config) -> None:
    """Plans the refit and opens its channel."""
    hf_config = read_hf_config(Path(str(config.policy.model_name)))
    sources, wanted = together(ranks, "weight_slices", [()] * len(ranks)), engine.begin("weight_slices").result()
    aliases = TIED_HEAD if hf_config.get("tie_word_embeddings") else None
    plan, address = plan_refit(sources, [wanted], dtype="float32", aliases=aliases), f"127.0.0.1:{reserve_port()}"
    kind: ChannelKind = "nccl" if gpu_count() > len(ranks) else "ipc" if gpu_count() else "gloo"
    specs = [(plan.for_rank(rank), ChannelSpec(kind, address, rank, plan.size, TIMEOUT_S)) for rank in range(plan.size)]
    together([*ranks, engine], "prepare_refit", specs)


def _divergence(ranks: Sequence[Member], engine: Member, layout: ParallelLayout) -> float:
    """Returns `gen_kl_error` of samples of the engine: KL(generation || train) per token, estimated by k3."""
    prompts = make_batch()
    lengths = np.minimum(prompts["lengths"], WIDTH - NEW_TOKENS)
    ids = np.arange(len(lengths))
    fields = {"tokens": prompts["tokens"], "lengths": lengths, "request_ids": ids, "seeds": ids + 5}
    limits = {"max_new_tokens": np.full(len(ids), NEW_TOKENS), "greedy": np.zeros(len(ids), np.int64)}
    made = engine.begin("generate", Batch({**fields, **limits}, {"engine_steps": 4 * NEW_TOKENS})).result()
    tokens, logprobs = prompts["tokens"].copy(), np.zeros((len(ids), WIDTH), np.float32)
    ends = lengths.copy()
    for row, request in enumerate(made.request_ids.tolist()):
        new = slice(lengths[request], lengths[request] + made.lengths[row])
        tokens[request, new], ends[request] = made.tokens[row, : made.lengths[row]], new.stop
        logprobs[request, new] = made.logprobs[row, : made.lengths[row]]
    places = np.arange(WIDTH)
    mask = ((places >= lengths[:, None]) & (places < ends[:, None])).astype(np.float32)
    samples = Batch({"tokens": tokens * (places < ends[:, None]), "lengths": ends, "loss_mask": mask}, prompts.scalars)
    rows = split_rows(ends, layout.dp)
    shards = [(samples.select(rows[layout.coordinates(rank).dp]),) for rank in range(layout.world_size)]
    trained = np.zeros_like(logprobs)
    for rank, part in enumerate(together(ranks, "logprobs", shards)):
        if part is not None:
            trained[rows[layout.coordinates(rank).dp]] = part["logprobs"]
    difference = torch.tensor((logprobs - trained)[mask > 0])
    return float(kl_estimate(difference, torch.zeros_like(difference), "k3").mean())


if __name__ == "__main__":
    main()
