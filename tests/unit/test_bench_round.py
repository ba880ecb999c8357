"""What the round's benchmark draws, and what is made of its rows."""

import json

import numpy as np
import pytest

from cuq1.config import load_config
from cuq1.cuda.weights import weights_plan
from cuq1.errors import RequestError
from cuq1.models import decode, q1
from cuq1.plan.types import Plan
from tests.paths import RELEASED
from tools.bench_capacity import sizes
from tools.bench_round import _told, contexts, routing, span, within_reach
from tools.plot_round import last_sweep, table


@pytest.mark.parametrize(("rows", "distinct"), [(1, 8), (6, 8), (6, 37), (8, 38), (8, 64), (4, 32)])
def test_routing_has_exactly_the_distinct_experts(rows, distinct):
    ids = routing(np.random.default_rng(rows * distinct), rows, 256, 8, distinct)
    assert ids.shape == (8, 8)
    assert len(np.unique(ids[:rows])) == distinct
    for row in ids[:rows]:
        assert len(set(row.tolist())) == 8


@pytest.mark.parametrize(("rows", "distinct"), [(1, 9), (8, 7), (4, 33)])
def test_impossible_routing_is_refused(rows, distinct):
    with pytest.raises(RequestError, match=f"{distinct} distinct experts"):
        routing(np.random.default_rng(0), rows, 256, 8, distinct)


def test_few_rows_choose_as_many_experts_as_they_can():
    assert [within_reach(37.7, rows, 256, 8) for rows in (1, 4, 5, 8)] == [8.0, 32.0, 37.7, 37.7]
    assert within_reach(2, 8, 256, 8) == 8.0


def test_lists_on_the_command_line():
    assert span("4..8") == [4, 5, 6, 7, 8]
    assert span("4,8") == [4, 8]
    assert contexts("sweep")[0] == 1024
    for text in ("0", "9", "4..9", "8..4"):
        with pytest.raises(ValueError, match=text.replace(".", r"\.")):
            span(text)


def row(context, command="bench_round.py --context sweep"):
    return {
        "command": command,
        "context": context,
        "us": {"median": 3500.0, "low": 3400.0, "high": 3600.0},
        "bytes": 7e9,
        "ceiling_gbps": 4400.0,
        "of_floor": 7e9 / 4400e3 / 3500,
    }


def test_the_last_sweep_becomes_a_table(tmp_path):
    log = tmp_path / "round.jsonl"
    rows = [row(1024), row(4096), row(1024, "bench_round.py"), row(1024), row(8192), row(16384)]
    log.write_text("".join(json.dumps(one) + "\n" for one in rows))
    assert [one["context"] for one in last_sweep(log)] == [1024, 8192, 16384]
    assert table(last_sweep(log)).splitlines()[2] == "| 1K | 3.50 (3.40 to 3.60) | 7.00 | 1.59 | 45% |"
    log.write_text(json.dumps(row(1024)) + "\n")
    with pytest.raises(RequestError, match="no sweep"):
        last_sweep(log)


def test_who_is_not_told_waits():
    config, draft = load_config(RELEASED)
    plan = decode.round_of(q1.resolve(config, draft, weights_plan(config, draft, 8, 0), tp=8, capacity=1024), 8, 5)

    def polling(*left_out):
        """(label, field) of what the launches of the target that remain poll for, or make ready to be polled."""
        kept = tuple(one for one in plan.launches if one.label not in left_out or one.layer < 0)
        fields = ("routed", "polled", "unready")
        return {
            (a.label, name) for a in _told(Plan(plan.buffers, kept)).launches for name in fields if a.args.get(name)
        }

    every = {(label, "routed") for label in ("attn_tail", "gate_up", "down")}
    every |= {("attn_tail", "polled"), ("down", "polled"), ("down", "unready")}
    assert polling() == every
    assert polling("qkv", "lm_head") == every
    drafts = {(label, "routed") for label in ("attn_tail", "gate_up", "down")} | {("down", "polled")}
    assert polling("o_proj") == every - {("attn_tail", "polled"), ("down", "unready")}
    assert polling("attn_tail") == drafts | {("down", "unready")}
    assert polling("attn_tail", "o_proj") == drafts


def test_capacities_to_compare():
    assert sizes("1024,1024,262144") == [1024, 1024, 262144]
    for text in ("1024", "0,1024", "all"):
        with pytest.raises(ValueError):  # noqa: PT011
            sizes(text)
