"""All layers of a Qwen2 token in float64, and how far a kernel's roundings may carry a result away from them.

Keys, values and inner are rounded to halves as kernels do it. Of other roundings only the size is known: tokens become
digits, attention's probabilities and partial results halves. Each sample but the first has noise of that size in their
place, through all layers: what samples differ by, a right kernel may differ by from the first one.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tests.kernels.twins.qwen2 import turned
from tests.kernels.twins.qwen2_gemv import ROWS, gate_up, values

DIGITS = 32600  # steps of a group's largest
HALF = 2.0**-11  # relative: half of a half's step, at most
SAMPLES = 9  # the first has no noise
DEVIATIONS = 6.5  # of one result
NORMS = 3  # of all results together, which scatter less
SUM_TOLERANCE = 3e-6  # FP32 sums, of the results' root mean square

Product = Callable[[np.ndarray], np.ndarray]  # of tokens [samples, padded k]: [samples, rows]


@dataclass(frozen=True)
class Layer:
    """Norms and bias: float16; keys and values: float16 [kv_heads, position, head_size] of older positions."""

    qkv: Product
    o: Product
    gate: Product
    up: Product
    down: Product
    input_norm: np.ndarray
    post_norm: np.ndarray
    bias: np.ndarray
    keys: np.ndarray
    values: np.ndarray


@dataclass
class Token:
    """Of each layer [samples, ..]: k and v [kv_heads, head_size], not yet rounded; x [hidden] before its MLP; inner
    [inner], halves times 1 / 16; x behind it."""

    k: list[np.ndarray] = field(default_factory=list)
    v: list[np.ndarray] = field(default_factory=list)
    middle: list[np.ndarray] = field(default_factory=list)
    inner: list[np.ndarray] = field(default_factory=list)
    end: list[np.ndarray] = field(default_factory=list)


class Noise:
    """What a kernel's roundings may do, to all samples but the first."""

    def __init__(self, rng):
        self._rng = rng

    def _draw(self, shape):
        """Uniform within -1 and 1."""
        found = self._rng.uniform(-1, 1, shape)
        found[0] = 0
        return found

    def digits(self, x):
        """A token [samples, k] with zeros up to whole groups, rounded to digits."""
        x = np.pad(x, ((0, 0), (0, -x.shape[1] % 128)))
        steps = np.abs(x).reshape(len(x), -1, 128).max(axis=2).repeat(128, axis=1) / DIGITS
        return x + self._draw(x.shape) * steps / 2

    def attended(self, o, probabilities):
        """Attention's result [samples, heads, head_size]; probabilities: the square sum that their errors multiply."""
        partial = np.square(o) + np.square(o).mean(
            axis=2, keepdims=True
        )  # other spans' may be larger than all together
        return o + self._draw(o.shape) * HALF * np.sqrt(partial + probabilities)


class Rounded:
    """Roundings as a kernel makes them, where attention has one span."""

    def digits(self, x):
        x = np.pad(x, ((0, 0), (0, -x.shape[1] % 128)))
        steps = np.maximum(np.abs(x).reshape(len(x), -1, 128).max(axis=2).repeat(128, axis=1) / DIGITS, 1e-30)
        return np.rint(x / steps) * steps

    def attended(self, o, _):
        return halves(o)


def halves(x):
    return x.astype(np.float16).astype(np.float64)


def products(words, scales, x, xp=np, power=1):
    """float64 [samples, rows] = x W^T of x [samples, 128 * groups]: as qwen2_gemv.product, of several tokens."""
    x = x.astype(np.float64).T
    starts = range(0, len(words), ROWS)
    parts = [values(words[i : i + ROWS], scales[i : i + ROWS], xp) ** power @ x for i in starts]
    return xp.concatenate(parts).T


def in_parts(x, parts):
    """[parts, k] of a token x [k]: each of its parts by itself, with zeros in the others' places."""
    return (np.eye(parts)[:, :, None] * x.reshape(parts, -1)).reshape(parts, -1)


def rms(x, norm, eps):
    return x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + eps) * norm.astype(np.float64)


def attention(qkv, layer, position, frequencies, noise):
    """attended [samples, q_width] of qkv [samples, rows] without biases; k and v [samples, kv_heads, head_size]."""
    kv_heads, _, size = layer.keys.shape
    samples = len(qkv)
    heads = (qkv + layer.bias.astype(np.float64)).reshape(samples, -1, size)
    count = heads.shape[1] - 2 * kv_heads
    k, v = turned(heads[:, count : count + kv_heads], position, frequencies), heads[:, count + kv_heads :]
    q = turned(heads[:, :count], position, frequencies).reshape(samples, kv_heads, -1, size) / np.sqrt(size)
    by_head = q.swapaxes(0, 1).reshape(kv_heads, -1, size)  # all samples attend to the same older positions
    own = (q * halves(k)[:, :, None]).sum(axis=3)  # [samples, kv_heads, group]
    own = own.swapaxes(0, 1).reshape(kv_heads, -1, 1)
    scores = np.concatenate([by_head @ layer.keys.astype(np.float64).swapaxes(1, 2), own], axis=2)
    p = np.exp(scores - scores.max(axis=2, keepdims=True))
    p /= p.sum(axis=2, keepdims=True)

    def weighed(p, old, new):
        found = (p[:, :, :-1] @ old).reshape(kv_heads, samples, -1, size)
        return (found + p[:, :, -1].reshape(kv_heads, samples, -1, 1) * new.swapaxes(0, 1)[:, :, None]).swapaxes(0, 1)

    old, new = layer.values.astype(np.float64), halves(v)
    out, square = weighed(p, old, new), weighed(np.square(p), np.square(old), np.square(new))
    out = noise.attended(out.reshape(samples, -1, size), square.reshape(samples, -1, size))
    return out.reshape(samples, -1), k, v


def token(layers, residual, position, frequencies, eps, noise, samples=SAMPLES):
    """A token's way through layers, from residual [hidden]."""
    x = np.tile(residual.astype(np.float64), (samples, 1))
    found = Token()
    for layer in layers:
        qkv = layer.qkv(noise.digits(rms(x, layer.input_norm, eps)))
        attended, k, v = attention(qkv, layer, position, frequencies, noise)
        found.k.append(k)
        found.v.append(v)
        x = x + layer.o(noise.digits(attended))
        found.middle.append(x)
        normed = noise.digits(rms(x, layer.post_norm, eps))
        inner = halves(gate_up(layer.gate(normed), layer.up(normed)))
        found.inner.append(inner)
        x = x + 16 * layer.down(noise.digits(inner))
        found.end.append(x)
    return found


def distance(found, samples, *, half=False):
    """The largest difference of `found` from the first of `samples` [samples, ..], of what it may be.

    half: found are halves, of values that samples may have as they were before.
    """
    expected, apart = samples[0], np.square(samples[1:] - samples[0]).mean(axis=0)
    differ = np.abs(found.astype(np.float64) - expected)
    differ = np.where(np.isfinite(differ), differ, np.inf)
    sums = SUM_TOLERANCE * np.sqrt(np.square(expected).mean())
    rounding = 2 * HALF * np.abs(expected) + 2.0**-24 if half else 0.0
    each = DEVIATIONS * np.sqrt(np.maximum(apart, apart.mean())) + sums + rounding
    together = NORMS * np.sqrt(apart.mean()) + sums + (HALF * np.sqrt(np.square(expected).mean()) if half else 0.0)
    return max((differ / each).max(), np.sqrt(np.square(differ).mean()) / together)
