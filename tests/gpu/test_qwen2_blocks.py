"""The middle tier: every launch of a token, so each whole decoder block, against float64."""

import numpy as np
import pytest

from cuq1.checkpoint.nanoqwen import Nanoqwen
from cuq1.cuda.qwen2_engine import Qwen2CudaEngine
from tests.gpu.qwen2_blocks import Float64, OnGpu, differences
from tests.gpu.qwen2_models import TINY, Made

pytestmark = pytest.mark.gpu

TOLERANCE = 4e-3  # ||gpu - float64|| / ||float64||: halves between kernels, over all layers
TOKENS = 19  # past a page's border


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return Made(tmp_path_factory.mktemp("models"))


def tokens(count):
    return np.random.default_rng().integers(0, 500, count).tolist()


CASES = [(name, "fp16", True) for name in TINY] + [(TINY[0], "int4", True), (TINY[0], "fp16", False)]


@pytest.mark.parametrize(("name", "head", "chained"), CASES)
def test_every_launch_of_every_layer(gpu, made, name, head, chained):
    model = Nanoqwen.open(made.file(name, head))
    with Qwen2CudaEngine(model, loop="host", chained=chained) as engine:
        assert engine._model.chained == chained
        on_gpu = OnGpu(engine._runtime)
        for short in (True, False):
            engine.rewind(0)
            engine._reset()
            found = list(differences(Float64(model), on_gpu, tokens(TOKENS), short=short))
            assert len(found) == TOKENS * (3 + 7 * model.config.num_hidden_layers)
            wrong = [(what, error) for what, error in found if not error < TOLERANCE]
            print(f"short {short}: largest {max(found, key=lambda one: one[1])}")
            assert not wrong, wrong[:5]


@pytest.mark.parametrize("chained", [False, True])
def test_a_changed_scale_is_found_where_it_is(gpu, made, chained):
    """The control: of all launches, the first that differs is the one whose weights were changed."""
    model = Nanoqwen.open(made.file(TINY[3]))
    with Qwen2CudaEngine(model, loop="host", chained=chained) as engine:
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


@pytest.mark.parametrize("wrong", ["pages", "positions"])
def test_other_keys_are_found(gpu, made, wrong):
    """The control of the cache: one position's page, or angle, is another's."""
    model = Nanoqwen.open(made.file(TINY[0]))
    ids = tokens(TOKENS)
    with Qwen2CudaEngine(model, loop="host") as engine:
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
        assert not found[f"position {TOKENS - 1}, layer 0: attended"] < TOLERANCE
        assert found[f"position {TOKENS - 1}, layer 0: qkv"] < TOLERANCE
