"""Line plots as inline SVG: enough for a report that needs no network and no plotting library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 320
LEFT, RIGHT, TOP, BOTTOM = 60, 150, 30, 45
COLOURS = ("#4c566a", "#d1495b", "#00798c", "#edae49", "#66a182", "#8d6a9f", "#2e4057", "#e07a5f", "#3d9970", "#b07aa1")
NUM_TICKS = 5


@dataclass(frozen=True, slots=True)
class Line:
    """One named line; points in the order in which they are joined."""

    name: str
    points: Sequence[tuple[float, float]]


def plot(title: str, x_label: str, y_label: str, lines: Sequence[Line]) -> str:
    """An <svg> element; both axes begin at 0."""
    xs = [x for line in lines for x, _ in line.points] or [1.0]
    ys = [y for line in lines for _, y in line.points] or [1.0]
    x_top, y_top = max(*xs, 1e-9) * 1.05, max(*ys, 1e-9) * 1.1

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + x / x_top * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - y / y_top * (HEIGHT - TOP - BOTTOM),
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="11">',
        f'<text x="{LEFT}" y="18" font-size="14">{escape(title)}</text>',
    ]
    for tick in range(NUM_TICKS + 1):
        share = tick / NUM_TICKS
        x, y = at(share * x_top, share * y_top)
        x0, y0 = at(0, 0)
        x1, _ = at(x_top, 0)
        parts.append(f'<line x1="{x0:.1f}" x2="{x1:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{x0 - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{share * y_top:.3g}</text>')
        parts.append(f'<text x="{x:.1f}" y="{y0 + 15:.1f}" text-anchor="middle">{share * x_top:.3g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(
        f'<text x="14" y="{HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 14 {HEIGHT / 2})">'
        f"{escape(y_label)}</text>"
    )
    for index, line in enumerate(lines):
        colour = COLOURS[index % len(COLOURS)]
        places = [at(x, y) for x, y in line.points]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        key = TOP + 14 * index
        parts.append(f'<rect x="{WIDTH - RIGHT + 12}" y="{key}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 27}" y="{key + 9}">{escape(line.name)}</text>')
    return "".join([*parts, "</svg>"])
