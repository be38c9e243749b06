"""ParallelLayout: how many workers a role has, and which part of the model and the batch each of them holds.

Ranks follow Megatron-Core's default order `tp-cp-ep-dp-pp`, tensor parallel fastest (`RankGenerator` in
`megatron/core/parallel_state.py`). Dense and expert weights of a pipeline stage are on the same ranks under two different
maps: dense by (tp, cp, dp), experts by (etp, ep, edp).
"""

from dataclasses import dataclass

from dagrl.errors import LayoutError


@dataclass(frozen=True)
class Coordinates:
    """The coordinates of one rank: `tp`, `cp`, `dp`, `pp` for dense weights, `etp`, `ep`, `edp` for experts."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int

    def __str__(self) -> str:
        return f"dp {self.dp}, pp {self.pp}, tp {self.tp}, cp {self.cp}"


@dataclass(frozen=True)
class ParallelLayout:
    """Parallel sizes of a worker group, and the map between a rank and its coordinates.

    Example: `ParallelLayout(dp=2, pp=2, tp=2)` has 8 workers; rank 1 is the second tensor-parallel worker of the first
    shard's first stage; `shard(0)` is `(0, 1, 4, 5)`.

    Raises LayoutError when a size is not positive, or when `etp * ep` does not divide `tp * cp * dp`.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None  # None: equal to tp, as in Megatron
    vpp: int = 1  # virtual pipeline stages per rank
    first_stage_layers: int | None = None  # for an uneven pipeline; None: as many as the stages between
    last_stage_layers: int | None = None

    def __post_init__(self) -> None:
        for name in ("dp", "pp", "tp", "cp", "ep", "vpp"):
            if getattr(self, name) < 1:
                raise LayoutError(f"{name} is {getattr(self, name)}; expected at least 1")
        if self.expert_tp < 1:
            raise LayoutError(f"etp is {self.etp}; expected at least 1")
        if self.stage_size % (self.expert_tp * self.ep):
            raise LayoutError(
                f"expert layout etp {self.expert_tp} x ep {self.ep} does not divide the {self.stage_size} workers of a "
                f"pipeline stage (tp {self.tp} x cp {self.cp} x dp {self.dp}); choose etp and ep whose product "
                "divides it, or 1 and 1 for a model without experts"
            )
        if self.vpp > 1 and self.pp == 1:
            raise LayoutError(f"vpp is {self.vpp} but pp is 1; virtual stages need at least two pipeline stages")
        if self.pp == 1 and (self.first_stage_layers, self.last_stage_layers) != (None, None):
            raise LayoutError("first_stage_layers or last_stage_layers is set, but pp is 1; leave it out")

    def stage_layers(self, layers: int, pp: int, stage: int = 0) -> range:
        """Returns the layers of virtual stage `stage` of pipeline rank `pp`, out of `layers`.

        Follows Megatron-Core's `get_transformer_layer_offset` and `get_num_layers_to_build`: the layers of each rank are cut
        into `vpp` parts, and a round takes one part of every rank. Raises LayoutError if they do not divide.
        """
        counts = self._layers_per_rank(layers)
        if any(count % self.vpp for count in counts):
            raise LayoutError(
                f"{layers} layers give the pipeline ranks {counts}, which are not divisible by vpp {self.vpp}; "
                "choose another virtual_pipeline_model_parallel_size"
            )
        first = stage * layers // self.vpp + sum(counts[:pp]) // self.vpp
        return range(first, first + counts[pp] // self.vpp)

    def _layers_per_rank(self, layers: int) -> list[int]:
        ends = [count for count in (self.first_stage_layers, self.last_stage_layers) if count is not None]
        between = self.pp - len(ends)
        left = layers - sum(ends)
        if left < 0 or left % max(between, 1) or (not between and left):
            raise LayoutError(
                f"{layers} layers are not divisible by pp {self.pp}"
                + (f" with {ends} on the outer stages" if ends else "")
                + "; choose another pipeline_model_parallel_size, or num_layers_in_first_pipeline_stage and "
                "num_layers_in_last_pipeline_stage that leave a multiple"
            )
        middle = [left // max(between, 1)] * between
        first = [] if self.first_stage_layers is None else [self.first_stage_layers]
        return [*first, *middle, *([] if self.last_stage_layers is None else [self.last_stage_layers])]

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel size of the experts."""
        return self.tp if self.etp is None else self.etp

    @property
    def stage_size(self) -> int:
        """Number of workers in one pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def world_size(self) -> int:
        """Number of workers in the group."""
        return self.stage_size * self.pp

    @property
    def shard_size(self) -> int:
        """Number of workers in one data-parallel shard."""
        return self.tp * self.cp * self.pp

    def coordinates(self, rank: int) -> Coordinates:
        """Returns the coordinates of `rank`. Raises LayoutError unless 0 <= rank < world_size."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} is outside a layout of {self.world_size} workers")
        pp, inside = divmod(rank, self.stage_size)
        replica, tp = divmod(inside, self.tp)
        dp, cp = divmod(replica, self.cp)
        expert_replica, etp = divmod(inside, self.expert_tp)
        edp, ep = divmod(expert_replica, self.ep)
        return Coordinates(tp=tp, cp=cp, dp=dp, pp=pp, etp=etp, ep=ep, edp=edp)

    def rank(self, *, dp: int = 0, pp: int = 0, tp: int = 0, cp: int = 0) -> int:
        """Returns the rank at these dense coordinates; the inverse of `coordinates`."""
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def shard(self, dp: int) -> tuple[int, ...]:
        """Returns the ranks of data-parallel shard `dp`, stage by stage, tensor parallel fastest."""
        return tuple(
            self.rank(dp=dp, pp=pp, tp=tp, cp=cp) for pp in range(self.pp) for cp in range(self.cp) for tp in range(self.tp)
        )

    def describe(self) -> str:
        """Names the sizes above one, e.g. `dp2 tp2`, and `etp` if it differs from tp; `single` for one worker."""
        sizes = {"dp": self.dp, "pp": self.pp, "tp": self.tp, "cp": self.cp, "ep": self.ep, "vpp": self.vpp}
        words = [f"{name}{size}" for name, size in sizes.items() if size > 1]
        words += [f"etp{self.expert_tp}"] if self.expert_tp != self.tp else []
        words += [f"first{self.first_stage_layers}"] if self.first_stage_layers is not None else []
        words += [f"last{self.last_stage_layers}"] if self.last_stage_layers is not None else []
        return " ".join(words) or "single"
