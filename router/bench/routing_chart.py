"""The rows of `pageray bench routing` as a drawing, without a plotting library."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from pageray.router.bench.routing_bench import RoutingRow

_COLOURS = ("#9aa5b1", "#5c6b7a", "#d9822b", "#7fb7e6", "#1f6fb2")
_BAR, _GAP, _LABEL, _WIDTH, _PANEL_GAP = 16, 4, 170, 260, 90
_HEAD = 46


@dataclass(frozen=True)
class _Panel:
    title: str
    value: Callable[[RoutingRow], float]
    form: str


_PANELS = (
    _Panel("prefill tokens computed, x optimum", lambda row: row.ratio, "{:.2f}"),
    _Panel("first token, p50, ms", lambda row: row.ttft_ms["p50"], "{:,.0f}"),
    _Panel("first token, p99, ms", lambda row: row.ttft_ms["p99"], "{:,.0f}"),
)


def draw_rows(rows: Sequence[RoutingRow]) -> str:
    """An SVG document: a line of bar charts for each load, a bar for each policy."""
    parts: list[str] = []
    top = 0
    for load in dict.fromkeys(row.load for row in rows):
        of_load = [row for row in rows if row.load == load]
        parts.append(_text(0, top + 16, load, weight="bold"))
        for number, panel in enumerate(_PANELS):
            parts += _panel(of_load, panel, _LABEL + number * (_WIDTH + _PANEL_GAP), top)
        for number, row in enumerate(of_load):
            parts.append(_text(0, _bar_y(top, number) + 12, row.policy))
        top = _bar_y(top, len(of_load)) + 24
    width = _LABEL + len(_PANELS) * (_WIDTH + _PANEL_GAP)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-12 -12 {width + 12} {top + 12}" '
        'font-family="sans-serif" font-size="12">\n'
        '<rect x="-12" y="-12" width="100%" height="100%" fill="white"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _panel(rows: Sequence[RoutingRow], panel: _Panel, left: int, top: int) -> list[str]:
    values = [panel.value(row) for row in rows]
    # NaN, when nothing was answered, is not equal to itself.
    longest = max((value for value in values if value == value), default=0.0)  # noqa: PLR0124
    parts = [_text(left, top + 36, panel.title)]
    for number, value in enumerate(values):
        share = value / longest if value == value and longest else 0.0  # noqa: PLR0124
        y = _bar_y(top, number)
        colour = _COLOURS[number % len(_COLOURS)]
        parts.append(
            f'<rect x="{left}" y="{y}" width="{share * _WIDTH:.1f}" height="{_BAR}" '
            f'fill="{colour}"/>'
        )
        parts.append(_text(left + round(share * _WIDTH) + 5, y + 12, panel.form.format(value)))
    return parts


def _bar_y(top: int, number: int) -> int:
    return top + _HEAD + number * (_BAR + _GAP)


def _text(x: int, y: int, text: str, weight: str = "normal") -> str:
    return f'<text x="{x}" y="{y}" font-weight="{weight}">{escape(text)}</text>'
