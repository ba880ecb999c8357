"""The sizes that kernels are tested and compiled for."""

from dataclasses import replace

from cuq1.config import load_config
from cuq1.plan.dims import dims_of, draft_dims
from tests import paths

_released, _released_draft = load_config(paths.RELEASED)
_nano, _nano_draft = load_config(paths.NANO)

RELEASED = dims_of(_released, 8)  # what a rank of eight holds of the released model
NANO = dims_of(_nano, 1)
NANO2 = dims_of(_nano, 2)
DIMS = {"released": RELEASED, "nano": NANO, "nano2": NANO2}
# Shares of ranks that exchange their results.
EXCHANGED = {
    "released, 8 ranks": replace(RELEASED, ranks=8),
    "released, 2 ranks": replace(RELEASED, ranks=2),
    "nano, 2 ranks": replace(NANO2, ranks=2),
}

# As many experts as the released model has beside a row of fewer columns: tools/check_lengths.py computes with it.
NARROW = replace(RELEASED, hidden=256, slice_width=256, vocab=128, vocab_total=128, eh_rows=256)

# Windows of the target's sliding layers and of the draft: config facts, not sizes of a share.
WINDOWS = {"released": _released.sliding_window, "nano": _nano.sliding_window, "nano2": _nano.sliding_window}


def variants():
    """(name, Dims) of every precision in which a share's kernels are compiled, the draft's among them."""
    yield "narrow", NARROW
    for name, dims in DIMS.items():
        yield name, dims
        yield f"{name} BF16", replace(dims, fp8_attention=False, fp8_experts=False)
        yield f"{name} FP8 activations", replace(dims, fp8_activations=True)
    for name, draft, tp in (("released", _released_draft, 8), ("nano", _nano_draft, 1), ("nano2", _nano_draft, 2)):
        yield f"{name} draft", draft_dims(draft, tp)
    for name, dims in EXCHANGED.items():
        yield name, dims
