"""What TensorBoard's custom scalars page shows without a click: where each group's time goes, queue and throughput."""

from collections.abc import Iterable, Mapping, Sequence

from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar.metadata import CONFIG_SUMMARY_TAG, PLUGIN_NAME

from dflash.profiling.totals import StageTotals, shares

REST = "rest"  # the band of all stages too small for one of their own
# Each band is a run, and beyond 40 runs TensorBoard shows none of them until it is told which.
_LEAST_BAND = 0.02
_WAITING = ("starved", "blocked")  # lowest in a stack, where the axis tells their share
# These end when the first step begins: a band of theirs would be a line over its neighbours' for the rest of the run.
_ONLY_AT_START = ("prepare", "connect", "load")


def layout_summary(roles: Iterable[str]) -> Summary:
    """The page's layout as TensorBoard's plugin reads it; `tensorboard.plugins.custom_scalar.summary` needs TensorFlow.

    A band of `stack` belongs to a run of its own, since the page colours by run, so that each chart names one tag.
    Titles of charts are short enough (48 characters) for one line, since a second one would move its chart down.
    """
    # TensorBoard 2.21 shows a category's margin charts in the reverse order; charts of lines keep theirs.
    time_charts = [_stack_chart(role) for role in reversed(list(roles))]
    flow_charts = [
        _lines_chart("tokens per second; all: the drafters' sum", "throughput/tokens_per_s"),
        _lines_chart("micro-batches in the queue of each drafter", "queue/depth"),
        _lines_chart("bytes in the queue of each drafter", "queue/bytes"),
        _lines_chart("bytes each rank holds, host and device", "memory/resident_bytes", "memory/allocated_bytes"),
    ]
    layout = layout_pb2.Layout(
        category=[
            layout_pb2.Category(title="where the time goes, as a mean over the ranks of a group", chart=time_charts),
            layout_pb2.Category(title="what flows, and what it fills", chart=flow_charts),
        ]
    )
    tensor = TensorProto(dtype=DT_STRING, string_val=[layout.SerializeToString()])
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name=PLUGIN_NAME))
    return Summary(value=[Summary.Value(tag=CONFIG_SUMMARY_TAG, tensor=tensor, metadata=metadata)])


def stack_tags(role: str) -> tuple[str, str]:
    """Tags of the lower and the upper edge of a band in a group's chart."""
    return f"stack/{role}_from", f"stack/{role}"


def stack_run(role: str, stage: str) -> str:
    """Name of the run, below the folder of charts, that holds a stage's band."""
    return f"stack/{role}/{stage}"


def band_place(stage: str) -> int:
    """Place of a stage in its group's stack, 0 to 2 from the bottom; bands of one place lie in order of their names."""
    return 2 if stage == REST else int(stage not in _WAITING)


def edge_below(stage: str, bands: Mapping[str, tuple[float, float]]) -> float:
    """Where a stage without a band of its own would lie between `bands`, of which `rest` is one."""
    return min(bottom for other, (bottom, _) in bands.items() if _stack_order(other) > _stack_order(stage))


def stacked_shares(
    ranks: Sequence[Mapping[str, StageTotals]], known: Iterable[str] = ()
) -> dict[str, tuple[float, float]]:
    """Edges of the bands of a group, by stage: mean shares over its ranks, put on top of one another, waiting lowest.

    Then by name, not by size: a band must not change its place from one interval to the next. `known` are the stages
    that have a band already; another one gets one as soon as it takes 2 % of the time, unless it only belongs to the
    start, and is part of `rest` until then.
    """
    found = [shares(dict(stages)) for stages in ranks]
    means = {
        stage: sum(of_rank.get(stage, 0.0) for of_rank in found) / len(found)
        for stage in {stage for of_rank in found for stage in of_rank}
    }
    named = {stage for stage, mean in means.items() if mean >= _LEAST_BAND}.union(known) - {REST, *_ONLY_AT_START}
    bands, top = {}, 0.0
    for stage in sorted(named, key=_stack_order):
        bottom, top = top, top + means.get(stage, 0.0)
        bands[stage] = (bottom, top)
    if means:
        bands[REST] = (top, max(top, sum(means.values())))
    return bands


def _stack_order(stage: str) -> tuple[int, str]:
    return band_place(stage), stage


def _stack_chart(role: str) -> layout_pb2.Chart:
    lower, upper = stack_tags(role)
    series = layout_pb2.MarginChartContent.Series(value=upper, lower=lower, upper=upper)
    return layout_pb2.Chart(
        title=f"{role}: the stages' shares of the time, stacked", margin=layout_pb2.MarginChartContent(series=[series])
    )


def _lines_chart(title: str, *tags: str) -> layout_pb2.Chart:
    # The page matches tags from their beginning on; without an end, queue/depth would show what begins with it, too.
    return layout_pb2.Chart(title=title, multiline=layout_pb2.MultilineChartContent(tag=[f"{tag}$" for tag in tags]))
