"""bench_e2e without a GPU: the reference in the engine's place, and what the report says of what does not fit."""

import json
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from cuq1.cuda import abi
from cuq1.cuda.qwen2_weights import qwen2_layout
from cuq1.models import qwen2, qwen2_decode
from cuq1.models.qwen2_forms import FORMS
from cuq1.reference.qwen2_engine import Qwen2Engine
from tests.unit.test_breakdown import TOKEN, span
from tools import bench_e2e
from tools.bench_e2e import bench
from tools.breakdown import REGIONS, breakdown
from tools.checkpoint_qwen2 import qwen2_config
from tools.e2e_report import Regions, lines, plain, region_lines
from tools.make_checkpoint import write_qwen2_checkpoint
from tools.qwen2_engines import Subject, parts_of
from tools.timeline import Times


class Engine(Qwen2Engine):
    """The reference, with what bench_e2e asks of a GPU engine besides; every third decoding may go wrong."""

    wrong = False

    def verified_rows(self, rows, start):
        return np.full((1, self.vocab_size), np.nan if self.wrong else np.arange(self.vocab_size), np.float32)


class Modes(Subject):
    """A checkpoint's engines in the reference. other: the mode whose tokens are others."""

    other = ""

    @contextmanager
    def engine(self, mode, context, tracer=None):
        with Engine(self.opened, context=context) as engine:
            if mode == self.other:
                engine._weights.lm_head[...] *= -1
            engine.wrong = self.other == "logits"
            yield engine


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    folder = write_qwen2_checkpoint(tmp_path_factory.mktemp("m") / "hf", qwen2_config("qwen2.5-coder-7b-tiny"))
    return Modes.of(str(folder), form="chain")


@pytest.fixture
def options():
    return SimpleNamespace(
        prompt=9, gen=4, context=20, repeats=3, warm_up=1, traced=1, seed=1, int4_head=False, capacity=64
    )


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch):
    @contextmanager
    def records(engine):
        yield [SimpleNamespace(launched=1000 * i, ended=1000 * i + 1700) for i in range(1, 5)]

    monkeypatch.setattr(bench_e2e, "records", records)
    plan = SimpleNamespace(read_bytes=lambda: 5_000_000, launches=[None] * 7)
    monkeypatch.setattr(bench_e2e, "token_plan", lambda engine, context: plan)
    shares = breakdown(TOKEN, 1000, 1700)
    found = Regions("device", 9, shares, 0.7, [], {"embed": 0, "qkv_gemv": 2_000_000})
    monkeypatch.setattr(bench_e2e, "regions", lambda *args: found)


def test_all_figures_of_a_model(subject, options):
    found = bench(subject, options, 4000.0)
    assert found["problems"] == []
    assert found["device"]["tokens"] == found["host"]["tokens"] == found["eager"]["tokens"]
    assert len(found["device"]["tokens"]) == 4
    assert found["clock_us"].median == pytest.approx(1.7)
    added = 11 * 2 * 2 * 128 * 2  # positions, layers, keys and values of one KV head, halves
    assert found["context"]["added_bytes"] == added
    extra = 1e3 * (found["context"]["itl_ms"].median - found["device"]["itl_ms"].median)
    assert found["context"]["ratio"] == pytest.approx(extra / (added / 4000e3))
    text = "\n".join(lines(found, 4000.0))
    for part in (
        "device  ",
        "host  ",
        "eager  ",
        "20  ",
        "kernel_gap",
        "append_kv: in attention",
        "device after 9",
        "form chain; a token: 8 launches, 0.005 GB",
    ):
        assert part in text
    assert json.loads(json.dumps(plain(found)))["device"].keys() == {"ttft_ms", "itl_ms"}


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        ("device", "host gives other tokens than device"),
        ("eager", "eager gives other tokens than device"),
        ("logits", "the logits are not finite"),
    ],
)
def test_results_are_checked(subject, options, other, problem):
    subject = Modes(**vars(subject))
    object.__setattr__(subject, "other", other)
    options.context = None
    found = bench(subject, options, 4000.0)
    assert any(problem in text for text in found["problems"]), found["problems"]
    assert f"PROBLEM: {found['problems'][0]}" in lines(found, 4000.0)


def test_a_layers_times_are_printed_where_asked_for(subject, options, monkeypatch):
    plan = bench_e2e.regions()
    timed = replace(plan, times={"layers.qkv": Times(0.5, 1, 1.5, 2, 2.5, 3, 1.25, 132)})
    for found, said in ((plan, 0), (timed, 3)):  # of the device, eager, and the long context
        monkeypatch.setattr(bench_e2e, "regions", lambda *args, found=found: found)
        report = bench(subject, options, 4000.0)
        text = lines(report, 4000.0)
        row = ["layers.qkv", "0.50", "1.00", "1.50", "2.00", "2.50", "3.00", "1.25", "132"]
        assert sum(line.split() == row for line in text) == said
        assert plain(report)["breakdowns"]["device"]["times"].keys() == found.times.keys()


def test_the_breakdown_is_printed_with_its_sum():
    shares = breakdown([*TOKEN[:-1], span("control", 1590, 1610, 2600)], 1000, 2600)
    table = region_lines("device", Regions("device", 9, shares, 1.6, [], {"qkv_gemv": 2_000_000}), 1.5, 4000.0)
    assert any(line.split()[:2] == ["qkv_gemv", "0.20"] and "250" in line for line in table)  # 2 MB in 0.2 µs
    assert any("sum" in line and "1.60; ITL 1.60 traced, 1.50 untraced; kernel_gap 14.37%" in line for line in table)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("most", [28, 10])
def test_every_launch_and_part_of_a_token_has_a_region(short, form, most):
    config = Subject.of("qwen2.5-coder-7b").config
    model = qwen2.resolve(config, qwen2_layout(config), capacity=1024, form=form, layers_per_launch=most)
    plan = qwen2_decode.round_of(model, context=400, short=short)
    parts = parts_of(plan)
    assert {one.label for one in parts} <= REGIONS.keys() - {"control", "chain", "layers"}
    assert sum(one.read for one in parts) == plan.read_bytes()
    read = bench_e2e.region_bytes(parts)
    units = 3584 // 128 * 1056  # of a tile of 16 rows
    assert read["gate_up"] == 28 * 18944 // 8 * units
    assert read["qkv_gemv"] == 28 * 4608 // 16 * units
    assert read["down"] == 28 * 3584 // 16 * 18944 // 128 * 1056
    assert read["attention"] == 400 * qwen2.position_bytes(config)
    assert (len(parts) > len(plan.launches)) == (form != "launches")
    assert len({(one.label, one.layer) for one in parts}) == len(parts)
    if form == "layers":
        phases = [f"layers.{part}" for part in ("qkv", "attention", "o_proj", "gate_up", "down")]
        assert [(one.label, one.layer) for one in parts[1:-4]] == [(p, layer) for layer in range(28) for p in phases]


def test_forms_are_chosen_before_anything_is_measured(monkeypatch, capsys):
    """Each in turn, under its name; of a form that a model does not have, one sentence and no figures."""
    device = SimpleNamespace(name="GPU", arch="sm_90a", multiprocessors=132)
    monkeypatch.setattr(bench_e2e, "open_device", lambda: device)
    monkeypatch.setattr(bench_e2e.graph, "stream", lambda: 0)
    monkeypatch.setattr(bench_e2e, "read_ceiling", lambda *args: 4000.0)
    monkeypatch.setattr(bench_e2e, "lines", lambda found, ceiling: [found["form"]])
    monkeypatch.setattr(bench_e2e, "bench", lambda subject, *args: {"form": subject.form, "problems": []})
    argv = ["--config", "qwen2.5-coder-7b"]
    for chosen, forms in (([], ["layers"]), (["launches", "layers"], ["launches", "layers"])):
        assert bench_e2e.main([*argv, *(["--form", *chosen] if chosen else [])]) == 0
        assert capsys.readouterr().out.splitlines()[1:] == forms
    assert bench_e2e.main(["--config", "qwen2.5-coder-0.5b-tiny", "--form", "chain", "layers"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "form layers takes a model of other sizes: choose chain or launches" in err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--config", "qwen2.5-coder-8b"], "qwen2.5-coder-8b is no Qwen2 model"),
        (["--model", "cuq1/assets/iquest-q1-nano"], "is no Qwen2 model"),
        (["--gen", "1"], "--gen must be at least 2"),
        (["--context", "512"], "--context must be more than --prompt"),
        (["--config", "qwen2.5-coder-0.5b", "--model", "x"], "not allowed with"),
        (["--prompt", "0"], "argument --prompt: '0' is not an integer of at least 1"),
        (["--gen", "many"], "argument --gen: 'many' is not an integer of at least 1"),
        (["--warm-up", "-1"], "argument --warm-up: '-1' is not an integer of at least 0"),
        (["--traced", "-1"], "argument --traced: '-1' is not an integer of at least 0"),
        (["--prompt", "32768"], "positions"),
        (["--form", "eager"], "argument --form: invalid choice: 'eager'"),
    ],
)
def test_bad_options(capsys, argv, says):
    assert bench_e2e.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert says in err


def test_records_are_what_the_loop_says():
    assert {"launched", "ended"} <= {name for name, _ in abi.Record._fields_}
