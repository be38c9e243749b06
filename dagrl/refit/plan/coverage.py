"""Coverage: which sources hold each part that a destination wants, and the proof that each element is written once."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dagrl.errors import RefitPlanError
from dagrl.refit.fp8 import BLOCK
from dagrl.refit.slices import STACKED, Box, WeightSlice, expand, intersect, stacked_name, volume

SlicesOfRanks = list[tuple[Sequence[WeightSlice], tuple[int, ...]]]  # distinct slice lists, each with the ranks that have it


@dataclass(frozen=True, eq=False)
class Replicas:
    """The ranks that hold one box, and the slice in which each of them holds it."""

    ranks: tuple[int, ...]
    slices: Mapping[int, WeightSlice]


SourceIndex = Mapping[str, Mapping[Box, Replicas]]  # parameter name -> box -> the ranks that hold it


@dataclass(frozen=True, eq=False, slots=True)
class SourcePart:
    """A box that one source can send as a whole. All destinations that want it share one object."""

    name: str
    box: Box
    replicas: Replicas


@dataclass(frozen=True, eq=False, slots=True)
class PlacedPart:
    """A part, and the destination slice that it is written to."""

    part: SourcePart
    target: WeightSlice

    @property
    def target_local(self) -> Box:
        """The box of the destination tensor that is written."""
        return local_box(self.target, self.part.box)


def local_box(whole: WeightSlice, box: Box) -> Box:
    """Returns the box of the local tensor of `held` that stores `box`, which is inside `held.box`."""
    if box == whole.box:
        return whole.local
    lead = len(whole.local) - len(box)
    inner = zip(whole.local[lead:], whole.box, box, strict=True)
    return whole.local[:lead] + tuple((at + lo - start, at + hi - start) for (at, _), (start, _), (lo, hi) in inner)


def subtract(box: Box, hole: Box) -> list[Box]:
    """Returns `box` without `hole`, which is inside it, as disjoint boxes."""
    rest: list[Box] = []
    core = list(box)
    for dim, ((start, stop), (low, high)) in enumerate(zip(box, hole, strict=True)):
        for edge in ((start, low), (high, stop)):
            if edge[0] < edge[1]:
                rest.append((*core[:dim], edge, *core[dim + 1 :]))
        core[dim] = (low, high)
    return rest


def split(box: Box, elements: int, blocks: bool = False) -> Iterator[Box]:
    """Yields `box` in parts of at most `elements`, split along its outer dimensions first so that parts stay contiguous.

    With `blocks` the last two dimensions are split only between FP8 blocks, and each part has at least one block.
    """
    if volume(box) <= elements:
        yield box
        return
    steps = [BLOCK if blocks and dim >= len(box) - 2 else 1 for dim in range(len(box))]
    dim = next((dim for dim, (start, stop) in enumerate(box) if stop - start > steps[dim]), None)
    if dim is None:
        yield box
        return
    start, stop = box[dim]
    row = volume(box) // (stop - start)
    step = max(1, elements // row // steps[dim]) * steps[dim]
    count = -(-(stop - start) // step)
    step = -(-(stop - start) // count // steps[dim]) * steps[dim]  # the same number of parts, of equal size
    for low in range(start, stop, step):
        yield from split((*box[:dim], (low, min(low + step, stop)), *box[dim + 1 :]), elements, blocks)


def distinct_lists(ranks: Sequence[Sequence[WeightSlice]]) -> SlicesOfRanks:
    """Returns each distinct slice list with its ranks, so that replicas are planned once. Drops empty slices."""
    objects: dict[int, list[int]] = defaultdict(list)
    for index, slices in enumerate(ranks):
        objects[id(slices)].append(index)
    members: dict[tuple[WeightSlice, ...], list[int]] = defaultdict(list)
    for indices in objects.values():
        members[tuple(weight for weight in ranks[indices[0]] if volume(weight.box))].extend(indices)
    return [(slices, tuple(sorted(indices))) for slices, indices in members.items()]


def without_mixed_stacks(*sides: SlicesOfRanks) -> Iterator[SlicesOfRanks]:
    """Yields the lists of each side, without stacks of parameters that some rank describes outside a stack.

    A rank that holds one expert of a layer describes it so.
    """
    names = {weight.name for side in sides for slices, _ in side for weight in slices}
    mixed = names & {stacked_name(name)[0] for name in names if STACKED not in name}
    for side in sides:
        if not mixed:
            yield side
            continue
        split = [
            [part for weight in slices for part in (expand([weight]) if weight.name in mixed else [weight])]
            for slices, _ in side
        ]
        yield [(slices, ranks) for slices, (_, ranks) in zip(split, side, strict=True)]


def index_sources(sources: SlicesOfRanks) -> SourceIndex:
    """Returns the ranks that hold each box. Equal slices of several ranks become one object."""
    holders: dict[str, dict[Box, dict[int, WeightSlice]]] = defaultdict(lambda: defaultdict(dict))
    slices_of: dict[WeightSlice, WeightSlice] = {}
    for slices, ranks in sources:
        for weight in slices:
            first = slices_of.setdefault(weight, weight)
            for rank in ranks:
                holders[first.name][first.box].setdefault(rank, first)
    rank_lists: dict[tuple[int, ...], tuple[int, ...]] = {}  # one object for equal rank lists, which are compared often
    index: dict[str, dict[Box, Replicas]] = {}
    for name, boxes in holders.items():
        index[name] = {
            box: Replicas(rank_lists.setdefault(key, key), by) for box, by in boxes.items() for key in (tuple(sorted(by)),)
        }
    return index


def check_parameters(sources: SourceIndex, destinations: SlicesOfRanks, aliases: Mapping[str, str]) -> None:
    """Raises RefitPlanError unless both sides have the same parameters, of the same shapes; names those that differ."""
    wanted: dict[str, set[Box]] = defaultdict(set)
    for slices, _ in destinations:
        for part in slices:
            wanted[source_name(part.name, sources, aliases)].add(part.box)
    _check_names(set(sources), set(wanted))
    for name, boxes in wanted.items():
        has, wants = extents(sources[name]), extents(boxes)
        if has != wants:
            raise RefitPlanError(
                f"parameter {name!r} is {has} in the sources but {wants} in the destinations; describe both sides "
                "from one model configuration"
            )


def source_name(name: str, sources: SourceIndex, aliases: Mapping[str, str]) -> str:
    """Returns the name under which the sources hold the destination's parameter `name`."""
    return name if name in sources else aliases.get(name, name)


def _check_names(sources: set[str], destinations: set[str]) -> None:
    for missing, having, lacking in (
        (destinations - sources, "destinations", "sources"),
        (sources - destinations, "sources", "destinations"),
    ):
        if missing:
            names = sorted(missing)
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise RefitPlanError(
                f"the {having} have parameters that the {lacking} lack: {', '.join(map(repr, names[:5]))}{more}; "
                "describe both sides from one model configuration, or pass an alias for a tied head"
            )


def extents(boxes: Iterable[Box]) -> Box:
    """Returns the smallest box around `boxes`; empty if they differ in their number of dimensions."""
    around: list[tuple[int, int]] | None = None
    for box in boxes:
        if around is None:
            around = list(box)
        elif len(around) != len(box):
            return ()
        else:
            around = [(min(a, c), max(b, d)) for (a, b), (c, d) in zip(around, box, strict=True)]
    return tuple(around or ())


def cover(target: WeightSlice, sources: SourceIndex, name: str, limit: int) -> list[SourcePart]:
    """Returns the parts that make up destination slice `held`, each of at most `limit` elements.

    Raises RefitPlanError that names the parameter if no source holds some box of it, or if an edge is inside an FP8 block.
    """
    parts: list[SourcePart] = []
    remaining = [target.box]
    for box, replicas in sources[name].items():
        rest: list[Box] = []
        for region in remaining:
            both = intersect(region, box)
            if both is None:
                rest.append(region)
                continue
            rest.extend(subtract(region, both))
            parts.extend(SourcePart(name, part, replicas) for part in split(both, limit, target.scales is not None))
        remaining = rest
        if not remaining:
            break
    if remaining:
        raise RefitPlanError(
            f"parameter {name!r}: no source holds {remaining[0]}, which is part of {target.box} in the destination tensor "
            f"{target.tensor!r}; the sources hold {sorted(sources[name])[:8]}"
        )
    if target.scales is not None:
        _check_blocks(name, [target.box, *(part.box for part in parts)], extents(sources[name]))
    return parts


def _check_blocks(name: str, boxes: Iterable[Box], around: Box) -> None:
    """Raises RefitPlanError unless every edge is between FP8 blocks or at the end of the parameter."""
    for box in boxes:
        for (start, stop), (_, end) in zip(box[-2:], around[-2:], strict=True):
            if start % BLOCK or (stop % BLOCK and stop != end):
                raise RefitPlanError(
                    f"parameter {name!r}: a shard from {start} to {stop} ends inside an FP8 block of {BLOCK}; choose tensor "
                    f"parallel sizes of both sides that split its {end} rows or columns at multiples of {BLOCK}"
                )


def prove_covered(slices: Sequence[WeightSlice], placed_parts: Sequence[PlacedPart]) -> None:
    """Proves that each element of each slice is written once; no two slices may share an element.

    Checks the finished parts only, independently of how they were made. Raises RefitPlanError with parameter and box.
    """
    by_tensor: dict[str, list[tuple[Box, WeightSlice]]] = defaultdict(list)
    for target in slices:
        by_tensor[target.tensor].append((target.local, target))
        if target.scales is not None:
            by_tensor[target.scales.tensor].append((target.scales.local, target))
    for tensor, boxes in by_tensor.items():
        _prove_disjoint(tensor, boxes)
    written: dict[int, list[tuple[Box, WeightSlice]]] = defaultdict(list)
    for placed_part in placed_parts:
        written[id(placed_part.target)].append((placed_part.target_local, placed_part.target))
    for target in slices:
        boxes = written[id(target)]
        if len(boxes) == 1 and boxes[0][0] == target.local:
            continue
        _prove_disjoint(target.tensor, boxes)
        elements = sum(volume(box) for box, _ in boxes)
        inside = all(intersect(box, target.local) == box for box, _ in boxes)
        if elements != volume(target.local) or not inside:
            raise RefitPlanError(
                f"parameter {target.name!r}: {elements} of the {volume(target.local)} elements of {target.box} in the "
                f"destination tensor {target.tensor!r} would be written; every element must be written exactly once"
            )


def _prove_disjoint(tensor: str, boxes: list[tuple[Box, WeightSlice]]) -> None:
    boxes = sorted(boxes, key=lambda entry: entry[0])
    for index, (box, target) in enumerate(boxes):
        for other, other_target in boxes[index + 1 :]:
            if other and other[0][0] >= box[0][1]:
                break
            if (both := intersect(box, other)) is not None:
                raise RefitPlanError(
                    f"{both} of the destination tensor {tensor!r} would be written twice: by parameter {target.name!r} "
                    f"{target.box} and by {other_target.name!r} {other_target.box}"
                )
