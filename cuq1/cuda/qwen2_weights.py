"""Where a Qwen2 model's weights lie on the GPU: named tensors in one arena, planned from its sizes alone.

INT4 matrices are units as kernels_cu/abi_qwen2.cuh orders them, uint8 [tiles, groups of 128 inputs, UNIT_BYTES]: q, k
and v of a layer one matrix, gate and up one whose tiles have eight rows of each. All else is halves: the embedding as
the checkpoint has it, and the logits' matrix once more, tied or not, as chunks of lm_head.cu (repack.f16_tiles), its
columns padded with zeros to whole groups, unless it is INT4, too.

Names: embed, norm, lm_head; of a layer input_norm, qkv, qkv_bias, o, post_norm, gate_up, down under `layers.3.`.
"""

from dataclasses import dataclass

from cuq1.checkpoint.packed import Packed
from cuq1.config_qwen2 import Qwen2Config
from cuq1.cuda.kernels.qwen2_attention import MAX_GROUP
from cuq1.cuda.repack import TILE
from cuq1.cuda.weights import Planner, Tensor
from cuq1.errors import ConfigError
from cuq1.plan.dims import MAX_TOP_K
from cuq1.plan.qwen2_dims import GROUP, UNIT_BYTES, Qwen2Dims, padded, qwen2_dims, tiles

MOST_HIDDEN = 5120  # columns of the logits' matrix that lm_head.cu keeps in registers
MOST_INNER = 32768  # columns of down whose inputs shared memory holds beside what is copied


@dataclass(frozen=True)
class Qwen2Layout:
    """The arena: `nbytes` bytes, its tensors by name in order of offset."""

    config: Qwen2Config
    dims: Qwen2Dims
    tensors: dict[str, Tensor]
    nbytes: int


@dataclass(frozen=True)
class Qwen2Source:
    """A layout, and the model that fills it."""

    layout: Qwen2Layout
    packed: Packed


@dataclass(frozen=True)
class Qwen2Random:
    """A layout that random weights fill, for benchmarks at sizes of which there is no checkpoint at hand."""

    layout: Qwen2Layout
    seed: int = 0


def qwen2_source(packed: Packed) -> Qwen2Source:
    """Raises ConfigError where the model's sizes have no kernels."""
    return Qwen2Source(qwen2_layout(packed.config, int4_head=packed.int4_head), packed)


def qwen2_layout(config: Qwen2Config, *, int4_head: bool = False) -> Qwen2Layout:
    """The layout of a model's weights. int4_head: the logits' matrix is INT4.

    Raises ConfigError where the model's sizes have no kernels.
    """
    for name, size, most in (
        ("hidden_size", config.hidden_size, MOST_HIDDEN),
        ("intermediate_size", config.intermediate_size, MOST_INNER),
    ):
        if size > most:
            raise ConfigError(
                f"{name} is {size}, and the CUDA kernels compute {most} at most: use --device cpu for this model"
            )
    if config.vocab_size < MAX_TOP_K:
        raise ConfigError(
            f"vocab_size is {config.vocab_size}, and the CUDA kernels sample from {MAX_TOP_K} at least: use "
            "--device cpu for this model"
        )
    if config.num_attention_heads > MAX_GROUP * config.num_key_value_heads:
        raise ConfigError(
            f"num_attention_heads {config.num_attention_heads} for num_key_value_heads {config.num_key_value_heads} is "
            f"more than the {MAX_GROUP} for each that the CUDA kernels compute: use --device cpu for this model"
        )
    dims, planner = qwen2_dims(config, int4_head=int4_head), Planner()

    def units(name: str, count: int, width: int) -> None:
        planner.add(name, (count, padded(width) // GROUP, UNIT_BYTES))

    hidden = dims.hidden
    planner.add("embed", (dims.vocab, hidden), "float16")
    for number in range(config.num_hidden_layers):
        prefix = f"layers.{number}."
        planner.add(f"{prefix}input_norm", (hidden,), "float16")
        units(f"{prefix}qkv", tiles(dims.qkv_rows), hidden)
        planner.add(f"{prefix}qkv_bias", (dims.qkv_rows,), "float16")
        units(f"{prefix}o", tiles(hidden), dims.q_width)
        planner.add(f"{prefix}post_norm", (hidden,), "float16")
        units(f"{prefix}gate_up", dims.gate_up_tiles, hidden)
        units(f"{prefix}down", tiles(hidden), dims.inner)
    planner.add("norm", (hidden,), "float16")
    if int4_head:
        units("lm_head", tiles(dims.vocab), hidden)
    else:
        planner.add("lm_head", (tiles(dims.vocab), padded(hidden) // TILE, 512))
    return Qwen2Layout(config, dims, planner.tensors, planner.position)
