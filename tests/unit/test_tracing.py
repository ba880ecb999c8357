"""Timelines: entries of blocks as launches, and what is written of them."""

import json
from dataclasses import astuple

import numpy as np
import pytest

from cuq1.cuda import compile as jit
from cuq1.cuda.kernels import control
from cuq1.plan.kernel import Kernel
from tests.kernels import shapes
from tools.breakdown import REGIONS
from tools.timeline import medians, timeline, timeline_lines
from tools.trace_round import chrome, draw, table
from tools.tracing import BLOCKS, ENTRY, Tracer, spans

LABELS = ("one", "two")


def entries(*rows):
    """(begin, waiting, resumed, end, kernel, layer) of blocks."""
    found = np.zeros(len(rows), ENTRY)
    for i, row in enumerate(rows):
        for name, value in zip(("begin", "waiting", "resumed", "end", "kernel", "layer"), row, strict=True):
            found[name][i] = value
    return found


ENTRIES = entries(
    (100, 110, 120, 300, 0, 0),
    (105, 112, 119, 290, 0, 0),
    (250, 260, 301, 400, 1, 0),  # begins before its predecessor has ended
    (390, 395, 405, 500, 0, -1),
    (700, 710, 720, 800, 0, -1),  # the same kernel and layer again: another depth
    (60, 0, 0, 90, 1, 5),  # thread 0 waits for nothing
)


def test_blocks_are_grouped_to_launches():
    found = spans(ENTRIES[::-1].copy(), LABELS)
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
    found = spans(ENTRIES, LABELS)
    trace = json.loads(json.dumps(chrome(found)))
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [event["name"] for event in complete[1:4]] == ["one prologue", "one waits for two, layer 5", "one, layer 0"]
    assert min(event["ts"] for event in complete) == 0
    assert sum(event["dur"] for event in complete) == pytest.approx((30 + 200 + 150 + 110 + 100) / 1e3)
    assert len(table(found)) == 4


def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    draw(spans(ENTRIES, LABELS), "title", [0], tmp_path / "round.svg")
    assert "<svg" in (tmp_path / "round.svg").read_text()


def test_only_traced_kernels_hold_a_scope():
    kernel = control.control(shapes.NANO)
    traced = Kernel(**{**vars(kernel), "defines": (*kernel.defines, ("TRACE", 3))})
    assert "TraceScope trace_scope(a.layer);" not in jit.source_text(kernel)
    assert jit.source_text(traced).count("TraceScope trace_scope(a.layer);") == 1


def test_parts_of_many_layers_are_launches_of_their_own():
    """A launch's parts have the number behind its own, and each of its layers has places."""
    tracer = object.__new__(Tracer)
    tracer.labels = [label for label in REGIONS if label != "control"]
    tracer._layers, tracer._places = 28, len(tracer.labels) * 28 * BLOCKS
    defines = {label: dict(pairs) for label, pairs in tracer.defines.items()}
    assert defines["layers"]["TRACE_PHASES"] == 5
    assert defines["layers"]["TRACE_LAYERS"] == 28
    numbers = [tracer.labels.index(f"layers.{part}") for part in ("qkv", "attention", "o_proj", "gate_up", "down")]
    assert numbers == [defines["layers"]["TRACE"] + 1 + phase for phase in range(5)]
    places = [
        (number * 28 + layer) * BLOCKS + block for number in numbers for layer in range(28) for block in range(132)
    ]
    assert len(set(places)) == 5 * 28 * 132
    assert max(places) < tracer._places


def phased(blocks, layers, rng):
    """Entries of a launch with three parts, as common/trace.cuh writes them, and when half of its blocks ended a layer.

    Nobody waits for anything in the first part, and some blocks have no work in the second.
    """
    found, half = [], []
    ends = rng.integers(1, 50, blocks)
    for layer in range(layers):
        for part in (1, 2, 3):
            resumed = ends + rng.integers(0, 100, blocks) * (part > 1)
            after = resumed + rng.integers(1, 100, blocks)
            idle = (part == 1) | ((part == 2) & (np.arange(blocks) % 3 > 0))
            resumed = np.where(idle, 0, resumed)
            found += [(*row, part, layer) for row in zip(ends, ends, resumed, after, strict=True)]
            ends = after
        half.append(np.median(ends))
    return found, half


def test_a_layers_times_are_those_of_its_blocks():
    rng = np.random.default_rng()
    labels, order = (
        ("one", "one.a", "one.b", "one.c"),
        [("one.a", 0), *((f"one.{part}", 1) for part in "abc"), ("two", 3)],
    )
    rows, half = phased(7, 3, rng)
    found = timeline(entries(*(rows[i] for i in rng.permutation(len(rows)))), labels, order)
    assert list(found) == ["one.a", "one.b", "one.c"]
    for part, name in enumerate(found, 1):
        assert len(found[name]) == 2
        for layer, times in enumerate(found[name], 1):
            own = [row for row in rows if row[4:] == (part, layer)]
            own = [row for row in own if row[2] > 0] or own
            resumed = [(row[2] or row[0]) - half[layer - 1] for row in own]
            ended = [row[3] - half[layer - 1] for row in own]
            work = [end - begin for begin, end in zip(resumed, ended, strict=True)]
            wanted = [f(values) for values in (resumed, ended) for f in (min, np.median, max)] + [np.median(work)]
            assert astuple(times) == pytest.approx([*(value / 1e3 for value in wanted), {2: 3}.get(part, 7)])
    middle = medians([found])["one.c"]
    assert middle.work == pytest.approx(np.mean([one.work for one in found["one.c"]]))
    text = timeline_lines("title", {"one.c": middle})
    assert text[-1].split() == ["one.c", *(f"{value:.2f}" for value in astuple(middle)[:-1]), "7"]
    assert timeline(entries(*rows), labels, [("embed", 0)]) == {}
    assert medians([{"one.a": []}]) == {}


def test_parts_of_a_launch_are_numbered_behind_it():
    tracer = object.__new__(Tracer)
    tracer.labels, tracer._layers, tracer._places = ("one", "chain", "chain.a", "chain.b", "chainlike"), 0, 0
    defines = {label: dict(pairs) for label, pairs in tracer.defines.items()}
    assert defines["chain"] == {"TRACE": 1, "TRACE_PHASES": 2}
    assert defines["chainlike"] == {"TRACE": 4}
    assert defines["one"] == {"TRACE": 0}
