"""Converts models between checkpoints of the train workers (Megatron's distributed format) and Hugging Face directories.

    export_checkpoint(Path("runs/a/checkpoints/step_00000100"), Path("model"), [])     # -> a Hugging Face directory
    import_model(Path("model"), Path("runs/b"), [])                                    # -> runs/b/checkpoints/step_00000000

Only train workers start: one, unless overrides say otherwise, as checkpoints are readable at any layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from dagrl.config import Config
from dagrl.config.file import dump_config, load_config
from dagrl.errors import ConfigError
from dagrl.files import require_writable, write_whole
from dagrl.run.alone import worker_group
from dagrl.run.checkpoints import CheckpointStore, TrainState, load_checkpoint_directory
from dagrl.run.derive import derive_from_machine
from dagrl.run.model import CONFIG, load_tokenizer
from dagrl.run.start import with_absolute_paths
from dagrl.telemetry.record import RunPaths

TRAIN = "train"
"""The role, and the name of its part of a checkpoint."""

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

    Raises a UserError if `source` is neither a checkpoint nor a Hugging Face directory, or if `target` exists.
    """
    if target.exists():
        raise ConfigError(f"{target} exists already; remove it, or name another directory with -o")
    require_writable(target.parent, f"-o {target}")
    if (source / CONFIG).is_file():
        return import_model(source, target, overrides)
    return export_checkpoint(source, target, overrides)


def export_checkpoint(source: Path, target: Path, overrides: Sequence[str]) -> Path:
    """Writes the policy of a checkpoint of a run as a Hugging Face directory."""
    saved = source.absolute().parents[1] / "config.yaml"
    if not saved.is_file():
        raise ConfigError(
            f"{source} is neither a Hugging Face directory (no {CONFIG}) nor a checkpoint in a run's directory "
            f"(no {saved}); expected one, such as runs/my_run/checkpoints/step_00000100"
        )
    checkpoint = load_checkpoint_directory(source.absolute())
    config = load_config(saved, [*ONE_WORKER, *overrides])
    model = saved.with_name("init_model") if config.policy.random_init is not None else Path(str(config.policy.model_name))
    tokenizer = load_tokenizer(config.policy)
    with worker_group(with_absolute_paths(config, model), TRAIN) as group:
        group.call("load_checkpoint", str(checkpoint.directory / TRAIN), deadline=config.timeouts.checkpoint)
        group.call("export_hf", str(target.absolute()), deadline=config.timeouts.checkpoint)
    tokenizer.save_pretrained(target)
    return target


def import_model(source: Path, target: Path, overrides: Sequence[str]) -> Path:
    """Writes a Hugging Face directory as step 0 of a run in `target`, with the configuration that reads it."""
    config = _import_config(source, target, overrides)
    load_tokenizer(config.policy)
    with worker_group(with_absolute_paths(config, source), TRAIN) as group:
        paths = RunPaths.of(config)
        paths.directory.mkdir(parents=True)
        write_whole(paths.config, dump_config(config))
        store = CheckpointStore(paths.checkpoints)
        store.recover(resume=False)
        with store.saving(TrainState(0)) as part:
            group.call("save_checkpoint", str(part / TRAIN), {}, deadline=config.timeouts.checkpoint)
    return paths.checkpoints / "step_00000000"


def _import_config(source: Path, target: Path, overrides: Sequence[str]) -> Config:
    content = {
        "name": target.name,
        "algorithm": "sft",
        "output_dir": str(target.absolute().parent),
        "policy": {"model_name": str(source.absolute())},
        "data": {},
    }
    with TemporaryDirectory(prefix="dagrl-") as made:
        file = Path(made, "config.yaml")
        file.write_text(yaml.safe_dump(content), encoding="utf-8")
        return derive_from_machine(load_config(file, [*ONE_WORKER, *overrides])).config
