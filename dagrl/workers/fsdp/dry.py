"""A sharded model without weights and without other ranks, for checks before a run and for refit plans without one.

Imported only where torch is.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.utils.generic import ContextManagers

from dagrl.config import Json, PolicyConfig
from dagrl.errors import ConfigError, UserError, error_line
from dagrl.runtime.layout import ParallelLayout
from dagrl.workers.families.hf_config import SCALAR_HEAD
from dagrl.workers.fsdp.architecture import find_class, find_config
from dagrl.workers.fsdp.model import HiddenStates, Meshes, forget_meshes, shard_model
from dagrl.workers.train.groups import destroy_groups


def build(kind: Any, config: Any, attention: str | None) -> Any:
    """Returns a model of this class without weights. Raises ConfigError for an attention that it cannot use."""
    with ContextManagers(kind.get_init_context(torch.float32, False, False, False)):  # of `from_pretrained`
        try:
            return kind._from_config(config, dtype=torch.float32, attn_implementation=attention)
        except (ImportError, ValueError) as error:
            if attention is None:
                raise
            raise ConfigError(
                f"policy.fsdp_cfg.attn_implementation is {attention}, which {kind.__name__} cannot use here: "
                f"{error_line(error)} Choose another one, or leave it out"
            ) from error


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
