"""What a rank's GPU engine needs of the others, without a GPU: agreement, sums, gathered logits, texts."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from cuq1.checkpoint import Checkpoint
from cuq1.config import load_config
from cuq1.cuda import abi, chunks, ranks
from cuq1.cuda.chunks import Chunks
from cuq1.cuda.engine import CudaEngine
from cuq1.cuda.runtime import Runtime
from cuq1.cuda.weights import weights_plan
from cuq1.engine import open_engine
from cuq1.errors import DeviceError, LaunchError, PeerError, RequestError
from cuq1.models import loop, prefill, q1
from cuq1.models.prefill import Chunk, Step, Sum
from cuq1.plan.dims import DRAFT
from cuq1.sampling.depth import default_rule
from tests.paths import NANO
from tests.unit.test_rendezvous import serving, together


def model_of(tp=2, rank=0, folder=NANO, **more):
    config, draft = load_config(folder)
    layout = weights_plan(config, draft, tp, rank)
    return q1.resolve(config, draft, layout, tp=tp, rank=rank, ranks=tp, place=rank, **more)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(ranks, "versions", lambda: "as here")


def agreed(values):
    """What ranks say that agree on `values`, one dictionary each."""
    with serving(len(values)) as served:
        return together(served, len(values), lambda meeting: meeting.agree("setup", values[meeting.rank]))


def test_ranks_of_one_checkpoint_agree():
    values = [ranks.setup(Checkpoint.open(NANO), tp=2, loop="device") for _ in range(2)]
    assert agreed(values) == [None, None]


@pytest.mark.parametrize(
    ("change", "named"),
    [("config", "config"), ("draft", "draft's config"), ("tensors", "checkpoint"), ("loop", "loop")],
)
def test_ranks_that_differ_stop_with_the_difference_named(model, change, named):
    if change == "config":
        changed = json.loads((model / "config.json").read_text()) | {"rms_norm_eps": 1e-5}
        (model / "config.json").unlink()
        (model / "config.json").write_text(json.dumps(changed))
    elif change == "draft":
        changed = json.loads((model / "mtp" / "config.json").read_text()) | {"swa_rope_theta": 1e5}
        (model / "mtp" / "config.json").unlink()
        (model / "mtp" / "config.json").write_text(json.dumps(changed))
    elif change == "tensors":  # the same tensors, elsewhere in the file
        data = (model / "model.safetensors").read_bytes()
        length = int.from_bytes(data[:8], "little")
        (model / "model.safetensors").unlink()
        longer = data[8 : 8 + length] + b" " * 8
        (model / "model.safetensors").write_bytes(len(longer).to_bytes(8, "little") + longer + data[8 + length :])
    loops = ["device", "host" if change == "loop" else "device"]
    values = [ranks.setup(Checkpoint.open(at), loop=loop) for at, loop in zip((NANO, model), loops, strict=True)]
    for error in agreed(values):
        assert isinstance(error, LaunchError)
        assert str(error).startswith(f'ranks disagree on "{named}"' if "'" in named else f"ranks disagree on '{named}'")
        assert "on rank 0" in str(error)
        assert "on rank 1" in str(error)


@pytest.mark.parametrize("tp", [2, 4])
def test_all_ranks_have_the_same_plan(no_gpu, tp):
    values = [ranks.plan_values(model_of(tp, rank), default_rule(), "sm_90a") for rank in range(tp)]
    assert all(one == values[0] for one in values)


def test_another_plan_or_rule_is_noticed(no_gpu):
    """The controls."""
    first = ranks.plan_values(model_of(), default_rule(), "sm_90a")

    def differing(model, rule=None, arch="sm_90a"):
        found = ranks.plan_values(model, rule or default_rule(), arch)
        return {name for name in first if first[name] != found[name]}

    assert differing(model_of()) == set()
    assert "plan" in differing(model_of(capacity=1024))
    assert "plan" in differing(model_of(sms=114))
    assert "plan" in differing(model_of(fp8_activations=True))
    assert differing(model_of(), replace(default_rule(), threshold=0.25)) == {"rule for drafts"}
    assert differing(model_of(), arch="sm_100a") == {"kernels"}


def test_the_stop_rule_is_the_same_on_any_number_of_gpus():
    """Else a seed would give other tokens: how many are drafted decides which number a token is drawn from."""
    rules = [ranks.shared_rule(model_of(tp)) for tp in (1, 2, 4)]
    assert rules[0] == rules[1] == rules[2]
    own = [loop.draft_threshold(model_of(tp), default_rule().worth) for tp in (1, 2, 4)]
    assert len(set(own)) == 3  # the control: each by itself would be another
    assert rules[0].threshold == own[2]
    released = NANO.parent / "iquest-q1"
    assert ranks.shared_rule(model_of(4, 1, released)).threshold == pytest.approx(0.425, abs=0.01)


def test_prompts_are_summed_where_ranks_have_parts_alone():
    model = model_of(2, 1)
    steps = prefill.chunk_steps(model)
    found = [(steps[i - 1].label, step) for i, step in enumerate(steps) if isinstance(step, Sum)]
    layers = range(len(model.layers))
    expected = [("eh_proj", DRAFT)] + [each for i in layers for each in (("o_proj", i), ("combine", i))]
    assert [(before, step.layer) for before, step in found] == [*expected, ("eh_proj", DRAFT)]
    hidden = model.dims.hidden
    for before, step in found:
        writer = next(s for s in steps if isinstance(s, Step) and s.label == before and s.layer == step.layer)
        out = writer.args["y" if before == "combine" else "out"]
        assert step.buffer == out.buffer
        if before == "eh_proj":
            assert (step.first, step.columns, step.width) == (hidden // 2, hidden // 2, hidden)
            assert writer.args["first_column"] == step.first
        else:
            assert (step.first, step.columns, step.width) == (0, hidden, hidden)
            assert step.rows(Chunk(0, 77)) == 77
    before, after = found[0][1], found[-1][1]
    assert (before.rows(Chunk(64, 32, 63, 90)), after.rows(Chunk(64, 32, 63, 90))) == (1, 26)
    assert (before.rows(Chunk(64, 32)), after.rows(Chunk(64, 32))) == (0, 0)


def test_one_rank_sums_nothing():
    config, draft = load_config(NANO)
    alone = q1.resolve(config, draft, weights_plan(config, draft, 2, 1), tp=2, rank=1)
    for model in (model_of(1), alone):
        assert not any(isinstance(step, Sum) for step in prefill.chunk_steps(model))
        assert not any(b.name == "prefill.all_logits" for b in prefill.working_buffers(model))


@pytest.mark.parametrize(("first", "columns"), [(0, 4), (4, 4), (8, 4), (0, 12)])
def test_columns_of_others_count_as_zero(monkeypatch, first, columns):
    """Every rank's clears leave its own columns, and nothing of what lay beside them."""
    memory = np.arange(5 * 12, dtype=np.float32)
    issued = []

    def clear(at, pitch, value, width, height, stream):
        assert (pitch, value, stream) == (48, 0, 9)
        start = (at - 4096) // 4
        memory[: 12 * height].reshape(height, 12)[:, start : start + width] = 0
        issued.append("clear")
        return (0,)

    driver = SimpleNamespace(CUdeviceptr=int, CUstream=int, cuMemsetD2D32Async=clear)
    monkeypatch.setattr(chunks, "bindings", lambda: driver)
    summed = SimpleNamespace(sum=lambda *args: issued.append(args))
    step = Sum("sum", 0, "b", 12, lambda chunk: chunk.rows, first, columns)
    ((label, issue),) = Chunks([step], {"b": 4096}, summed).launches(Chunk(0, 3))
    issue(9)
    assert label == "sum"
    assert issued[-1] == (4096, 3 * 12, 9)
    expected = np.arange(60, dtype=np.float32).reshape(5, 12)
    expected[:3, :first] = expected[:3, first + columns :] = 0
    assert np.array_equal(memory.reshape(5, 12), expected)


def test_gathered_logits_are_in_the_order_of_the_vocabulary():
    parts = np.arange(3 * 2 * 4, dtype=np.float32).reshape(3, 2, 4)  # ranks, rows, columns of each
    gathers = []
    runtime = SimpleNamespace(
        ranks=SimpleNamespace(world=3, gather=lambda *args: gathers.append(args)),
        model=SimpleNamespace(dims=SimpleNamespace(vocab=4)),
        addresses={"logits": 100, "prefill.all_logits": 200},
        stream=7,
        wait=lambda: gathers.append("waited"),
        read=lambda name, out: np.copyto(out, parts),
    )
    out = np.zeros((2, 12), np.float32)
    Runtime.read_logits(runtime, "logits", out)
    assert gathers == [(100, 200, 8, 7), "waited"]
    assert np.array_equal(out, np.concatenate(list(parts), axis=1))


@pytest.mark.parametrize(
    ("kernel", "layer", "text"),
    [
        ("attn_tail", 12, "rank 1's part of the attention output of layer 12 never came within 4 s"),
        ("mlp_tail", 0, "rank 1's part of the experts' output of layer 0 never came within 4 s"),
        ("attn_tail", -1, "rank 1's part of the attention output of the draft's layer never came within 4 s"),
        ("qkv", -1, "rank 1's part of the draft's entry never came within 4 s"),
        ("accept", 62, "rank 1's part of the candidates of the head never came within 4 s"),
        ("draft_sample", -1, "rank 1's part of the candidates of the draft's layer never came within 4 s"),
    ],
)
def test_a_part_that_never_came_is_named(kernel, layer, text):
    numbers = {name: number for number, name in abi.KERNELS.items()}
    fault = abi.Fault(what=6, kernel=numbers[kernel], layer=layer, detail=1)
    cleared = []
    runtime = SimpleNamespace(
        _fault=SimpleNamespace(read=lambda: fault, clear=lambda: cleared.append(1)),
        model=SimpleNamespace(layers=range(62)),
        ranks=SimpleNamespace(),
    )
    with pytest.raises(PeerError, match=re.escape(text)):
        Runtime._raise_fault(runtime, None)
    assert not cleared  # it goes on to end what other ranks do


def test_an_engine_of_several_ranks_needs_them(monkeypatch):
    with pytest.raises(DeviceError, match="tp 2 the CUDA engine is one of 2 ranks"):
        CudaEngine(NANO, 2)
    with pytest.raises(RequestError, match="cuq1-launch -n 2 --"):
        open_engine(NANO, "cuda", 2)
    with pytest.raises(RequestError, match="tp 2 does not go with a run of 3 ranks"):
        open_engine(NANO, "cuda", 2, meeting=SimpleNamespace(world=3))


def test_a_fault_that_another_rank_has_is_told_by_that_rank():
    """A chain ends for it on all ranks: those without a fault of their own wait for the one that has it."""

    def act(meeting):
        own = ranks.Ranks(meeting)
        engine = SimpleNamespace(_runtime=SimpleNamespace(ranks=own))
        CudaEngine._check_end(engine, abi.Record(reason=abi.END_CANCELLED))
        try:
            if meeting.rank == 1 and fails:
                raise DeviceError("routing that did not come ended gate_up of layer 7")
            CudaEngine._check_end(engine, abi.Record(reason=abi.END_FAULT))
        except DeviceError as error:
            meeting.fail(str(error))
            return str(error)

    fails = True
    with serving(3) as served:
        results = together(served, 3, act)
    assert [str(results[rank]) for rank in (0, 2)] == [f"rank 1 failed: {results[1]}"] * 2
    fails = False  # the control: if all wait, none has it
    with serving(2) as served:
        assert all("no rank has reported" in str(result) for result in together(served, 2, act))


def test_more_ranks_than_can_exchange():
    with pytest.raises(DeviceError, match="tp 16 is more than the 8 GPUs"):
        ranks.Ranks(SimpleNamespace(rank=0, world=16))
