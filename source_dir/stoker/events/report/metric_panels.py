"""Head and laptop: the charts and tables of a run's metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from stoker.events.report import charts
from stoker.events.report.charts import WIDTH, Bar, Line, figure, svg
from stoker.events.report.panel import MOST_ROWS, Panel, panel, table_rows
from stoker.events.report.reading import RunData, Table

MOST_METRICS, MOST_DRAWN, MOST_LISTED, MOST_CELLS = 12, 40, 200, 5_000
"""Panels of each kind of scalars; classes of a matrix that is drawn; rows of another table; cells of all
tables, so that the page stays below a megabyte."""


def metrics(run: RunData) -> list[Panel]:
    """One chart per validation metric except the loss, or per metric that a script logs; then the tables."""
    found, own = [], run.summary.script is not None
    parts: dict[str, list[str]] = {}
    for name, points in run.metrics.items():
        if not own and (not name.startswith("val/") or name == "val/loss"):
            continue
        if not own and name.count("/") > 1:
            parts.setdefault(name.rpartition("/")[0], []).append(name)
            continue
        percent = not own and all(0 <= y <= 1 for _, y in points)
        shown = [(x, 100 * y) for x, y in points] if percent else points
        unit = "%" if percent else ""
        best = run.summary.metrics.best.get(name)
        text = f"Best {figure(100 * best if percent else best, unit)}, " if best is not None else ""
        text += f"last {figure(shown[-1][1], unit)}."
        svg = charts.line_chart(
            f"{name} against the global step",
            text,
            [Line(name, shown)],
            "global step",
            unit or name,
            from_zero=False,
            height=220,
        )
        found.append(panel(name, svg, caption=text, heads=["step", name], rows=table_rows(shown)))
    several = [by_part(run, name, names) for name, names in parts.items() if name not in run.tables]
    found = found[:MOST_METRICS] + several[:MOST_METRICS]
    room = MOST_CELLS
    for name, table in run.tables.items():
        size = min(len(table.rows), MOST_LISTED) * len(table.columns)
        drawn = table.rows != table.columns or len(table.rows) <= MOST_DRAWN
        if drawn and size > room:
            found.append(Panel(name, [], "Too large for this page; see the event `table` in events.jsonl."))
        else:
            found.append(table_of(name, table))
            room -= size if drawn else 0
    return found


def by_part(run: RunData, name: str, names: list[str]) -> Panel:
    """The last values of a metric that has several, such as one per class; the lowest first."""
    last = {part: run.metrics[part][-1][1] for part in names}
    best = {part: run.summary.metrics.best.get(part) for part in names}
    order = sorted(names, key=lambda part: last[part])
    label = len(name) + 1
    bars = [Bar(part[label:], last[part]) for part in order]
    text = f"From {figure(last[order[0]])} to {figure(last[order[-1]])} in the last epoch."
    if len(order) > MOST_ROWS:
        text += f" The chart shows the {MOST_ROWS} lowest of {len(order)}, the table all."
    rows = [[p[label:], figure(last[p]), "–" if best[p] is None else figure(best[p] or 0.0)] for p in order]
    svg = charts.bars(f"{name}: last values", text, bars[:MOST_ROWS], "")
    return panel(name, svg, caption=text, heads=["", "last", "best"], rows=rows)


def table_of(name: str, table: Table) -> Panel:
    """A metric's table; a square one with the same rows and columns, such as a confusion matrix, is drawn."""
    rows, columns, values, epoch = table
    text = "" if epoch is None else f"After epoch {epoch + 1}. "
    shown = [
        [row, *("–" if cell is None else figure(cell) for cell in cells)]
        for row, cells in zip(rows, values, strict=True)
    ]
    heads = ["", *columns]
    if rows == columns and len(rows) > MOST_DRAWN:
        pairs = [
            (cell or 0.0, row, columns[n])
            for row, cells in zip(rows, values, strict=True)
            for n, cell in enumerate(cells)
            if columns[n] != row
        ]
        shown = [
            [row, column, figure(cell)] for cell, row, column in sorted(pairs, reverse=True)[:50] if cell
        ]
        text += f"The largest values off the diagonal of {len(rows)} × {len(rows)}."
        return Panel(name, [], text, ["row (target)", "column (predicted)", "value"], shown)
    if rows != columns:
        text += f"The first {MOST_LISTED} of {len(shown)} rows." if len(shown) > MOST_LISTED else ""
        return Panel(name, [], text, heads, shown[:MOST_LISTED], wide=len(columns) > 8)
    text += "Rows are targets and columns predictions, shaded by their share of the row."
    svg = matrix(name, text, rows, values)
    return panel(name, svg, caption=text, heads=heads, rows=shown)


def matrix(title: str, description: str, names: Sequence[str], rows: Sequence[Sequence[float | None]]) -> str:
    """A square matrix, each cell shaded by its share of the row's sum; of few rows, with the values."""
    left, top = 92, 16
    side = min(34.0, (WIDTH - left) / len(names))
    body, written = [], side >= 24
    for number, (name, row) in enumerate(zip(names, rows, strict=True)):
        total = sum(abs(cell) for cell in row if cell) or 1.0
        y = top + number * side
        short = name if len(name) <= 15 else f"{name[:14]}…"
        if side >= 9:
            middle = f"{y + side / 2 + 4:.1f}"
            body.append(
                f'<text class="tick" x="{left - 5}" y="{middle}" text-anchor="end">{escape(short)}</text>'
            )
        for column, cell in enumerate(row):
            x, share = left + column * side, 0.12 + 0.88 * abs(cell) / total if cell else 0.0
            told = f"{escape(name)} as {escape(names[column])}: {'–' if cell is None else figure(cell)}"
            box = f'x="{x:.1f}" y="{y:.1f}" width="{side:.1f}" height="{side:.1f}"'
            kind = "f1" if number == column else "f3"
            if cell or written:
                body.append(
                    f'<g><title>{told}</title><rect class="cell" {box}/>'
                    f'<rect class="{kind}" {box} opacity="{share:.2f}"/></g>'
                )
            if written and cell:
                ink = ' style="fill:var(--on)"' if share > 0.5 else ""
                body.append(
                    f'<text class="tick" x="{x + side / 2:.1f}" y="{y + side / 2 + 4:.1f}"'
                    f' text-anchor="middle"{ink}>{figure(cell)}</text>'
                )
    whole = side * len(names)
    body.append(f'<rect class="frame" x="{left}" y="{top}" width="{whole:.1f}" height="{whole:.1f}"/>')
    body.append(f'<text class="axis" x="{left}" y="10">predicted →</text>')
    body.append('<text class="axis" x="0" y="10">target ↓</text>')
    return svg(title, description, math.ceil(top + whole + 2), body)
