"""The rows of a simulation as a small SVG: hit rates as bars, times to the first token as marks."""

import math
from collections.abc import Iterator
from html import escape

from pageray.router.simulate_report import Report, Row

_NAMES_X, _BARS_X, _TIMES_X, _PANEL_WIDTH = 10, 130, 420, 250
_TOP, _ROW_HEIGHT = 64, 28
_COLOURS = {"p50": "#1b9e77", "p90": "#d95f02", "p99": "#7570b3"}


def draw(report: Report) -> str:
    """Left: share of prompt tokens from caches, with the optimum as a line. Right: p50, p90 and
    p99 of the time to the first token, on a logarithmic axis."""
    bottom = _TOP + _ROW_HEIGHT * len(report.rows)
    width, height = _TIMES_X + _PANEL_WIDTH + 30, bottom + 36
    first = report.rows[0]
    title = f"{report.workload}: {first.requests:,} requests, {first.engines} engines"
    low, high = _decades(report.rows)
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(_NAMES_X, 20, title, "bold"),
        _text(_BARS_X, 44, "prompt tokens from caches"),
        _text(_TIMES_X, 44, "time to first token"),
        *_legend(),
        *_axis(low, high, bottom),
    ]
    optimum_x = _BARS_X + first.optimal_hit_rate * _PANEL_WIDTH
    body.append(
        f'<line x1="{optimum_x:.1f}" x2="{optimum_x:.1f}" y1="{_TOP - 8}" y2="{bottom}" '
        'stroke="#c00" stroke-dasharray="4 3"/>'
    )
    body.append(_text(_BARS_X, bottom + 18, f"optimum: {first.optimal_hit_rate:.1%}"))
    for position, row in enumerate(report.rows):
        body += _row(row, _TOP + _ROW_HEIGHT * position, low, high)
    return "\n".join([*body, "</svg>", ""])


def _row(row: Row, y: int, low: int, high: int) -> Iterator[str]:
    middle = y + _ROW_HEIGHT // 2
    bar = row.hit_rate * _PANEL_WIDTH
    yield _text(_NAMES_X, middle, row.policy)
    yield f'<rect x="{_BARS_X}" y="{y}" width="{bar:.1f}" height="18" fill="#4c78a8"/>'
    yield _text(round(_BARS_X + bar) + 4, middle, f"{row.hit_rate:.1%}")
    xs = {name: _time_x(row.ttft_ms[name], low, high) for name in _COLOURS}
    yield (
        f'<line x1="{xs["p50"]:.1f}" x2="{xs["p99"]:.1f}" y1="{y + 9}" y2="{y + 9}" '
        'stroke="#999" stroke-width="2"/>'
    )
    for name, x in xs.items():
        yield f'<circle cx="{x:.1f}" cy="{y + 9}" r="5" fill="{_COLOURS[name]}"/>'


def _axis(low: int, high: int, bottom: int) -> Iterator[str]:
    for decade in range(low, high + 1):
        x = _time_x(10.0**decade, low, high)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 8}" y2="{bottom}" stroke="#ddd"/>'
        label = f"{10**decade} ms" if decade < 3 else f"{10 ** (decade - 3)} s"
        yield _text(round(x) - 12, bottom + 18, label)


def _legend() -> Iterator[str]:
    for position, (name, colour) in enumerate(_COLOURS.items()):
        x = _TIMES_X + 120 + 48 * position
        yield f'<circle cx="{x}" cy="40" r="5" fill="{colour}"/>'
        yield _text(x + 9, 44, name)


def _decades(rows: list[Row]) -> tuple[int, int]:
    """Powers of ten, in milliseconds, that hold all times."""
    times = [max(1.0, row.ttft_ms[name]) for row in rows for name in _COLOURS]
    low = math.floor(math.log10(min(times)))
    return low, max(low + 1, math.ceil(math.log10(max(times))))


def _time_x(time_ms: float, low: int, high: int) -> float:
    share = (math.log10(max(1.0, time_ms)) - low) / (high - low)
    return _TIMES_X + share * _PANEL_WIDTH


def _text(x: int, y: int, text: str, weight: str = "normal") -> str:
    return f'<text x="{x}" y="{y}" font-weight="{weight}">{escape(text)}</text>'
