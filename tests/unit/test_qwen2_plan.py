"""Plans of a Qwen2 model's token and prompts, from its config alone."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from cuq1.config_qwen2 import parse_qwen2
from cuq1.cuda.abi import QWEN2_LAYERS
from cuq1.cuda.kernels import qwen2_layers
from cuq1.cuda.qwen2_engine import RESERVE, fitting
from cuq1.cuda.qwen2_weights import qwen2_layout
from cuq1.errors import ConfigError
from cuq1.models import loop, qwen2, qwen2_decode, qwen2_forms, qwen2_prefill
from cuq1.models.family import plans_of
from cuq1.models.qwen2_forms import FORMS
from cuq1.models.steps import Chunk
from cuq1.plan.qwen2_dims import PAGE, padded, pieces
from cuq1.plan.types import Ref
from tools.checkpoint_qwen2 import NAMES, qwen2_config


def model_of(name, *, int4_head=False, **options):
    config = parse_qwen2(qwen2_config(name))
    return qwen2.resolve(config, qwen2_layout(config, int4_head=int4_head), **options)


FIT = [name for name in NAMES if qwen2_layers.fits(model_of(name).sizes)]  # all but the smallest scaled down


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("head", "form"), [(False, "launches"), (False, "chain"), (True, "chain"), (False, None)])
def test_every_model_has_plans(name, head, form):
    """Every field of every launch has a value, within its buffer: a Plan refuses anything else."""
    model = model_of(name, int4_head=head, capacity=4096, form=form)
    form = model.form
    assert form == ("layers" if name in FIT else "chain") or form != "layers"
    plans = plans_of(model)
    layers = model.config.num_hidden_layers
    apart = ("qkv", "attention", "o_proj", "gate_up", "down")
    for short in (False, True):
        counts = Counter(launch.label for launch in loop.round_of(model, 1, 0, short=short).launches)
        of_layers = {
            "layers": {"layers": 2 if layers > QWEN2_LAYERS else 1},
            "chain": {**dict.fromkeys(("attention", "chain"), layers), "qkv": 1},
            "launches": dict.fromkeys(apart, layers),
        }[form]
        assert counts == {
            **of_layers,
            **dict.fromkeys(("embed", "norm", "lm_head", "top_k", "accept", "control"), 1),
            **({} if short or form == "layers" else {"combine": layers}),
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
    used = {buffer.name for short in (False, True) for buffer in plans.round_of(1, 0, short=short).buffers}
    own = {"qkv_pieces", "attended", "partial_out", "o_pieces", "inner", "down_pieces", "handed"}
    assert used & own == set(names) & own  # no form takes memory for another's


def flow(launches, model):
    """Follows what each launch reads to who wrote it; AssertionError, naming the launch, for anything else.

    x3: the residual before layer 3's attention, h3: before its MLP; the others by their launches' names. Words that
    blocks hand to one another have to be cleared, all of them, since they were last stored.
    """
    d, form, layers = model.sizes, model.form, len(model.layers)
    held, cleared = {}, set()  # pieces of 16 bytes

    def store(launch):
        for name, size in qwen2_forms.handed_parts(d, form).items():
            place = launch.args[name]
            assert (place.buffer, place.offset % 128) == ("handed", 0)
            pieces_of = set(range(place.offset // 16, -(-(place.offset + size) // 16)))
            assert pieces_of <= cleared, f"{launch.label} {launch.layer}: {name} was not cleared"
            cleared.difference_update(pieces_of)

    def step(launch):
        args, n = launch.args, launch.layer

        def read(name, wanted):
            assert held.get(args[name]) == wanted, f"{launch.label} {n}: {name} is {held.get(args[name])}, not {wanted}"

        match launch.label:
            case "embed":
                held[args["residual"]] = "x0"
            case "layers":
                read("residual", f"x{n}")
                run = range(n, n + args["layers"])
                for name, weight in LAYERS_ARRAYS.items():
                    assert args[name] == tuple(Ref(f"layers.{i}.{weight}") for i in run), f"layers {n}: {name}"
                store(launch)
                held[args["residual_out"]] = f"x{run[-1] + 1}"
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
                store(launch)
                held[args["down_pieces"]] = f"down{n}"
                held[args["residual_out"]] = f"h{n}" if n == layers - 1 else f"x{n + 1}"
                assert (args["qkv_pieces"] == 0) == (n == layers - 1)
                held[args["qkv_pieces"]] = f"qkv{n + 1}"
            case "norm" if form == "layers":
                read("residual", f"x{layers}")
                assert args["pieces"] == 0, "norm: pieces are there already"
            case "norm":
                read("residual", f"h{layers - 1}")
                read("pieces", f"down{layers - 1}")
        unready = args.get("unready", 0)
        if unready:
            assert unready.buffer == "handed"
            assert unready != args.get("o_pieces")
            first = unready.offset // 16
            cleared.update(range(first, first + args["unready_pieces"]))

    for launch in launches:
        step(launch)


LAYERS_ARRAYS = {
    **{f"{name}_weights": name for name in ("qkv", "o", "gate_up", "down")},
    **{name: name for name in ("input_norm", "post_norm", "k_pages", "v_pages")},
    "bias": "qkv_bias",
}


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_each_launch_reads_what_the_one_before_it_wrote(short, form, count):
    config = parse_qwen2(qwen2_config("qwen2.5-coder-1.5b", num_hidden_layers=count))
    model = qwen2.resolve(config, qwen2_layout(config), capacity=4096, form=form, layers_per_launch=2)
    launches = qwen2_decode.round_of(model, short=short).launches
    flow(launches + launches, model)  # and the next token

    def refused(label, which=0, **changes):
        """The control: what `label` does besides is found."""
        args = [one.args for one in launches if one.label == label][which]
        kept = dict(args)
        args |= changes
        with pytest.raises(AssertionError) as found:
            flow(launches, model)
        args |= kept
        return str(found.value)

    for label in {"layers": ("norm",), "chain": ("qkv", "chain"), "launches": ("qkv", "gate_up")}[form]:
        args = next(one.args for one in launches if one.label == label)
        other = Ref("residual", 4 * model.sizes.hidden if args["residual"].offset == 0 else 0)
        assert "residual" in refused(label, residual=other)
    if form == "launches":
        return
    assert f"{form} 0: " in refused("embed", unready=0)
    whole = launches[0].args["unready_pieces"]
    assert "was not cleared" in refused("embed", unready_pieces=whole - 1)
    if form == "layers":
        assert "layers 0: bias" in refused("layers", bias=launches[1].args["bias"][:-1])
        assert "layers 0: k_pages" in refused("layers", k_pages=launches[1].args["v_pages"])
        assert "norm" in refused("norm", pieces=launches[1].args["down_pieces"])
        if count == 5:
            again = {name: launches[1].args[name] for name in qwen2_forms.handed_parts(model.sizes, form)}
            assert "layers 1: qkv_pieces was not cleared" in refused("layers", 1, **again)


@pytest.mark.parametrize("name", FIT)
def test_what_layers_hand_on(name):
    """Where the kernel's arguments lie, against the sizes that it documents."""
    model = model_of(name, form="layers")
    d = model.sizes
    parts = qwen2_layers.parts(d)
    for region, run in enumerate(model.runs):
        (launch,) = (
            one for one in qwen2_decode.round_of(model).launches if one.layer == run[0] and one.label == "layers"
        )
        sizes = {
            "qkv_pieces": 4 * pieces(d.qkv_rows, d.hidden) * d.qkv_rows,
            "partials": d.kv_heads * qwen2_layers.spans(d) * qwen2_layers.record_bytes(d),
            "o_pieces": parts * 4 * d.hidden,
            "rows_handed": 2 * 2 * 4 * d.hidden,
            "inner": 2 * 2 * padded(d.inner),
            "down_pieces": 2 * parts * 4 * pieces(d.hidden, padded(d.inner) // parts, 132 // parts) * d.hidden,
        }
        at = region * qwen2_forms.handed_bytes(d, "layers")
        for part, size in sizes.items():
            assert launch.args[part] == Ref("handed", at), part
            at += -(-size // 128) * 128
        assert at == (region + 1) * qwen2_forms.handed_bytes(d, "layers")
    buffer = next(one for one in qwen2.working_buffers(model) if one.name == "handed")
    assert buffer.bytes == at


@pytest.mark.parametrize("name", FIT)
def test_a_short_context_has_a_plan_with_more_room_for_weights(name):
    model = model_of(name, form="layers")
    assert model.short_context == qwen2_layers.spans(model.sizes) * qwen2_layers.SLOTS * 16
    assert model.is_short(0)
    assert not model.is_short(model.short_context)
    (short, long) = (
        [one.kernel for one in qwen2_decode.round_of(model, short=short).launches if one.label == "layers"]
        for short in (True, False)
    )
    assert {one.kernel.entry for one in qwen2_decode.round_of(model).launches} >= {"qwen2_layers"}
    for a, b in zip(short, long, strict=True):
        assert dict(a.defines)["SLOTS"] < dict(b.defines)["SLOTS"]
        assert dict(a.defines)["STAGES"] >= dict(b.defines)["STAGES"]


@pytest.mark.parametrize(
    ("layers", "most", "lengths"),
    [(28, 48, [28]), (48, 48, [48]), (64, 48, [32, 32]), (49, 48, [24, 25]), (5, 2, [1, 2, 2]), (3, 1, [1, 1, 1])],
)
def test_layers_are_shared_out_to_launches(layers, most, lengths):
    runs = qwen2_forms.runs_of(layers, most)
    assert [len(run) for run in runs] == lengths
    assert [number for run in runs for number in run] == list(range(layers))


def test_what_a_chain_stores_is_cleared_whole():
    for name in NAMES:
        d = qwen2_layout(parse_qwen2(qwen2_config(name))).dims
        size = qwen2_forms.handed_bytes(d, "chain")
        for region in (0, 1):
            places = qwen2_forms.handed(d, "chain", region)
            assert places["o_pieces"].offset == region * size
            assert size % 128 == 0
            assert all(ref.offset % 128 == 0 for ref in places.values())
            sizes = {
                "o_pieces": 4 * pieces(d.hidden, d.q_width) * d.hidden,
                "down_pieces": 4 * pieces(d.hidden, d.inner) * d.hidden,
                "inner": 2 * padded(d.inner),
            }
            ends = sorted((ref.offset, ref.offset + sizes[name]) for name, ref in places.items())
            assert all(end == begin for (_, end), (begin, _) in pairwise(ends))
            assert ends[-1][1] == (region + 1) * size


def test_a_form_is_chosen_by_the_gpu_and_the_model():
    """All blocks of a chain, or of the layers' launch, have to be resident together."""
    labels = {"layers": "layers", "chain": "chain", "launches": "gate_up"}
    for name, sms, form in (
        ("qwen2.5-coder-7b", 131, "launches"),
        ("qwen2.5-coder-7b", 132, "layers"),
        ("qwen2.5-coder-7b", 144, "layers"),
        ("qwen2.5-coder-0.5b-tiny", 131, "launches"),
        ("qwen2.5-coder-0.5b-tiny", 132, "chain"),
    ):
        model = model_of(name, sms=sms)
        assert model.form == form
        found = {one.label for one in qwen2_decode.round_of(model).launches}
        assert {labels[other] for other in FORMS} & found == {labels[form]}


def test_a_form_that_is_not_possible_is_refused():
    for name, sms, form, says in (
        ("qwen2.5-coder-7b", 131, "layers", "form layers takes a GPU of 132 multiprocessors, not 131: choose launches"),
        ("qwen2.5-coder-7b", 131, "chain", "form chain takes a GPU of 132 multiprocessors, not 131: choose launches"),
        (
            "qwen2.5-coder-0.5b-tiny",
            132,
            "layers",
            "form layers takes a model of other sizes: choose chain or launches",
        ),
    ):
        with pytest.raises(ConfigError) as refused:
            model_of(name, sms=sms, form=form)
        assert str(refused.value) == says


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["qwen2.5-coder-3b", "qwen2.5-coder-32b"])
def test_a_token_reads_every_matrix_once(name, form):
    model = model_of(name, capacity=4096, form=form)
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
    model = model_of(NAMES[0], form="chain")
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
