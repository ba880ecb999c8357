"""Plans of a Qwen2 model's token and prompts, from its config alone."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from cuq1.config_qwen2 import parse_qwen2
from cuq1.cuda.qwen2_engine import RESERVE, fitting
from cuq1.cuda.qwen2_weights import qwen2_layout
from cuq1.models import loop, qwen2, qwen2_decode, qwen2_prefill
from cuq1.models.family import plans_of
from cuq1.models.steps import Chunk
from cuq1.plan.qwen2_dims import PAGE
from cuq1.plan.types import Ref
from tools.checkpoint_qwen2 import NAMES, qwen2_config


def model_of(name, *, int4_head=False, **options):
    config = parse_qwen2(qwen2_config(name))
    return qwen2.resolve(config, qwen2_layout(config, int4_head=int4_head), **options)


def reads(launch):
    """Buffers that a launch reads, by the names of its arguments: all that it has but what it writes."""
    return {(ref.buffer, ref.offset) for name, ref in launch.refs() if name not in writes_of(launch)}


def writes_of(launch):
    return {
        "embed": {"residual"},
        "qkv": {"residual_out", "out"},
        "attention": {"attended"},
        "combine": {"attended"},
        "o_proj": {"out"},
        "gate_up": {"residual_out", "inner"},
        "down": {"out"},
        "norm": {"normed"},
        "lm_head": {"logits"},
        "top_k": {"values", "ids"},
    }.get(launch.label, set())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("head", [False, True])
def test_every_model_has_plans(name, head):
    """Every field of every launch has a value, within its buffer: a Plan refuses anything else."""
    model = model_of(name, int4_head=head, capacity=4096)
    plans = plans_of(model)
    layers = model.config.num_hidden_layers
    for short in (False, True):
        counts = Counter(launch.label for launch in loop.round_of(model, 1, 0, short=short).launches)
        assert counts == {
            **dict.fromkeys(("qkv", "attention", "o_proj", "gate_up", "down"), layers),
            **dict.fromkeys(("embed", "norm", "lm_head", "top_k", "accept", "control"), 1),
            **({} if short else {"combine": layers}),
        }
        assert [one.label for one in plans.target_of(1, short=short).launches][-1] == "lm_head"
    assert [one.label for one in loop.first_of(model, 0).launches] == ["top_k", "accept", "control"]
    assert [one.label for one in plans.logits_of().launches] == ["lm_head"]
    for chunk in (Chunk(0, 1), Chunk(17, 2048)):
        counts = Counter(launch.label for launch in qwen2_prefill.chunk_plan(model, chunk).launches)
        steps = ("qkv", "attention", "o_proj", "gate_up", "down")
        assert counts == {**dict.fromkeys(steps, layers), "norm": 2 * layers + 1, "rope": 1, "embed": 1}
    part = Chunk(3, min(plans.scored, 200))
    scoring = qwen2_prefill.steps_plan(model, plans.logits_steps(), part)
    assert [one.label for one in scoring.launches] == ["norm", "lm_head"]
    assert scoring.launches[0].args["residual"] == Ref("prefill.residual", 3 * model.config.hidden_size * 4)
    names = [buffer.name for buffer in (*plans.buffers(), *loop.working_buffers())]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("short", [False, True])
def test_what_a_launch_writes_the_one_before_does_not_read(short):
    """A dependent launch begins while its predecessor may still run."""
    model = model_of("qwen2.5-coder-1.5b", capacity=4096)
    launches = qwen2_decode.round_of(model, short=short).launches

    def overlaps():
        for before, after in pairwise(launches):
            written = {(ref.buffer, ref.offset) for name, ref in after.refs() if name in writes_of(after)}
            yield from reads(before) & written

    assert not list(overlaps())
    for launch in launches:
        if launch.label in ("qkv", "gate_up"):
            assert launch.args["residual"] != launch.args["residual_out"]
            launch.args["residual_out"] = launch.args["residual"]
    own = [one for one in launches if one.label in ("qkv", "gate_up") and one.args["residual_out"] in one.args.values()]
    assert own  # the control: what was planted is seen by the same comparison
    assert any((one.args["residual"].buffer, one.args["residual"].offset) in reads(one) for one in own)


def test_a_token_reads_every_matrix_once():
    model = model_of("qwen2.5-coder-3b", capacity=4096)
    plan = qwen2_decode.round_of(model, context=1000, short=True)
    weights = sum(
        tensor.nbytes for tensor in model.weights.tensors.values() if tensor.dtype == "uint8"
    )  # all that is packed: embedding, norms and biases are a token's row or small
    cache = 1000 * qwen2.position_bytes(model.config)
    assert plan.read_bytes() == pytest.approx(weights + cache, rel=1e-3)


def test_capacity_changes_buffers_and_nothing_else():
    small, large = (model_of(NAMES[0], capacity=size) for size in (4096, 32768))
    plans = [qwen2_decode.round_of(model) for model in (small, large)]
    assert [one.kernel for one in plans[0].launches] == [one.kernel for one in plans[1].launches]
    assert plans[0].total_bytes() < plans[1].total_bytes()
    more = plans[1].total_bytes() - plans[0].total_bytes()
    assert more == (32768 - 4096) * qwen2.position_bytes(small.config) + 2 * 4 * (32768 - 4096) // PAGE


@pytest.mark.parametrize(("capacity", "pages"), [(1, 1), (16, 1), (17, 2), (400, 25)])
def test_pages_of_an_empty_sequence(capacity, pages):
    model = model_of(NAMES[-1], capacity=capacity)
    assert (model.pages, model.capacity) == (pages, pages * PAGE)
    empty = model.empty
    assert (empty["page_table"] == -1).all()
    assert sorted(empty["free_pages"]) == list(range(pages))
    assert empty["free_pages"][-1] == 0  # taken first
    assert empty["pages"].tolist() == [pages, 0, 0, 0]
    sizes = {buffer.name: buffer.bytes for buffer in qwen2.cache_buffers(model)}
    assert all(values.nbytes == sizes[name] for name, values in empty.items())
    assert all(values.dtype == np.int32 for values in empty.values())


def test_short_contexts_end_as_control_decides():
    model = model_of(NAMES[0])
    limit = model.short_context
    assert [model.is_short(done) for done in (0, limit - 8, limit - 7)] == [True, True, False]


def test_a_model_without_drafts_refuses_them():
    plans = plans_of(model_of(NAMES[-1]))
    for call in (
        lambda: plans.round_of(2, 0, short=True),
        lambda: plans.round_of(1, 1, short=True),
        lambda: plans.first_of(1),
        lambda: plans.target_of(8, short=False),
        lambda: plans.depth_of(0),
    ):
        with pytest.raises(ValueError, match="Qwen2 model"):
            call()


def test_scoring_has_caches_of_its_own():
    model = model_of(NAMES[-1])
    own, plans, buffers = plans_of(model).scoring(33)
    assert own.pages == 3
    names = {buffer.name for buffer in buffers}
    used = {ref.buffer for step in plans.chunk_steps() for ref in step.args.values() if isinstance(ref, Ref)}
    shared = {name for name in used - names if not name.startswith("prefill.")}
    assert shared == {"fault", model.rope} | (used & model.weights.tensors.keys())
    assert own.empty.keys() <= names


def test_memory_decides_how_long_a_context_is():
    config = parse_qwen2(qwen2_config("qwen2.5-coder-7b"))
    layout = qwen2_layout(config)
    each = qwen2.position_bytes(config)
    assert fitting(layout, 140 << 30) == 32768
    assert fitting(layout, layout.nbytes) == 32768  # nothing fits: taking memory says so
    some = fitting(layout, layout.nbytes + RESERVE + (1 << 30))
    assert 0 < some < (1 << 30) / each
    assert some % PAGE == 0
    more = fitting(layout, layout.nbytes + RESERVE + (1 << 30) + 100 * PAGE * (each + 4))
    assert more == some + 100 * PAGE
