"""Exports a checkpoint of a run as a Hugging Face directory.

    export(Path("runs/a/checkpoints/step_00000100"), Path("model"), [])

Only train workers start: one, unless overrides say otherwise, as checkpoints are readable at any layout. It gets a GPU if
this machine shows one; nothing is computed with the model.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from dagrl.config import FsdpLayoutConfig, MegatronConfig
from dagrl.config.file import load_config
from dagrl.config.roles import TRAIN
from dagrl.errors import ConfigError
from dagrl.files import require_writable
from dagrl.imports import load_class
from dagrl.run.checkpoint_store import load_checkpoint_directory
from dagrl.run.checkpoints import load_role
from dagrl.run.cluster import gpus_per_worker
from dagrl.run.fleet import Fleet
from dagrl.run.model import load_tokenizer, save_tokenizer
from dagrl.run.start import with_absolute_paths
from dagrl.run.stop import stop_on_signals
from dagrl.run.worker_protocols import HuggingFaceExporter
from dagrl.runtime.worker import check_worker_class
from dagrl.telemetry.progress import Progress

ONE_WORKER = (
    *(
        f"policy.megatron_cfg.{name}={json.dumps(key.default)}"
        for name, key in MegatronConfig.model_fields.items()
        if name.endswith(("_size", "_stage")) or name in ("sequence_parallel", "cuda_graphs")
    ),
    *(f"policy.fsdp_cfg.{name}=1" for name in FsdpLayoutConfig.model_fields),
    *(f"cluster.{name}=null" for name in ("address", "num_gpus", "gpus_per_worker")),
)
UNUSED = ("policy.fsdp_cfg.torch_compile=false", "policy.sequence_packing={enabled: false}")
"""Without them a worker compiles layers to try packed rows, which takes most of a minute on a CPU."""


def export(source: Path, target: Path, overrides: Sequence[str]) -> None:
    """Writes the policy of the checkpoint `source` and its tokenizer to the new directory `target`.

    Raises a UserError if `source` is not a checkpoint of a run, or if `target` exists.
    """
    if target.exists():
        raise ConfigError(f"{target} exists already; remove it, or name another directory with -o")
    require_writable(target.parent, f"-o {target}")
    saved = source.absolute().parent.parent / "config.yaml"
    if not saved.is_file():
        raise ConfigError(
            f"{source} is not a checkpoint in a run's directory (no {saved}); expected one, such as "
            "runs/my_run/checkpoints/step_00000100"
        )
    checkpoint = load_checkpoint_directory(source.absolute())
    config = load_config(saved, [*ONE_WORKER, *UNUSED, *overrides])
    worker = load_class(config.policy.worker, "policy.worker")
    check_worker_class(worker, (HuggingFaceExporter,), (), "policy.worker")
    model = saved.with_name("init_model") if config.policy.random_init is not None else Path(str(config.policy.model_name))
    config = with_absolute_paths(config, model)
    shown = Progress(config.logger, Console(stderr=True))
    with shown as progress, stop_on_signals(saves=False) as stop, stop.at_once(), Fleet() as fleet:
        progress.stage("Starting Ray, and importing what a train worker needs")
        fleet.begin_imports(config, {TRAIN: worker})
        fleet.begin_cluster(config)
        tokenizer = load_tokenizer(config.policy, fleet.apart)
        fleet.join(config)
        stop.listen()
        progress.stage(f"Starting a train worker on {'a GPU' if gpus_per_worker(config.cluster) else 'the CPU'}")
        with fleet.single_group(config, TRAIN) as group:
            progress.stage(f"Loading {source}")
            load_role(group, TRAIN, checkpoint.directory, config.timeouts.checkpoint)
            progress.stage(f"Writing {target}")
            group.call("export_hf", str(target.absolute()), deadline=config.timeouts.checkpoint)
        save_tokenizer(config.policy, tokenizer, target)
