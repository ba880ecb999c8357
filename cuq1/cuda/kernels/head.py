"""The language-model head: logits, and the largest of them."""

from cuq1.cuda.abi import LmHeadArgs, TopKArgs
from cuq1.cuda.kernels.defines import common
from cuq1.plan.dims import MULTIPROCESSORS, ROWS, Dims
from cuq1.plan.kernel import Kernel

KEPT = 2  # sixteenths of the draft's matrix that stay in L2 from one depth to the next
PIECES = 1  # candidate lists that `top_k` writes for a row

_RING = 192 << 10  # bytes of weights in flight in a block, at most
_CONSUMERS = 8  # warps
_CLUSTER = 8
_PIECE = 32 << 10  # logits that a cluster takes, at most


def lm_head(dims: Dims, kept: int = 0, *, fp8: bool = False) -> Kernel:
    """logits float32 [ROWS, vocab] = scale * normed [rows, hidden] @ W.T; twin: cuq1.reference.q1.head_logits.

    W: float16 as `repack.f16_tiles`, padded with zeros to a multiple of 16 rows; fp8: codes as `repack.fp8_tiles` with
    a scale a row, as `repack.quantised`. kept: sixteenths of it that L2 should hold until the next launch with the same
    weights.
    """
    chunks = dims.hidden // (32 if fp8 else 16)
    stage = next(n for n in (32, 24, 16, 8) if chunks % n == 0)
    stages = min(_RING // (stage * 512), 24)
    tiles = -(-dims.vocab // 16)
    defines = (*common(dims), ("STAGE_CHUNKS", stage), ("STAGES", stages), ("KEPT", kept), ("FP8_HEAD", int(fp8)))
    grid = (min(MULTIPROCESSORS, tiles), 1, 1)
    block = (_CONSUMERS + 1) * 32
    smem = stages * stage * 512
    return Kernel("lm_head.cu", "lm_head", LmHeadArgs, defines, grid, block, smem=smem, max_registers=168)


def pieces_of(vocab: int) -> int:
    """Parts in which `top_k` looks at one row's logits, so that registers hold them."""
    return 8 if vocab > _PIECE else 1


def top_k(dims: Dims, rows: int = ROWS, pieces: int = PIECES) -> Kernel:
    """values float32, ids int32 [ROWS, pieces, MAX_TOP_K] of each row's largest logits; twin: numpy.argsort.

    Largest first, ties by lower id; ids count from first_id. Of several ranks, [ROWS, ranks, MAX_TOP_K] in the inbox of
    each, and one cluster more, which tells them all what this rank's host wants. pieces: of the vocabulary, a list for
    each; one for several ranks.
    """
    grid = (_CLUSTER * pieces, rows + (dims.ranks > 1), 1)
    defines = (*common(dims), *((("PIECES", pieces),) if pieces > 1 else ()))
    return Kernel("top_k.cu", "top_k", TopKArgs, defines, grid, 256, cluster=_CLUSTER, max_registers=96)


def kernels(dims: Dims) -> list[Kernel]:
    """All of the head's."""
    return [lm_head(dims), lm_head(dims, KEPT, fp8=True), top_k(dims)]
