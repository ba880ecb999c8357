"""Timelines: entries of blocks as launches, and what is written of them."""

import json

import numpy as np
import pytest

from cuq1.cuda import compile as jit
from cuq1.cuda.kernels import control
from cuq1.plan.kernel import Kernel
from tests.kernels import shapes
from tools.trace_round import chrome, draw, table
from tools.tracing import ENTRY, Tracer, spans

LABELS = ("one", "two")


def entries(*rows):
    """(begin, waiting, resumed, end, kernel, layer) of blocks."""
    found = np.zeros(len(rows), ENTRY)
    for i, row in enumerate(rows):
        for name, value in zip(("begin", "waiting", "resumed", "end", "kernel", "layer"), row, strict=True):
            found[name][i] = value
    return found


BLOCKS = entries(
    (100, 110, 120, 300, 0, 0),
    (105, 112, 119, 290, 0, 0),
    (250, 260, 301, 400, 1, 0),  # begins before its predecessor has ended
    (390, 395, 405, 500, 0, -1),
    (700, 710, 720, 800, 0, -1),  # the same kernel and layer again: another depth
    (60, 0, 0, 90, 1, 5),  # thread 0 waits for nothing
)


def test_blocks_are_grouped_to_launches():
    found = spans(BLOCKS[::-1].copy(), LABELS)
    assert [(s.label, s.layer, s.begin, s.resumed, s.end, s.blocks) for s in found] == [
        ("two", 5, 60, 60, 90, 1),
        ("one", 0, 100, 119, 300, 2),
        ("two", 0, 250, 301, 400, 1),
        ("one", -1, 390, 405, 500, 1),
        ("one", -1, 700, 720, 800, 1),
    ]
    assert found[1].last_begin == 105
    assert found[1].waiting == 110


def test_a_trace_file_has_each_part_of_a_launch(tmp_path):
    found = spans(BLOCKS, LABELS)
    trace = json.loads(json.dumps(chrome(found)))
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [event["name"] for event in complete[1:4]] == ["one prologue", "one waits for two, layer 5", "one, layer 0"]
    assert min(event["ts"] for event in complete) == 0
    assert sum(event["dur"] for event in complete) == pytest.approx((30 + 200 + 150 + 110 + 100) / 1e3)
    assert len(table(found)) == 4


def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    draw(spans(BLOCKS, LABELS), "title", [0], tmp_path / "round.svg")
    assert "<svg" in (tmp_path / "round.svg").read_text()


def test_only_traced_kernels_hold_a_scope():
    kernel = control.control(shapes.NANO)
    traced = Kernel(**{**vars(kernel), "defines": (*kernel.defines, ("TRACE", 3))})
    assert "TraceScope trace_scope(a.layer);" not in jit.source_text(kernel)
    assert jit.source_text(traced).count("TraceScope trace_scope(a.layer);") == 1


def test_parts_of_a_launch_are_numbered_behind_it():
    tracer = object.__new__(Tracer)
    tracer.labels, tracer._layers, tracer._places = ("one", "chain", "chain.a", "chain.b", "chainlike"), 0, 0
    defines = {label: dict(pairs) for label, pairs in tracer.defines.items()}
    assert defines["chain"] == {"TRACE": 1, "TRACE_PHASES": 2}
    assert defines["chainlike"] == {"TRACE": 4}
    assert defines["one"] == {"TRACE": 0}
