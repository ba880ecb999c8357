"""Without a GPU: the twin of qwen2_layers against the model in float64, and its checks on a launch that is emulated."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from cuq1.cuda.abi import QWEN2_LAYERS
from cuq1.cuda.kernels import qwen2_layers as family
from cuq1.plan.dims import MULTIPROCESSORS
from cuq1.plan.qwen2_dims import PAGE, padded
from tests.gpu.qwen2_blocks import Float64
from tests.kernels.harness import tells
from tests.kernels.qwen2_layers_case import FIRST, NOT_READY, SHAPES, Case, Handed, Model
from tests.kernels.twins import qwen2_layers as twin
from tests.kernels.twins.qwen2 import swizzled, turned
from tests.kernels.twins.qwen2_gemv import written

EXACT = 1e-3  # relative: keys, values and inner as halves


class Array(np.ndarray):
    """Has what is used of CuPy's."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data)

    def get(self):
        return np.array(self)


def at(address, shape, dtype):
    """An array in memory."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype).reshape(shape)


def store_pieces(out, sums, k, blocks=MULTIPROCESSORS):
    """sums [rows] of a matrix of k columns into its pieces [n, rows]."""
    there = written(len(sums), k, blocks)
    out[there] = np.broadcast_to(sums / there.sum(axis=0), there.shape)[there]


def handed(args, dims):
    """What the arguments point to, as arrays in memory."""
    arrays = Handed(Emulated(), dims).arrays
    return {name: at(getattr(args, name), shape, dtype) for name, (dtype, shape) in arrays.items()}


class Given(twin.Rounded):
    def __init__(self, attended):
        self._attended = attended

    def attended(self, o, _):
        return self._attended.reshape(o.shape)


def spans_results(args, layer, dims, position, frequencies, wrong):
    """What a launch of one layer that clears nothing leaves up to attention's partial results; these, put together."""
    residual = at(args.residual, dims.hidden, np.float32).astype(np.float64)
    normed = twin.Rounded().digits(twin.rms(residual[None], layer.input_norm, dims.eps))
    qkv = layer.qkv(normed)
    out = handed(args, dims)
    store_pieces(out["qkv_pieces"], qkv[0] * (1.0002 if wrong == "qkv" else 1), dims.hidden)
    _, *own = twin.attention(qkv, layer, position, frequencies, twin.Rounded())
    heads = (qkv + layer.bias.astype(np.float64)).reshape(-1, dims.head_size)[: dims.q_heads]
    q = turned(heads, position, frequencies).reshape(dims.kv_heads, dims.group, -1) / np.sqrt(dims.head_size)
    keys, values = (
        np.concatenate([old.astype(np.float64), twin.halves(new[0][:, None])], axis=1)
        for old, new in zip((layer.keys, layer.values), own, strict=True)
    )
    pages = position // PAGE + 1
    spans = min(family.spans(dims), -(-pages // family.SPAN_PAGES))
    records, found = out["partials"], []
    for span in range(spans + (wrong == "a span more")):
        part = slice(span % spans * pages // spans * PAGE, (span % spans + 1) * pages // spans * PAGE)
        s = np.log2(np.e) * q @ keys[:, part].swapaxes(1, 2)
        p = np.exp2(s - s.max(axis=2, keepdims=True))
        result = (p @ values[:, part] / p.sum(axis=2, keepdims=True)).astype(np.float16)
        statistics = np.zeros((dims.kv_heads, 8, 2), np.float32)
        sums = p.sum(axis=2) if wrong != "statistics" else np.ones(p.shape[:2])
        statistics[:, : dims.group] = np.stack([s.max(axis=2), sums], axis=2)
        record = [x.reshape(dims.kv_heads, -1).view(np.uint8) for x in (result, statistics)]
        records[:, span] = np.concatenate(record, axis=1)
        found.append((s.max(axis=2), p.sum(axis=2), result.astype(np.float64)))
    top, sums, results = (np.stack(one) for one in zip(*found[:spans], strict=True))
    weights = np.exp2(top - top.max(axis=0)) * sums / (np.exp2(top - top.max(axis=0)) * sums).sum(axis=0)
    return (weights[..., None] * results).sum(axis=0)


class Emulated:
    """A GPU whose one kernel is the twin, with a kernel's roundings. wrong: what it is to do wrong."""

    def __init__(self):
        self.fault = SimpleNamespace(address=0)
        self.models, self.wrong = [], None

    def array(self, values):
        return np.ascontiguousarray(values).copy().view(Array)

    def poison(self, shape, dtype):
        return np.full(shape, np.nan, dtype).view(Array)

    def layer(self, args, i, position, pages):
        """The twin's layer of what the arguments point to, and where its token's rows lie."""
        dims = self.models[0].dims
        found = next(
            one for model in self.models for one in model.layers if one.units["o_weights"].data.ptr == args.o_weights[i]
        )
        for name, array in found.units.items():
            assert getattr(args, name)[i] == array.data.ptr
        shape = (pages.max() + 1, dims.kv_heads, PAGE, dims.head_size)
        caches = [at(getattr(args, name)[i], shape, np.float16) for name in ("k_pages", "v_pages")]
        rows = [
            swizzled(cache)[pages].transpose(1, 0, 2, 3).reshape(dims.kv_heads, -1, dims.head_size)[:, :position]
            for cache in caches
        ]
        if self.wrong == "a position less" and position:
            rows[0][:, -1] = rows[0][:, 0]
        vectors = {name: at(getattr(args, name)[i], array.shape, np.float16) for name, array in found.vectors.items()}
        if self.wrong == "another layer's norm":
            vectors["input_norm"] = at(args.input_norm[0], dims.hidden, np.float16)
        return twin.Layer(**found.products, **vectors, keys=rows[0], values=rows[1]), caches

    def run(self, kernel, args, patch):
        """patch: what a step of a single layer does wrong, or "right"; each step's results stay then."""
        dims = self.models[0].dims
        assert kernel in family.kernels(dims)
        assert args.layer >= FIRST
        assert 0 < args.layers <= QWEN2_LAYERS
        position = int(at(args.positions, 1, np.int32)[0])
        pages = at(args.page_table, position // PAGE + 1, np.int32)
        frequencies = at(args.inverse_frequencies, dims.head_size // 2, np.float64)
        layers, caches = zip(*(self.layer(args, i, position, pages) for i in range(args.layers)), strict=True)
        sign = -1 if self.wrong == "the other way round" else 1
        residual = at(args.residual, dims.hidden, np.float32)
        rounding = twin.Rounded()
        alone = patch and len(layers) == 1
        if alone:
            attended = spans_results(args, layers[0], dims, position, frequencies, patch)
            rounding = Given(attended)
        found = twin.token(layers, residual, position, sign * frequencies, dims.eps, rounding, 1)
        for pair, k, v in zip(caches, found.k, found.v, strict=True):
            for cache, own in zip(pair, (k, v), strict=True):
                page = swizzled(cache[pages[-1]])
                page[:, (position + (self.wrong == "another row")) % PAGE] = own[0].astype(np.float16)
                cache[pages[-1]] = swizzled(page)
        at(args.residual_out, dims.hidden, np.float32)[:] = found.end[-1][0]
        out = handed(args, dims)
        if alone:
            self.store_o(out, layers[0], attended, patch)
        stay = range(len(layers)) if patch or self.wrong == "rows not cleared" else [len(layers) - 1]
        for i in stay:
            self.store_mlp(out, layers[i], found, i, patch)
        if self.wrong == "nothing cleared":
            out["o_pieces"][-1, 7] = 1
        if self.wrong == "written beyond":
            at(args.partials - 128, 1, np.uint8)[0] = NOT_READY

    def store_o(self, out, layer, attended, wrong):
        digits = twin.Rounded().digits(attended.reshape(1, -1))[0]
        out["o_pieces"][:] = layer.o(twin.in_parts(digits, len(out["o_pieces"])))
        if wrong == "o":
            out["o_pieces"][0, 5] += 1e-2
        if wrong == "o's parts":
            out["o_pieces"][:] = out["o_pieces"][::-1].copy()

    def store_mlp(self, out, layer, found, i, patch):
        """What a layer's MLP leaves in its turn."""
        dims, last, wrong = self.models[0].dims, i + 1 == len(found.end), self.wrong or patch
        parts, turn = family.parts(dims), (i + (self.wrong == "another turn")) % 2
        out["rows_handed"][turn, 0] = found.middle[i][0] * (1.01 if wrong == "row" else 1)
        if not last or self.wrong == "a row too many":
            out["rows_handed"][turn, 1] = found.end[i][0]
            out["rows_handed"][turn, 1, 9] += 1e-2 * (wrong == "row behind the MLP")
        inner = out["inner"][turn]
        inner[:] = np.pad(found.inner[i][0], (0, len(inner) - dims.inner))
        shares = twin.in_parts(twin.Rounded().digits(found.inner[i])[0], parts)
        added = 16 * layer.down(shares)
        if wrong == "down's parts":
            added = added[::-1]
        for one, sums in zip(out["down_pieces"][turn], added, strict=True):
            store_pieces(one, sums, padded(dims.inner) // parts, MULTIPROCESSORS // parts)
        if wrong == "a piece of down":
            out["down_pieces"][turn, -1, 0, 3] += 1e-2


def emulated(size, layers, most):
    gpu = Emulated()
    gpu.models.append(Model(gpu, SHAPES[size], layers, most))
    return gpu


def test_the_twin_is_the_model():
    dims, rng = SHAPES["7b-tiny"], np.random.default_rng()
    model = Model(Emulated(), dims, 3, 40)
    case = Case(model, 37)
    heads, size = dims.q_heads, dims.head_size

    def layer(one):
        dense = {name: product(np.eye(padded(m.k)))[: m.k].T for (name, product), m in zip(
            one.products.items(), one.matrices.values(), strict=True)}  # fmt: skip
        cuts = [dims.q_width, dims.q_width + dims.kv_heads * size]
        q, k, v = np.split(dense["qkv"], cuts)
        biases = zip(("q_bias", "k_bias", "v_bias"), np.split(one.vectors["bias"].astype(float), cuts), strict=True)
        norms = {name: one.vectors[name] for name in ("input_norm", "post_norm")}
        rest = {name: dense[name] for name in ("o", "gate", "up", "down")}
        return SimpleNamespace(q=q, k=k, v=v, **dict(biases), **norms, **rest)

    float64 = Float64.__new__(Float64)
    float64.config = SimpleNamespace(
        head_dim=size, rms_norm_eps=dims.eps, rope_theta=1e6, q_size=dims.q_width,
        kv_size=dims.kv_heads * size, num_attention_heads=heads, num_key_value_heads=dims.kv_heads,
    )  # fmt: skip
    float64.weights = SimpleNamespace(
        embed_tokens=case.residual[None], layers=[layer(one) for one in model.layers], norm=np.ones(dims.hidden),
        lm_head=np.eye(dims.hidden),
    )  # fmt: skip
    float64.k, float64.v = (
        [list(one[:, :37].swapaxes(0, 1).astype(float)) for one in cache] for cache in (model.keys, model.values)
    )
    steps = {(number, what): values for number, what, values in float64.token(0, 37)}
    found = twin.token(model.twin(37), case.residual, 37, model.frequencies, dims.eps, twin.Noise(rng), 2)

    def close(a, b):
        assert np.linalg.norm(a - b) < EXACT * np.linalg.norm(b)

    for number in range(3):
        close(found.k[number][0], steps[number, "k"][-1])
        close(found.v[number][0], steps[number, "v"][-1])
        close(found.middle[number][0], steps[number, "middle"])
        close(found.inner[number][0], steps[number, "gate_up"])
        close(found.end[number][0] - found.middle[number][0], steps[number, "down"])
    normed = found.end[-1][0] / np.sqrt(np.square(found.end[-1][0]).mean() + dims.eps)
    close(normed, steps[3, "norm"])


@pytest.mark.parametrize(("size", "layers"), [("7b-tiny", 3), ("32b-tiny", 2), ("four-parts", 2)])
def test_roundings_stay_within_what_samples_differ_by(size, layers):
    gpu = emulated(size, layers, 600)
    for position in (0, 1, 15, 16, 17, 100, 513, 599):
        worst = Case(gpu.models[0], position).check()
        assert worst > 0.05, "a tolerance that nothing comes near"


WRONG = (
    "a position less", "another layer's norm", "the other way round", "another row", "nothing cleared",
    "written beyond", "rows not cleared", "a row too many", "another turn", "row", "down's parts", "a piece of down",
)  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_checks_notice(wrong):
    gpu = emulated("32b-tiny", 3, 100)
    case = Case(gpu.models[0], 81)
    case.check()
    gpu.wrong = wrong
    with tells():
        case.check()


ALONE = ("qkv", "statistics", "a span more", "o", "o's parts", "row", "down's parts", "a piece of down")


@pytest.mark.parametrize(
    ("layers", "wrongs"), [(1, ALONE), (2, ("row", "row behind the MLP", "down's parts", "a piece of down"))]
)
def test_checks_of_steps_notice(layers, wrongs):
    gpu = emulated("32b-tiny", layers, 400)
    for position in (0, 15, 64, 399):
        case = Case(gpu.models[0], position)
        case.judge_steps(case.run("right"))
    for wrong in wrongs:
        with tells():
            case.judge_steps(case.run(wrong))
