"""Charts of one matrix: row lengths, and what row orders change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparsetile.bench.report.svg import Axis, Chart, log_ticks, short

__all__ = ["length_histogram", "order_bars"]

_WIDTH, _HEIGHT = 400, 272
_LEFT, _RIGHT, _TOP, _BOTTOM = 42, 392, 26, 226


def _y_axis(chart: Chart, y: Axis, ticks: Sequence[float], title: str) -> None:
    for tick in ticks:
        chart.line(_LEFT, y.at(tick), _RIGHT, y.at(tick), "grid")
        chart.text(_LEFT - 6, y.at(tick) + 3.5, short(tick), "tick", "end")
    chart.line(_LEFT, _BOTTOM, _RIGHT, _BOTTOM, "axis")
    chart.text(2, _TOP - 12, title, "axis-title", "start")


def length_histogram(bins: Sequence[Mapping[str, int]]) -> str:
    """Rows by their number of entries; bins double, the count of rows is logarithmic.

    Parameters
    ----------
    bins : sequence of dict
        ``from``, ``to`` and ``rows``, as ``pictures.length_bins`` returns them.
    """
    if not bins:
        return ""
    most = max(item["rows"] for item in bins)
    # A bin of one row must still be seen, hence the axis begins below 1.
    y = Axis(0.6, max(most * 1.5, 2.0), _BOTTOM, _TOP, log=True)
    chart = Chart(_WIDTH, _HEIGHT, "Rows by their number of nonzeros")
    _y_axis(chart, y, [t for t in log_ticks(1.0, y.high) if t >= 1], "rows")
    slot = (_RIGHT - _LEFT) / len(bins)
    every = -(-len(bins) // 12)  # more labels than this would touch each other
    for place, item in enumerate(bins):
        left, span = _LEFT + place * slot, f"{item['from']} to {item['to']}"
        if item["rows"]:
            top = y.at(item["rows"])
            tip = (
                f"{item['rows']:,} rows of "
                f"{item['from'] if item['from'] == item['to'] else span} nonzeros"
            )
            chart.rect(left + 0.09 * slot, top, 0.82 * slot, _BOTTOM - top, "box s0", tip)
        if place % every == 0:
            chart.text(left + slot / 2, _BOTTOM + 16, short(item["from"]), "tick")
    chart.text((_LEFT + _RIGHT) / 2, _BOTTOM + 36, "nonzeros in a row, from", "axis-title")
    return chart.render()


def order_bars(
    groups: Sequence[tuple[str, Sequence[float]]], orders: Sequence[str], label: str, title: str
) -> str:
    """Bars in groups, one bar a row order.

    Parameters
    ----------
    groups : sequence of (name, values)
        One value per order.
    orders : sequence of str
        Names of the orders; their place is their colour.
    label : str
        What the chart shows, for those who do not see it.
    title : str
        Of the upright axis.
    """
    most = max((value for _, values in groups for value in values), default=0.0)
    y = Axis(0.0, most * 1.12 or 1.0, _BOTTOM, _TOP)
    chart = Chart(_WIDTH, _HEIGHT, label)
    step = _step(y.high)
    _y_axis(chart, y, [k * step for k in range(int(y.high / step) + 1)], title)
    slot = (_RIGHT - _LEFT) / max(len(groups), 1)
    thick = min(30.0, 0.8 * slot / max(len(orders), 1))
    for place, (name, values) in enumerate(groups):
        centre = _LEFT + (place + 0.5) * slot
        for number, (order, value) in enumerate(zip(orders, values, strict=True)):
            left = centre + (number - len(orders) / 2) * thick
            top = y.at(value)
            tip = f"{name} · {order} · {value:.3g}"
            chart.rect(left + 1, top, thick - 2, _BOTTOM - top, f"box s{number % 10}", tip)
            shown = f"{value:.3g}" if value >= 1 else f"{value:.2g}"
            chart.text(left + thick / 2, top - 5, shown, "value small")
        chart.text(centre, _BOTTOM + 17, name, "tick")
    return chart.render()


def _step(high: float) -> float:
    """A round distance between ticks: at most five of them."""
    step = 10.0 ** len(str(int(high)))
    for shrink in (2, 2.5, 2) * 6:
        if high / (step / shrink) > 5:
            break
        step /= shrink
    return step
