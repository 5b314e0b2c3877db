"""Head and laptop: a chart of the report with its caption and data table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from stoker.events.report.charts import Point, figure

Rows = list[list[str]]
MOST_ROWS = 12


@dataclass(frozen=True)
class Panel:
    """A chart, or several small ones, with a caption and a data table."""

    title: str
    svgs: list[Markup]
    caption: str = ""
    heads: list[str] = field(default_factory=list)
    rows: Rows = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    """For small multiples: one per SVG."""
    wide: bool = False
    keys: list[tuple[int, str]] = field(default_factory=list)
    """Legend: (colour and hatching number, text)."""


def panel(title: str, svg: str, **more: object) -> Panel:
    """Head and laptop: a panel with one chart."""
    return Panel(title, [Markup(svg)], **more)  # type: ignore[arg-type]  # noqa: S704 - made by charts, escaped


def table_rows(points: Sequence[Point]) -> Rows:
    step = max(1, len(points) // MOST_ROWS)
    return [[figure(x), figure(y)] for x, y in list(points)[::step]]
