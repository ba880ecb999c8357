"""The sizes of a Qwen2 model, as kernels are compiled for them."""

from dataclasses import dataclass

from cuq1.config_qwen2 import Qwen2Config
from cuq1.plan.dims import MULTIPROCESSORS

GROUP = 128  # inputs that share a scale
TILE = 16  # rows of a tile of INT4 weights
PAGE = 16  # positions of a page of the KV cache
UNIT_BYTES = TILE * GROUP // 2 + TILE * 2  # codes and scales of a tile's group


def padded(width: int) -> int:
    """Inputs of a row as kernels read it: whole groups."""
    return -(-width // GROUP) * GROUP


def tiles(rows: int) -> int:
    """Tiles that hold the rows of a matrix."""
    return -(-rows // TILE)


@dataclass(frozen=True)
class Qwen2Dims:
    """Elements. inner: columns of the MLP; int4_head: the logits' matrix is INT4, not halves."""

    hidden: int
    q_heads: int
    kv_heads: int
    head_size: int
    inner: int
    vocab: int
    eps: float
    int4_head: bool = False

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.q_heads // self.kv_heads

    @property
    def q_width(self) -> int:
        """Rows of q, and columns of o."""
        return self.q_heads * self.head_size

    @property
    def qkv_rows(self) -> int:
        """Of q, k and v as one matrix."""
        return (self.q_heads + 2 * self.kv_heads) * self.head_size

    @property
    def gate_up_tiles(self) -> int:
        """8 rows of gate and the same 8 of up each; as many as fill what down reads."""
        return padded(self.inner) // (TILE // 2)


def qwen2_dims(config: Qwen2Config, *, int4_head: bool = False) -> Qwen2Dims:
    """The sizes of a config's model."""
    return Qwen2Dims(
        hidden=config.hidden_size,
        q_heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_size=config.head_dim,
        inner=config.intermediate_size,
        vocab=config.vocab_size,
        eps=config.rms_norm_eps,
        int4_head=int4_head,
    )


def matrix_bytes(rows: int, k: int) -> int:
    """Of an INT4 matrix [rows, k] as kernels read it."""
    return tiles(rows) * (padded(k) // GROUP) * UNIT_BYTES


def pieces(rows: int, k: int, blocks: int = MULTIPROCESSORS) -> int:
    """The most blocks that share a tile of a matrix [rows, k], where `blocks` take its units in equal runs.

    Block b takes units b * units // blocks up to (b + 1) * units // blocks of all tiles' units, tile after tile. There
    are no more blocks than units.
    """
    groups = padded(k) // GROUP
    units = tiles(rows) * groups
    blocks = min(blocks, units)

    def block_of(unit: int) -> int:
        return ((unit + 1) * blocks - 1) // units

    return max(block_of((tile + 1) * groups - 1) - block_of(tile * groups) + 1 for tile in range(tiles(rows)))
