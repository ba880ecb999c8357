"""The row kernels (embedding, tails, norms, routing) against float64."""

from dataclasses import replace

import numpy as np
import pytest

from cuq1.cuda.abi import ROUTED_COPIES
from cuq1.cuda.kernels import rows as family
from cuq1.errors import DeviceError
from cuq1.plan.dims import ROWS
from cuq1.reference.ops import route
from tests.kernels.harness import in_header
from tests.kernels.shapes import DIMS, RELEASED
from tests.kernels.told import TELL, run_chain, tell
from tests.kernels.twins import rows as twin

EXACT = 3e-6  # what FP32 sums and norms may differ by
HALF = 4e-4  # and halves, half a step of 2^-11 at most


@pytest.fixture
def rng():
    seed = int(np.random.default_rng().integers(1 << 32))
    print(f"seed {seed}")  # shown where a test fails
    return np.random.default_rng(seed)


def fill(gpu, kernel, **values):
    """The kernel's arguments: arrays become addresses."""
    args = kernel.args(fault=gpu.fault.address)
    for name, value in values.items():
        setattr(args, name, value.data.ptr if hasattr(value, "data") else value)
    return args


def assert_close(out, expected, tolerance, name):
    error = np.linalg.norm(np.asarray(out, np.float64) - expected) / max(np.linalg.norm(expected), 1e-30)
    assert error <= tolerance, f"{name}: relative error {error:.2e}"


def assert_untouched(out, live, name):
    dead = out[live:]
    assert (np.isnan(dead) if dead.dtype.kind == "f" else dead == dead.dtype.type(0x7F7F7F7F)).all(), f"{name}: written"


def in_sublayer(old, new):
    return in_header("common/sublayer.cuh", old, new)


def norm_weights(rng, count):
    return rng.uniform(0.5, 1.5, count).astype(np.float32)


def random_bf16(rng, shape):
    return (rng.standard_normal(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def dead_poisoned(x, live, axis=1):
    """Rows from `live` on are NaN: they must not reach live ones."""
    x = x.copy()
    x[(slice(None),) * axis + (slice(live, None),)] = np.nan
    return x


# --- embed


def check_embed(gpu, rng, dims, count, live=None, *, normed_residual=False, patch=None, passes=ROWS):
    rows = count if live is None else live
    table = random_bf16(rng, (dims.vocab_total, dims.hidden))
    tokens = rng.integers(0, dims.vocab_total, count).astype(np.int32)
    tokens[0] = dims.vocab_total - 1
    tokens[rows:] = 1 << 30  # not read as tokens
    norm = norm_weights(rng, dims.hidden)
    residual = gpu.poison((max(count, ROWS), dims.hidden), np.float32)
    normed = gpu.poison((max(count, ROWS), dims.hidden), np.float16)
    kernel = family.embed(dims, passes)
    inputs = {"tokens": gpu.array(tokens), "table": gpu.array(table), "norm": gpu.array(norm)}
    limit = gpu.array(np.array([rows], np.int32))
    args = fill(gpu, kernel, rows=count, **inputs, residual=residual, normed=normed, normed_residual=normed_residual)
    if live is not None:
        args.live = limit.data.ptr
    gpu.run(kernel, args, patch)
    expected = twin.embed(tokens[:rows], table, norm, dims.eps, normed_residual=normed_residual)
    assert_close(residual.get()[:rows], expected[0], EXACT if normed_residual else 0, "residual")
    assert_close(normed.get()[:rows], expected[1], HALF, "normed")
    assert_untouched(residual.get(), rows, "residual")
    assert_untouched(normed.get(), rows, "normed")


@pytest.mark.gpu
@pytest.mark.parametrize("name", DIMS)
@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_embed(gpu, rng, name, count):
    dims = replace(DIMS[name], vocab_total=1000)
    check_embed(gpu, rng, dims, count)
    check_embed(gpu, rng, dims, count, normed_residual=True)
    check_embed(gpu, rng, dims, 8, count)
    check_embed(gpu, rng, dims, 300 + count, passes=400)


@pytest.mark.gpu
def test_embed_tells_a_broken_kernel(gpu, rng):
    dims = replace(RELEASED, vocab_total=1000)
    with pytest.raises(AssertionError, match="normed"):
        check_embed(gpu, rng, dims, 5, patch=("store4(a.normed + at, n);", "store4(a.normed + at, x);"))


@pytest.mark.gpu
@pytest.mark.parametrize("token", [-1, 1000])
def test_embed_reports_a_foreign_token(gpu, rng, token):
    dims = replace(RELEASED, vocab_total=1000)
    kernel = family.embed(dims)
    out = gpu.poison((ROWS, dims.hidden), np.float32), gpu.poison((ROWS, dims.hidden), np.float16)
    table, norm = gpu.array(random_bf16(rng, (1000, dims.hidden))), gpu.array(norm_weights(rng, dims.hidden))
    tokens = gpu.array(np.array([7, token], np.int32))
    args = fill(gpu, kernel, rows=2, layer=4, tokens=tokens, table=table, norm=norm, residual=out[0], normed=out[1])
    with pytest.raises(DeviceError, match=r"token outside the vocabulary in embed, layer 4"):
        gpu.run(kernel, args)
    assert_close(out[0].get()[1], twin.bf16_values(table.get()[0]), 0, "residual")


# --- attn_tail


def attn_inputs(rng, dims, rows, ranks):
    count = max(rows, ROWS)
    return {
        "o": rng.standard_normal((ranks, count, dims.hidden), np.float32) * np.float32(0.3),
        "residual": rng.standard_normal((count, dims.hidden), np.float32),
        "router_attended": rng.standard_normal((ranks, count, dims.experts), np.float32),
        "router_residual": rng.standard_normal((ranks, count, dims.experts), np.float32) * 2,
        "attn_out_norm": norm_weights(rng, dims.hidden),
        "ffn_norm": norm_weights(rng, dims.hidden),
    }


def with_inverse(rng, x):
    """The residual as qkv leaves it: not divided by its norm yet."""
    return {**x, "inverse": rng.uniform(0.2, 3.0, len(x["residual"])).astype(np.float32)}


def check_attn_tail(
    gpu,
    dims,
    x,
    rows,
    *,
    live=None,
    moe=True,
    codes=False,
    forced=None,
    patch=None,
    scale=0.37,
    tolerance=EXACT,
    pause=None,
):
    """pause: nanoseconds after which a predecessor, whose results are polled, writes a third of them."""
    count = rows if live is None else live
    ranks, size = len(x["o"]), x["residual"].shape
    kernel = family.attn_tail(dims, max(rows, ROWS), moe=moe)
    poisoned = {name: dead_poisoned(x[name], count) for name in ("o", "router_attended", "router_residual")}
    inputs = {name: gpu.array(value) for name, value in {**x, **poisoned}.items()}
    if not moe:
        del inputs["router_attended"], inputs["router_residual"]
    out = {
        "h": gpu.poison(size, np.float32),
        "normed": gpu.poison(size, np.float16),
        "normed32": gpu.poison(size, np.float32),
        "expert_ids": gpu.poison((ROWS, dims.top_k), np.int32),
        "routed": gpu.array(np.zeros((ROUTED_COPIES, ROWS, dims.top_k), np.int32)),
        "expert_weights": gpu.poison((ROWS, dims.top_k), np.float32),
    }
    groups = max(ROWS * dims.top_k, 64)
    if rows <= ROWS:
        out["inner"] = gpu.poison((groups, ROWS, dims.inner), np.float16)
    if codes:
        out |= {
            "codes": gpu.poison(size, np.uint8),
            "code_scale": gpu.poison(size[0], np.float32),
            "inner_max": gpu.poison((groups, ROWS), np.float32),
        }
    args = fill(gpu, kernel, rows=rows, ranks=ranks, attn_scale=scale, **inputs, **out)
    limit = gpu.array(np.array([count], np.int32))
    if live is not None:
        args.live = limit.data.ptr
    chosen = None if forced is None else gpu.array(forced)
    if forced is not None:
        args.forced_ids = chosen.data.ptr
    if pause is None:
        gpu.run(kernel, args, patch)
    else:
        handed = [x[name].view(np.int32).copy() for name in ("o", "router_attended", "router_residual")]
        for values in handed:
            values[:, count:] = -1  # not ready, for good
        words = np.concatenate([values.ravel() for values in handed])
        source, target = gpu.array(words), gpu.array(np.full(words.size, -1, np.int32))
        ends = np.cumsum([0] + [v.nbytes for v in handed])
        args.o, args.router_attended, args.router_residual = (target.data.ptr + int(at) for at in ends[:3])
        args.polled = 1
        run_chain(gpu, [(TELL, tell(source, target, pause=pause), None), (kernel, args, patch)])

    got = {name: value.get() for name, value in out.items()}
    if rows <= ROWS:
        assert not got["inner"][: count * dims.top_k, :count].any(), "inner"
        assert np.isnan(got["inner"][:, count:]).all(), "inner"
    live_x = {name: value[:, :count] if value.ndim == 3 else value for name, value in x.items()}
    residual = x["residual"][:count].astype(np.float64) * x.get("inverse", np.ones(size[0]))[:count, None]
    h, normed = twin.attn_tail(
        live_x["o"], residual, x["attn_out_norm"], x["ffn_norm"], np.float64(np.float32(scale)), dims.eps
    )
    assert_close(got["h"][:count], h, tolerance, "h")
    assert_close(got["normed32"][:count], normed, tolerance, "normed32")
    assert_close(got["normed"][:count], normed, HALF, "normed")
    for name in ("h", "normed", "normed32"):
        assert_untouched(got[name], count, name)
    if codes:
        assert_close(got["code_scale"][:count], twin.code_scales(normed), EXACT, "code_scale")
        values = twin.e4m3_values(got["codes"][:count]) * got["code_scale"][:count, None]
        assert np.abs(values - normed).max() <= np.abs(normed).max() / 27.9, "codes"  # half a step at the largest
        assert_close(values, normed, 0.04, "codes")
        assert (got["inner_max"][:, :count] == 0).all(), "inner_max"
        assert np.isnan(got["inner_max"][:, count:]).all(), "inner_max"
    if not moe or count == 0:
        count = 0
    else:
        logits = twin.folded_logits(
            live_x["o"], h, live_x["router_attended"], live_x["router_residual"], scale, dims.eps
        )
        ids, weights = twin.route(logits, dims.top_k)
        if forced is not None:
            ids, weights = forced[:count], twin.softmax_of(logits, forced[:count])
        assert (got["expert_ids"][:count] == ids).all(), "expert_ids"
        assert (got["routed"][:, :count] == ids + 1).all(), "routed"
        assert_close(got["expert_weights"][:count], weights, 1e-5, "expert_weights")
    assert_untouched(got["expert_ids"], count, "expert_ids")
    assert not got["routed"][:, count:].any(), "routed"
    assert_untouched(got["expert_weights"], count, "expert_weights")


@pytest.mark.gpu
@pytest.mark.parametrize("name", DIMS)
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_attn_tail(gpu, rng, name, ranks):
    dims = DIMS[name]
    for rows in (1, 2, 5, 8):
        x = attn_inputs(rng, dims, rows, ranks)
        check_attn_tail(gpu, dims, x, rows)
        check_attn_tail(gpu, dims, x, 8, live=rows)
        check_attn_tail(gpu, dims, x, rows, codes=True, moe=False)
    check_attn_tail(gpu, dims, x, 8, live=0)
    check_attn_tail(gpu, dims, x, 8, live=3, codes=True)
    for moe in (True, False):
        check_attn_tail(gpu, dims, with_inverse(rng, x), 8, live=5, moe=moe)
    forced = np.stack([rng.permutation(dims.experts)[: dims.top_k] for _ in range(ROWS)]).astype(np.int32)
    check_attn_tail(gpu, dims, x, 8, forced=forced)


@pytest.mark.gpu
@pytest.mark.parametrize("name", DIMS)
@pytest.mark.parametrize("pause", [0, 2000, 100_000])
def test_attn_tail_polls(gpu, rng, name, pause):
    dims = DIMS[name]
    for rows, live in ((1, None), (8, None), (8, 0), (8, 3), (5, 5)):
        x = with_inverse(rng, attn_inputs(rng, dims, rows, 1))
        check_attn_tail(gpu, dims, x, rows, live=live, pause=pause, codes=pause == 0 and live != 0)
    for patch in (
        ("polls.again(here && has_come(attended) && has_come(residual),", "polls.again(true,"),
        ("polls.again(has_come(o), a.fault", "polls.again(true, a.fault"),
    ):
        with pytest.raises((AssertionError, DeviceError)):
            check_attn_tail(gpu, dims, x, rows, pause=100_000, patch=patch)


@pytest.mark.gpu
@pytest.mark.parametrize("name", DIMS)
def test_attn_tail_takes_prompt_chunks(gpu, rng, name):
    for ranks in (1, 2):
        check_attn_tail(gpu, DIMS[name], attn_inputs(rng, DIMS[name], 203, ranks), 203, moe=False)


def tied(rng, dims, *, flood):
    """Router parts of few values; with `flood`, both zeros and hardly another, so that most choices are ties."""
    x = attn_inputs(rng, dims, ROWS, 1)
    x["router_attended"][:] = -0.0
    if flood:
        levels = np.array([-1.0, -0.0, 0.0, 0.5], np.float32)
        x["router_residual"] = rng.choice(levels, x["router_residual"].shape, p=[0.4, 0.29, 0.29, 0.02])
    else:
        x["router_residual"] = np.round(x["router_residual"])
    return x


@pytest.mark.gpu
@pytest.mark.parametrize("name", DIMS)
@pytest.mark.parametrize("flood", [True, False])
def test_ties_go_to_the_lower_index(gpu, rng, name, flood):
    dims = DIMS[name]
    x = tied(rng, dims, flood=flood)
    check_attn_tail(gpu, dims, x, ROWS)
    patch = in_header("common/choice.cuh", "< index / 4 ? key - 1 : key", "> index / 4 ? key - 1 : key")
    with pytest.raises(AssertionError, match="expert_ids"):
        check_attn_tail(gpu, dims, x, ROWS, patch=patch)
    if flood:
        with pytest.raises(AssertionError, match="expert_ids"):
            check_attn_tail(gpu, dims, x, ROWS, patch=in_header("common/choice.cuh", "(x + 0.0f)", "(x)"))


@pytest.mark.gpu
@pytest.mark.parametrize("spread", [0, 1, 2, 8])
def test_choices_that_lie_together(gpu, rng, spread):
    """A ramp of logits: the less noise, the more of the chosen are one warp's."""
    for _ in range(4):
        x = attn_inputs(rng, RELEASED, ROWS, 1)
        x["router_attended"][:] = 0
        ramp = np.arange(RELEASED.experts, dtype=np.float32) / 50
        noise = spread * rng.standard_normal(x["router_residual"].shape, np.float32)
        x["router_residual"] = ramp[:: rng.choice([-1, 1])] + noise
        check_attn_tail(gpu, RELEASED, x, ROWS)


@pytest.mark.gpu
@pytest.mark.parametrize("name", DIMS)
def test_a_row_that_cancels_is_summed_again(gpu, rng, name):
    """h = x + k p with |h| a thousandth of |x|: sums of x and p alone have lost every digit of h^2."""
    dims = DIMS[name]
    x = attn_inputs(rng, dims, ROWS, 1)
    scale = float(np.float32(0.37))
    sublayer = scale * twin.rms_norm(x["o"][0], x["attn_out_norm"], dims.eps)
    x["residual"] = (-sublayer * (1 + 1e-3 * rng.standard_normal(sublayer.shape))).astype(np.float32)
    modes = {"moe": False, "scale": scale, "tolerance": 1e-3}  # h is a difference of FP32 values
    check_attn_tail(gpu, dims, x, ROWS, **modes)
    with pytest.raises(AssertionError, match="normed32"):
        check_attn_tail(
            gpu, dims, x, ROWS, **modes, patch=in_sublayer("CANCELLED = 1.0f / 64.0f;", "CANCELLED = -1.0f;")
        )


@pytest.mark.gpu
def test_attn_tail_tells_broken_kernels(gpu, rng):
    x = with_inverse(rng, attn_inputs(rng, RELEASED, ROWS, 8))
    for patch, match in (
        (("if (a.inverse != nullptr) x", "if (false) x"), "h"),
        (in_sublayer("2.0f * s.factor * t.z", "s.factor * t.z"), "normed32"),
        (("sum_ranks(a.o + at, a.ranks,", "sum_ranks(a.o + at, 1,"), "h"),
        (("fmaf(factor, attended, residual)", "residual"), "expert_ids"),
        (("total += r.squares[w]", "total += r.squares[0]"), "expert_ids"),
        (("(value - warp_max(value)) * inverse_h", "value - warp_max(value)"), "expert_weights"),
        (("top * (1.0f / 448.0f)", "top * (1.0f / 100.0f)"), "code_scale"),
        (('"r"(id + 1)', '"r"(id)'), "routed"),
        (("i % PIECES] = make_uint4(0, 0, 0, 0)", "i % PIECES].x = 0"), "inner"),
    ):
        with pytest.raises(AssertionError, match=match):
            check_attn_tail(gpu, RELEASED, x, ROWS, codes=match == "code_scale", patch=patch)


@pytest.mark.gpu
def test_rows_of_zeros_stay_finite(gpu, rng):
    x = attn_inputs(rng, RELEASED, ROWS, 1)
    x["o"][:] = 0
    x["residual"][:] = 0
    check_attn_tail(gpu, RELEASED, x, ROWS, codes=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("broken", "kernel"), [("o", "o_proj"), ("residual", "attn_tail"), ("router_residual", "attn_tail")]
)
@pytest.mark.parametrize("pause", [None, 5000])
def test_attn_tail_reports_what_is_not_finite(gpu, rng, broken, kernel, pause):
    for value in (np.nan, np.inf):
        x = attn_inputs(rng, RELEASED, ROWS, 1)
        x[broken][..., 3, :] = value
        with pytest.raises(DeviceError, match=f"not finite in {kernel}, layer 0"):
            check_attn_tail(gpu, RELEASED, x, ROWS, pause=pause)


@pytest.mark.gpu
def test_attn_tail_reports_what_never_comes(gpu, rng):
    x = attn_inputs(rng, RELEASED, ROWS, 1)
    x["o"].view(np.int32)[0, 3, 5] = -1
    with pytest.raises(DeviceError, match="a result that did not arrive in attn_tail, layer 0"):
        check_attn_tail(gpu, RELEASED, x, ROWS, pause=0)


# --- mlp_tail


def check_mlp_tail(
    gpu, rng, dims, rows, ranks, *, live=None, sandwich=True, normed_residual=False, patch=None, bad=None
):
    count, size = rows if live is None else live, (max(rows, ROWS), dims.hidden)
    y, h = rng.standard_normal((ranks, *size), np.float32) * 4, rng.standard_normal(size, np.float32)
    norms = [norm_weights(rng, dims.hidden) for _ in range(2)]
    if bad is not None:
        (y if bad == "y" else h)[..., 0, 5] = np.inf
    residual, normed = gpu.poison(size, np.float32), gpu.poison(size, np.float16)
    kernel = family.mlp_tail(dims, max(rows, ROWS))
    inputs = {"y": gpu.array(dead_poisoned(y, count)), "h": gpu.array(dead_poisoned(h, count, 0))}
    inputs["next_norm"], out_norm = gpu.array(norms[0]), gpu.array(norms[1])
    limit = gpu.array(np.array([count], np.int32))
    args = fill(gpu, kernel, rows=rows, ranks=ranks, ffn_scale=0.21, **inputs, residual=residual, normed=normed)
    args.normed_residual = normed_residual
    if sandwich:
        args.ffn_out_norm = out_norm.data.ptr
    if live is not None:
        args.live = limit.data.ptr
    gpu.run(kernel, args, patch)
    expected = twin.mlp_tail(
        y[:, :count],
        h[:count],
        norms[1] if sandwich else None,
        norms[0],
        np.float64(np.float32(0.21)),
        dims.eps,
        normed_residual=normed_residual,
    )
    assert_close(residual.get()[:count], expected[0], EXACT, "residual")
    assert_close(normed.get()[:count], expected[1], HALF, "normed")
    assert_untouched(residual.get(), count, "residual")
    assert_untouched(normed.get(), count, "normed")


@pytest.mark.gpu
@pytest.mark.parametrize("name", DIMS)
@pytest.mark.parametrize("sandwich", [True, False])
@pytest.mark.parametrize("normed_residual", [True, False])
def test_mlp_tail(gpu, rng, name, sandwich, normed_residual):
    modes = {"sandwich": sandwich, "normed_residual": normed_residual}
    for rows in (1, 2, 5, 8):
        for ranks in (1, 3, 8):
            check_mlp_tail(gpu, rng, DIMS[name], rows, ranks, **modes)
            check_mlp_tail(gpu, rng, DIMS[name], 8, ranks, live=rows, **modes)
    check_mlp_tail(gpu, rng, DIMS[name], 8, 1, live=0, **modes)
    check_mlp_tail(gpu, rng, DIMS[name], 203, 2, **modes)


@pytest.mark.gpu
def test_mlp_tail_tells_broken_kernels(gpu, rng):
    for sandwich, patch in (
        (True, ("a.normed_residual ? n : s.out", "s.out")),
        (True, ("a.ffn_out_norm != nullptr, exchange", "false, exchange")),
        (False, in_sublayer("s.factor = scale;", "s.factor = 1.0f; scale = 1.0f;")),
    ):
        with pytest.raises(AssertionError, match="residual"):
            check_mlp_tail(gpu, rng, RELEASED, 8, 1, sandwich=sandwich, normed_residual=True, patch=patch)


@pytest.mark.gpu
@pytest.mark.parametrize(("bad", "kernel"), [("y", "down"), ("h", "mlp_tail")])
def test_mlp_tail_reports_what_is_not_finite(gpu, rng, bad, kernel):
    with pytest.raises(DeviceError, match=f"not finite in {kernel}, layer 0"):
        check_mlp_tail(gpu, rng, RELEASED, 8, 1, bad=bad)


# --- without a GPU


def test_the_twin_routes_as_the_reference(rng):
    logits = rng.choice(np.linspace(-1, 1, 9, dtype=np.float32), (8, 32))
    for ours, theirs in zip(twin.route(logits, 8), route(logits, 8), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_the_twin_reads_e4m3():
    codes = np.array([0x00, 0x01, 0x08, 0x38, 0x7E, 0xB8], np.uint8)
    assert twin.e4m3_values(codes).tolist() == [0, 2**-9, 2**-6, 1, 448, -1]


def test_folded_logits_are_the_router_of_the_normed_row(rng):
    hidden, experts, scale, eps = 64, 32, 0.37, 1e-6
    o, x = rng.standard_normal((2, 3, hidden)), rng.standard_normal((3, hidden))
    norms, router = rng.uniform(0.5, 1.5, (2, hidden)), rng.standard_normal((experts, hidden))
    h, normed = twin.attn_tail(o, x, *norms, scale, eps)
    folded = router * norms[1]
    residual = np.stack([x @ folded.T, np.zeros((3, experts))])
    logits = twin.folded_logits(o, h, o @ (folded * norms[0]).T, residual, scale, eps)
    np.testing.assert_allclose(logits, normed @ router.T, rtol=1e-9)
