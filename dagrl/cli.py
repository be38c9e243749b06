"""The `dagrl` command: `dagrl train CONFIG [a.b=c ...]`, `dagrl inspect CONFIG [--phase P] [-o F]`,
`dagrl bench SUITE [...]`, `dagrl doctor`.

Subcommands import what they need when they run, so that `dagrl --help` answers at once. Exit codes: 0 done, 1 the run
failed, 2 something the user can mend, 130 interrupted.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dagrl.errors import ConfigError, DagrlError, UserError
from dagrl.files import require_writable
from dagrl.imports import require_package
from dagrl.loops.stop import StopRequestedError

if TYPE_CHECKING:
    from dagrl.config import Config

INTERRUPTED = 130  # 128 + SIGINT, as shells have it


BENCHES = {
    "overhead": "what a step costs before any work is done, over 1 to 64 workers, five ways",
    "step_overhead": "what a step costs beyond its workers' own time, compiled and eager",
    "refit": "weights from Megatron's modules to vLLM's, beside broadcasts",
    "refit_plan": "planning refits of models at full size, without weights: time and memory",
    "train": "training steps beside a plain Megatron loop: time, MFU, losses",
    "step": "GRPO steps, synchronous, asynchronous and with updates in flight",
    "compare": "GRPO steps beside the same step in plain Ray calls",
    "curves": "reward by step and by minute, synchronous and asynchronous",
    "packing": "padding, dynamic microbatches and sequence packing",
    "optimizer_offload": "optimizer state that leaves the GPU for log-probabilities",
    "reference_weights": "the reference policy in host memory or on the GPU",
}
"""Modules of the package `bench`, each with `add_arguments(parser)` and `run(options)`, and a word on each."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; errors become one message on standard error."""
    atexit.register(gc.freeze)  # else the interpreter, as it ends, looks through all that torch and Ray made: 2 s and more
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
        if options.debug or error.filename is None:  # without a file's name it is no path that the user could mend
            raise
        _complain(f"{error.filename}: {error.strerror}")
        return 2
    except StopRequestedError as stopped:
        _complain(str(stopped))
        return INTERRUPTED
    except KeyboardInterrupt:
        _complain("interrupted")
        return INTERRUPTED
    return 0


class _Version(argparse.Action):
    """Prints the installed version; looked up only when asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *unused: object) -> None:
        from importlib.metadata import version

        sys.stdout.write(f"dagrl {version('dagrl')}\n")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dagrl", description="SFT and GRPO on Ray with statically compiled phase graphs.")
    parser.add_argument("--version", action=_Version, nargs=0, help="say which version this is")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error, and log more")
    configured = argparse.ArgumentParser(add_help=False, parents=[common])
    configured.add_argument("config", metavar="CONFIG", help="a YAML file, such as examples/grpo_quickstart.yaml")
    configured.add_argument(
        "overrides", nargs="*", default=[], metavar="a.b=c", help="keys to set over those of the file; values are YAML"
    )

    train = commands.add_parser("train", parents=[configured], help="train by SFT or GRPO, as the configuration says")
    train.add_argument("--dry-run", action="store_true", help="check everything, print the resolved configuration, and stop")
    train.set_defaults(command=_train)

    inspect = commands.add_parser(
        "inspect", parents=[configured], help="draw the phase graphs, print buckets and the refit plan"
    )
    inspect.add_argument("--phase", metavar="P", help="only this one of `phases`, such as train_step")
    inspect.add_argument("-o", "--output", metavar="F", type=Path, help="draw into F, a .svg, .mmd or .md file")
    inspect.set_defaults(command=_inspect)

    names = "\n".join(f"  {name:18} {what}" for name, what in BENCHES.items())
    bench = commands.add_parser(
        "bench",
        help="measure; `dagrl bench --help` lists what",
        epilog=f"what to measure (`dagrl bench NAME --help` says more):\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench.add_argument("name", choices=BENCHES, metavar="NAME", help="what to measure, one of those below")
    bench.add_argument("arguments", nargs=argparse.REMAINDER, help="options of that measurement").required = False
    bench.set_defaults(command=_bench, debug=False)

    doctor = commands.add_parser("doctor", parents=[common], help="say what this machine has, and what is known not to work")
    doctor.set_defaults(command=_doctor)
    return parser


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """argparse takes overrides in one run only, so those after an option come back as unknown words."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    unknown = [word for word in rest if word.startswith("-") or not hasattr(options, "overrides")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


def _train(options: argparse.Namespace) -> None:
    from dagrl.config.file import dump_config, load_config

    config = load_config(options.config, options.overrides)
    _log(options, config.logger.log_level)
    if options.dry_run:
        from dagrl.preflight import preflight

        preflight(config)
        sys.stdout.write(dump_config(config))
        return
    _run(config)


def _run(config: Config) -> None:
    from dagrl.loops.restart import run_with_restarts

    if config.algorithm == "sft":
        from dagrl.loops.sft import run_sft

        run_with_restarts(run_sft, config)
    else:
        from dagrl.loops.grpo import run_grpo

        run_with_restarts(run_grpo, config)


def _inspect(options: argparse.Namespace) -> None:
    from dagrl.config.file import load_config
    from dagrl.inspect import inspect_config

    _log(options)
    sys.stdout.write(inspect_config(load_config(options.config, options.overrides), options.phase, options.output))


def _bench(options: argparse.Namespace) -> None:
    require_package("bench", f"dagrl bench {options.name}", otherwise=" from the repository")
    module = importlib.import_module(f"bench.{options.name}")
    parser = argparse.ArgumentParser(
        prog=f"dagrl bench {options.name}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.add_arguments(parser)
    _log(options)
    chosen = parser.parse_intermixed_args(options.arguments)
    _check_outputs(chosen)
    module.run(chosen)


def _check_outputs(options: argparse.Namespace) -> None:
    """Refuse files that could not be written, before the minutes that are measured."""
    for name in ("json", "plot"):
        path = getattr(options, name, None)
        if path is not None:
            if path.is_dir():
                raise ConfigError(f"--{name} {path}: this is a directory; name a file")
            require_writable(path.parent, f"--{name} {path}")
    if getattr(options, "plot", None) is not None:
        require_package("matplotlib", f"--plot {options.plot}", otherwise=", or leave --plot out")


def _doctor(options: argparse.Namespace) -> None:
    from dagrl.doctor import examine, show

    _log(options)
    show(examine())


def _log(options: argparse.Namespace, level: str = "WARNING") -> None:
    """Log to standard error: all with `--debug`, else from `level` on."""
    from rich.console import Console
    from rich.logging import RichHandler

    handler = RichHandler(console=Console(stderr=True), show_path=False, log_time_format="%H:%M:%S")
    logging.basicConfig(level="WARNING", format="%(message)s", handlers=[handler])
    logging.getLogger("dagrl").setLevel("DEBUG" if options.debug else level)


def _complain(message: str) -> None:
    sys.stderr.write(f"dagrl: error: {message}\n")


if __name__ == "__main__":
    sys.exit(main())
