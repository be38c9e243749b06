"""A sharded model without weights and without other ranks, for checks before a run and for refit plans without one.

Imported only where torch is.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import DistributedConfig
from transformers.utils.generic import ContextManagers
from transformers.utils.logging import disable_progress_bar, get_verbosity, set_verbosity, set_verbosity_error

from dagrl.config import Json, PolicyConfig
from dagrl.errors import CheckpointError, ConfigError, UserError, error_line
from dagrl.runtime.layout import ParallelLayout
from dagrl.workers.families.hf_config import SCALAR_HEAD
from dagrl.workers.fsdp.architecture import find_class, find_config
from dagrl.workers.fsdp.model import HiddenStates, Meshes, check_report, forget_meshes, shard_model, sharded_class
from dagrl.workers.train.groups import destroy_groups
from dagrl.workers.train.hf_load import INDEX, check_stored, stored_parameters

logger = logging.getLogger(__name__)


def check_files(policy: PolicyConfig, hf_config: Mapping[str, Json]) -> None:
    """Raises CheckpointError for a checkpoint of which transformers would not load each parameter.

    It loads parameters without memory, which have the names and shapes of the files' headers. Those in MXFP4, which it
    would dequantize, are not compared.
    """
    scalar, directory = bool(hf_config.get(SCALAR_HEAD)), policy.model_name
    assert directory is not None, "a model from a seed has no files"
    config = find_config(policy, hf_config, scalar=scalar)
    kind, stored, index = find_class(policy, config, scalar=scalar), stored_parameters(directory), Path(directory, INDEX)
    if index.exists() and not isinstance(json.loads(index.read_text()).get("metadata"), dict):
        raise CheckpointError(f'{index} has no "metadata", which transformers reads: add "metadata": {{}} to its object')
    quantized = config.__dict__.pop("quantization_config", None) or {}

    def prepare(model: Any) -> None:
        """Leaves out values of new parameters, and raises nothing for those that transformers fails to join."""
        adjust = model._adjust_missing_and_unexpected_keys

        def note(info: Any) -> None:
            info.conversion_errors.clear()
            adjust(info)

        model._adjust_missing_and_unexpected_keys, model._initialize_missing_keys = note, lambda _: None

    shapes = {name: torch.empty(one.shape, device="meta") for name, one in stored.items()}
    before = get_verbosity()
    disable_progress_bar()
    set_verbosity_error()
    try:
        model, report = sharded_class(kind, torch.device("meta"), prepare).from_pretrained(
            None,
            config=config,
            state_dict=shapes,
            dtype=torch.float32,
            distributed_config=DistributedConfig(),
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    finally:
        set_verbosity(before)
    for name in sorted(model.state_dict().keys() & stored):
        check_stored(name, stored[name], stored[name].shape)
    method = quantized.get("quant_method")
    if (report["missing_keys"] or report["mismatched_keys"]) and method not in (None, "mxfp4"):
        raise CheckpointError(
            f"{directory} is quantized ({method}); training starts from plain weights: dequantize it first"
        )
    if method is None:
        check_report(directory, report)
    if (others := sorted(report["unexpected_keys"])) and method is None and not scalar:  # which has no vocabulary's head
        text = "%s has %d parameters that the model of its config.json does not have, such as %r; they are not read"
        logger.warning(text, directory, len(others), others[0])


def build(kind: Any, config: Any, attention: str | None) -> Any:
    """Returns a model of this class without weights. Raises ConfigError for an attention that it cannot use."""
    with ContextManagers(kind.get_init_context(torch.float32, False, False, False)):  # of `from_pretrained`
        try:
            model = kind._from_config(config, dtype=torch.float32, attn_implementation=attention)
        except (ImportError, ValueError) as error:
            if attention is None:
                raise
            raise ConfigError(
                f"policy.fsdp_cfg.attn_implementation is {attention}, which {kind.__name__} cannot use here: "
                f"{error_line(error)} Choose another one, or leave it out"
            ) from error
    if getattr(model.config, "is_decoder", True) or config.model_type.startswith("gpt_neox"):  # which are always decoders
        return model
    raise ConfigError(
        f"the model is an encoder, whose tokens see later ones: config.json has is_decoder = false, for {kind.__name__}; "
        "expected a causal language model: choose another one"
    )


@contextmanager
def dry_model(
    policy: PolicyConfig, hf_config: Mapping[str, Json], layout: ParallelLayout, rank: int
) -> Iterator[HiddenStates]:
    """Context of what `rank` of `layout` will hold. Raises ConfigError, with the library's own words, if it cannot be."""
    settings, device = policy.fsdp_cfg, torch.device("cpu")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        scalar = bool(hf_config.get(SCALAR_HEAD))
        config = find_config(policy, hf_config, scalar=scalar)
        kind: Any = find_class(policy, config, scalar=scalar)
        model = build(kind, config, settings.attn_implementation)
        meshes = Meshes.of(layout, settings.data_parallel_replicas, device)
        root = shard_model(model, policy, meshes, device, trains=True)
    except UserError:
        raise
    except Exception as error:  # architectures raise anything
        raise ConfigError(
            f"transformers cannot build a {hf_config.get('model_type')} in the layout {layout.describe()}: "
            f"{error_line(error)}"
        ) from error
    else:
        yield root
    finally:
        forget_meshes()
        destroy_groups()  # they are fake, and have no threads
