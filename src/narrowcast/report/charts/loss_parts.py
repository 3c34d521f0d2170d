"""The chart of the parts of the loss, for tasks that name them."""

from narrowcast.report.charts import drawing
from narrowcast.report.charts.run_charts import Chart
from narrowcast.report.charts.series import Series, series, smoothed, smoothing_window
from narrowcast.report.phrases import count, said, value
from narrowcast.report.run_data import RunData


def parts_chart(data: RunData) -> Chart | None:
    """Draw each part of the loss over steps; nothing where the loss is of one piece."""
    curves = {name: curve for name in data.parts if (curve := _curve(data, name)).finite}
    if not curves:
        return None
    window = smoothing_window(len(data.steps))
    traces = [
        drawing.one_of_many(smoothed(curve, window), name=said(name), place=place, width=1.75)
        for place, (name, curve) in enumerate(curves.items())
    ]
    told = [
        f"{said(name)} {value(curve.finite[0])} at first, {value(curve.finite[-1])} at last"
        for name, curve in curves.items()
    ]
    lowest = min(min(curve.finite) for curve in curves.values())
    layout = drawing.layout([r.step for r in data.steps], height=300)
    layout["showlegend"] = True
    return Chart(
        name="parts",
        title="Parts of the loss",
        alt=f"Parts of the loss over {count(len(data.steps), 'step')}: {'; '.join(told)}.",
        data=traces,
        layout=layout,
        note=f"Each line is the median of {window} steps." if window > 1 else "",
        log_switch=lowest > 0,
    )


def _curve(data: RunData, name: str) -> Series:
    """Return one part over steps; a step that did not record it is a gap."""
    return series([r.step for r in data.steps], [r.parts.get(name) for r in data.steps])
