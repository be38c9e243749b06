"""The `dagrl` command.

One parser describes all commands (`dagrl --help`); each has a function below, and most a module of this package.

Subcommands import what they need when they run, which keeps `dagrl --help` fast. Exit codes: 0 success, 1 the run failed,
2 an error that the user can fix, 130 interrupted.
"""

from __future__ import annotations

import argparse
import atexit
import errno
import gc
import importlib
import json
import logging
import os
import signal
import stat
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Timer, get_ident
from typing import TYPE_CHECKING, Any, TextIO

from dagrl.attributes import setting
from dagrl.cli.numbers import count, finite, positive, whole
from dagrl.errors import ConfigError, DagrlError, StopRequestedError, UserError
from dagrl.files import require_writable, write_whole
from dagrl.imports import keep_bytecode, require_package

if TYPE_CHECKING:
    from dagrl.run.fork_server import Server

logger = logging.getLogger(__name__)

OVERRIDES = "keys that override the file's; values are YAML"

INTERRUPTED = 130  # 128 + SIGINT, as in shells

COLLECT_EVERY = 10_000
"""New objects after which Python looks for unreachable ones. Imports and data make millions that stay: with Python's 700, a
quarter of the processor time before the first worker starts goes into these looks."""

BENCHES = {
    "overhead": "steps over 1 to 64 workers that do no work: dagrl, Ray's compiled graphs, actor calls",
    "refit": "refits from Megatron to vLLM: broadcasts, vLLM's own transfers, plans, all architectures",
    "step": "whole runs of `dagrl train`: any configuration, with other keys on each side",
    "train": "SFT steps compared with a plain Megatron loop: time, MFU, losses",
    "generate": "the generation of a step, compared with `LLM.generate` and vLLM's async engine",
    "peers": "GRPO and SFT steps compared with TRL and torchtitan",
    "embed": "calls and training steps of verl's worker groups, its own and accelerated ones",
}
"""Modules of `dagrl.bench` and what each measures. Each has `add_arguments(parser)` and `run(options)`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code. Errors become one message on standard error.

    Without `arguments`, the process ends with the command: SIGTERM interrupts it like Ctrl-C from its first moment, and once
    it is ending, neither of them kills it before it has said why it ends.
    """
    if arguments is not None:
        return _main(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.unraisablehook = interrupt_again
    gc.set_threshold(COLLECT_EVERY)
    keep_bytecode()
    try:
        return _main(None)
    except KeyboardInterrupt:  # while a message was written
        return INTERRUPTED
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)


def interrupt_again(dropped: sys.UnraisableHookArgs) -> None:
    """Repeats an interrupt that Python has dropped, as it does with every exception in a `__del__`."""
    if isinstance(dropped.exc_value, KeyboardInterrupt):
        # Not in this function, where it would be dropped, too; and as SIGTERM, for a shell's background job ignores SIGINT.
        Timer(0.01, signal.pthread_kill, [get_ident(), signal.SIGTERM]).start()
    else:
        sys.__unraisablehook__(dropped)


def _main(arguments: Sequence[str] | None) -> int:
    output, errors = Stream(sys.stdout), Stream(sys.stderr)
    with setting(sys, stdout=output, stderr=errors):
        try:
            code = _run(arguments)
        except SystemExit as ended:
            if not isinstance(ended.code, int):  # argparse's is
                raise
            code = ended.code
        if reason := output.end():
            _complain(f"cannot write to standard output: {reason}")
            code = code or 2
        errors.end()
        return code


def _run(arguments: Sequence[str] | None) -> int:
    atexit.register(gc.freeze)  # skips the final collection over torch's and Ray's objects, over 2 s
    options = _parse(arguments)
    command: Callable[[argparse.Namespace], None] = options.command
    try:
        command(options)
    except DagrlError as error:
        if options.debug:
            raise
        _complain(str(error))
        return 2 if isinstance(error, UserError) else 1
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        if options.debug or not (error.filename or full):  # without a file name the user cannot fix it
            raise
        _complain(f"{error.filename or 'cannot write a file'}: {error.strerror}")
        return 2
    except StopRequestedError as stopped:
        _complain(str(stopped))
        return INTERRUPTED
    except KeyboardInterrupt:
        _complain("interrupted")
        from dagrl.run.local_cluster import forget_interrupted_import

        forget_interrupted_import()
        return INTERRUPTED
    return 0


class Stream:
    """Standard output or standard error, flushed after each text. A text that cannot be written is dropped: a run goes on.

    `error` is that of the last text.
    """

    def __init__(self, file: TextIO | None) -> None:
        self._file = file or open(os.devnull, "w", encoding="utf-8")  # None: closed, as by `>&-`
        self.error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        try:
            self._file.write(text)
            self._file.flush()
            self.error = None
        except OSError as error:
            self.error = error
        return len(text)

    def flush(self) -> None:
        """Has been done."""

    def end(self) -> str | None:
        """Returns why the last text was not written; None if it was, or the pipe is closed, as after `| head`."""
        if self.error is None:
            return None
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._file.fileno())  # Python flushes again at its end
        return None if isinstance(self.error, BrokenPipeError) else self.error.strerror


class _Version(argparse.Action):
    """Prints the installed version, and those of its parts. Looks them up only when used."""

    def __call__(self, parser: argparse.ArgumentParser, *unused: object) -> None:
        import platform

        from dagrl.machine import PARTS, package_versions

        versions = "".join(f"{name} {version}\n" for name, version in package_versions(PARTS).items())
        sys.stdout.write(f"{versions}Python {platform.python_version()}\n")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dagrl", description="Post-trains language models on Ray with statically compiled phase graphs."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version, and those of its parts, and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], None], what: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=what)
        added.add_argument("--debug", action="store_true", help="show tracebacks, and log at level DEBUG")
        added.set_defaults(command=run)
        return added

    def add_overrides(to: argparse.ArgumentParser) -> None:
        to.add_argument("overrides", nargs="*", default=[], metavar="a.b=c", help=OVERRIDES)

    def add_config(to: argparse.ArgumentParser, nargs: str | None = None) -> None:
        to.add_argument("config", metavar="CONFIG", nargs=nargs, help="a YAML file, such as examples/grpo_quickstart.yaml")
        add_overrides(to)

    init = command("init", _init, "write a commented configuration from three answers")
    init.add_argument("--model", help="a directory, or an id on the Hugging Face Hub")
    init.add_argument("--data", help="a JSONL, JSON, CSV or Parquet file, or a dataset on disk or on the Hub")
    init.add_argument("--reward", help="math, exact, or an import path such as my_task:reward; '' for SFT")
    init.add_argument("-o", "--output", metavar="F", type=Path, default=Path("my_run.yaml"), help="default: my_run.yaml")

    train = command("train", _train, "train by SFT, DPO, GRPO, PPO or an algorithm of your own")
    add_config(train)
    train.add_argument("--dry-run", action="store_true", help="check everything, print the resolved configuration and exit")

    config = command("config", _config, "print a resolved configuration, or the schema of all keys")
    add_config(config, nargs="?")
    schema = "print the JSON schema: every key, its type, default and meaning"
    config.add_argument("--schema", action="store_true", help=schema)

    examples = command("examples", _examples, "list the examples that come with dagrl, or copy one")
    examples.add_argument("name", metavar="NAME", nargs="?", help="the example to copy, such as grpo_quickstart")
    examples.add_argument("-o", "--output", metavar="DIR", type=Path, default=Path(), help="copy into DIR (default: here)")

    inspect = command(
        "inspect", _inspect, "draw the phase graphs; print buckets and the refit plan, the data as tokens, memory, or time"
    )
    add_config(inspect)
    text = "print the first N examples of the run as tokens: what is trained, where it ends, and what the template adds"
    shown = inspect.add_mutually_exclusive_group()
    shown.add_argument("--text", metavar="N", type=count, nargs="?", const=3, help=f"{text} (default: 3)")
    shown.add_argument("--phase", metavar="P", help="only this key of `phases`, such as train_step")
    shown.add_argument("--memory", action="store_true", help="predict the memory that each role takes of a GPU")
    shown.add_argument("--time", metavar="GPU", help="predict the seconds of a step, by phase, on a GPU such as H200")
    text = "memory of a GPU for --memory (default: this machine's)"
    inspect.add_argument("--gpu-memory", metavar="GIB", type=positive, help=text)
    text = "mean tokens of a completion for --time (default: forced_lengths, or max_new_tokens)"
    inspect.add_argument("--completion", metavar="N", type=positive, help=text)

    evaluate = command("evaluate", _evaluate, "measure a model on held-out prompts: greedy, sampled, pass@k")
    add_config(evaluate)
    add = evaluate.add_argument
    checkpoint = "a Hugging Face directory or Hub id, instead of the configuration's; repeatable, for a table"
    add("--checkpoint", metavar="DIR", action="append", help=checkpoint)
    standard = "a standard set, instead of held-out prompts: gsm8k, math500, ... (see evaluation.sets); repeatable"
    add("--set", metavar="NAME[=PATH]", action="append", help=standard)
    add("--samples", metavar="N", type=whole, default=8, help="sampled completions of a prompt (default: 8)")
    add("--k", metavar="K", type=count, action="append", help="a k of pass@k; repeatable (default: 1 and N)")
    add("--right-from", metavar="R", type=finite, default=1.0, help="reward of a right completion (default: 1)")
    add("--limit", metavar="N", type=count, help="prompts (default: grpo.max_val_samples; of a set all)")
    add("--no-greedy", action="store_true", help="no greedy completion")
    add("--train", action="store_true", help="on the prompts that training uses, not on held-out ones")
    add("--json", metavar="F", type=Path, help="write the metrics, and every completion with its reward, to F")

    export = command("export", _export, "write a checkpoint as a Hugging Face directory")
    export.add_argument("source", metavar="SOURCE", type=Path, help="a checkpoint of a run")
    add_overrides(export)
    export.add_argument("-o", "--output", metavar="TARGET", type=Path, required=True, help="the directory to write")

    replay = command("replay", _replay, "put a step's recorded samples under another loss, advantage or filter")
    replay.add_argument("run", metavar="RUN", type=Path, help="the directory of a run")
    replay.add_argument("--step", metavar="K", type=count, required=True, help="a step that the run has recorded")
    add_overrides(replay)

    certify = command("certify", _certify, "execute golden runs again in this environment, and name what differs")
    add = certify.add_argument
    add("golden", metavar="GOLDEN", nargs="*", type=Path, help="directories of golden runs (default: those of dagrl)")
    add("--record", metavar="CONFIG", help="record the first steps of each stage of CONFIG, with overrides, as GOLDEN")
    add("--steps", metavar="N", type=count, default=3, help="steps of each stage to record (default: 3)")
    add("--measure", action="store_true", help="set the bounds of GOLDEN by what differs here, where nothing is wrong")
    add("--json", metavar="F", type=Path, help="write the certificates to F")
    certify.set_defaults(overrides=[])

    view = command("view", _view, "show a run's curves, samples and conversations in a browser")
    add = view.add_argument
    add("runs", metavar="RUN", nargs="+", type=Path, help="the directory of a run; two are shown next to each other")
    add("--host", default="127.0.0.1", help="address to serve at (default: this machine only)")
    add("--port", type=whole, default=8365, help="port to serve at (default: 8365; 0: any free one)")
    add("--export", metavar="F", type=Path, help="write one HTML file that needs no server, and exit")
    add("--samples", metavar="N", type=whole, default=1000, help="conversations in the exported file (default: 1000)")

    bench = commands.add_parser(
        "bench",
        help="run a benchmark; `dagrl bench --help` lists them",
        epilog="benchmarks (`dagrl bench NAME --help` shows their options):\n"
        + "\n".join(f"  {name:18} {what}" for name, what in BENCHES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench.add_argument("name", choices=BENCHES, metavar="NAME", help="one of the benchmarks below")
    bench.add_argument("arguments", nargs=argparse.REMAINDER, help="options of the benchmark").required = False
    bench.set_defaults(command=_bench, debug=False)

    command("doctor", _doctor, "show versions, GPUs and known problems of this machine")
    return parser


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses arguments. argparse accepts overrides only in one place, so those after an option arrive as unknown words."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    unknown = [word for word in rest if word.startswith("-") or not hasattr(options, "overrides")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


def _init(options: argparse.Namespace) -> None:
    from dagrl.cli.init import ask, check_answers, check_new, config_text

    check_new(options.output)
    _check_outputs(options)
    answers = ask(options.model, options.data, options.reward)
    if unknown := check_answers(answers):
        sys.stdout.write(f"not checked, as the Hugging Face Hub does not answer: {', '.join(unknown)}\n")
    write_whole(options.output, config_text(answers, options.output.stem))
    sys.stdout.write(f"wrote {options.output}; next: dagrl train {options.output} --dry-run\n")


def _train(options: argparse.Namespace) -> None:
    with ExitStack() as stack:
        server = None if options.dry_run else _imports_begun(stack)
        from dagrl.config.file import dump_config, load_config
        from dagrl.telemetry.record import RunPaths, lock_run

        config = load_config(options.config, options.overrides)
        _log(options, config.logger.log_level)
        if options.dry_run:
            from dagrl.run.preflight import preflight

            inputs = preflight(config)
            sys.stdout.write(dump_config(inputs.config, inputs.derived))
            return
        with lock_run(RunPaths.of(config), existing=True):
            pass  # no other run holds it
        server = server or _imports_begun(stack, config.cluster.keep_imports_s > 0)
        from dagrl.run.train import run_with_restarts, train

        run_with_restarts(train, config, server)


def _imports_begun(stack: ExitStack, kept: bool = True) -> Server | None:
    """Begins to import what workers on this machine need, until `stack` ends. None if an earlier run may have kept that."""
    from dagrl.run.fork_server import Server, some_server

    return None if sys.platform != "linux" or (kept and some_server()) else stack.enter_context(Server())


def _config(options: argparse.Namespace) -> None:
    from dagrl.config import Config
    from dagrl.config.file import dump_config, load_config

    if options.schema:
        if options.config is not None:
            raise ConfigError(f"--schema takes no configuration; found {options.config}")
        sys.stdout.write(json.dumps(Config.model_json_schema(), indent=2, ensure_ascii=False) + "\n")
    elif options.config is None:
        raise ConfigError("dagrl config needs a CONFIG, or --schema")
    else:
        from dagrl.run.derive import derive_from_machine

        derived = derive_from_machine(load_config(options.config, options.overrides))
        sys.stdout.write(dump_config(derived.config, derived.reasons))


def _examples(options: argparse.Namespace) -> None:
    from dagrl.cli.examples import copy_example, list_examples

    if options.name is None:
        sys.stdout.write(list_examples())
    else:
        require_writable(options.output, f"-o {options.output}")
        sys.stdout.write("".join(f"{path}\n" for path in copy_example(options.name, options.output)))


def _inspect(options: argparse.Namespace) -> None:
    from rich.console import Console

    from dagrl.cli.inspect import inspect_config, inspect_memory, step_times
    from dagrl.cli.text import text_report
    from dagrl.config.file import load_config
    from dagrl.run.derive import derive_from_machine
    from dagrl.run.step_time import time_table

    _log(options)
    if (options.gpu_memory and not options.memory) or (options.completion and options.time is None):
        raise ConfigError("--gpu-memory needs --memory, and --completion needs --time GPU; add what is missing")
    config = load_config(options.config, options.overrides)
    if options.text is not None:
        sys.stdout.write(text_report(config, options.text, Console()))
    elif options.memory:
        sys.stdout.write(inspect_memory(config, options.gpu_memory))
    elif options.time is not None:
        sys.stdout.write(time_table(*step_times(config, options.time, options.completion), options.time))
    else:
        derived = derive_from_machine(config)
        if derived.lengths_open:
            logger.warning(
                "policy.max_total_sequence_length is open: buckets are shown with %d tokens; a run derives it from its data",
                derived.config.policy.max_total_sequence_length,
            )
        sys.stdout.write(inspect_config(derived.config, options.phase, lengths=not derived.lengths_open))


def _evaluate(options: argparse.Namespace) -> None:
    from dagrl.cli.evaluate import run_evaluation

    _check_outputs(options)
    _log(options, "INFO")
    sys.stdout.write(run_evaluation(options))


def _export(options: argparse.Namespace) -> None:
    from dagrl.run.export import export

    _log(options, "INFO")
    export(options.source, options.output, options.overrides)
    sys.stdout.write(f"wrote {options.output}\n")


def _replay(options: argparse.Namespace) -> None:
    from dagrl.run.counterfactual import replay_step, report

    _log(options)
    sys.stdout.write(report(options.step, replay_step(options.run, options.step, options.overrides)))


def _certify(options: argparse.Namespace) -> None:
    from dagrl.cli.certify import run_certify

    _check_outputs(options)
    _log(options)
    run_certify(options)


def _view(options: argparse.Namespace) -> None:
    from dagrl.cli.view import export, serve

    _check_outputs(options)
    _log(options, "INFO")
    if options.export is not None:
        export(options.runs, options.export, options.samples)
    else:
        serve(options.runs, options.host, options.port)


def _bench(options: argparse.Namespace) -> None:
    module = importlib.import_module(f"dagrl.bench.{options.name}")
    parser = argparse.ArgumentParser(
        prog=f"dagrl bench {options.name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        exit_on_error=False,
    )
    module.add_arguments(parser)
    _log(options)
    try:
        chosen = parser.parse_intermixed_args(options.arguments)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from error
    _check_outputs(chosen)
    module.run(chosen)


def _check_outputs(options: argparse.Namespace) -> None:
    """Raises ConfigError for outputs that cannot be written, before minutes of measuring, and makes their directories."""
    for flag, name in (("--json", "json"), ("--plot", "plot"), ("--export", "export"), ("-o", "output")):
        path = getattr(options, name, None)
        if path is not None:
            if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):  # root would replace /dev/null by a file
                raise ConfigError(f"{flag} {path} is a directory, a link or a device; expected: a file, or a new name")
            require_writable(path.parent, f"{flag} {path}")
            path.parent.mkdir(parents=True, exist_ok=True)
    if getattr(options, "plot", None) is not None:
        require_package("matplotlib", f"--plot {options.plot}", otherwise=", or leave --plot out")


def _doctor(options: argparse.Namespace) -> None:
    from dagrl.cli.doctor import examine, show

    _log(options)
    show(examine())


def _log(options: argparse.Namespace, level: str = "WARNING") -> None:
    """Logs to standard error: everything with `--debug`, else from `level` on."""
    from rich.console import Console

    from dagrl.telemetry.progress import log_handler

    logging.basicConfig(level="WARNING", format="%(message)s", handlers=[log_handler(Console(stderr=True))])
    logging.getLogger("dagrl").setLevel("DEBUG" if options.debug else level)


def _complain(message: str) -> None:
    sys.stderr.write(f"dagrl: error: {message}\n")


if __name__ == "__main__":
    sys.exit(main())
