"""The Bokeh figure of the Timeline, as JSON that the page embeds and feeds. It holds no data of a run."""

from __future__ import annotations

import json
from functools import cache


@cache
def timeline_json() -> str:
    from bokeh.embed import json_item
    from bokeh.models import ColumnDataSource, FactorRange, HoverTool, NumeralTickFormatter, Range1d, Span, WheelZoomTool
    from bokeh.plotting import figure

    bars = ColumnDataSource({name: [] for name in ("role", "left", "right", "fill", "edge", "alpha", "what", "phase", "took")}, name="bars")
    marks = ColumnDataSource({name: [] for name in ("place", "role", "t", "words")}, name="marks")
    steps = ColumnDataSource({name: [] for name in ("t", "step")}, name="steps")
    wheel = WheelZoomTool(dimensions="width")
    plot = figure(
        y_range=FactorRange(factors=[], range_padding=0.02), x_range=Range1d(0, 60), height=300,
        sizing_mode="stretch_width", tools=["xpan", "xbox_zoom", wheel], active_scroll=wheel, toolbar_location=None, name="plot")
    plot.vspan(x="t", source=steps, line_width=1, line_alpha=0.35, line_color="#888888")
    drawn = plot.hbar(y="role", left="left", right="right", height=0.72, fill_color="fill", line_color="edge", fill_alpha="alpha",
                      line_alpha="alpha", line_width=0.7, source=bars)
    hits = plot.scatter(x="t", y="place", marker="inverted_triangle", size=13, source=marks, fill_color="#d55e00", line_color="#ffffff",
                        line_width=1.5)
    plot.add_tools(HoverTool(renderers=[drawn], tooltips=[("role", "@role"), ("", "@what"), ("phase", "@phase"), ("for", "@took")],
                             point_policy="follow_mouse"),
                   HoverTool(renderers=[hits], tooltips=[("role", "@role"), ("", "@words")]))
    plot.add_layout(Span(location=0, dimension="height", line_dash="dashed", line_width=1, name="now"))
    plot.xaxis.formatter = NumeralTickFormatter(format="0.[0]")
    plot.xaxis.axis_label = "seconds since the start of the run"
    plot.ygrid.grid_line_color = None
    plot.min_border_left = 120
    plot.outline_line_color = None
    return json.dumps(json_item(plot))
