"""Random models of a few layers, and a token's launch of qwen2_layers with all that it reads and writes."""

from copy import copy
from dataclasses import dataclass, field

import numpy as np

from cuq1.cuda.abi import Qwen2LayersArgs
from cuq1.cuda.kernels import qwen2_layers as family
from cuq1.cuda.repack import int4_units
from cuq1.plan.dims import MULTIPROCESSORS
from cuq1.plan.qwen2_dims import GROUP, PAGE, Qwen2Dims, padded, pieces
from tests.kernels.qwen2_shapes import DIMS
from tests.kernels.test_qwen2_gemv import BIG, Matrix, error, mlp, total
from tests.kernels.twins import qwen2_gemv, qwen2_layers
from tests.kernels.twins.qwen2 import attention, swizzled

FIRST = 5  # the first layer's number
NOT_READY, GUARD = 0xFF, 0x7F  # bytes
APART = 128  # bytes of GUARD behind each handed array
ATTENDED = 6e-4  # relative, of a token: probabilities and spans' results are halves
SPARE = 5  # pages that belong to no position
THETA = 1e6

# Besides the family: small, with columns in four parts, and an MLP off 8 rows; with so many KV heads that few blocks
# share one's positions.
SHAPES = {
    **DIMS,
    "four-parts": Qwen2Dims(hidden=768, q_heads=16, kv_heads=4, head_size=128, inner=2500, vocab=512, eps=1e-6),
    "many-heads": Qwen2Dims(hidden=2048, q_heads=32, kv_heads=32, head_size=64, inner=2048, vocab=512, eps=1e-6),
}
TURNS = ("rows_handed", "inner", "down_pieces")  # have a place for each of two layers


def random_scales(rng, rows, k, size):
    """Of a Matrix whose products with a token of order 1 are of about this size."""
    return (rng.uniform(0.1, 1.0, (rows, padded(k) // GROUP)) * 0.35 * size * k**-0.5).astype(np.float16)


class Dense:
    """A Matrix as the twin multiplies it."""

    def __init__(self, matrix):
        self.matrix = matrix
        self._small = None

    def __call__(self, x, power=1):
        m = self.matrix
        if m.rows * m.k < BIG:
            if self._small is None:
                self._small = qwen2_gemv.values(m.words, m.scales).T.copy()
            return x @ self._small**power
        cupy = m.gpu.cupy
        return qwen2_layers.products(*map(m.gpu.array, (m.words, m.scales, x)), cupy, power).get()


def without_mean(words):
    """Words with 0 for each code of -8, as packing leaves it out: the others add up to nothing in the mean."""
    other = words ^ np.uint32(0x88888888)
    eights = ~(((other & np.uint32(0x77777777)) + np.uint32(0x77777777)) | other) & np.uint32(0x88888888)
    return words & ~eights


class Weights:
    """A layer's, on both sides. Attention and the MLP count as much as the residual, and older positions as much as the
    token's own: codes with a mean would turn all columns, heads and keys one way, so that a token sees itself alone."""

    def __init__(self, gpu, dims, rng):
        def matrix(rows, k, size):
            made = Matrix(gpu, rng, rows, k, scales=random_scales(rng, rows, k, size))
            made.words = without_mean(made.words)
            return made

        self.matrices = {
            "qkv": matrix(dims.qkv_rows, dims.hidden, 1.0),
            "o": matrix(dims.hidden, dims.q_width, 2.0),
            "gate": matrix(dims.inner, dims.hidden, 2.0),
            "up": matrix(dims.inner, dims.hidden, 2.0),
            "down": matrix(dims.hidden, dims.inner, 1.0),
        }
        self.products = {name: Dense(one) for name, one in self.matrices.items()}
        mlp = [(one.words, one.scales) for one in (self.matrices["gate"], self.matrices["up"])]
        self.units = {
            "qkv_weights": self.matrices["qkv"].units(),
            "o_weights": self.matrices["o"].units(),
            "gate_up_weights": gpu.array(int4_units(mlp, dims.gate_up_tiles)),
            "down_weights": self.matrices["down"].units(),
        }
        self.vectors = {
            name: rng.uniform(0.5, 1.5, dims.hidden).astype(np.float16) for name in ("input_norm", "post_norm")
        }
        self.vectors["bias"] = rng.standard_normal(dims.qkv_rows, np.float32).astype(np.float16)
        self.units.update((name, gpu.array(vector)) for name, vector in self.vectors.items())

    def apart(self, name, found, token, scale=1):
        """How far sums [parts, rows] of parts of a matrix's columns are from its products with a token, of what they
        may be: see error."""
        tokens = qwen2_layers.in_parts(token, len(found))
        variance = qwen2_layers.in_parts(qwen2_gemv.digit_variance(token), len(found))
        product, spread = self.products[name](tokens), np.sqrt(self.products[name](variance, power=2))
        return max(
            error(one, scale * expected, scale * qwen2_layers.DEVIATIONS * differ)
            for one, expected, differ in zip(found, product, spread, strict=True)
        )


class Model:
    """Random layers, with keys and values of `most` positions."""

    def __init__(self, gpu, dims: Qwen2Dims, layers, most, seed=None):
        self.gpu, self.dims, self.most = gpu, dims, most
        self.seed = int(np.random.default_rng().integers(1 << 31)) if seed is None else seed
        rng = np.random.default_rng(self.seed)
        self.layers = [Weights(gpu, dims, rng) for _ in range(layers)]
        shape = (dims.kv_heads, most, dims.head_size)
        self.keys, self.values = [], []
        for _ in range(layers):
            # Keys differ in length, so that some positions stand out.
            keys = rng.standard_normal(shape, np.float32) * rng.uniform(0.2, 1.5, (1, most, 1)).astype(np.float32)
            self.keys.append(keys.astype(np.float16))
            self.values.append((rng.standard_normal(shape, np.float32) + np.float32(0.5)).astype(np.float16))
        self.frequencies = THETA ** (-2 * np.arange(dims.head_size // 2) / dims.head_size)
        self.device_frequencies = gpu.array(self.frequencies)

    def __len__(self):
        return len(self.layers)

    def first(self, layers):
        """A model of so many of these layers."""
        found = copy(self)
        found.layers, found.keys, found.values = (one[:layers] for one in (self.layers, self.keys, self.values))
        return found

    def twin(self, position):
        """The layers, with older positions' keys and values."""
        return [
            qwen2_layers.Layer(**one.products, **one.vectors, keys=k[:, :position], values=v[:, :position])
            for one, k, v in zip(self.layers, self.keys, self.values, strict=True)
        ]


class Handed:
    """What blocks hand to one another: one buffer of NOT_READY, with guards between its arrays, or with none.

    fill: another byte than NOT_READY's.
    """

    def __init__(self, gpu, dims, fill=NOT_READY, *, guarded=True):
        parts = family.parts(dims)
        self.arrays = {
            "qkv_pieces": (np.float32, (pieces(dims.qkv_rows, dims.hidden), dims.qkv_rows)),
            "partials": (np.uint8, (dims.kv_heads, family.spans(dims), family.record_bytes(dims))),
            "o_pieces": (np.float32, (parts, dims.hidden)),
            "rows_handed": (np.float32, (2, 2, dims.hidden)),
            "inner": (np.float16, (2, padded(dims.inner))),
            "down_pieces": (np.float32, (2, parts, family.down_pieces(dims), dims.hidden)),
        }
        sizes = {name: int(np.prod(shape)) * np.dtype(dtype).itemsize for name, (dtype, shape) in self.arrays.items()}
        assert sizes == family.handed(dims)
        self.at, end = {}, 0
        for name, size in sizes.items():
            self.at[name] = slice(end, end + size)
            end += -(-size // APART) * APART + guarded * APART
        self.guards = np.full(end, guarded)
        for place in self.at.values():
            self.guards[place] = False
        self.bytes = gpu.array(np.where(self.guards, GUARD, fill).astype(np.uint8))

    def point(self, args):
        for name, place in self.at.items():
            setattr(args, name, self.bytes.data.ptr + place.start)

    def found(self):
        """Each array as it lies now; what lies between them is as it was."""
        whole = self.bytes.get()
        np.testing.assert_array_equal(whole[self.guards], GUARD, err_msg="written beyond what is handed over")
        return {name: whole[self.at[name]].view(dtype).reshape(shape) for name, (dtype, shape) in self.arrays.items()}


@dataclass
class Found:
    """What a launch left: residual_out, each layer's pages, and the handed arrays. Of what layers have in turns, the
    last one's comes first."""

    residual: np.ndarray
    k_pages: list[np.ndarray]
    v_pages: list[np.ndarray]
    handed: dict[str, np.ndarray]

    def same(self, other, *, handed=True):
        """Bit for bit."""
        assert_same(self.residual, other.residual, "residual_out")
        for layer, pairs in enumerate(zip(self.k_pages, other.k_pages, strict=True)):
            assert_same(*pairs, f"k_pages of layer {layer}")
        for layer, pairs in enumerate(zip(self.v_pages, other.v_pages, strict=True)):
            assert_same(*pairs, f"v_pages of layer {layer}")
        if handed:
            for name, array in self.handed.items():
                assert_same(array, other.handed[name], name)


def assert_same(found, expected, what):
    np.testing.assert_array_equal(found.view(np.uint8), expected.view(np.uint8), err_msg=what)


@dataclass
class Case:
    """The token at `position` of a model, with a random residual. Pages lie in any order, among others; what no token
    before has written of them is NaN, as are pages that are no position's. fill: the byte that is polled for. short:
    the kernel's form; by default as plans have it."""

    model: Model
    position: int
    fill: int = NOT_READY
    short: bool | None = None
    seed: int = field(default_factory=lambda: int(np.random.default_rng().integers(1 << 31)))

    def __post_init__(self):
        dims, rng = self.model.dims, np.random.default_rng(self.seed)
        short = self.position < family.short_positions(dims) if self.short is None else self.short
        self.gpu, self.kernel = self.model.gpu, family.layers(dims, short=short)
        self.residual = rng.standard_normal(dims.hidden, np.float32)
        self.count = self.position // PAGE + 1
        self.places = rng.permutation(self.count + SPARE)[: self.count].astype(np.int32)
        self.pages = {
            "k_pages": [self._paged(keys) for keys in self.model.keys],
            "v_pages": [self._paged(values) for values in self.model.values],
        }

    def _paged(self, vectors):
        dims, whole = self.model.dims, self.position // PAGE
        pages = np.full((self.count + SPARE, dims.kv_heads, PAGE, dims.head_size), np.nan, np.float16)
        cut = vectors[:, : whole * PAGE].reshape(dims.kv_heads, whole, PAGE, dims.head_size)
        pages[self.places[:whole]] = cut.transpose(1, 0, 2, 3)
        pages[self.places[whole], :, : self.position % PAGE] = vectors[:, whole * PAGE : self.position]
        return swizzled(pages)

    def prepare(self):
        """Fresh buffers for launches of this token."""
        gpu, dims = self.gpu, self.model.dims
        self.buffers = {
            "positions": gpu.array(np.array([self.position], np.int32)),
            "page_table": gpu.array(np.append(self.places, -1).astype(np.int32)),
            "residual": gpu.array(self.residual),
            "residual_out": gpu.poison(dims.hidden + 64, np.float32),
        }
        self.caches = {name: [gpu.array(one) for one in pages] for name, pages in self.pages.items()}

    def arguments(self, handed, layers=None, **changed):
        """Of a launch of these layers (a range), all where none are given. changed: other arrays for some fields."""
        model = self.model
        layers = range(len(model)) if layers is None else layers
        args = Qwen2LayersArgs(fault=self.gpu.fault.address, layer=FIRST + layers.start, rows=1, layers=len(layers))
        for i, layer in enumerate(layers):
            for name, array in model.layers[layer].units.items():
                getattr(args, name)[i] = array.data.ptr
            for name, arrays in self.caches.items():
                getattr(args, name)[i] = arrays[layer].data.ptr
        for name, array in {**self.buffers, **changed}.items():
            setattr(args, name, array.data.ptr)
        args.inverse_frequencies = model.device_frequencies.data.ptr
        handed.point(args)
        return args

    def found(self, handed, layers=None):
        """After a launch, of all layers or of so many."""
        dims = self.model.dims
        out = self.buffers["residual_out"].get()
        assert np.isnan(out[dims.hidden :]).all(), "written beyond residual_out"
        caches = {name: [one.get() for one in arrays] for name, arrays in self.caches.items()}
        left = handed.found()
        if (layers or len(self.model)) % 2 == 0:
            left |= {name: left[name][::-1] for name in TURNS}
        return Found(out[: dims.hidden], **caches, handed=left)

    def run(self, patch=None, **changed):
        """One launch of all layers in fresh buffers. changed: fields of layers' weights, as (layer, array)."""
        self.prepare()
        handed = Handed(self.gpu, self.model.dims, self.fill)
        args = self.arguments(handed)
        for name, (layer, array) in changed.items():
            getattr(args, name)[layer] = array.data.ptr
        self.gpu.run(self.kernel, args, patch)
        assert_same(self.buffers["residual"].get(), self.residual, "residual")
        return self.found(handed)

    def expected(self):
        noise = qwen2_layers.Noise(np.random.default_rng(self.seed))
        model = self.model
        return qwen2_layers.token(
            model.twin(self.position), self.residual, self.position, model.frequencies, model.dims.eps, noise
        )

    def check(self, patch=None):
        """Runs a launch and checks all that it left; returns the largest difference, of what it may be."""
        return self.judge(self.run(patch))

    def judge(self, found):
        dims, last, expected = self.model.dims, self.model.layers[-1], self.expected()
        errors = {"residual_out": qwen2_layers.distance(found.residual, expected.end[-1])}
        self._judge_caches(found, expected, errors)
        self.judge_cleared(found)
        (row, _), inner, _ = (found.handed[name][0] for name in TURNS)
        errors["residual before the MLP"] = qwen2_layers.distance(row, expected.middle[-1])
        errors["inner"] = qwen2_layers.distance(inner[: dims.inner], expected.inner[-1], half=True)
        self._judge_down(last, found, 0, found.residual, errors)
        return self._worst(errors)

    def judge_cleared(self, found):
        """What the launch has used for the last time is ready for the next."""
        handed = found.handed
        cleared = {name: handed[name] for name in ("qkv_pieces", "partials", "o_pieces")}
        cleared |= {f"{name} of the layer before": handed[name][1] for name in TURNS}
        cleared["the last layer's row behind the MLP"] = handed["rows_handed"][0, 1]
        for name, array in cleared.items():
            left = np.ascontiguousarray(array).view(np.uint8)
            assert (left == NOT_READY).all(), f"{name} is not cleared: {(left != NOT_READY).sum()} bytes, {self.where}"

    def judge_steps(self, found):
        """Steps of one layer or two, from what a launch stored itself that has cleared nothing of it: of one layer
        every step; of two what layers have in turns, which is the MLP's."""
        model, rows, errors = self.model, found.handed["rows_handed"], {}
        for number, layer in enumerate(model.layers):
            turn = len(model) - 1 - number
            before = self.residual if number == 0 else rows[turn + 1, 1]
            if len(model) == 1:
                self._judge_attention(layer, found, errors)
                added = found.handed["o_pieces"].astype(np.float64).sum(axis=0)
                errors["residual before the MLP"] = error(rows[turn, 0], before + added)
            _, normed = qwen2_gemv.entry(rows[turn, 0], None, layer.vectors["post_norm"], model.dims.eps)
            inner = found.handed["inner"][turn][: model.dims.inner]
            gate, up = layer.matrices["gate"], layer.matrices["up"]
            errors[f"inner, layer {number}"] = error(inner, *mlp(self.kernel, gate, up, normed))
            self._judge_down(layer, found, turn, rows[turn, 1] if turn else found.residual, errors)
        self._worst(errors)

    def _judge_down(self, layer, found, turn, end, errors):
        """down of what lies in inner, and the residual behind it."""
        dims = self.model.dims
        parts = family.parts(dims)
        rows, inner, down = (found.handed[name][turn] for name in TURNS)
        assert not inner[dims.inner :].any(), f"inner has no zeros beyond its columns: {self.where}"
        shares = padded(dims.inner) // parts, MULTIPROCESSORS // parts
        added = np.stack([total(one, dims.hidden, *shares) for one in down])
        errors[f"down_pieces, turn {turn}"] = layer.apart("down", added, inner, 16)
        errors[f"residual behind the MLP, turn {turn}"] = error(end, rows[0] + added.sum(axis=0))

    def _judge_attention(self, layer, found, errors):
        """qkv, attention and o_proj of the only layer."""
        dims, model, handed = self.model.dims, self.model, found.handed
        _, normed = qwen2_gemv.entry(self.residual, None, layer.vectors["input_norm"], dims.eps)
        qkv = total(handed["qkv_pieces"], dims.qkv_rows, dims.hidden)
        errors["qkv"] = layer.apart("qkv", qkv[None], normed)
        keys, values = (one[0][:, : self.position] for one in (model.keys, model.values))
        expected, k, v = attention(qkv, layer.vectors["bias"], self.position, model.frequencies, keys, values)
        for name, own in (("k", k), ("v", v)):
            after = swizzled(getattr(found, f"{name}_pages")[0])[self.places[-1], :, self.position % PAGE]
            # FP32 may round to the other neighbour of a half, of a number that is small beside those it is the sum of.
            allowed = 2.0**-10 * np.abs(own.astype(np.float64)) + 1e-5
            errors[name] = (np.abs(after.astype(np.float64) - own) / allowed).max()
        attended = np.pad(self.merged(handed["partials"]), (0, -dims.q_width % GROUP))
        errors["attended"] = np.linalg.norm(attended[: dims.q_width] - expected) / np.linalg.norm(expected) / ATTENDED
        errors["o_pieces"] = layer.apart("o", handed["o_pieces"], attended)

    def _worst(self, errors):
        worst = max(errors, key=errors.get)
        assert errors[worst] < 1, f"{worst} differs by {errors[worst]:.3g} of what it may: {errors}, {self.where}"
        return errors[worst]

    def merged(self, records):
        """attended float64 [q_width] of the spans' results, which are there for as many spans as there are to be."""
        dims = self.model.dims
        spans = min(family.spans(dims), -(-self.count // family.SPAN_PAGES))
        left = records[:, spans:]
        assert (left == NOT_READY).all(), f"more spans than {spans} have results: {self.where}"
        used = np.ascontiguousarray(records[:, :spans])
        size = dims.group * dims.head_size * 2
        shape = (dims.kv_heads, spans, dims.group, dims.head_size)
        results = used[:, :, :size].view(np.float16).reshape(shape).astype(np.float64)
        statistics = used[:, :, size:].view(np.float32).reshape(dims.kv_heads, spans, -1, 2)[:, :, : dims.group]
        assert np.isfinite(statistics).all(), self.where
        top, sums = statistics.astype(np.float64).transpose(3, 0, 1, 2)[..., None]
        weights = np.exp2(top - top.max(axis=1, keepdims=True)) * sums
        return ((weights * results).sum(axis=1) / weights.sum(axis=1)).ravel()

    def _judge_caches(self, found, expected, errors):
        place, row = self.places[-1], self.position % PAGE
        for name in ("k", "v"):
            for layer, own in enumerate(getattr(expected, name)):
                what = f"{name} of layer {layer}"
                before = swizzled(self.pages[f"{name}_pages"][layer])
                after = swizzled(getattr(found, f"{name}_pages")[layer])
                errors[what] = qwen2_layers.distance(after[place, :, row], own, half=True)
                after[place, :, row] = before[place, :, row]
                assert_same(after, before, f"{what}: other rows, {self.where}")

    @property
    def where(self):
        model = self.model
        slots = dict(self.kernel.defines)["SLOTS"]
        form = f"position {self.position}, {len(model)} layers, {slots} slots"
        return f"seeds {model.seed} and {self.seed}, {form}, {model.dims}"
