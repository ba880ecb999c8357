"""Which form a model's layers take on which GPU."""

from dataclasses import replace
from math import prod

import pytest

from cuq1.config_qwen2 import parse_qwen2
from cuq1.cuda.qwen2_weights import qwen2_layout
from cuq1.errors import ConfigError
from cuq1.models import qwen2_forms
from cuq1.models.qwen2_forms import form_for, layer_bytes
from cuq1.plan.qwen2_dims import Qwen2Dims
from tools.checkpoint_qwen2 import NAMES, qwen2_config

CHOICE = {  # on a GPU of 132 multiprocessors or more
    "qwen2.5-coder-0.5b": "chain",
    "qwen2.5-coder-1.5b": "chain",
    "qwen2.5-coder-3b": "chain",
    "qwen2.5-coder-7b": "layers",
    "qwen2.5-coder-14b": "layers",
    "qwen2.5-coder-32b": "layers",
}
# As Qwen2.5-72B: columns that only whole blocks could share, and more than a block's threads take.
TOO_LARGE = Qwen2Dims(hidden=8192, q_heads=64, kv_heads=8, head_size=128, inner=29568, vocab=512, eps=1e-6)


def layout_of(name):
    return qwen2_layout(parse_qwen2(qwen2_config(name)))


def check_choices():
    for name, form in CHOICE.items():
        dims = layout_of(name).dims
        for sms, expected in ((131, "launches"), (132, form), (144, form)):
            assert form_for(dims, sms) == expected, f"{name} on {sms} multiprocessors"


def test_released_sizes():
    assert set(CHOICE) == {name for name in NAMES if not name.endswith("-tiny")}
    check_choices()


@pytest.mark.parametrize("megabytes", [0, 37, 38, 114, 115, 1 << 20])
def test_another_threshold_is_noticed(monkeypatch, megabytes):
    """Between 3B and 7B, whose layers are of 37.9 and 114.6 MiB."""
    monkeypatch.setattr(qwen2_forms, "LARGE", megabytes << 20)
    if megabytes in (38, 114):
        check_choices()
    else:
        with pytest.raises(AssertionError, match="multiprocessors"):
            check_choices()


@pytest.mark.parametrize("name", ["qwen2.5-coder-1.5b", "qwen2.5-coder-7b"])
def test_the_threshold_itself(monkeypatch, name):
    """A layer of as many bytes is large, of one less it is not."""
    dims = layout_of(name).dims
    for more, form in ((-1, "layers"), (0, "layers"), (1, "chain")):
        monkeypatch.setattr(qwen2_forms, "LARGE", layer_bytes(dims) + more)
        assert form_for(dims, 132) == form


@pytest.mark.parametrize("name", NAMES)
def test_bytes_of_a_layer(name):
    """Of the matrices as the engine lays them out."""
    layout = layout_of(name)
    tensors = layout.tensors
    expected = sum(prod(tensors[f"layers.0.{matrix}"].shape) for matrix in ("qkv", "o", "gate_up", "down"))
    assert layer_bytes(layout.dims) == expected
    assert layer_bytes(replace(layout.dims, inner=layout.dims.inner + 128)) != expected


def test_a_large_model_that_does_not_fit():
    assert layer_bytes(TOO_LARGE) > qwen2_forms.LARGE
    assert form_for(TOO_LARGE, 132) == "chain"
    with pytest.raises(ConfigError, match="form layers takes a model of other sizes: choose chain or launches"):
        form_for(TOO_LARGE, 132, "layers")


@pytest.mark.parametrize("form", ["layers", "chain", "launches"])
def test_a_wanted_form_is_taken(form):
    for name in CHOICE:
        assert form_for(layout_of(name).dims, 132, form) == form
