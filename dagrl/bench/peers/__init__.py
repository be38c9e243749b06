"""Compares GRPO and SFT steps of `dagrl train` with TRL's trainers and torchtitan, on one GPU, in the same run.

    dagrl bench peers --cases "grpo 0.6b 128" "sft 0.6b 16" [--peers trl trl-packed torchtitan] [--json F]
    dagrl bench peers --cases "grpo 4b 512" --micro 4 --more peers.json --json peers.json
    dagrl bench peers --cases "grpo vl-2b 128" --completion 128       with images of 448 x 448 to 1024 x 768

A case is a kind, a model and the number of sequences of a step. `grpo`: a whole step, with `--prompt` tokens, groups of 8
and completions of `--completion` tokens; with `--median` their lengths are log-normal with sigma 1, and `--completion` is
the longest. `vl-2b` gets an image with each prompt, and dagrl trains it with FSDP workers. `sft`: an optimizer step over
sequences of `--length` tokens, which `trl-packed` packs. Every side runs to its end in each turn and has the GPU alone. All
start from the same checkpoint with random weights, in bfloat16 with float32 master weights, and take one optimizer step per
batch; engines have the same KV cache, attention and number of sequences at once. The first steps do not count. Ratios are
the peer's time over dagrl's. Peers whose package is not installed are left out and reported. `--tiny` also runs without a
GPU, to try the benchmark.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from dagrl.bench import harness
from dagrl.bench.harness import Column, Contest, Take, Turn, execute, medians, train_run
from dagrl.bench.models import SHAPES, write_with_tokenizer
from dagrl.bench.report import Row
from dagrl.bench.train import sft_config
from dagrl.bench.workloads import MODELS, PROMPT, RolloutCase, grpo_config, rollout_case
from dagrl.cli.numbers import count, share, whole
from dagrl.errors import ConfigError

SFT_MICROBATCH = 8
RECORDED = ("0.6b",)
"""Models whose launches take as long as their kernels, so that dagrl records SFT microbatches as CUDA graphs."""


@dataclass(frozen=True)
class Peer:
    """A peer: its package, and the module of its side by kind."""

    package: str
    modules: Mapping[str, str]
    packed: bool = False


PEERS: Mapping[str, Peer] = {
    "trl": Peer("trl", {"grpo": "dagrl.bench.peers.trl", "sft": "dagrl.bench.peers.trl"}),
    "trl-packed": Peer("trl", {"sft": "dagrl.bench.peers.trl"}, packed=True),
    "torchtitan": Peer("torchtitan", {"sft": "dagrl.bench.peers.titan"}),
}
BACKENDS: Mapping[str, tuple[str, ...]] = {
    "megatron": (),
    "fsdp": ("policy.backend=fsdp", "policy.fsdp_cfg.torch_compile=true"),
    "fsdp-eager": ("policy.backend=fsdp", "policy.fsdp_cfg.torch_compile=false"),
}
"""What each of dagrl's sides overrides."""
COLUMNS = (
    Column("tokens/s", "tokens_per_s", "{:,.0f}"),
    Column("KL", "gen_kl_error", "{:.1e}"),
    Column("generate s", "timing_s/generate", "{:.3f}"),
    Column("train s", "timing_s/train_step", "{:.3f}"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    harness.add_arguments(parser)
    cases = ["grpo 0.6b 128", "grpo 0.6b 512", "sft 0.6b 16"]
    parser.add_argument("--cases", nargs="+", default=cases, metavar="CASE", help="'KIND MODEL SEQUENCES' each")
    parser.add_argument(
        "--peers", nargs="*", choices=PEERS, default=list(PEERS), help="or none; default: all installed ones"
    )
    workers = "dagrl's train workers, each a side, or none; default: megatron, or fsdp"
    parser.add_argument("--backends", nargs="*", choices=BACKENDS, help=workers)
    parser.add_argument("--keys", nargs="+", default=[], metavar="A.B=C", help="further keys of dagrl's runs")
    parser.add_argument("--settling", type=whole, default=2, help="first steps of a turn, which do not count (default: 2)")
    parser.add_argument("--steps", type=count, default=4, help="counted steps of a turn")
    parser.add_argument("--prompt", type=count, default=PROMPT, help="tokens of a prompt without an image")
    parser.add_argument("--completion", type=count, default=256, help="tokens of a completion")
    parser.add_argument(
        "--kv-share", type=share, default=0.4, metavar="F", help="most of the GPU for KV cache (default: 0.4)"
    )
    parser.add_argument("--median", type=count, help="median tokens of a completion, if lengths differ")
    parser.add_argument("--length", type=count, default=2048, help="tokens of an SFT sequence")
    parser.add_argument("--micro", type=count, help="sequences of a microbatch; default: 8, in GRPO 16, for 4b 4")
    parser.add_argument("--tiny", action="store_true", help="a narrow model in float32, also without a GPU")


def run(options: argparse.Namespace) -> None:
    missing = {name: PEERS[name].package for name in options.peers if not find_spec(PEERS[name].package)}
    left_out = {name: f"{package} is not installed" for name, package in missing.items()}
    peers = {name: PEERS[name] for name in options.peers if name not in missing}
    with tempfile.TemporaryDirectory() as directory:
        contests = [contest(text, options, peers, Path(directory)) for text in options.cases]
        harness.run(options, contests, COLUMNS, finish, left_out)


def contest(text: str, options: argparse.Namespace, peers: Mapping[str, Peer], directory: Path) -> Contest:
    """Returns the contest of a case. Raises ConfigError if it is malformed or unknown."""
    kind, _, rest = text.partition(" ")
    model, _, sequences = rest.partition(" ")
    if kind not in ("grpo", "sft"):
        raise ConfigError(f"case {text!r}: expected KIND MODEL SEQUENCES, with a kind of grpo or sft; found {kind!r}")
    if kind == "grpo":
        case = rollout_case(
            text,
            model,
            sequences,
            options.completion,
            micro=options.micro,
            tiny=options.tiny,
            kv_share=options.kv_share,
            prompt=options.prompt,
            median=options.median,
        )
        sizes = {"tokens": case.sequences * case.completion, "micro": case.micro, "kv_bytes": case.kv_bytes}
        opened: Callable[[], Any] = partial(grpo_sides, case, options, peers, directory)
    else:
        texts = [name for name, shape in MODELS.items() if not SHAPES[shape].images]
        if model not in texts or not sequences.isdecimal() or int(sequences) < 1:
            raise ConfigError(f"case {text!r}: expected a model of {', '.join(texts)} and a number of sequences")
        micro = min(options.micro or SFT_MICROBATCH, int(sequences))
        sizes = {"tokens": int(sequences) * options.length, "length": options.length, "micro": micro}
        opened = partial(sft_sides, text, model, int(sequences), options, peers, directory)
    return Contest(text, {text: sizes}, opened)


@contextmanager
def grpo_sides(
    case: RolloutCase, options: argparse.Namespace, peers: Mapping[str, Peer], directory: Path
) -> Iterator[dict[str, Take]]:
    """Yields the turns of all sides of GRPO."""
    model, config = write_with_tokenizer(case.shape, directory, case.precision), directory / "grpo.yaml"
    config.write_text(yaml.safe_dump(grpo_config(case, model)))
    order = {"case": asdict(case), "model": str(model), "steps": options.steps + options.settling}
    theirs = {
        name: partial(peer_turn, case.name, peer.modules["grpo"], order, options.settling)
        for name, peer in peers.items()
        if "grpo" in peer.modules
    }
    default = "fsdp" if case.shape.images else "megatron"
    yield {**dagrl_sides(case.name, config, "grpo", options, {}, default), **theirs}


@contextmanager
def sft_sides(
    name: str, size: str, rows: int, options: argparse.Namespace, peers: Mapping[str, Peer], directory: Path
) -> Iterator[dict[str, Take]]:
    """Yields the turns of all sides of SFT."""
    shape, precision = SHAPES[MODELS[size]], "float32" if options.tiny else "bfloat16"
    shape = shape.narrowed() if options.tiny else shape
    model, config = write_with_tokenizer(shape, directory, precision), directory / "sft.yaml"
    micro = min(options.micro or SFT_MICROBATCH, rows)
    values = sft_config(model, rows, options.length, micro, precision)
    del values["policy"]["megatron_cfg"]
    config.write_text(yaml.safe_dump(values))
    recorded = {"megatron": ("policy.megatron_cfg.cuda_graphs=true",)} if size in RECORDED and not options.tiny else {}
    order = {"model": str(model), "shape": dict(shape.config), "rows": rows, "length": options.length, "micro": micro}
    order["steps"] = options.steps + options.settling
    theirs = {
        other: partial(peer_turn, name, peer.modules["sft"], order | {"packed": peer.packed}, options.settling)
        for other, peer in peers.items()
        if "sft" in peer.modules
    }
    yield {**dagrl_sides(name, config, "sft", options, recorded), **theirs}


def dagrl_sides(
    name: str,
    config: Path,
    stage: str,
    options: argparse.Namespace,
    more: Mapping[str, tuple[str, ...]],
    default: str = "megatron",
) -> dict[str, Take]:
    """Returns the turns of dagrl with each backend, the first called `dagrl`. `more` are further overrides of each."""
    turns: dict[str, Take] = {}
    for number, backend in enumerate([default] if options.backends is None else options.backends):
        words = (*BACKENDS[backend], *more.get(backend, ()), *options.keys)
        side = f"dagrl {backend}" if number else "dagrl"
        turns[side] = partial(dagrl_turn, name, config, stage, options.settling, options.steps, words)
    return turns


def dagrl_turn(name: str, config: Path, stage: str, settling: int, steps: int, words: Sequence[str]) -> dict[str, Turn]:
    """Runs `dagrl train`. The last step, which validates, does not count."""
    lines = train_run(config, [*words, f"{stage}.max_num_steps={settling + steps + 1}"])[settling:-1]
    return {name: Turn([line["timing_s/total"] for line in lines], medians(lines, [column.key for column in COLUMNS]))}


def peer_turn(name: str, module: str, order: Mapping[str, Any], settling: int) -> dict[str, Turn]:
    """Runs a peer's process."""
    return {name: Turn(execute(module, order)[settling:])}


def finish(rows: list[Row]) -> list[Row]:
    """Adds the completion tokens (SFT: all tokens) per second."""
    return [row | {"tokens_per_s": row["tokens"] / row["median_s"]} for row in rows]
