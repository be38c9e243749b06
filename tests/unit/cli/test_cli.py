"""The `dagrl` command: fast help, exit codes, dry runs, and what evaluate and export reject before anything starts."""

import errno
import json
import os
import platform
import re
import signal
import sys
import time
import tomllib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import yaml

from dagrl.cli.main import interrupt_again, main
from dagrl.config import Config
from dagrl.config.file import dump_config, load_config
from dagrl.errors import ChannelError, ConfigError, RunError
from dagrl.run.cluster import gpus_per_worker
from dagrl.run.derive import derive_from_machine
from dagrl.run.model import character_tokenizer, write_random_model

ROOT = Path(__file__).parents[3]
EXAMPLE = "examples/sft_quickstart.yaml"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def dagrl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command in the repository. Returns its exit code, and what it writes to both streams."""
    monkeypatch.chdir(ROOT)

    def run(*words: str | Path) -> tuple[int, str, str]:
        try:
            code = main([str(word) for word in words])
        except SystemExit as stopped:
            code = stopped.code
        return (code, *capsys.readouterr())

    return run


@pytest.mark.parametrize(
    "words", ["train EXAMPLE --dry-run seed=5", "train EXAMPLE seed=5 --dry-run", "config EXAMPLE seed=5"]
)
def test_the_resolved_configuration_is_printed(words: str, dagrl: Run) -> None:
    code, shown, _ = dagrl(*words.replace("EXAMPLE", EXAMPLE).split())
    resolved = Config.model_validate(yaml.safe_load(shown))
    assert (code, resolved.seed, resolved.policy.backend) == (0, 5, "megatron")
    if words.startswith("config"):
        assert resolved == derive_from_machine(load_config(EXAMPLE, ["seed=5"])).config


def test_config_schema_describes_every_key_of_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    sections = {"Config": schema, **schema["$defs"]}
    lr = sections["OptimizerConfig"]["properties"]["lr"]
    assert (lr["type"], lr["default"], lr["exclusiveMinimum"]) == ("number", 1e-6, 0)
    undescribed = [
        f"{name}.{key}"
        for name, section in sections.items()
        for key, field in section.get("properties", {}).items()
        if not field.get("description") and not sections[field["$ref"].rpartition("/")[2]]["description"]
    ]
    assert undescribed == []


def test_the_readmes_command_for_your_own_data(tmp_path: Path, dagrl: Run, caplog: pytest.LogCaptureFixture) -> None:
    """It keeps the checkpoint's chat template."""
    turns = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    (tmp_path / "train.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 20)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    quickstart = load_config(ROOT / EXAMPLE).policy.random_init
    write_random_model(quickstart, character_tokenizer("12+", template), tmp_path / "model")
    command = re.search(r"^dagrl (train examples/sft_own_data.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert command is not None
    words = command[1].replace("/models/Qwen3-0.6B", str(tmp_path / "model")).replace("=train", f"={tmp_path / 'train'}")
    words = f"{words} output_dir={tmp_path} --dry-run"
    assert dagrl(*words.split())[0] == 0 and "chat_template" not in caplog.text
    with caplog.at_level("WARNING", "dagrl"):
        assert dagrl(*words.split(), "policy.tokenizer.chat_template='{{ x }}'")[0] == 2
    assert "policy.tokenizer.chat_template replaces" in caplog.text


def test_an_interrupted_import_of_ray_is_not_ended(dagrl: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end would import it again, and fail."""
    ended, unregister = MagicMock(), MagicMock()
    monkeypatch.setattr("dagrl.cli.init.ask", MagicMock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr("atexit.unregister", unregister)
    monkeypatch.setitem(sys.modules, "ray._private.worker", ended)
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert dagrl("init")[0] == 130
    unregister.assert_called_once_with(ended.shutdown)


def test_an_interrupt_in_a_destructor_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of regex's patterns while they are compiled. Python drops the exception."""
    monkeypatch.setattr("sys.unraisablehook", interrupt_again)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as in `main`
    with pytest.raises(KeyboardInterrupt):
        type("Dropped", (), {"__del__": lambda _: signal.default_int_handler(signal.SIGINT, None)})()
        time.sleep(5)
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("mine"), 2), (ChannelError("broken"), 1), (KeyboardInterrupt(), 130)]
)
def test_exit_codes(error: BaseException, code: int, dagrl: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagrl.run.train.run_session", MagicMock(side_effect=error))
    assert dagrl("train", EXAMPLE) == (code, "", f"dagrl: error: {str(error) or 'interrupted'}\n")


def test_a_path_that_cannot_be_written_is_one_message(dagrl: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "drawn.mmd")
    quota = OSError(errno.EDQUOT, "Disk quota exceeded")  # as a write raises it
    monkeypatch.setattr("dagrl.cli.inspect.inspect_config", MagicMock(side_effect=[full, quota, full]))
    assert dagrl("inspect", EXAMPLE) == (2, "", "dagrl: error: drawn.mmd: No space left on device\n")
    assert dagrl("inspect", EXAMPLE) == (2, "", "dagrl: error: cannot write a file: Disk quota exceeded\n")
    with pytest.raises(OSError, match="No space"):
        dagrl("inspect", EXAMPLE, "--debug")


@pytest.mark.parametrize("words", [["config", "--schema"], ["doctor"], ["inspect", EXAMPLE, "--text"]])
def test_a_closed_output_is_no_error(words: list[str], dagrl: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `dagrl config --schema | head`."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as gone:
        monkeypatch.setattr("sys.stdout", gone)
        assert dagrl(*words) == (0, "", "")
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert dagrl(*words) == (2, "", "dagrl: error: cannot write to standard output: No space left on device\n")
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(f"sys.{name}", None)
        assert dagrl(*words) == (0, "", "")
    assert dagrl("train", "no.yaml") == (2, "", "")


def test_an_unusable_checkpoint_is_found_by_a_dry_run_and_changes_nothing(tmp_path: Path, dagrl: Run) -> None:
    run = tmp_path / "runs" / "sft_quickstart"
    (run / "checkpoints" / "step_00000010").mkdir(parents=True)
    (run / "config.yaml").touch()
    before = sorted(tmp_path.rglob("*"))
    for dry_run in (["--dry-run"], []):
        code, _, errors = dagrl("train", EXAMPLE, f"output_dir={run.parent}", "checkpointing.resume=true", *dry_run)
        assert code == 2 and "step_00000010 has no manifest.json" in errors
    assert sorted(tmp_path.rglob("*")) == before


def test_version(dagrl: Run) -> None:
    code, text, _ = dagrl("--version")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    shown = dict(line.split() for line in text.splitlines())
    assert code == 0 and next(iter(shown)) == "dagrl" and shown["dagrl"] == project["version"]
    assert (shown["ray"], shown["torch"]) == (version("ray"), version("torch"))
    assert shown["Python"] == platform.python_version()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train"], "the following arguments are required: CONFIG"),
        (["inspect"], "the following arguments are required: CONFIG"),
        (["inspect", EXAMPLE, "--completion", "0"], "argument --completion: found '0'; expected a number above 0"),
        (["inspect", EXAMPLE, "--time", "H200", "--gpu-memory", "80"], "--gpu-memory needs --memory, and"),
        (["inspect", EXAMPLE, "--completion", "9"], "--gpu-memory needs --memory, and --completion needs"),
        (["inspect", EXAMPLE, "--memory", "--time", "H200"], "argument --time: not allowed with argument --memory"),
        (["bench"], "the following arguments are required: NAME"),
        (["train", EXAMPLE, "--dry", "--fast"], "unrecognized arguments: --fast"),
        (["config"], "dagrl config needs a CONFIG, or --schema"),
        (["config", "--schema", EXAMPLE], "--schema takes no configuration; found"),
        (["init", "--model", "m", "--data", "d", "--reward", "", "-o", "/proc/x.yaml"], "-o /proc/x.yaml: cannot write in"),
        (["view", "docs", "--export", "docs"], "--export docs is a directory, a link or a device; expected: a file"),
        (["view", "docs", "--export", "/dev/stdout"], "--export /dev/stdout is a directory, a link or a device; expected"),
        (["view", "docs", "--samples", "-1"], "argument --samples: found '-1'; expected a whole number of 0 or more"),
        (["examples", "own_loss", "-o", "/proc/x"], "-o /proc/x: cannot write in /proc"),
        (["examples", "own_loss", "-o", "README.md"], "-o README.md: cannot write in"),
        (["bench", "overhead", "--json", "/proc/x/y.json"], "--json /proc/x/y.json: cannot write in /proc"),
        (["bench", "overhead", "--plot", "step.png"], "--plot step.png needs the package 'matplotlib'"),
        (["bench", "overhead", "--workers", "0"], "argument --workers: found '0'; expected a whole number of 1 or more"),
        (["bench", "peers", "--kv-share", "2"], "argument --kv-share: found '2'; expected a number above 0, of 1 at most"),
        (["bench", "step", "--deadline", "nan"], "argument --deadline: found 'nan'; expected a number above 0"),
        (["evaluate", EXAMPLE, "--right-from", "nan"], "argument --right-from: found 'nan'; expected a finite number"),
        (["bench", "step", "--sides", "synch"], "--sides: found 'synch'; expected 'NAME: a.b=c ...' or one of sync; eager"),
    ],
)
def test_arguments_are_checked_first(words: list[str], message: str, dagrl: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, errors = dagrl(*words)
    assert code == 2 and re.search(rf"^dagrl( \w+)?: error: {re.escape(message)}", errors, re.MULTILINE)


def test_benchmark_settings_are_in_the_wheel() -> None:
    """All data files that the modules of `bench` read."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for path in set((ROOT / "bench").rglob("*.yaml")) - set((ROOT / "bench" / "results").rglob("*")):
        package = ".".join(("dagrl", *path.relative_to(ROOT).parts[:-1]))
        assert any(path.match(pattern) for pattern in data[package]), path


GRPO = "examples/grpo_quickstart.yaml"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([EXAMPLE], "add algorithm=grpo and reward.function="),
        ([GRPO, "--samples", "0", "--no-greedy"], "nothing to generate"),
        ([GRPO, "--samples", "4", "--k", "8"], "pass@8: expected a k of 1 to 4"),
        ([GRPO, "--checkpoint", "examples"], "examples is not a Hugging Face directory: it has no config.json"),
        ([GRPO, "data.task=null", "data.path=examples/data/arithmetic.jsonl", "data.val_fraction=0"], "no held-out prompts"),
    ],
)
def test_bad_arguments_are_errors(arguments: list[str], message: str, tmp_path: Path, dagrl: Run, monkeypatch: Any) -> None:
    for begun in ("begin_imports", "begin_cluster"):
        monkeypatch.setattr(f"dagrl.run.fleet.Fleet.{begun}", lambda *_: None)
    code, _, errors = dagrl("evaluate", *arguments, f"output_dir={tmp_path}")
    assert code == 2 and message in errors


@pytest.mark.parametrize(
    "source, message",
    [
        ("nothing", "nothing is not a checkpoint in a run's directory"),
        ("/", "/ is not a checkpoint"),
        ("run/checkpoints/step_00000001", "does not exist; expected the directory of a checkpoint"),
    ],
)
def test_export_rejects_a_source_that_is_no_checkpoint(source: str, message: str, tmp_path: Path, dagrl: Run) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").touch()
    code, _, errors = dagrl("export", tmp_path / source, "-o", tmp_path / "out")
    assert code == 2 and message in errors and not (tmp_path / "out").exists()
    code, _, errors = dagrl("export", tmp_path, "-o", tmp_path)
    assert code == 2 and "exists already; remove it" in errors


def test_a_worker_that_cannot_export_is_an_error(tmp_path: Path, dagrl: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagrl.run.export.load_checkpoint_directory", MagicMock())
    config = load_config(ROOT / EXAMPLE, ["policy.worker=tests.integration.unigram_workers:UnigramTrainer"])
    (tmp_path / "config.yaml").write_text(dump_config(config))
    code, _, errors = dagrl("export", tmp_path / "checkpoints/step_00000001", "-o", tmp_path / "model")
    assert code == 2 and "it has no method export_hf; expected export_hf(directory: str)" in errors


def test_an_export_computes_nothing_and_needs_no_gpu(tmp_path: Path, dagrl: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run whose saved configuration says what eight GPUs make of it."""
    started = MagicMock(side_effect=RunError("far enough"))
    monkeypatch.setattr("dagrl.run.export.load_checkpoint_directory", MagicMock())
    monkeypatch.setattr("dagrl.run.fleet.Fleet.begin_imports", started)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    derived = ["policy.sequence_packing.enabled=true", "policy.fsdp_cfg.torch_compile=true"]
    config = load_config(ROOT / EXAMPLE, ["cluster.num_gpus=8", "cluster.gpus_per_worker=1", *derived])
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert dagrl("export", tmp_path / "checkpoints/step_00000001", "-o", tmp_path / "model")[0] != 0
    config = started.call_args.args[0]
    assert gpus_per_worker(config.cluster) == 0
    assert not config.policy.sequence_packing.enabled and not config.policy.fsdp_cfg.torch_compile
