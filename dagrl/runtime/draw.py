"""Draws phase graphs as Mermaid flowcharts.

    text = mermaid([Drawing(graph, layouts={"train": layout}, buffers={None: input_bytes, 0: result_bytes})])

All data-parallel shards have the same graph, so one drawing shows them all.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dagrl.runtime.graph import SHARED_MEMORY, PhaseGraph, Source
from dagrl.runtime.layout import ParallelLayout


@dataclass(frozen=True)
class Drawing:
    """A graph to draw, with the layouts of its roles. `buffers`: bytes by writing node, None for the input."""

    graph: PhaseGraph
    layouts: Mapping[str, ParallelLayout]
    buffers: Mapping[Source, int]

    @property
    def title(self) -> str:
        """The phase, and how many equal graphs it has."""
        graphs = max(layout.world_size // self.graph.widths[role] for role, layout in self.layouts.items())
        return f"{self.graph.phase}: one of {graphs} equal graphs" if graphs > 1 else self.graph.phase


def size_text(nbytes: int) -> str:
    """Formats a size, e.g. `512 B`, `64 KiB`, `1.5 MiB`."""
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if size >= 100 or size == int(size) else f"{size:.1f} {unit}"


def mermaid(drawings: Sequence[Drawing]) -> str:
    """Draws one flowchart, a subgraph for each phase and role. See https://mermaid.js.org/syntax/flowchart.html."""
    lines = ["flowchart LR"]
    for index, drawing in enumerate(drawings):
        lines += [f"  {line}" for line in _phase_lines(f"p{index}", drawing)]
    lines += [
        "  classDef driver fill:#22262e,color:#ffffff,stroke:#22262e",
        "  classDef run fill:#dbeafe,stroke:#2563eb,color:#22262e",
        "  classDef reduce fill:#ffedd5,stroke:#ea580c,color:#22262e",
        "  classDef collect fill:#f3f4f6,stroke:#6b7280,color:#22262e",
    ]
    return "\n".join(lines) + "\n"


def _phase_lines(prefix: str, drawing: Drawing) -> Iterator[str]:
    yield f'subgraph {prefix}["{drawing.title}"]'
    yield f'  {prefix}_input(["input"]):::driver'
    for role, layout in drawing.layouts.items():
        yield f'  subgraph {prefix}_{role}["{role} ({layout.describe()})"]'
        for node in (node for node in drawing.graph.nodes if node.worker.role == role):
            style = "run" if node.kind in ("call", "spread") else node.kind
            yield f'    {prefix}_n{node.number}["{node.label}"]:::{style}'
        yield "  end"
    yield f'  {prefix}_result(["result"]):::driver'
    nodes = drawing.graph.nodes
    read = {(source, f"n{node.number}"): None for node in nodes for source in node.sources}
    for source, target in [*read, *((number, "result") for number in drawing.graph.outputs)]:
        name, transport = ("input", SHARED_MEMORY) if source is None else (f"n{source}", nodes[source].transport)
        yield f'  {prefix}_{name} -->|"{transport}, {size_text(drawing.buffers[source])}"| {prefix}_{target}'
    yield "end"
