"""How recoveries look: a line or table row each, with a bar that shows detect, restart and reconnect to scale. Static text and HTML.

Everything that comes from a run is escaped. Colours are Okabe and Ito's, for each stage the same in all views; the figures stand beside
them.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

COLOURS = {"detect": "#e69f00", "restart": "#cc79a7", "reconnect": "#0072b2"}
"""Of the stages; views.css has them too, as --det, --res and --rec."""
_SIGNS = {"detect": "-", "restart": "=", "reconnect": "~"}
_WIDTH, _PIXELS = 30, 240
_SHOWN = ("number", "role", "rule", "mode", "at", "detect", "restart", "reconnect", "total", "lost", "redone", "outcome")


def recovery_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line per recovery, the longest bar ``_WIDTH`` characters wide."""
    if not rows:
        return "<no recoveries>"
    cells = [_SHOWN, *(_cells(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(_SHOWN))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    longest = max((sum(_stages(row).values()) for row in rows), default=0.0) or 1.0
    bars = ["".join(_SIGNS[stage] * round(_WIDTH * s / longest) for stage, s in _stages(row).items()) for row in rows]
    legend = ", ".join(f"{sign} {stage}" for stage, sign in _SIGNS.items())
    pad = max(map(len, lines))
    return "\n".join([f"{lines[0].ljust(pad)}  {legend}", *(f"{a.ljust(pad)}  {b}".rstrip() for a, b in zip(lines[1:], bars, strict=True))])


def recovery_html(rows: Sequence[Mapping[str, Any]]) -> str:
    """A self-contained table with a bar in each row; no script, nothing to fetch."""
    if not rows:
        return "<div>no recoveries</div>"
    longest = max((sum(_stages(row).values()) for row in rows), default=0.0) or 1.0
    legend = " ".join(f'<span style="color:{colour}">&#9632;</span> {stage}' for stage, colour in COLOURS.items())
    cell = '<t{0} style="text-align:left;padding:1px 8px 1px 0">{1}</t{0}>'
    head = "".join(cell.format("h", name) for name in _SHOWN) + cell.format("h", legend)
    body = ""
    for row in rows:
        texts = [html.escape(text) for text in _cells(row)]
        body += f"<tr>{''.join(cell.format('d', text) for text in [*texts, _bar(row, longest)])}</tr>"
    seconds = "<div>at: seconds from the start of the run to the onset; lost, redone: seconds of training</div>"
    return f'<table style="border-collapse:collapse;font-size:13px"><tr>{head}</tr>{body}</table>{seconds}'


def _bar(row: Mapping[str, Any], longest: float) -> str:
    x, parts = 0.0, []
    for stage, taken in _stages(row).items():
        width = _PIXELS * taken / longest
        title = f"<title>{stage} {taken:.2f} s</title>"
        parts.append(f'<rect x="{x:.1f}" width="{width:.1f}" height="12" fill="{COLOURS[stage]}">{title}</rect>')
        x += width
    label = html.escape(f"{row['role']}: " + ", ".join(f"{stage} {taken:.2f} s" for stage, taken in _stages(row).items()))
    return f'<svg role="img" aria-label="{label}" width="{_PIXELS}" height="12">{"".join(parts)}</svg>'


def _stages(row: Mapping[str, Any]) -> dict[str, float]:
    """Those that are over."""
    return {stage: row[stage] for stage in COLOURS if row[stage] is not None}


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    mode = f"{row['mode'] or 'none'}, {row['standby'] or 'cold'}" if row["mode"] else "none"
    texts = dict(row) | {"mode": mode}
    return tuple(map(_short, (texts[name] for name in _SHOWN)))


def _short(value: Any) -> str:
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
