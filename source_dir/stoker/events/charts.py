"""Head and laptop: charts as inline SVG, coloured by the page's CSS variables; pure functions.

Every chart has a title and a description for screen readers, and never relies on colour alone: lines have
different dashes and labels, bars their name and value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from markupsafe import Markup

from stoker.events.runs import Point

Moment = tuple[float, str]
"""A vertical line: its x, and what it stands for."""

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 420, 46, 12, 26, 34
MOST_POINTS = 360
DASHES = ("", "6 3", "2 3", "8 3 2 3")


@dataclass(frozen=True)
class Bar:
    name: str
    value: float | None
    """None: not measured."""
    note: str = ""
    strong: bool = False


@dataclass
class _Scale:
    low: float
    high: float
    start: float
    end: float
    ticks: list[float]

    def __call__(self, value: float) -> float:
        span = self.high - self.low or 1.0
        return self.start + (value - self.low) / span * (self.end - self.start)


def figure(text: float, unit: str = "") -> str:
    size = abs(text)
    if size >= 100 or text == int(text):
        form = ",.0f"
    else:
        form = ".1f" if size >= 10 else ".3g" if size >= 0.01 else ".2g"
    return f"{text:{form}} {unit}".strip()


def usd(amount: float) -> str:
    return f"${amount:,.2f}" if amount >= 0.1 or amount == 0 else f"${figure(amount)}"


def nice_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round tick values that cover low … high, in at most `most` steps."""
    if not high > low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def thin(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """Downsample to about `most` points, keeping each interval's minimum and maximum, so no spike is lost."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(2 * len(points) / most)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        pair = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        kept += sorted(pair)
    return kept


def line_chart(
    title: str,
    description: str,
    lines: Mapping[str, Sequence[Point]],
    x_label: str,
    y_label: str,
    *,
    events: Sequence[Moment] = (),
    y_top: float | None = None,
    from_zero: bool = True,
    height: int = 200,
) -> Markup:
    points = [p for line in lines.values() for p in line]
    xs = [x for x, _ in points] + [at for at, _ in events]
    ys = [y for _, y in points]
    least = 0.0 if from_zero and min(ys) >= 0 else min(ys)
    y_ticks = nice_ticks(least, y_top if y_top is not None else max(ys), 4)
    y = _Scale(y_ticks[0], y_ticks[-1], height - BOTTOM, TOP, y_ticks)
    end = WIDTH - RIGHT - (52 if len(lines) > 1 else 0)
    x_low = min(xs)
    x_high = max(xs) if max(xs) > x_low else x_low + 1
    x_ticks = [t for t in nice_ticks(x_low, x_high, 5) if x_low <= t <= x_high]
    x = _Scale(x_low, x_high, LEFT, end, x_ticks)
    body = [*_axes(x, y, height, x_label, y_label, end)]
    body += [
        f'<g class="event"><title>{escape(text)}</title>'
        f'<line x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{TOP}" y2="{height - BOTTOM}"/></g>'
        for at, text in events
    ]
    ends: list[tuple[float, str]] = []
    for number, (name, line) in enumerate(lines.items()):
        kept = thin(sorted(line))
        path = " ".join(f"{x(a):.1f},{y(min(b, y.high)):.1f}" for a, b in kept)
        dashes = DASHES[number % len(DASHES)]
        dash = f' stroke-dasharray="{dashes}"' if dashes else ""
        if len(kept) <= 24:
            body += [
                f'<circle class="s{number + 1} dot" cx="{x(a):.1f}" cy="{y(min(b, y.high)):.1f}" r="2.6">'
                f"<title>{escape(name)}: {figure(b)} at {figure(a)}</title></circle>"
                for a, b in kept
            ]
        body.append(f'<polyline class="s{number + 1} line" points="{path}"{dash}/>')
        ends.append((y(min(kept[-1][1], y.high)), name))
    if len(lines) > 1:
        for low, name in _apart(ends, height - BOTTOM - 4):
            body.append(f'<text class="name" x="{end + 5}" y="{low + 4:.1f}">{escape(name)}</text>')
    return svg(title, description, height, body)


def _apart(
    ends: list[tuple[float, str]], lowest: float, gap: float = 13.0
) -> Iterator[tuple[float, str]]:
    """Labels at the ends of lines, moved up where they would overlap."""
    last = lowest + gap
    for at, name in sorted(ends, reverse=True):
        last = min(at, last - gap)
        yield last, name


def _labels(ticks: Sequence[float]) -> list[str]:
    """Three digits, or as many decimals as it takes to tell the ticks apart."""
    labels, digits = [figure(tick) for tick in ticks], 0
    while len({*labels}) < len({*ticks}):
        labels, digits = [f"{tick:,.{digits}f}" for tick in ticks], digits + 1
    return labels


def _axes(
    x: _Scale, y: _Scale, height: int, x_label: str, y_label: str, end: float
) -> Iterator[str]:
    for tick, label in zip(y.ticks, _labels(y.ticks), strict=True):
        at, below = f"{y(tick):.1f}", f"{y(tick) + 3.6:.1f}"
        yield f'<line class="grid" x1="{LEFT}" x2="{end}" y1="{at}" y2="{at}"/>'
        yield f'<text class="tick" x="{LEFT - 5}" y="{below}" text-anchor="end">{label}</text>'
    for tick, label in zip(x.ticks, _labels(x.ticks), strict=True):
        yield (
            f'<text class="tick" x="{x(tick):.1f}" y="{height - BOTTOM + 14}" text-anchor="middle">'
            f"{label}</text>"
        )
    yield f'<text class="axis" x="{end}" y="{height - 4}" text-anchor="end">{escape(x_label)}</text>'
    yield f'<text class="axis" x="0" y="9">{escape(y_label)}</text>'


def bars(title: str, description: str, rows: Sequence[Bar], unit: str) -> Markup:
    end = max((row.value for row in rows if row.value and row.value > 0), default=1.0)
    step, body = 40, []
    for number, row in enumerate(rows):
        top = number * step
        strong = " strong" if row.strong else ""
        value = "not measured" if row.value is None else figure(row.value, unit)
        note = f" · {row.note}" if row.note else ""
        body.append(
            f'<text class="label{strong}" x="0" y="{top + 12}">{escape(row.name)}'
            f'<tspan class="note"> {escape(value + note)}</tspan></text>'
        )
        wide = max((WIDTH - 16) * (row.value or 0.0) / end, 1.5)
        kind = "f1" if row.strong else "f6"
        body.append(
            f'<rect class="{kind}" x="0" y="{top + 18}" width="{wide:.1f}" height="14" rx="2"/>'
        )
    return svg(title, description, len(rows) * step, body)


_numbers = iter(range(1, 1 << 62))


def svg(title: str, description: str, height: int, body: Sequence[str]) -> Markup:
    ident = f"c{next(_numbers)}"
    return Markup(  # noqa: S704 - its parts have escaped the texts in them
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="{ident}t {ident}d">'
        f'<title id="{ident}t">{escape(title)}</title><desc id="{ident}d">{escape(description)}</desc>'
        + "".join(body)
        + "</svg>"
    )
