"""One token's products with the INT4 matrices of a Qwen2 model: kernels_cu/qwen2_gemv_*.cu."""

from ctypes import Structure
from dataclasses import dataclass

from cuq1.cuda.abi import Qwen2ChainArgs, Qwen2GateUpArgs, Qwen2HeadArgs, Qwen2ProjectionArgs, Qwen2QkvArgs
from cuq1.plan.dims import MULTIPROCESSORS
from cuq1.plan.kernel import Define, Kernel
from cuq1.plan.qwen2_dims import GROUP, UNIT_BYTES, Qwen2Dims, padded, pieces, tiles

INNER_SCALE = 0.0625  # of what gate_up writes; down's scale is one over it

AT_ONCE, AFTER_WAIT, AFTER_COPIES = range(3)  # when a successor's prologue may begin: common/int4_stream.cuh

Defines = tuple[tuple[str, Define], ...]


@dataclass(frozen=True)
class Ring:
    """How a kernel streams: `warps` with a ring of `stages` copies of `units` units each, when it triggers, and whether
    it multiplies the token as digits or as halves (common/int4.cuh)."""

    units: int
    stages: int
    trigger: int
    warps: int = 8
    digits: bool = False

    @property
    def nbytes(self) -> int:
        return self.warps * self.stages * self.units * UNIT_BYTES

    @property
    def defines(self) -> Defines:
        return (
            ("WARPS", self.warps),
            ("STAGE_UNITS", self.units),
            ("STAGES", self.stages),
            ("TRIGGER", self.trigger),
            ("TOKEN", "Digits" if self.digits else "Halves"),
        )

    def smem(self, k: int) -> int:
        """Bytes of dynamic shared memory, with a token of k columns."""
        return self.nbytes + padded(k) * 2 + (padded(k) // GROUP * 16 if self.digits else 0)


# What was fastest (tools/decisions/016-int8-activations.md). Of down's long token, digits take as long as they save.
QKV = Ring(4, 2, AFTER_WAIT, digits=True)
O_PROJ = Ring(3, 2, AFTER_WAIT, digits=True)
GATE_UP = Ring(4, 2, AFTER_WAIT, digits=True)
DOWN = Ring(2, 5, AFTER_WAIT)
WIDE_DOWN = Ring(2, 4, AFTER_WAIT)  # where the token takes more than 40 KB
LM_HEAD = Ring(4, 2, AFTER_WAIT, warps=12, digits=True)
CHAIN = Ring(2, 3, AFTER_WAIT, warps=16, digits=True)
FIRST = 2  # copies of a warp's ring that are sent before the predecessor's end
DEFERRED = 1  # copies of a warp that wait until the next phase's token is there


def common(dims: Qwen2Dims) -> Defines:
    """The sizes that the kernels of a model are compiled for, and how its matrices are split."""
    return (
        ("HIDDEN", dims.hidden),
        ("Q_HEADS", dims.q_heads),
        ("KV_HEADS", dims.kv_heads),
        ("HEAD_SIZE", dims.head_size),
        ("INNER", dims.inner),
        ("VOCAB", dims.vocab),
        ("EPS", f"{dims.eps!r}f"),
        ("GEMV_BLOCKS", MULTIPROCESSORS),
        ("QKV_PIECES", pieces(dims.qkv_rows, dims.hidden)),
        ("O_PIECES", pieces(dims.hidden, dims.q_width)),
        ("DOWN_PIECES", pieces(dims.hidden, dims.inner)),
    )


def qkv(dims: Qwen2Dims, ring: Ring = QKV) -> Kernel:
    """x = residual + pieces, to residual_out float32 [hidden]; rms(x, norm) @ W.T as pieces float32 [.., qkv_rows].

    Twin: tests' `qwen2_gemv.entry` and `.product`.
    """
    blocks = _blocks(dims.qkv_rows, dims.hidden)
    return _kernel("qkv", "qwen2_qkv", Qwen2QkvArgs, dims, ring, dims.hidden, blocks)


def o_proj(dims: Qwen2Dims, ring: Ring = O_PROJ) -> Kernel:
    """scale * attended float16 [padded q_width] @ W.T as pieces float32 [.., hidden]. Twin: `qwen2_gemv.product`."""
    return projection("o_proj", dims, dims.q_width, ring)


def gate_up(dims: Qwen2Dims, ring: Ring = GATE_UP) -> Kernel:
    """x as qkv's; INNER_SCALE * silu(gate) * up, float16 [padded inner]. Twin: `qwen2_gemv.entry` and `.gate_up`."""
    blocks = min(MULTIPROCESSORS, dims.gate_up_tiles)
    return _kernel("gate_up", "qwen2_gate_up", Qwen2GateUpArgs, dims, ring, dims.hidden, blocks)


def down(dims: Qwen2Dims, ring: Ring | None = None) -> Kernel:
    """scale * inner float16 [padded inner] @ W.T as pieces float32 [.., hidden]. Twin: `qwen2_gemv.product`."""
    return projection("down", dims, dims.inner, ring or (DOWN if dims.inner <= 20480 else WIDE_DOWN))


def lm_head(dims: Qwen2Dims, ring: Ring = LM_HEAD) -> Kernel:
    """logits float32 [vocab] = normed float16 [padded hidden] @ W.T. Twin: `qwen2_gemv.product`."""
    blocks = min(MULTIPROCESSORS, tiles(dims.vocab))
    return _kernel("head", "qwen2_lm_head", Qwen2HeadArgs, dims, ring, dims.hidden, blocks)


def chain(
    dims: Qwen2Dims,
    ring: Ring = CHAIN,
    *,
    last: bool = False,
    first: int = FIRST,
    deferred: int = DEFERRED,
) -> Kernel:
    """o_proj, gate_up, down and the next layer's qkv, or in the last layer none: as the kernels of these names.

    All blocks have to be resident together: the GPU must have MULTIPROCESSORS of them.
    """
    own = (("LAST", int(last)), ("FIRST", first), ("DEFERRED", deferred))
    defines = (*common(dims), *ring.defines, *own)
    widest = padded(max(dims.hidden, dims.q_width, dims.inner))
    smem = ring.nbytes + widest // GROUP * (2 * GROUP + 16)
    grid = (MULTIPROCESSORS, 1, 1)
    return Kernel(
        "qwen2_chain.cu", "qwen2_chain", Qwen2ChainArgs, defines, grid, ring.warps * 32, smem=smem, max_registers=112
    )


def _blocks(rows: int, k: int) -> int:
    return min(MULTIPROCESSORS, tiles(rows) * (padded(k) // GROUP))


def projection(name: str, dims: Qwen2Dims, k: int, ring: Ring) -> Kernel:
    """The kernel that is called qwen2_<name>, of a matrix [hidden, k]."""
    entry = f"qwen2_{name}"
    own: Defines = (("ENTRY", entry), ("KERNEL", f"KERNEL_{name.upper()}"), ("INPUTS", k))
    return _kernel("projection", entry, Qwen2ProjectionArgs, dims, ring, k, _blocks(dims.hidden, k), own)


def _kernel(
    source: str, entry: str, args: type[Structure], dims: Qwen2Dims, ring: Ring, k: int, blocks: int, own: Defines = ()
) -> Kernel:
    return Kernel(
        f"qwen2_gemv_{source}.cu",
        entry,
        args,
        (*common(dims), *ring.defines, *own),
        (blocks, 1, 1),
        ring.warps * 32,
        smem=ring.smem(k),
        max_registers=128,
    )


def kernels(dims: Qwen2Dims) -> list[Kernel]:
    """All of a model's."""
    chains = [chain(dims), chain(dims, last=True)]
    return [qkv(dims), o_proj(dims), gate_up(dims), down(dims), lm_head(dims), *chains]
