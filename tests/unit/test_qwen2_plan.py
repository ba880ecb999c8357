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
from cuq1.plan.qwen2_dims import PAGE, padded, pieces
from cuq1.plan.types import Ref
from tools.checkpoint_qwen2 import NAMES, qwen2_config


def model_of(name, *, int4_head=False, **options):
    config = parse_qwen2(qwen2_config(name))
    return qwen2.resolve(config, qwen2_layout(config, int4_head=int4_head), **options)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("head", "chained"), [(False, False), (False, True), (True, True)])
def test_every_model_has_plans(name, head, chained):
    """Every field of every launch has a value, within its buffer: a Plan refuses anything else."""
    model = model_of(name, int4_head=head, capacity=4096, chained=chained)
    plans = plans_of(model)
    layers = model.config.num_hidden_layers
    apart = ("qkv", "attention", "o_proj", "gate_up", "down")
    for short in (False, True):
        counts = Counter(launch.label for launch in loop.round_of(model, 1, 0, short=short).launches)
        assert counts == {
            **dict.fromkeys(("attention", "chain") if chained else apart, layers),
            **dict.fromkeys(("embed", "norm", "lm_head", "top_k", "accept", "control"), 1),
            **({"qkv": 1} if chained else {}),
            **({} if short else {"combine": layers}),
        }
        assert [one.label for one in plans.target_of(1, short=short).launches][-1] == "lm_head"
    assert [one.label for one in loop.first_of(model, 0).launches] == ["top_k", "accept", "control"]
    assert [one.label for one in plans.logits_of().launches] == ["lm_head"]
    for chunk in (Chunk(0, 1), Chunk(17, 2048)):
        counts = Counter(launch.label for launch in qwen2_prefill.chunk_plan(model, chunk).launches)
        assert counts == {**dict.fromkeys(apart, layers), "norm": 2 * layers + 1, "rope": 1, "embed": 1}
    part = Chunk(3, min(plans.scored, 200))
    scoring = qwen2_prefill.steps_plan(model, plans.logits_steps(), part)
    assert [one.label for one in scoring.launches] == ["norm", "lm_head"]
    assert scoring.launches[0].args["residual"] == Ref("prefill.residual", 3 * model.config.hidden_size * 4)
    names = [buffer.name for buffer in (*plans.buffers(), *loop.working_buffers())]
    assert len(names) == len(set(names))


def flow(launches, layers):
    """Follows what each launch reads to who wrote it; AssertionError, naming the launch, for anything else.

    x3: the residual before layer 3's attention, h3: before its MLP; the others by their launches' names. A chain's
    words have to be cleared since they were last stored.
    """
    held, cleared = {}, set()

    def step(launch):
        args, n = launch.args, launch.layer

        def read(name, wanted):
            assert held.get(args[name]) == wanted, f"{launch.label} {n}: {name} is {held.get(args[name])}, not {wanted}"

        match launch.label:
            case "embed":
                held[args["residual"]] = "x0"
            case "qkv":
                assert args["residual"] != args["residual_out"]
                if n == 0:
                    assert args["pieces"] == 0
                    read("residual", "x0")
                else:
                    read("residual", f"h{n - 1}")
                    read("pieces", f"down{n - 1}")
                held[args["residual_out"]], held[args["out"]] = f"x{n}", f"qkv{n}"
            case "attention":
                read("pieces", f"qkv{n}")
                held[args["attended"]] = f"attended{n}"
            case "combine":
                held[args["attended"]] = f"attended{n}"
            case "o_proj":
                read("in", f"attended{n}")
                held[args["out"]] = f"o{n}"
            case "gate_up":
                assert args["residual"] != args["residual_out"]
                read("residual", f"x{n}")
                read("pieces", f"o{n}")
                held[args["residual_out"]], held[args["inner"]] = f"h{n}", f"inner{n}"
            case "down":
                read("in", f"inner{n}")
                held[args["out"]] = f"down{n}"
            case "chain":
                assert args["residual"] != args["residual_out"]
                read("residual", f"x{n}")
                read("attended", f"attended{n}")
                assert args["o_pieces"] in cleared, f"chain {n}: what it stores was not cleared"
                cleared.remove(args["o_pieces"])
                held[args["down_pieces"]] = f"down{n}"
                held[args["residual_out"]] = f"h{n}" if n == layers - 1 else f"x{n + 1}"
                assert (args["qkv_pieces"] == 0) == (n == layers - 1)
                held[args["qkv_pieces"]] = f"qkv{n + 1}"
            case "norm":
                read("residual", f"h{layers - 1}")
                read("pieces", f"down{layers - 1}")
        unready = args.get("unready", 0)
        if unready:
            assert unready != args.get("o_pieces")
            cleared.add(unready)

    for launch in launches:
        step(launch)


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_each_launch_reads_what_the_one_before_it_wrote(short, chained, count):
    config = parse_qwen2(qwen2_config("qwen2.5-coder-1.5b", num_hidden_layers=count))
    model = qwen2.resolve(config, qwen2_layout(config), capacity=4096, chained=chained)
    launches = qwen2_decode.round_of(model, short=short).launches
    flow(launches + launches, count)  # and the next token
    for label in ("qkv", "chain" if chained else "gate_up"):  # the control: rows of the residual that are exchanged
        args = next(one.args for one in launches if one.label == label)
        args["residual"], args["residual_out"] = args["residual_out"], args["residual"]
        with pytest.raises(AssertionError):
            flow(launches, count)
        args["residual"], args["residual_out"] = args["residual_out"], args["residual"]
    if chained:
        launches[0].args["unready"] = 0
        with pytest.raises(AssertionError, match="chain 0: what it stores was not cleared"):
            flow(launches, count)


def test_what_a_chain_stores_is_cleared_whole():
    for name in NAMES:
        d = qwen2_layout(parse_qwen2(qwen2_config(name))).dims
        for layer in (0, 1):
            places = qwen2.handed(d, layer)
            words = qwen2.handed_words(d)
            assert places["o_pieces"].offset == layer * 4 * words
            assert 4 * words % 16 == 0
            assert all(ref.offset % 16 == 0 for ref in places.values())
            sizes = {
                "o_pieces": 4 * pieces(d.hidden, d.q_width) * d.hidden,
                "down_pieces": 4 * pieces(d.hidden, d.inner) * d.hidden,
                "inner": 2 * padded(d.inner),
            }
            ends = sorted((ref.offset, ref.offset + sizes[name]) for name, ref in places.items())
            assert all(end == begin for (_, end), (begin, _) in pairwise(ends))
            assert ends[-1][1] == (layer + 1) * 4 * words


def test_a_gpu_with_fewer_multiprocessors_has_no_chains():
    """All blocks of a chain have to be resident together."""
    config = parse_qwen2(qwen2_config(NAMES[0]))
    layout = qwen2_layout(config)
    for sms, chained in ((131, False), (132, True), (144, True)):
        model = qwen2.resolve(config, layout, sms=sms, chained=True)
        assert model.chained == chained
        labels = {one.label for one in qwen2_decode.round_of(model).launches}
        assert ("chain" in labels) == chained


@pytest.mark.parametrize("chained", [False, True])
def test_a_token_reads_every_matrix_once(chained):
    model = model_of("qwen2.5-coder-3b", capacity=4096, chained=chained)
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
