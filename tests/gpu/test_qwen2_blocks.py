"""The middle tier: every launch of a token, so each whole decoder block, against float64."""

import numpy as np
import pytest

from cuq1.checkpoint.nanoqwen import Nanoqwen
from cuq1.checkpoint.qwen2 import open_qwen2
from cuq1.cuda.abi import QWEN2_LAYERS
from cuq1.cuda.qwen2_engine import Qwen2CudaEngine
from cuq1.models.qwen2_forms import FORMS
from tests.gpu.qwen2_blocks import Float64, OnGpu, differences
from tests.gpu.qwen2_models import TINY, Made
from tools.checkpoint_qwen2 import qwen2_config
from tools.make_checkpoint import write_qwen2_checkpoint

pytestmark = pytest.mark.gpu

TOLERANCE = 4e-3  # ||gpu - float64|| / ||float64||: halves between kernels, over all layers
TOKENS = 19  # past a page's border


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return Made(tmp_path_factory.mktemp("models"))


def tokens(count):
    return np.random.default_rng().integers(0, 500, count).tolist()


LAYERS = (TINY[1], TINY[3], TINY[5])  # whose layers fit one launch: blocks without tiles of gate, one part, two
CASES = [
    *((name, "fp16", "layers", most) for name in LAYERS for most in (1, QWEN2_LAYERS)),
    *((name, "fp16", "chain", QWEN2_LAYERS) for name in TINY),
    (TINY[0], "int4", "chain", QWEN2_LAYERS),
    (TINY[3], "int4", "layers", 1),
    (TINY[0], "fp16", "launches", QWEN2_LAYERS),
]


@pytest.mark.parametrize(("name", "head", "form", "most"), CASES)
def test_every_launch_of_every_layer(gpu, made, name, head, form, most):
    model = Nanoqwen.open(made.file(name, head))
    with Qwen2CudaEngine(model, loop="host", form=form, layers_per_launch=most) as engine:
        on_gpu = OnGpu(engine._runtime)
        assert on_gpu.model.form == form
        layers = model.config.num_hidden_layers
        of_layers = 2 * layers + 4 * len(on_gpu.model.runs) if form == "layers" else 7 * layers
        for short in (True, False):
            engine.rewind(0)
            engine._reset()
            found = list(differences(Float64(model), on_gpu, tokens(TOKENS), short=short))
            assert len(found) == TOKENS * (3 + of_layers)
            wrong = [(what, error) for what, error in found if not error < TOLERANCE]
            print(f"short {short}: largest {max(found, key=lambda one: one[1])}")
            assert not wrong, wrong[:5]


@pytest.mark.parametrize("form", FORMS)
def test_a_changed_scale_is_found_where_it_is(gpu, made, form):
    """The control: of all launches, the first that differs is the one whose weights were changed."""
    model = Nanoqwen.open(made.file(TINY[3]))
    with Qwen2CudaEngine(model, loop="host", form=form, layers_per_launch=1) as engine:
        runtime, layout = engine._runtime, engine._runtime.model.weights
        name = "layers.1.gate_up"
        tensor = layout.tensors[name]
        units = np.empty(tensor.shape, np.uint8)
        runtime.read(name, units)
        units[3, :, 1024:].view(np.float16)[...] *= np.float16(2)
        runtime.write(name, units)
        found = differences(Float64(model), OnGpu(runtime), tokens(1))
        first = next(what for what, error in found if not error < TOLERANCE)
        assert first == "position 0, layer 1: gate_up"


def test_layers_in_any_number_of_launches_are_the_same(gpu, tmp_path):
    """Bit by bit, as the launches' end is all that differs; what a launch gets from the one before it counts."""
    folder = write_qwen2_checkpoint(tmp_path / "m", qwen2_config(TINY[3], num_hidden_layers=5), 5, 1)
    model, ids, found = open_qwen2(folder), tokens(70), []
    for most in (1, 2, 3, 5):
        with Qwen2CudaEngine(model, loop="host", form="layers", layers_per_launch=most) as engine:
            assert [len(run) for run in engine._runtime.model.runs] == {1: [1] * 5, 2: [1, 2, 2], 3: [2, 3], 5: [5]}[
                most
            ]
            found.append(engine.verified_logits(ids))
            if most == 2:  # the control: two layers of the second launch change places
                names = [f"layers.{layer}.down" for layer in (1, 2)]
                matrices = [np.empty(engine._runtime.model.weights.tensors[name].shape, np.uint8) for name in names]
                for name, matrix in zip(names, matrices, strict=True):
                    engine._runtime.read(name, matrix)
                for name, matrix in zip(names, matrices[::-1], strict=True):
                    engine._runtime.write(name, matrix)
                changed = engine.verified_logits(ids)
    assert np.isfinite(found[0]).all()
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])
    assert not np.array_equal(changed, found[0])


@pytest.mark.parametrize("wrong", ["pages", "positions"])
@pytest.mark.parametrize(("name", "form"), [(TINY[0], "chain"), (TINY[3], "layers")])
def test_other_keys_are_found(gpu, made, wrong, name, form):
    """The control of the cache: one position's page, or angle, is another's."""
    model = Nanoqwen.open(made.file(name))
    ids = tokens(TOKENS)
    with Qwen2CudaEngine(model, loop="host", form=form, layers_per_launch=1) as engine:
        on_gpu, expected = OnGpu(engine._runtime), Float64(model)
        list(differences(expected, on_gpu, ids[:-1]))
        if wrong == "pages":
            table = np.empty(engine._runtime.model.pages, np.int32)
            engine._runtime.read("page_table", table)
            table[0] = table[1]
            engine._runtime.write("page_table", table)
        else:
            table = engine._runtime.model.inverse_frequencies
            (name,) = table
            engine._runtime.write(name, table[name] * 1.01)
        found = dict(differences(expected, on_gpu, ids[-1:], start=TOKENS - 1))
        at = f"position {TOKENS - 1}, layer"
        if form == "layers":
            assert not found[f"{at} 0: residual"] < TOLERANCE
            assert found[f"{at} 0: embed"] < TOLERANCE
        else:
            assert not found[f"{at} 0: attended"] < TOLERANCE
            assert found[f"{at} 0: qkv"] < TOLERANCE
