"""The Qwen2 sizes that kernels are tested and compiled for."""

from dataclasses import replace

from cuq1.config_qwen2 import parse_qwen2
from cuq1.plan.qwen2_dims import Qwen2Dims, qwen2_dims
from tools.checkpoint_qwen2 import NAMES, qwen2_config

# By the names of tools/make_checkpoint.py, without "qwen2.5-coder-": the released family, and each of it scaled down.
DIMS = {name.removeprefix("qwen2.5-coder-"): qwen2_dims(parse_qwen2(qwen2_config(name))) for name in NAMES}
RELEASED = {name: dims for name, dims in DIMS.items() if not name.endswith("-tiny")}

# Widths off the group, a vocabulary off the tile, an MLP off 8 rows; and matrices of few units.
ODD = {
    "odd": Qwen2Dims(hidden=192, q_heads=3, kv_heads=1, head_size=64, inner=204, vocab=509, eps=1e-5),
    "least": Qwen2Dims(hidden=64, q_heads=1, kv_heads=1, head_size=64, inner=8, vocab=16, eps=1e-6),
}
SMALL = {**ODD, **{name: dims for name, dims in DIMS.items() if name.endswith("-tiny")}}
ALL = {**ODD, **DIMS}


def int4_head(dims: Qwen2Dims) -> Qwen2Dims:
    return replace(dims, int4_head=True)
