"""In which launches a Qwen2 token's layers run, and what those launches' blocks hand to one another.

    layers     all layers in one launch, or in as few as a launch's arguments allow
    chain      o_proj, gate_up, down and the next layer's qkv in one launch: what lies between two attentions
    launches   each of these a launch of its own

Blocks of the first two wait for each other's results, so that all of them have to be resident together. What they wait
for are words of the buffer `handed`, which hold NOT_READY before (kernels_cu/common/flagged.cuh).
"""

from typing import Literal, get_args

from cuq1.cuda.abi import QWEN2_LAYERS
from cuq1.cuda.kernels import qwen2_layers
from cuq1.errors import ConfigError
from cuq1.plan.dims import MULTIPROCESSORS
from cuq1.plan.qwen2_dims import TILE, Qwen2Dims, matrix_bytes, padded, pieces
from cuq1.plan.types import Ref

Form = Literal["layers", "chain", "launches"]
FORMS: tuple[Form, ...] = get_args(Form)
HALF = 2  # bytes
# Bytes of a layer's weights from which `layers` is the fastest: with fewer, what counts is how long blocks take to hear
# of each other, which the chain does in fewer steps (tools/decisions/021-all-layers-in-one-launch.md).
LARGE = 64 << 20
_ALIGNMENT = 128  # of each part of `handed`: no line of a cache holds two parts


def form_for(d: Qwen2Dims, sms: int, wanted: Form | None = None) -> Form:
    """The fastest form on a GPU of so many multiprocessors, or the wanted one. Raises ConfigError where it has none."""
    possible: dict[Form, bool] = {
        "layers": sms >= MULTIPROCESSORS and qwen2_layers.fits(d),
        "chain": sms >= MULTIPROCESSORS,
        "launches": True,
    }
    if wanted is None:
        faster = FORMS if layer_bytes(d) >= LARGE else FORMS[1:]
        return next(form for form in faster if possible[form])
    if not possible[wanted]:
        gpu = f"a GPU of {MULTIPROCESSORS} multiprocessors, not {sms}"
        needed = gpu if sms < MULTIPROCESSORS else "a model of other sizes"
        raise ConfigError(f"form {wanted} takes {needed}: choose {' or '.join(f for f in FORMS if possible[f])}")
    return wanted


def layer_bytes(d: Qwen2Dims) -> int:
    """Of a layer's INT4 matrices as kernels read them."""
    gate_up = d.gate_up_tiles * TILE
    matrices = ((d.qkv_rows, d.hidden), (d.hidden, d.q_width), (gate_up, d.hidden), (d.hidden, d.inner))
    return sum(matrix_bytes(rows, k) for rows, k in matrices)


def runs_of(layers: int, most: int = QWEN2_LAYERS) -> tuple[range, ...]:
    """The layers of each launch, at most `most`: as few launches as that takes, of as many layers each as can be."""
    count = -(-layers // most)
    return tuple(range(i * layers // count, (i + 1) * layers // count) for i in range(count))


def handed_parts(d: Qwen2Dims, form: Form) -> dict[str, int]:
    """Bytes of what a launch hands on, in the order in which it lies."""
    if form == "layers":
        return qwen2_layers.handed(d)
    row = d.hidden * 4
    inner, down = padded(d.inner) * HALF, pieces(d.hidden, d.inner) * row
    return {"o_pieces": pieces(d.hidden, d.q_width) * row, "down_pieces": down, "inner": inner}


def _room(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def handed_bytes(d: Qwen2Dims, form: Form) -> int:
    """Of one region of `handed`: all that a launch's blocks hand to one another."""
    return sum(map(_room, handed_parts(d, form).values()))


def handed(d: Qwen2Dims, form: Form, region: int) -> dict[str, Ref]:
    """Where a launch has its words, by the names of its arguments."""
    found, at = {}, region * handed_bytes(d, form)
    for name, size in handed_parts(d, form).items():
        found[name] = Ref("handed", at)
        at += _room(size)
    return found
