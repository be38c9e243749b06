"""Phase graphs as SVG: a lane for each worker, nodes from left to right in the order they can run, edges between them.

Written by hand, so that drawing needs no other program. The label right of a node says how its result travels, and how many
bytes its channel has room for; every node and edge says more when the mouse is over it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from dagrl.draw import Drawing, Edge, constants_text, node_text
from dagrl.graph import Node, WorkerRef

INK, MUTED, LINE, BAND, LANE_FILL = "#22262e", "#6b7280", "#e5e7eb", "#f8fafc", "#ffffff"
KINDS = {"call": ("#dbeafe", "#2563eb"), "reduce": ("#ffedd5", "#ea580c"), "collect": ("#f3f4f6", "#6b7280")}
KIND_NAMES = {"call": "call", "reduce": "reduce", "collect": "join"}
TRANSPORTS = {"shm": "#64748b", "nccl": "#059669", "gloo": "#7c3aed"}
OTHER_TRANSPORT = "#db2777"

LANE, NODE, BAR = 40.0, 26.0, 22.0  # heights of a lane and of a node, width of the driver's bars
MARGIN, TITLE, ROLE, REPLICA, BETWEEN = 16.0, 34.0, 24.0, 18.0, 28.0
CHARACTER, SMALL = 6.7, 5.3  # widths of a monospace character at 11 and at 8.8 pixels
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def svg(drawings: Sequence[Drawing]) -> str:
    """One SVG document with the drawings one below the other."""
    root = Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "font-family": FONT, "font-size": "11"})
    background = _add(root, "rect", x=0, y=0, fill="#ffffff")
    _arrowheads(root, {edge.transport for drawing in drawings for edge in drawing.edges})
    width, top = 0.0, MARGIN
    for drawing in drawings:
        frame = _frame(drawing, top)
        _draw(_add(root, "g", class_="phase"), frame)
        width, top = max(width, frame.right + MARGIN), frame.bottom + BETWEEN
    height = top - BETWEEN + MARGIN
    for element in (root, background):
        element.attrib |= {"width": _number(width), "height": _number(height)}
    root.set("viewBox", f"0 0 {_number(width)} {_number(height)}")
    indent(root)
    return tostring(root, encoding="unicode") + "\n"


@dataclass(frozen=True)
class _Frame:
    """Where everything of one drawing goes: the middle of each lane, the column of each node, the sides of each column."""

    drawing: Drawing
    top: float
    lanes: Mapping[WorkerRef, float]
    bands: Sequence[tuple[str, float, float]]  # label, top, bottom
    replicas: Sequence[tuple[str, float]]  # label, base line
    columns: Sequence[int]
    sides: Sequence[tuple[float, float]]
    label_width: float

    @property
    def bottom(self) -> float:
        return self.bands[-1][2]

    @property
    def input_x(self) -> float:
        return MARGIN + self.label_width

    @property
    def result_x(self) -> float:
        return self.sides[-1][1] + _gap(self.drawing)

    @property
    def right(self) -> float:
        return max(self.result_x + BAR, MARGIN + CHARACTER * 1.2 * len(self.drawing.title) + 420)

    def node(self, number: int) -> tuple[float, float, float]:
        """Left, right and middle of a node."""
        left, right = self.sides[self.columns[number]]
        return left, right, self.lanes[self.drawing.graph.nodes[number].worker]


def _frame(drawing: Drawing, top: float) -> _Frame:
    lanes: dict[WorkerRef, float] = {}
    bands: list[tuple[str, float, float]] = []
    replicas: list[tuple[str, float]] = []
    y = top + TITLE
    for role in drawing.graph.widths:
        start, y, last = y, y + ROLE, -1
        for worker in drawing.workers(role):
            replica = drawing.replica_of(worker)
            if drawing.replicas(role) > 1 and replica != last:
                y, last = y + REPLICA, replica
                replicas.append((f"replica {replica}", y - 5))
            lanes[worker] = y + LANE / 2
            y += LANE
        bands.append((drawing.role_label(role), start, y + 6))
        y += 14
    label_width = 24 + CHARACTER * max(len(drawing.worker_label(worker)) for worker in lanes)
    columns = _columns(drawing)
    sides = _sides(drawing, columns, MARGIN + label_width + BAR)
    return _Frame(drawing, top, lanes, bands, replicas, columns, sides, label_width)


def _columns(drawing: Drawing) -> list[int]:
    """Each node right of those it reads, and of those that its worker runs before it."""
    columns: list[int] = []
    last: dict[WorkerRef, int] = {}
    for node in drawing.graph.nodes:
        before = [columns[number] for number in node.upstream] + [last.get(node.worker, -1)]
        columns.append(1 + max(before))
        last[node.worker] = columns[-1]
    return columns


def _sides(drawing: Drawing, columns: Sequence[int], left: float) -> list[tuple[float, float]]:
    sides = []
    for column in range(max(columns) + 1):
        nodes = [node for node in drawing.graph.nodes if columns[node.number] == column]
        width = 18 + max(max(CHARACTER * len(node_text(node)), SMALL * len(constants_text(node))) for node in nodes)
        left += _gap(drawing)
        sides.append((left, left + width))
        left += width
    return sides


def _gap(drawing: Drawing) -> float:
    """Room between columns for curves, and for the longest label."""
    return max(56.0, 22 + SMALL * max(len(edge.label) for edge in drawing.edges))


def _draw(group: Element, frame: _Frame) -> None:
    _draw_title(group, frame)
    for label, top, bottom in frame.bands:
        width = frame.result_x + BAR - MARGIN
        _add(group, "rect", x=MARGIN, y=top, width=width, height=bottom - top, rx=6, fill=BAND, stroke=LINE)
        _add(group, "text", label, x=MARGIN + 10, y=top + 16, fill=INK, font_weight="bold")
    for label, y in frame.replicas:
        _add(group, "text", label, x=MARGIN + 10, y=y, fill=MUTED, font_size=10)
    for worker, y in frame.lanes.items():
        _add(group, "line", x1=frame.input_x, x2=frame.result_x, y1=y, y2=y, stroke=LINE, stroke_dasharray="1 4")
        _add(group, "text", frame.drawing.worker_label(worker), x=MARGIN + 10, y=y + 4, fill=MUTED)
    _draw_driver(group, frame)
    for place, edge in enumerate(frame.drawing.edges):
        _draw_edge(group, frame, edge, place)
    for node in frame.drawing.graph.nodes:
        _draw_node(group, frame, node)
    _draw_labels(group, frame)


def _draw_title(group: Element, frame: _Frame) -> None:
    drawing, y = frame.drawing, frame.top + 14
    _add(group, "text", drawing.title, x=MARGIN, y=y, fill=INK, font_size=13, font_weight="bold")
    x = MARGIN + CHARACTER * 1.2 * len(drawing.title) + 30
    for kind in dict.fromkeys(node.kind for node in drawing.graph.nodes):
        fill, stroke = KINDS[kind]
        _add(group, "rect", x=x, y=y - 9, width=14, height=10, rx=2, fill=fill, stroke=stroke)
        x = _legend(group, x + 19, y, KIND_NAMES[kind])
    for transport in dict.fromkeys(edge.transport for edge in drawing.edges):
        _add(group, "line", x1=x, x2=x + 16, y1=y - 4, y2=y - 4, stroke=_color(transport), stroke_width=2)
        x = _legend(group, x + 21, y, transport)


def _legend(group: Element, x: float, y: float, text: str) -> float:
    _add(group, "text", text, x=x, y=y, fill=MUTED, font_size=10)
    return x + CHARACTER * len(text) + 16


def _draw_driver(group: Element, frame: _Frame) -> None:
    """The driver on both sides: its input on the left, what it reads back on the right."""
    top = min(frame.lanes.values()) - LANE / 2 + 4
    bottom = max(frame.lanes.values()) + LANE / 2 - 4
    for name, x in (("input", frame.input_x), ("result", frame.result_x)):
        bar = _add(group, "g", class_="driver")
        _add(bar, "title", f"{name} (driver)")
        _add(bar, "rect", x=x, y=top, width=BAR, height=bottom - top, rx=4, fill=INK)
        center = x + BAR / 2 + 4
        y = (top + bottom) / 2 if bottom - top < 400 else top + 60
        place = f"rotate(-90 {_number(center)} {_number(y)})"
        size = min(11.0, (bottom - top) / CHARACTER)
        _add(bar, "text", name, x=center, y=y, fill="#fff", text_anchor="middle", font_size=size, transform=place)


def _draw_node(group: Element, frame: _Frame, node: Node) -> None:
    left, right, y = frame.node(node.number)
    fill, stroke = KINDS[node.kind]
    box = _add(group, "g", class_="node", data_node=node.number)
    _add(box, "title", f"{node.number}: {frame.drawing.worker_label(node.worker)}, {node.kind} {node_text(node)}")
    _add(box, "rect", x=left, y=y - NODE / 2, width=right - left, height=NODE, rx=4, fill=fill, stroke=stroke)
    constants, middle = constants_text(node), (left + right) / 2
    _add(box, "text", node_text(node), x=middle, y=y - 1 if constants else y + 4, fill=INK, text_anchor="middle")
    if constants:
        _add(box, "text", constants, x=middle, y=y + 9, fill=MUTED, font_size=8.8, text_anchor="middle")


def _draw_edge(group: Element, frame: _Frame, edge: Edge, place: int) -> None:
    path = _add(
        group, "path", class_="edge", d=_route(frame, edge, place), fill="none", stroke=_color(edge.transport),
        marker_end=f"url(#arrow-{edge.transport})",
        data_from="input" if edge.source is None else edge.source,
        data_to="result" if edge.target is None else edge.target,
    )  # fmt: skip
    _add(path, "title", f"{_end(frame, edge.source, 'input')} to {_end(frame, edge.target, 'result')}: {edge.label}")


def _route(frame: _Frame, edge: Edge, place: int) -> str:
    """A curve to the next column; to a later one, along the upper edge of the lane, above the nodes between."""
    if edge.source is not None:
        _, x1, y1 = frame.node(edge.source)
    if edge.target is not None:
        x2, _, y2 = frame.node(edge.target)
    if edge.source is None:
        x1, y1 = frame.input_x + BAR, y2
    if edge.target is None:
        x2, y2 = frame.result_x, y1
    first = -1 if edge.source is None else frame.columns[edge.source]
    last = len(frame.sides) if edge.target is None else frame.columns[edge.target]
    if last == first + 1:
        middle = x1 + 0.75 * (x2 - x1)  # the label stands in the left half
        return _path(f"M {x1} {y1} C", (middle, y1), (middle, y2), (x2 - 1, y2))
    gap = _gap(frame.drawing)
    above = y2 - LANE / 2 + 1 + place % 3 * 2
    rise = _path(f"M {x1} {y1} C", (x1 + gap / 2, y1), (x1 + gap / 2, above), (x1 + gap, above))
    fall = _path("C", (x2 - gap / 2, above), (x2 - gap / 2, y2), (x2 - 1, y2))
    return f"{rise} H {_number(x2 - gap)} {fall}"


def _path(start: str, *points: tuple[float, float]) -> str:
    words = [word if word in ("M", "C") else _number(float(word)) for word in start.split()]
    return " ".join([*words, ", ".join(f"{_number(x)} {_number(y)}" for x, y in points)])


def _draw_labels(group: Element, frame: _Frame) -> None:
    """Transport and bytes once for each writer, whose channel it is; below the edge, as trees go up to the first worker."""
    labels = {edge.source: edge.label for edge in frame.drawing.edges}
    for source, label in labels.items():
        if source is None:
            x, y = frame.input_x + BAR, min(frame.lanes.values())
        else:
            _, x, y = frame.node(source)
        _add(group, "text", label, x=x + 5, y=y + 11, fill=MUTED, font_size=8.8, class_="label")


def _end(frame: _Frame, number: int | None, driver: str) -> str:
    return driver if number is None else frame.drawing.graph.nodes[number].label


def _arrowheads(root: Element, transports: Iterable[str]) -> None:
    definitions = _add(root, "defs")
    for transport in sorted(transports):
        marker = _add(
            definitions, "marker", id=f"arrow-{transport}", viewBox="0 0 8 8", refX=7, refY=4, orient="auto",
            markerWidth=6, markerHeight=6,
        )  # fmt: skip
        _add(marker, "path", d="M 0 0 L 8 4 L 0 8 z", fill=_color(transport))


def _color(transport: str) -> str:
    return TRANSPORTS.get(transport, OTHER_TRANSPORT)


def _add(parent: Element, tag: str, text: str | None = None, **attributes: str | float) -> Element:
    """A child element; `font_size=9` becomes `font-size="9"`, and `class_` is `class`."""
    named = {
        name.rstrip("_").replace("_", "-"): value if isinstance(value, str) else _number(value)
        for name, value in attributes.items()
    }
    element = SubElement(parent, tag, named)
    element.text = text
    return element


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
