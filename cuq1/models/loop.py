"""The decode loop's graphs as plans: what one launch of each computes, its end decided by a control kernel.

A round verifies 1 to 8 rows and holds draft depths. Where the stop rule chooses, these are the first three; each
further depth has a graph of its own, so that one that is not worth its cost runs no kernel. `most` is the most drafts
that a request makes in a round:

    none            one row; the draft's cache takes in what was committed
    a fixed number  most + 1 rows, `most` depths in the round's graph, as a launch of a graph costs some microseconds
    automatic       4 .. most + 1 rows, three depths in the round's graph, up to most - 3 after it

Where ranks exchange, a round's target candidates carry what each rank's host wants (abi.Mirror) and whether its kernels
have reported a fault, so that all ranks' chains end at the same round.
"""

from ctypes import sizeof
from dataclasses import replace

from cuq1.cuda import abi
from cuq1.cuda.kernels import control
from cuq1.models import decode
from cuq1.models.collect import buffer_of
from cuq1.models.family import plans_of
from cuq1.models.plans import DeviceModel
from cuq1.models.q1 import Model
from cuq1.plan.dims import DRAFT, ROWS
from cuq1.plan.types import Buffer, Launch, Plan, Ref, Value
from cuq1.sampling.params import MIN_AUTO_DRAFTS

# What a launch and a graph's start cost besides bytes, and the read bandwidth.
LAUNCH_US, GRAPH_US, BYTES_PER_US = 2.0, 3.0, 4.4e6

MIRROR = Buffer("mirror", (sizeof(abi.Mirror),), "uint8", sizeof(abi.Mirror))  # host memory


def working_buffers() -> list[Buffer]:
    """What control kernels keep in device memory."""
    return [
        buffer_of("loop", (sizeof(abi.Loop),), "uint8"),
        buffer_of("log", (abi.LOG_RECORDS, sizeof(abi.Record)), "uint8"),
    ]


def depths_within(most: int, *, auto: bool) -> int:
    """Draft depths in the graph of a round."""
    return min(most, MIN_AUTO_DRAFTS) if auto else most


def rows_for(most: int, *, auto: bool) -> range:
    """Rows that a round of such a request may have."""
    return range(depths_within(most, auto=auto) + 1, most + 2)


def draft_threshold(model: Model, worth: float) -> float:
    """The least probability of being committed at which a further draft pays on this GPU.

    The time of a draft, made and verified, over what a committed token more saves, which is `worth` times that of a
    round with the fewest drafts (`DepthRule.worth`). Times as launches and bytes make them: the same for every request,
    so that a seed gives the same tokens again. An H200 is meant; what counts is the ratio.
    """
    if model.draft is None:
        return 1.0
    made = MIN_AUTO_DRAFTS

    def microseconds(plan: Plan) -> float:
        return GRAPH_US + LAUNCH_US * len(plan.launches) + plan.read_bytes() / BYTES_PER_US

    def round_us(rows: int) -> float:
        unread = (1 - model.dims.top_k / model.dims.experts) ** rows  # rows choose experts independently
        return microseconds(decode.round_of(model, rows, made, distinct=model.dims.experts * (1 - unread)))

    once = round_us(made + 1)
    draft = microseconds(depth_of(model, made)) + round_us(made + 2) - once
    return min(1.0, draft / (worth * once))


def first_of(model: DeviceModel, made: int) -> Plan:
    """A request's first token from the logits' row 0, and `made` draft depths."""
    return _controlled(model, plans_of(model).first_of(made), made, first=True)


def round_of(model: DeviceModel, rows: int, made: int, *, short: bool) -> Plan:
    """A round up to draft depth `made`. short: no row's position reaches `model.short_context`."""
    return _controlled(model, plans_of(model).round_of(rows, made, short=short), made, first=True)


def depth_of(model: DeviceModel, depth: int) -> Plan:
    """Draft depth `depth`, from 0, after the round's own."""
    return _controlled(model, plans_of(model).depth_of(depth, sample=True), depth + 1, first=False)


def _agreeing(launch: Launch) -> Launch:
    """Of several ranks, tells the others with the candidates what this rank's host wants, and hears what theirs do.

    A round ends with what all agree on; plans that hosts step end with each launch.
    """
    given = {"top_k": {"mirror": Ref("mirror")}, "accept": {"loop": Ref("loop")}}.get(launch.label, {})
    told = launch.args.get("status" if launch.label == "top_k" else "statuses", 0) != 0
    return replace(launch, args={**launch.args, **given}) if given and told else launch


def _controlled(model: DeviceModel, plan: Plan, made: int, *, first: bool) -> Plan:
    """The plan with a control kernel behind it."""
    args: dict[str, Value] = {
        "fault": Ref("fault"),
        "live": 0,
        "layer": DRAFT,
        "rows": ROWS,
        "state": Ref("state"),
        "loop": Ref("loop"),
        "log": Ref("log"),
        "mirror": Ref("mirror"),
        "made": made,
        "first": int(first),
    }
    last = Launch(control.control(model.dims), "control", DRAFT, args, sizeof(abi.Loop), 3 * sizeof(abi.Record))
    return Plan((*plan.buffers, *working_buffers(), MIRROR), (*map(_agreeing, plan.launches), last))
