"""Random tensors of an IQuest-Q1 checkpoint, in any of its layouts.

A matrix's values depend on the seed and on the matrix alone: fused or not, FP8
or BF16, one file or many, the same seed gives the same numbers. That is what
lets tests compare layouts bit for bit. How: a value is a code q times a power
of two, where q keeps E4M3's four significant bits when it is divided by
anything from 2**-3 to 2**3. A layout may therefore draw a different scale for
each of its blocks, whichever way its blocks lie, and store exactly q / that.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cuq1.config import Q1Config

Array = npt.NDArray[Any]

BLOCK = 128
DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}

_SPREAD = 3  # a block's scale is 2**-3 to 2**3 times the matrix's base
_LARGEST = 448 / 2**_SPREAD
_QUANTUM = 2.0 ** (_SPREAD - 9)  # E4M3's smallest step is 2**-9
_PIECE_ROWS = 1024  # bounds memory: no more of a matrix is held at once


@dataclass(frozen=True)
class Layout:
    """How a checkpoint is stored. None of it changes the values, except rounding:
    of the router (router_dtype), and of BF16 weights or scales where `pow2_scales` is off.
    """

    fused_experts: bool = False
    fp8: bool = True
    router_name: str = "router"
    router_dtype: str = "F32"
    sink_leading_one: bool = False
    scale_dtype: str = "F32"
    pow2_scales: bool = True
    training_draft: bool = False


@dataclass(frozen=True)
class Tensor:
    """One stored tensor; `pieces` makes its elements in order, a bounded piece at a time."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[Array]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class _Matrix:
    """A linear before it is stored; `scale_key` names what its scales' mantissas are drawn for."""

    key: str
    rows: int
    cols: int
    scale_key: str


class _Maker:
    def __init__(self, config: Q1Config, layout: Layout, seed: int, folder: str) -> None:
        self.config = config
        self.layout = layout
        self.seed = seed
        self.folder = folder

    def random(self, key: str) -> np.random.Generator:
        digest = hashlib.sha256(f"{self.seed} {self.folder} {key}".encode()).digest()
        return np.random.Generator(np.random.SFC64(int.from_bytes(digest[:16], "little")))

    def normal(
        self, name: str, shape: tuple[int, ...], deviation: float, mean: float = 0.0, dtype: str = "BF16"
    ) -> Tensor:
        """Normal values; the leading dimension is cut into pieces."""

        def pieces() -> Iterator[Array]:
            random = self.random(name)
            for top in range(0, shape[0], _PIECE_ROWS):
                rows = min(_PIECE_ROWS, shape[0] - top)
                values = random.standard_normal((rows, *shape[1:]), dtype=np.float32)
                yield (values * np.float32(deviation) + np.float32(mean)).astype(DTYPES[dtype])

        return Tensor(name, dtype, shape, pieces)

    def linear(self, prefix: str, rows: int, cols: int, scale_key: str = "") -> list[Tensor]:
        name = f"{prefix}.weight"
        return self.stored(name, (), [[_Matrix(prefix, rows, cols, scale_key or prefix)]])

    def stored(self, name: str, leading: tuple[int, ...], stack: list[list[_Matrix]]) -> list[Tensor]:
        """A weight that stacks matrices, [*leading, rows of one stack, cols], and its scales if it is FP8."""
        rows, cols = sum(matrix.rows for matrix in stack[0]), stack[0][0].cols
        base = _base_exponent(cols)
        grid = (-(-rows // BLOCK), -(-cols // BLOCK))

        def exponents(item: int) -> Array:
            return self.random(f"{name} scales {item}").integers(-_SPREAD, _SPREAD + 1, grid, dtype=np.int32)

        def scales() -> Iterator[Array]:
            for item, matrices in enumerate(stack):
                mantissas = self.mantissas(matrices[0].scale_key, grid[1])
                yield np.ldexp(mantissas, exponents(item) + base).astype(DTYPES[self.layout.scale_dtype])

        def fp8() -> Iterator[Array]:
            for item, matrices in enumerate(stack):
                powers = np.repeat(np.ldexp(np.float32(1), -exponents(item)), BLOCK, axis=1)[:, :cols]
                row = 0
                for matrix in matrices:
                    for codes in self.codes(matrix):
                        blocks = np.arange(row, row + len(codes)) // BLOCK
                        yield (codes * powers[blocks]).astype(DTYPES["F8_E4M3"])
                        row += len(codes)

        def bf16() -> Iterator[Array]:
            for matrices in stack:
                scale = np.ldexp(self.mantissas(matrices[0].scale_key, grid[1]), base)
                columns = np.repeat(scale, BLOCK)[:cols]
                for matrix in matrices:
                    for codes in self.codes(matrix):
                        yield (codes * columns).astype(DTYPES["BF16"])

        shape = (*leading, rows, cols)
        if not self.layout.fp8:
            return [Tensor(name, "BF16", shape, bf16)]
        return [
            Tensor(name, "F8_E4M3", shape, fp8),
            Tensor(f"{name}_scale_inv", self.layout.scale_dtype, (*leading, *grid), scales),
        ]

    def codes(self, matrix: _Matrix) -> Iterator[Array]:
        """Float32 pieces of q: value = q x 2**base x the mantissa of its column block."""
        deviation = np.float32(matrix.cols**-0.5 / 2.0 ** _base_exponent(matrix.cols))
        random = self.random(matrix.key)
        for top in range(0, matrix.rows, _PIECE_ROWS):
            rows = min(_PIECE_ROWS, matrix.rows - top)
            values = random.standard_normal((rows, matrix.cols), dtype=np.float32) * deviation
            np.clip(values, -_LARGEST, _LARGEST, out=values)
            small = np.abs(values) < 8 * _QUANTUM
            codes = values.astype(DTYPES["F8_E4M3"]).astype(np.float32)
            yield np.where(small, np.rint(values / _QUANTUM) * np.float32(_QUANTUM), codes)

    def mantissas(self, scale_key: str, blocks: int) -> Array:
        """One in [1, 2) for each column block: not by row block, whose borders depend on the layout."""
        if self.layout.pow2_scales:
            return np.ones(blocks, np.float32)
        drawn = self.random(f"{scale_key} mantissas").uniform(1, 2, blocks).astype(np.float32)
        return drawn.astype(DTYPES[self.layout.scale_dtype]).astype(np.float32)

    def layer(self, prefix: str, moe: bool, sandwich: bool) -> list[Tensor]:
        config, attention, mlp = self.config, f"{prefix}self_attn.", f"{prefix}mlp."
        hidden, head, kv_heads = config.hidden_size, config.head_dim, config.num_key_value_heads
        width = config.num_attention_heads * head
        norms = ["attention_norm", "attn_out_norm", "feed_forward_norm", *["ffn_out_norm"] * sandwich]
        sink = (1, kv_heads, head) if self.layout.sink_leading_one else (kv_heads, head)
        return [
            *(self.normal(f"{prefix}{name}.weight", (hidden,), 0.1, mean=1.0) for name in norms),
            *self.linear(f"{attention}q_proj", width, hidden),
            *self.linear(f"{attention}k_proj", kv_heads * head, hidden),
            *self.linear(f"{attention}v_proj", kv_heads * head, hidden),
            *self.linear(f"{attention}o_proj", hidden, width),
            self.normal(f"{attention}q_norm.weight", (head,), 0.1, mean=1.0),
            self.normal(f"{attention}k_norm.weight", (head,), 0.1, mean=1.0),
            self.normal(f"{attention}sink_k", sink, 1.0),
            *(self.experts(mlp) if moe else self.dense(mlp)),
        ]

    def dense(self, prefix: str) -> list[Tensor]:
        hidden, width = self.config.hidden_size, self.config.dense_intermediate_size
        return [
            *self.linear(f"{prefix}gate_proj", width, hidden),
            *self.linear(f"{prefix}up_proj", width, hidden),
            *self.linear(f"{prefix}down_proj", hidden, width),
        ]

    def experts(self, prefix: str) -> list[Tensor]:
        config, layout = self.config, self.layout
        hidden, width, count = config.hidden_size, config.intermediate_size, config.num_experts
        # One key for either of its names, and larger than 1/sqrt(hidden): routing should have preferences.
        drawn = self.normal(f"{prefix}router.weight", (count, hidden), 2 * hidden**-0.5, dtype=layout.router_dtype)
        tensors = [Tensor(f"{prefix}{layout.router_name}.weight", drawn.dtype, drawn.shape, drawn.pieces)]
        each = [f"{prefix}experts.{expert}." for expert in range(count)]
        if not layout.fused_experts:
            for expert in each:
                # gate and up share mantissas, since they may share a block in the fused layout
                tensors += self.linear(f"{expert}gate_proj", width, hidden, scale_key=expert)
                tensors += self.linear(f"{expert}up_proj", width, hidden, scale_key=expert)
                tensors += self.linear(f"{expert}down_proj", hidden, width)
            return tensors
        gate_up = [
            [_Matrix(f"{expert}{name}_proj", width, hidden, expert) for name in ("gate", "up")] for expert in each
        ]
        down = [[_Matrix(f"{expert}down_proj", hidden, width, f"{expert}down_proj")] for expert in each]
        return [
            *tensors,
            *self.stored(f"{prefix}experts.fc", (count,), gate_up),
            *self.stored(f"{prefix}experts.proj", (count,), down),
        ]


def _base_exponent(fan_in: int) -> int:
    """b such that values of deviation 1/sqrt(fan_in) are codes of deviation 4 to 8, times 2**b."""
    return math.floor(-0.5 * math.log2(fan_in)) - 2


def target_tensors(config: Q1Config, layout: Layout, seed: int) -> list[Tensor]:
    """Every tensor of the main files, layer by layer."""
    make = _Maker(config, layout, seed, "target")
    hidden, vocab = config.hidden_size, config.vocab_size
    tensors = [make.normal("model.embed_tokens.weight", (vocab, hidden), 1.0)]
    for i in range(config.num_layers):
        tensors += make.layer(f"model.layers.{i}.", moe=config.is_moe(i), sandwich=i == 0)
    tensors += [
        make.normal("model.norm.weight", (hidden,), 0.1, mean=1.0),
        make.normal("lm_head.weight", (vocab, hidden), hidden**-0.5),
    ]
    if layout.training_draft:
        tensors += [
            make.normal("mtp_layers.0.eh_proj.weight", (hidden, 2 * hidden), (2 * hidden) ** -0.5),
            make.normal("mtp_layers.0.final_layernorm.weight", (hidden,), 0.1, mean=1.0),
        ]
    return tensors


def draft_tensors(config: Q1Config, layout: Layout, seed: int) -> list[Tensor]:
    """Every tensor of mtp/; `config` holds the dimensions of the draft's layer."""
    make = _Maker(config, layout, seed, "draft")
    hidden, vocab = config.hidden_size, config.vocab_size
    norms = ("target_final_norm", "mtp.enorm", "mtp.hnorm", "mtp.final_layernorm")
    return [
        make.normal("embed_tokens.weight", (vocab, hidden), 1.0),
        *(make.normal(f"{name}.weight", (hidden,), 0.1, mean=1.0) for name in norms),
        make.normal("mtp.eh_proj.weight", (hidden, 2 * hidden), (2 * hidden) ** -0.5),
        *make.layer("mtp.mtp_model_layer.", moe=True, sandwich=True),
        make.normal("lm_head.weight", (vocab, hidden), hidden**-0.5),
    ]
