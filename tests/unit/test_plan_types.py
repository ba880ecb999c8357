"""Plans refuse what no kernel could run."""

from ctypes import Structure, c_double, c_float, c_int32, c_uint64
from dataclasses import replace

import pytest

from cuq1.cuda.execute import Program
from cuq1.models.collect import Collector
from cuq1.plan.kernel import Kernel
from cuq1.plan.types import Buffer, Launch, Plan, Ref


class Args(Structure):
    _fields_ = (
        ("input", c_uint64),
        ("output", c_uint64),
        ("rows", c_int32),
        ("scale", c_float),
        ("fine", c_double),
        ("many", c_uint64 * 3),
        ("reserved", c_int32),
    )


KERNEL = Kernel("x.cu", "x", Args, (), (1, 1, 1), 32)
BUFFERS = (Buffer("a", (4,), "float32", 16), Buffer("b", (2, 2), "float32", 16))
ARGS = {"input": Ref("a", 8), "output": Ref("b"), "rows": 3, "scale": 0.5, "fine": 2, "many": (Ref("b", 4), 0)}
LAUNCH = Launch(KERNEL, "label", 7, ARGS, 100, 10, "sliding")


def launch(**changes):
    return replace(LAUNCH, args={name: value for name, value in {**ARGS, **changes}.items() if value is not None})


def test_a_plan_binds_its_launches_to_addresses():
    plan = Plan(BUFFERS, (LAUNCH, launch(input=0)))
    assert plan.total_bytes() == 32
    assert plan.read_bytes() == 200
    assert plan.kernels() == [KERNEL]
    assert plan.buffer("b") == BUFFERS[1]
    bound = LAUNCH.structure({"a": 1000, "b": 2000})
    assert (bound.input, bound.output, bound.rows, bound.scale, bound.fine, bound.reserved) == (
        1008,
        2000,
        3,
        0.5,
        2,
        0,
    )
    assert list(bound.many) == [2004, 0, 0]  # nulls behind the tuple's end
    assert plan.launches[1].structure({"b": 2000}).input == 0
    assert dict(LAUNCH.refs()) == {"input": Ref("a", 8), "output": Ref("b"), "many[0]": Ref("b", 4)}
    assert plan == Plan(BUFFERS, (LAUNCH, launch(input=0)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"outptu": 1}, "Args has no field outptu"),
        ({"rows": None, "scale": None}, "no value for rows, scale of Args"),
        ({"input": Ref("c")}, "input refers to c, which is no buffer of this plan"),
        ({"input": Ref("a", 16)}, "input lies 16 bytes into a, which has 16"),
        ({"input": Ref("a", -4)}, "input lies -4 bytes into a, which has 16"),
        ({"input": 4096}, "input is a pointer: give a Ref or 0, not 4096"),
        ({"rows": Ref("a")}, "rows is no pointer: give a number"),
        ({"rows": 1.5}, "rows is an integer from -2147483648 to 2147483647, not 1.5"),
        ({"many": None}, "no value for many of Args"),
        ({"many": Ref("a")}, "many is an array: of these, arguments are tuples of pointers alone, not Ref"),
        ({"many": (0,) * 4}, "many has 3 places, not 4"),
        ({"many": (0, 7)}, "many[1] is a pointer: give a Ref or 0, not 7"),
        ({"many": (0, (Ref("a"),))}, "many[1] is no array: give one value"),
        ({"many": (0, Ref("c"))}, "many[1] refers to c, which is no buffer of this plan"),
        ({"many": (Ref("b", 16),)}, "many[0] lies 16 bytes into b, which has 16"),
        ({"input": (Ref("a"),)}, "input is no array: give one value, not (Ref"),
        ({"rows": (1,)}, "rows is no array: give one value, not (1,)"),
        ({"rows": 1 << 31}, "rows is an integer from -2147483648 to 2147483647, not 2147483648"),
    ],
)
def test_a_launch_that_cannot_be_bound_is_refused(changes, message):
    Plan(BUFFERS, (LAUNCH,))
    with pytest.raises(ValueError, match=r"launch 1 \(label, layer 7\): ") as told:
        Plan(BUFFERS, (LAUNCH, launch(**changes)))
    assert message in str(told.value)


def test_buffers_have_names_of_their_own_and_a_size():
    with pytest.raises(ValueError, match="two buffers are named a"):
        Plan((*BUFFERS, Buffer("a", (1,), "uint8", 1)), ())
    with pytest.raises(ValueError, match="buffer c has 0 bytes"):
        Plan((Buffer("c", (0,), "uint8", 0),), ())


def test_a_program_needs_every_address():
    with pytest.raises(ValueError, match="no address for b"):
        Program(Plan(BUFFERS, (LAUNCH,)), {"a": 256})
    only = launch(output=0, many=(0, Ref("b")))
    with pytest.raises(ValueError, match="no address for b"):
        Program(Plan(BUFFERS, (only,)), {"a": 256})
    with pytest.raises(KeyError, match="b"):
        only.structure({"a": 256})


def test_a_plan_in_the_making_keeps_the_buffers_that_arrays_name():
    made = Collector({}, (*BUFFERS, Buffer("c", (1,), "uint8", 1), Buffer("fault", (1,), "uint8", 1)))
    made.add(KERNEL, "label", 0, {**ARGS, "input": 0, "output": 0, "unknown": 3}, 1, 1)
    assert [buffer.name for buffer in made.plan().buffers] == ["b"]
    made.add(KERNEL, "label", 0, {**ARGS, "many": (0, 0, Ref("c"))}, 1, 1)
    assert [buffer.name for buffer in made.plan().buffers] == ["a", "b", "c"]
