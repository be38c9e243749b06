"""Converts models between checkpoints of the train workers (Megatron's distributed format) and Hugging Face directories.

    convert(Path("runs/a/checkpoints/step_00000100"), Path("model"), [])     # -> a Hugging Face directory
    convert(Path("model"), Path("runs/b"), [])                               # -> runs/b/checkpoints/step_00000000
    convert(Path("model/adapter"), Path("runs/c"), [])                       # the same, with adapters in PEFT's format

Only train workers start: one, unless overrides say otherwise, as checkpoints are readable at any layout.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from dagrl.config import Config, Json
from dagrl.config.file import dump_config, load_config
from dagrl.config.roles import TRAIN
from dagrl.errors import ConfigError
from dagrl.files import require_writable, write_whole
from dagrl.run.checkpoint_store import CheckpointStore, TrainState, load_checkpoint_directory
from dagrl.run.checkpoints import load_role
from dagrl.run.derive import derive_from_machine
from dagrl.run.fleet import single_group
from dagrl.run.hub import with_local_models
from dagrl.run.model import CONFIG, load_tokenizer
from dagrl.run.start import with_absolute_paths
from dagrl.telemetry.record import RunPaths

ADAPTERS = "adapter_config.json"
"""The file of PEFT's that says what adapters are, and of which model."""

PEFT_KEYS = {"r": "dim", "lora_alpha": "alpha", "use_rslora": "use_rslora"}

SIZES = (
    "data_parallel",
    "tensor_model_parallel",
    "pipeline_model_parallel",
    "virtual_pipeline_model_parallel",
    "context_parallel",
    "expert_model_parallel",
)
ONE_WORKER = (
    *(f"policy.megatron_cfg.{name}_size=1" for name in SIZES),
    "policy.megatron_cfg.expert_tensor_parallel_size=null",
    "policy.megatron_cfg.num_layers_in_first_pipeline_stage=null",
    "policy.megatron_cfg.num_layers_in_last_pipeline_stage=null",
    "policy.megatron_cfg.sequence_parallel=false",
    "policy.megatron_cfg.cuda_graphs=false",
    "cluster.address=null",
)


def convert(source: Path, target: Path, overrides: Sequence[str]) -> Path:
    """Converts in the direction that `source` asks for; returns what was written.

    Raises a UserError if `source` is neither a checkpoint nor in Hugging Face's or PEFT's format, or if `target` exists.
    """
    if target.exists():
        raise ConfigError(f"{target} exists already; remove it, or name another directory with -o")
    require_writable(target.parent, f"-o {target}")
    if (source / ADAPTERS).is_file():
        return _import(_adapted(source), target, overrides)
    if (source / CONFIG).is_file():
        return _import({"model_name": str(source.absolute())}, target, overrides)
    return _export(source, target, overrides)


def _export(source: Path, target: Path, overrides: Sequence[str]) -> Path:
    """Writes the policy of a checkpoint of a run as a Hugging Face directory."""
    saved = source.absolute().parent.parent / "config.yaml"
    if not saved.is_file():
        raise ConfigError(
            f"{source} is neither a Hugging Face directory (no {CONFIG}) nor one of PEFT's (no {ADAPTERS}) nor a checkpoint "
            f"in a run's directory (no {saved}); expected one, such as runs/my_run/checkpoints/step_00000100"
        )
    checkpoint = load_checkpoint_directory(source.absolute())
    config = load_config(saved, [*ONE_WORKER, *overrides])
    model = saved.with_name("init_model") if config.policy.random_init is not None else Path(str(config.policy.model_name))
    tokenizer = load_tokenizer(config.policy)
    with single_group(with_absolute_paths(config, model), TRAIN) as group:
        load_role(group, TRAIN, checkpoint.directory, config.timeouts.checkpoint)
        group.call("export_hf", str(target.absolute()), deadline=config.timeouts.checkpoint)
    tokenizer.save_pretrained(target)
    return target


def _import(policy: Mapping[str, Json], target: Path, overrides: Sequence[str]) -> Path:
    """Writes the model of the section `policy` as step 0 of a run in `target`, with the configuration that reads it."""
    config, _ = with_local_models(_import_config(policy, target, overrides))
    load_tokenizer(config.policy)
    with single_group(with_absolute_paths(config, Path(str(config.policy.model_name))), TRAIN) as group:
        paths = RunPaths.of(config)
        paths.directory.mkdir(parents=True)
        write_whole(paths.config, dump_config(config))
        store = CheckpointStore(paths.checkpoints)
        store.recover(resume=False)
        with store.saving(TrainState(0)) as part:
            group.call("save_checkpoint", str(part / TRAIN), deadline=config.timeouts.checkpoint)
    return paths.checkpoints / "step_00000000"


def _adapted(source: Path) -> dict[str, Json]:
    """Returns the section `policy` of the adapters in PEFT's format, on the base model that they name."""
    file = source / ADAPTERS
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
        base, targets = saved["base_model_name_or_path"], saved["target_modules"]
        settings = {key: saved[name] for name, key in PEFT_KEYS.items() if name in saved}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"cannot read {file}: {error!r}; expected what PEFT's `save_pretrained` writes for LoRA"
        ) from error
    if not isinstance(base, str) or not isinstance(targets, list):
        raise ConfigError(
            f"{file} has base_model_name_or_path {base!r} and target_modules {targets!r}; expected a directory or an id on "
            "the Hub, and a list of names: set them in the file"
        )
    peft = {"enabled": True, "adapter_path": str(source.absolute()), "target_modules": targets, **settings}
    return {"model_name": base, "peft": peft}


def _import_config(policy: Mapping[str, Json], target: Path, overrides: Sequence[str]) -> Config:
    content = {
        "name": target.name,
        "algorithm": "sft",
        "output_dir": str(target.absolute().parent),
        "policy": dict(policy),
        "data": {},
    }
    with TemporaryDirectory(prefix="dagrl-") as made:
        file = Path(made, "config.yaml")
        file.write_text(yaml.safe_dump(content), encoding="utf-8")
        return derive_from_machine(load_config(file, [*ONE_WORKER, *overrides])).config
