"""Memory against step time: a PNG by matplotlib, or a plot of characters.

The latter is what there is without the extra: a library for it would be one more thing to install
for everybody, in place of forty lines.
"""

from collections.abc import Sequence
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase

from ..messages.units import unit_of
from .cells import Point, front

DPI = 130


SIZE = 8  # of letters, in points


Extent = tuple[float, float, float, float]  # seconds and bytes: least, most, least, most


Box = tuple[float, float, float, float]  # left, bottom, right, top


def draw(measured: Sequence[Point], predicted: Sequence[Point], title: str, path: Path) -> bool:
    """Draw the picture; False when matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    unit = unit_of(max(point.peak for point in (*measured, *predicted)), "MiB")
    measured, predicted = (
        [point._replace(peak=point.peak / unit.bytes) for point in points]
        for points in (measured, predicted)
    )
    figure = Figure(figsize=(9, 6), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    best = front(measured)
    if len(best) > 1:
        axes.plot(*_axes(best), color="tab:green", linewidth=1, label="Pareto front", zorder=1)
    axes.scatter(*_axes(measured), color="tab:blue", s=24, label="measured", zorder=3)
    if predicted:
        there = {point.mode: point for point in measured}
        for point in predicted:
            pair = [there[point.mode], point] if point.mode in there else []
            axes.plot(*_axes(pair), color="0.8", linewidth=0.8, zorder=0)
        axes.scatter(
            *_axes(predicted),
            s=24,
            facecolors="none",
            edgecolors="tab:orange",
            label="predicted",
            zorder=2,
        )
    axes.set_xlabel("seconds for a step (median)")
    axes.set_ylabel(f"peak {unit.name}")
    axes.set_title(title, fontsize=9, wrap=True)
    axes.margins(x=0.15, y=0.1)
    axes.grid(color="0.93")
    axes.set_axisbelow(True)
    axes.legend(fontsize=SIZE)
    figure.draw_without_rendering()  # from here on it is known where points are
    scale = DPI / 72
    dots = [
        (float(x) / scale, float(y) / scale)
        for x, y in axes.transData.transform([point[1:] for point in (*measured, *predicted)])
    ]
    edges = (axes.bbox.x0 / scale, axes.bbox.y0 / scale, axes.bbox.x1 / scale, axes.bbox.y1 / scale)
    for point, (x, y) in zip(
        measured, labels([p.mode for p in measured], dots, edges), strict=True
    ):
        axes.annotate(
            point.mode,
            (point.seconds, point.peak),
            xytext=(x, y),
            textcoords="offset points",
            fontsize=SIZE,
            arrowprops={"arrowstyle": "-", "color": "0.7", "linewidth": 0.5},
        ).set_in_layout(False)
    figure.savefig(path)
    return True


def _axes(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [point.seconds for point in points], [point.peak for point in points]


def labels(
    texts: Sequence[str], dots: Sequence[tuple[float, float]], edges: Box
) -> list[tuple[float, float]]:
    """Where texts go so that they cover neither each other nor a dot: offsets from their dots.

    The first dots have the texts. All in points of 1/72 inch, y upwards. A text for which there
    is no room within the edges stands beside its dot.
    """
    taken: list[Box] = [(x - 3, y - 3, x + 3, y + 3) for x, y in dots]
    found = []
    for text, (x, y) in zip(texts, dots, strict=False):
        width, height = 0.58 * SIZE * len(text), 1.1 * SIZE
        sides = (5.0, -5.0 - width, 25.0, -25.0 - width)
        lifts = sorted((step * height for step in range(-12, 12)), key=lambda up: abs(up + 3))
        for up, along in sorted(
            ((up, along) for up in lifts for along in sides),
            key=lambda place: abs(place[0]) + 0.5 * (abs(place[1] + width / 2) - width / 2),
        ):
            box = (x + along, y + up, x + along + width, y + up + height)
            if _inside(box, edges) and not any(_overlap(box, other) for other in taken):
                break
        else:
            along, up = sides[0], 3.0
            box = (x + along, y + up, x + along + width, y + up + height)
        taken.append(box)
        found.append((along, up))
    return found


def _inside(box: Box, edges: Box) -> bool:
    return edges[0] <= box[0] and edges[1] <= box[1] and box[2] <= edges[2] and box[3] <= edges[3]


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def extent_of(points: Sequence[Point]) -> Extent:
    """Seconds and bytes, the least and the most of each."""
    times, sizes = [point.seconds for point in points], [point.peak for point in points]
    return min(times), max(times), min(sizes), max(sizes)


def terminal(
    measured: Sequence[Point], predicted: Sequence[Point] = (), width: int = 72, height: int = 16
) -> list[str]:
    """The same in characters: a letter for each measured mode, capital on the Pareto front.

    A predicted point is a dot. A letter whose place is taken stands in the next free column.
    """
    if not measured:
        return []
    left, right, low, high = extent_of([*measured, *predicted])
    canvas = [[" "] * width for _ in range(height)]

    def put(point: Point, mark: str, over: str = " ") -> None:
        across = (point.seconds - left) / (right - left) if right > left else 0.5
        up = (point.peak - low) / (high - low) if high > low else 0.5
        row = canvas[round((1 - up) * (height - 1))]
        column = round(across * (width - 1))
        places = [*range(column, width), *reversed(range(column))]
        free = next((place for place in places if row[place] in over), None)
        if free is not None:
            row[free] = mark

    for point in predicted:
        put(point, ".", " .")
    best = front(measured)
    legend = []
    for number, point in enumerate(measured):
        letters = ascii_uppercase if point in best else ascii_lowercase
        mark = letters[number % len(letters)]
        put(point, mark, " .")
        legend.append(f"{mark} {point.mode}")
    unit = unit_of(high, "MiB")
    labels = [f"{peak / unit.bytes:.3g}" for peak in (high, low)]
    margin = max(map(len, labels))
    lines = [f"peak {unit.name}"]
    for number, row in enumerate(canvas):
        label = labels[0] if number == 0 else labels[1] if number == height - 1 else ""
        lines.append(f"{label:>{margin}} |{''.join(row)}".rstrip())
    start, end = f"{left:.3g}", f"{right:.3g} s for a step"
    lines.append(f"{'':>{margin}} +{'-' * width}")
    lines.append(f"{'':>{margin}}  {start}{end:>{width - len(start)}}")
    said = "capitals: Pareto front" + ("; dots: predicted" if predicted else "")
    return [*lines, *_wrapped(legend, margin + 2 + width), said]


def _wrapped(entries: Sequence[str], width: int) -> list[str]:
    """``entries`` in lines of at most ``width`` characters, if each of them is shorter."""
    lines = [""]
    for entry in entries:
        longer = f"{lines[-1]}  {entry}" if lines[-1] else entry
        if len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(entry)
    return lines
