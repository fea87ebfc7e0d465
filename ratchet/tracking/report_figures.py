"""How Bokeh draws the charts of a report.

Traps: Bokeh takes text between dollar signs for TeX and would fetch a renderer from the network, so that no name that a
user brought is drawn on a canvas; those stand in the page. And the colours of axes are set by the page's script, which
knows whether it is dark.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ratchet.tracking.report_charts import Chart, Line
from ratchet.tracking.report_data import Numbers, smoothed

if TYPE_CHECKING:
    from bokeh.models import HoverTool, Range1d
    from bokeh.models.renderers.renderer import DataRenderer
    from bokeh.plotting import figure

HEIGHT = 240
"""Pixels of a chart."""
_BAND = 0.18
_DIGITS = "{0.[0000]a}"
_SMOOTHED_FROM = 100
"""Points from which on a curve is drawn twice: as it is, and smoothed."""
_SMOOTH_SHARE = 40


def smooth_width(numbers: Numbers) -> int:
    """Return how many points a point of a smoothed curve is the mean of; 0 where curves are drawn as they are."""
    points = numbers.steps.size
    return points // _SMOOTH_SHARE | 1 if points >= _SMOOTHED_FROM else 0


def figures(drawn: Sequence[Chart], numbers: Numbers, marked: Sequence[int]) -> "list[figure]":
    """Return a Bokeh figure for each chart, over one source; `marked` steps get a vertical line in every one."""
    from bokeh.models import Range1d

    data = _Data(drawn, numbers)
    first, last = (int(numbers.steps[0]), int(numbers.steps[-1])) if numbers.steps.size else (0, 1)
    room = max((last - first) * 0.02, 0.5)
    # One range, so that zooming into one chart zooms into the others.
    steps = Range1d(start=first - room, end=last + room, bounds=(first - room, last + room))
    return [_figure(chart, data, steps, marked) for chart in drawn]


class _Data:
    """The columns that charts share."""

    def __init__(self, drawn: Sequence[Chart], numbers: Numbers) -> None:
        from bokeh.models import ColumnDataSource

        self.numbers = numbers
        names = dict.fromkeys(name for chart in drawn for name in chart.names)
        # Bokeh reads names with braces and spaces in its own way.
        self.columns = {name: f"c{place}" for place, name in enumerate(names)}
        values = {"step": numbers.steps, **{self.columns[name]: numbers.series[name] for name in names}}
        width = smooth_width(numbers)
        for line in (line for chart in drawn if not chart.is_stacked for line in chart.lines if not line.is_sparse):
            if width:
                values[f"{self.columns[line.name]}s"] = smoothed(numbers.series[line.name], width)
        self.source = ColumnDataSource(values)

    def smooth(self, name: str) -> str | None:
        """Return the column of a metric's smoothed curve, None where there is none."""
        column = f"{self.columns[name]}s"
        return column if column in self.source.data else None


def _figure(chart: Chart, data: _Data, steps: "Range1d", marked: Sequence[int]) -> "figure":
    made = _frame(chart, data.numbers, steps)
    source, columns = data.source, data.columns
    if chart.band is not None:
        low, high = (columns[name] for name in chart.band)
        made.varea("step", low, high, source=source, color=chart.lines[0].colour, alpha=_BAND)
    if chart.is_stacked:
        names, colours = [columns[line.name] for line in chart.lines], [line.colour for line in chart.lines]
        made.varea_stack(names, x="step", source=source, color=colours, alpha=0.85)
    drawn = []
    for line in chart.lines:
        column, smooth = columns[line.name], data.smooth(line.name)
        if line.is_sparse or np.isfinite(data.numbers.series[line.name]).sum() == 1:
            _draw_sparse(made, line, data.numbers)
        elif smooth is not None:
            drawn.append(made.line("step", column, source=source, color=line.colour, alpha=0.35, line_width=1.0))
            made.line("step", smooth, source=source, color=line.colour, line_width=2.0)
        elif not chart.is_stacked:
            drawn.append(made.line("step", column, source=source, color=line.colour, line_width=2.0))
        elif not drawn:
            # Areas cannot be hovered over: an unseen curve stands for them.
            drawn.append(made.line("step", column, source=source, alpha=0.0))
    if marked:
        made.vspan(x=list(marked), color="#7c8794", line_dash="dashed", line_width=1, alpha=0.7)
    if drawn:
        shown = [(line.label, f"@{columns[line.name]}{_DIGITS}") for line in chart.lines]
        made.add_tools(_hover(drawn[0], shown))
    return made


def _frame(chart: Chart, numbers: Numbers, steps: "Range1d") -> "figure":
    """Return an empty figure with its axes and tools."""
    from bokeh.models import BasicTicker, DataRange1d, LogTicker, NumeralTickFormatter
    from bokeh.plotting import figure

    heights = DataRange1d(default_span=_span(chart, numbers))
    if chart.has_zero or chart.is_stacked:
        heights.start = 0
    made = figure(
        height=HEIGHT,
        sizing_mode="stretch_width",
        x_range=steps,
        y_range=heights,
        y_axis_type="log" if chart.is_log else "linear",
        # Touching a chart scrolls the page; whoever wants to zoom picks the tool.
        tools="box_zoom,xpan,reset",
        active_drag=None,
        toolbar_inner=True,
        min_border=0,
        outline_line_color=None,
        # From the first time that it is drawn: a canvas that was white once keeps an edge of it in the dark.
        background_fill_color=None,
        border_fill_color=None,
    )
    made.toolbar.logo = None
    made.toolbar.autohide = True
    made.xaxis.formatter = NumeralTickFormatter(format="0,0")
    made.xaxis.ticker = BasicTicker(desired_num_ticks=6, num_minor_ticks=0, mantissas=[1, 2, 5])
    made.xgrid.visible = False
    made.yaxis.ticker = (LogTicker if chart.is_log else BasicTicker)(desired_num_ticks=5, num_minor_ticks=0)
    return made


def _span(chart: Chart, numbers: Numbers) -> float:
    """Return what an axis spans whose values are all equal: Bokeh's 2 would make a learning rate look like 0."""
    return max((float(np.nanmax(np.abs(numbers.series[line.name]))) for line in chart.lines), default=0.0) or 1.0


def _draw_sparse(made: "figure", line: Line, numbers: Numbers) -> None:
    """Draw the points that are there, joined, each with its interval."""
    from bokeh.models import ColumnDataSource

    is_there = np.isfinite(numbers.series[line.name])
    columns = {"step": numbers.steps[is_there], "value": numbers.series[line.name][is_there]}
    if line.interval is not None:
        low, high = (numbers.series[name][is_there] for name in line.interval)
        columns |= {"low": low, "high": high}
    source = ColumnDataSource(columns)
    if line.interval is not None:
        made.segment("step", "low", "step", "high", source=source, color=line.colour, alpha=0.6, line_width=1.5)
    made.line("step", "value", source=source, color=line.colour, line_width=1.5)
    points = made.scatter("step", "value", source=source, color=line.colour, size=6)
    shown = [("95%", f"@low{_DIGITS} to @high{_DIGITS}")] if line.interval is not None else []
    made.add_tools(_hover(points, [(line.label, f"@value{_DIGITS}"), *shown]))


def _hover(renderer: "DataRenderer", shown: list[tuple[str, str]]) -> "HoverTool":
    from bokeh.models import HoverTool

    # Of the tools that a reader picks one from, this one is always on.
    return HoverTool(renderers=[renderer], mode="vline", visible=False, tooltips=[("step", "@step{0,0}"), *shown])
