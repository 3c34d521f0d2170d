"""The chart of the metric a run is judged by, where that is not its loss."""

from narrowcast.report.charts import drawing
from narrowcast.report.charts.run_charts import LOSS, Chart
from narrowcast.report.charts.series import series
from narrowcast.report.phrases import capital, count, measured, said
from narrowcast.report.run_data import RunData


def headline_chart(data: RunData) -> Chart | None:
    """Draw the headline metric over steps; nothing where it is the loss, which has its chart."""
    metric = data.headline
    if metric is None or metric.name == LOSS or not data.steps:
        return None
    found = [(r.step, r.metrics[metric.name]) for r in data.evals if metric.name in r.metrics]
    curve = series([step for step, _ in found], [y for _, y in found])
    if not curve.finite:
        return None
    name = said(metric.name)
    trace = drawing.points(curve, name=name)
    trace["text"] = ["" if y is None else measured(metric, y) for y in curve.values]
    trace["hovertemplate"] = f"{trace['name']}: %{{text}}<extra></extra>"
    layout = drawing.layout([r.step for r in data.steps], height=260)
    layout["showlegend"] = False
    if metric.text.endswith("%"):
        layout["yaxis"]["tickformat"] = drawing.PERCENT
    course = measured(metric, curve.finite[-1])
    if len(curve.finite) > 1:
        course = f"{measured(metric, curve.finite[0])} at first, {course} at last"
    return Chart(
        name="headline",
        title=f"Evaluated {name}",
        alt=f"{capital(name)}, evaluated {count(len(found), 'time')}: {course}; {metric.better} is "
        "better.",
        data=[trace],
        layout=layout,
        note=f"{capital(metric.better)} is better.",
    )
