"""What INT4 costs a trained model, in the reference, and what its rounding alone explains.

Rounding moves each weight by an error e. If these errors were independent of everything, e and -e would be as likely:
so weights moved by e with random signs have rounding's second moments exactly, element by element, and what they cost,
for several draws of signs, is what rounding alone explains. A quantiser with a mistake (scales off, codes exchanged)
moves weights by more than that, or all of a group one way.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from cuq1.checkpoint import int4
from cuq1.config import Q1Config
from cuq1.config_qwen2 import Qwen2Config
from cuq1.reference.cpu import Forward
from cuq1.reference.ops import F32
from cuq1.reference.q1 import TargetForward
from cuq1.reference.qwen2 import Qwen2Forward
from cuq1.reference.qwen2_weights import Qwen2Layer, Qwen2Weights
from cuq1.reference.weights import Dense, Layer, Target

Change = Callable[[F32], F32]  # a matrix [rows, inputs] to what takes its place
_LINEARS = ("q", "k", "v", "o", "gate", "up", "down")


class Subject(Protocol):
    """A trained model in the reference."""

    def changed(self, layers: Change, head: Change | None, room: int) -> Forward:
        """The model with its layers' matrices changed, and its logits' matrix; for sequences of `room` tokens."""


@dataclass(frozen=True)
class Q1Subject:
    """An IQuest-Q1 model on one rank. Its routers stay: INT4 models have no counterpart."""

    weights: Target
    config: Q1Config

    def changed(self, layers: Change, head: Change | None, room: int) -> Forward:
        def whole(matrices: F32) -> F32:
            """Of all experts, [experts, rows, inputs]."""
            return layers(matrices.reshape(-1, matrices.shape[-1])).reshape(matrices.shape)

        def layer(one: Layer) -> Layer:
            mlp, change = one.mlp, layers if isinstance(one.mlp, Dense) else whole
            mlp = replace(mlp, gate_up=[change(m) for m in mlp.gate_up], down=[change(m) for m in mlp.down])
            q, kv, o = ([layers(m) for m in part] for part in (one.q, one.kv, one.o))
            return replace(one, q=q, kv=kv, o=o, mlp=mlp)

        weights = replace(self.weights, layers=[layer(one) for one in self.weights.layers])
        if head is not None:
            weights = replace(weights, lm_head=[head(m) for m in weights.lm_head])
        return TargetForward(weights, self.config, room)


@dataclass(frozen=True)
class Qwen2Subject:
    """A Qwen2 model. A tied embedding stays where the logits' matrix changes."""

    weights: Qwen2Weights
    config: Qwen2Config

    def changed(self, layers: Change, head: Change | None, room: int) -> Forward:
        def layer(one: Qwen2Layer) -> Qwen2Layer:
            return Qwen2Layer(
                **{f.name: layers(m) if f.name in _LINEARS else m for f in fields(one) for m in (getattr(one, f.name),)}
            )

        weights = replace(self.weights, layers=[layer(one) for one in self.weights.layers])
        if head is not None:
            weights = replace(weights, lm_head=head(weights.lm_head))
        return Qwen2Forward(weights, self.config, room)


def unchanged(matrix: F32) -> F32:
    return matrix


def rounded(matrix: F32) -> F32:
    """What a packed file holds of a matrix."""
    codes, scales = int4.quantise(matrix)
    return int4.dequantise(int4.pack(codes), scales, matrix.shape[1])


def random_signs(rng: np.random.Generator) -> Change:
    """Rounding's errors with signs of their own."""

    def change(matrix: F32) -> F32:
        error = rounded(matrix) - matrix
        bits = np.unpackbits(np.frombuffer(rng.bytes(-(-matrix.size // 8)), np.uint8), count=matrix.size)
        return matrix + np.where(bits.reshape(matrix.shape).view(bool), error, -error)

    return change


def scaled(factor: float) -> Change:
    """Rounding whose scales are off."""
    return lambda matrix: rounded(matrix) * np.float32(factor)


def floored(matrix: F32) -> F32:
    """Rounding that drops the fraction."""
    _, scales = int4.quantise(matrix)
    wide = np.repeat(scales.astype(np.float32), int4.GROUP, axis=1)[:, : matrix.shape[1]]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(wide > 0, np.trunc(matrix / wide) * wide, 0).astype(np.float32)


def exchanged(matrix: F32) -> F32:
    """Rounding whose reader exchanges the two codes of a pair."""
    codes, scales = int4.quantise(matrix)
    words = int4.pack(codes)
    return int4.dequantise((words >> np.uint32(16)) | (words << np.uint32(16)), scales, matrix.shape[1])


class Cost(NamedTuple):
    """A token's mean, in nats: loss over the source model's, and the divergence of the predictions from its."""

    loss: float
    divergence: float


class Measure:
    """Pieces of text, and what the source model predicts of them."""

    def __init__(self, subject: Subject, pieces: Sequence[NDArray[np.int64]]) -> None:
        self._subject, self._pieces = subject, pieces
        self._room = max(map(len, pieces))
        self.tokens = sum(len(piece) - 1 for piece in pieces)
        self._source = list(self._predictions(unchanged, None))
        self.loss = self._loss(self._source)

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.loss))

    def _predictions(self, layers: Change, head: Change | None) -> Iterator[F32]:
        """Log-probabilities [tokens - 1, vocab] of each piece."""
        with threadpool_limits(1):
            for number, piece in enumerate(self._pieces):
                if number == 0:
                    model = self._subject.changed(layers, head, self._room)
                logits = model.logits(model.forward(piece[:-1], 0)).astype(np.float64)
                logits -= logits.max(1, keepdims=True)
                logits -= np.log(np.exp(logits).sum(1, keepdims=True))
                yield logits.astype(np.float32)

    def _loss(self, predictions: Sequence[F32]) -> float:
        pairs = zip(predictions, self._pieces, strict=True)
        return -sum(float(p[np.arange(len(p)), piece[1:]].sum(dtype=np.float64)) for p, piece in pairs) / self.tokens

    def cost(self, layers: Change, head: Change | None = None) -> Cost:
        """Of a model that is changed so."""
        loss = divergence = 0.0
        for source, piece, changed in zip(self._source, self._pieces, self._predictions(layers, head), strict=True):
            loss -= float(changed[np.arange(len(changed)), piece[1:]].sum(dtype=np.float64))
            divergence += float((np.exp(source) * (source - changed)).sum(dtype=np.float64))
        return Cost(loss / self.tokens - self.loss, divergence / self.tokens)
