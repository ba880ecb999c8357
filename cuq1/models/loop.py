"""The decode loop's graphs as plans: what one launch of each computes, its end decided by a control kernel.

A round verifies 1 to 8 rows and holds the first draft depths; each further depth has a graph of its own, so that a
depth that is not worth its cost runs no kernel. `most` is the most drafts that a request makes in a round:

    most 0          one row; the draft's cache takes in what was committed
    most 1, 2       most + 1 rows, `most` depths in the round's graph
    most 3 .. 7     4 .. most + 1 rows, three depths in the round's graph, up to most - 3 after it
"""

from ctypes import sizeof

from cuq1.cuda import abi
from cuq1.cuda.kernels import control
from cuq1.models import decode
from cuq1.models.q1 import Model, buffer_of
from cuq1.plan.dims import DRAFT, ROWS
from cuq1.plan.types import Buffer, Launch, Plan, Ref
from cuq1.sampling.params import MIN_AUTO_DRAFTS

MIRROR = Buffer("mirror", (sizeof(abi.Mirror),), "uint8", sizeof(abi.Mirror))  # host memory


def working_buffers() -> list[Buffer]:
    """What control kernels keep in device memory."""
    return [
        buffer_of("loop", (sizeof(abi.Loop),), "uint8"),
        buffer_of("log", (abi.LOG_RECORDS, sizeof(abi.Record)), "uint8"),
    ]


def depths_within(most: int) -> int:
    """Draft depths in the graph of a round."""
    return min(most, MIN_AUTO_DRAFTS)


def rows_for(most: int) -> range:
    """Rows that a round of such a request may have."""
    return range(depths_within(most) + 1, most + 2)


def first_of(model: Model, most: int) -> Plan:
    """A request's first token from the logits' row 0, and the first draft depths."""
    made = depths_within(most)
    return _controlled(model, decode.first_of(model, made), made, first=True)


def round_of(model: Model, rows: int, most: int, *, short: bool) -> Plan:
    """A round up to the first draft depths. short: as in decode.round_of."""
    made = depths_within(most)
    plan = decode.round_of(model, rows, made, short=short)
    return _controlled(model, plan, made, first=True)


def depth_of(model: Model, depth: int) -> Plan:
    """Draft depth `depth`, from 0, after the round's own."""
    plan = decode.depth_of(model, depth, sample=True)
    return _controlled(model, plan, depth + 1, first=False)


def _controlled(model: Model, plan: Plan, made: int, *, first: bool) -> Plan:
    """The plan with a control kernel behind it."""
    args: dict[str, int | float | Ref] = {
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
    return Plan((*plan.buffers, *working_buffers(), MIRROR), (*plan.launches, last))
