"""A Qwen2 token's way in and out: embedding with its page of the KV cache, the norm before the logits."""

from cuq1.cuda.abi import Qwen2EmbedArgs, Qwen2NormArgs
from cuq1.plan.dims import MULTIPROCESSORS
from cuq1.plan.kernel import Define, Kernel
from cuq1.plan.qwen2_dims import Qwen2Dims, pieces

_EMBED_COLUMNS = 128 * 8  # of a block
_EMBED_BLOCKS = 64  # for what is to be made NOT_READY: half a megabyte is four stores of a thread


def embed(dims: Qwen2Dims) -> Kernel:
    """residual float32 [hidden] = table float16 [vocab, hidden] of the token; the position's page, where it has none;
    and NOT_READY in every word of unready, of unready_pieces times 16 bytes.

    Reports a token outside the vocabulary, and a position that no page is left for. Twin: tests' `qwen2.embed`.
    """
    grid = (max(_EMBED_BLOCKS, -(-dims.hidden // _EMBED_COLUMNS)), 1, 1)
    return Kernel("qwen2_rows.cu", "qwen2_embed", Qwen2EmbedArgs, _defines(dims), grid, 128, max_registers=40)


def norm(dims: Qwen2Dims) -> Kernel:
    """normed float16 [padded hidden], zeros beyond hidden, of the residual and the last layer's pieces.

    Twin: tests' `qwen2.norm`.
    """
    return Kernel("qwen2_rows.cu", "qwen2_norm", Qwen2NormArgs, _defines(dims), (1, 1, 1), 512, max_registers=80)


def _defines(dims: Qwen2Dims) -> tuple[tuple[str, Define], ...]:
    return (
        ("HIDDEN", dims.hidden),
        ("INNER", dims.inner),
        ("VOCAB", dims.vocab),
        ("EPS", f"{dims.eps!r}f"),
        ("GEMV_BLOCKS", MULTIPROCESSORS),
        ("DOWN_PIECES", pieces(dims.hidden, dims.inner)),
    )


def kernels(dims: Qwen2Dims) -> list[Kernel]:
    """All of the family."""
    return [embed(dims), norm(dims)]
