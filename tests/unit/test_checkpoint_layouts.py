"""Every layout of one random model loads to the same values; nano loads to what the safetensors library reads."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from safetensors import deserialize

from cuq1.checkpoint import Checkpoint, MoeShare
from cuq1.config import load_config
from tests.checkpoint_files import edit, read, values
from tests.paths import NANO
from tools.make_checkpoint import DRAFT_ALIASES, Layout, tiny_config, write_checkpoint

WIDTHS = [
    128,
    192,
    200,
]  # experts of one block; of one and a half, so that a fused up begins inside one; of no round size


def load(folder):
    checkpoint = Checkpoint.open(folder)
    found = {f"target.{path}": array for path, array in values(checkpoint.target()).items()}
    if checkpoint.draft_config is not None:
        found |= {f"draft.{path}": array for path, array in values(checkpoint.draft()).items()}
    return found


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for path, array in expected.items():
        np.testing.assert_array_equal(got[path], array, err_msg=path)


@pytest.fixture(scope="module", params=WIDTHS)
def width(request):
    return request.param


@pytest.fixture(scope="module")
def plain(width, tmp_path_factory):
    """The values as the plainest layout gives them: BF16, one file, an expert at a time."""
    folder = tmp_path_factory.mktemp("plain") / "model"
    return load(write_checkpoint(folder, *tiny_config(intermediate_size=width), Layout(fp8=False), seed=3))


@pytest.mark.parametrize(
    ("fused", "fp8", "shards", "scale_dtype"),
    [
        (fused, fp8, shards, dtype)
        for fused, fp8, shards, dtype in itertools.product((False, True), (False, True), (1, 4), ("F32", "BF16"))
        if fp8 or dtype == "F32"
    ],
)
def test_layouts_hold_the_same_values(width, plain, tmp_path, fused, fp8, shards, scale_dtype):
    layout = Layout(fused_experts=fused, fp8=fp8, scale_dtype=scale_dtype)
    write_checkpoint(tmp_path / "model", *tiny_config(intermediate_size=width), layout, seed=3, shards=shards)
    assert_same(load(tmp_path / "model"), plain)


@pytest.mark.parametrize(
    "layout", [Layout(router_name="gate"), Layout(sink_leading_one=True), Layout(training_draft=True)]
)
def test_spellings_hold_the_same_values(tmp_path, layout):
    expected = load(write_checkpoint(tmp_path / "plain", *tiny_config(), seed=4))
    assert_same(load(write_checkpoint(tmp_path / "other", *tiny_config(), layout, seed=4)), expected)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scale_dtype", ["F32", "BF16"])
def test_scales_of_any_value_hold_the_same_values_fused_or_not(tmp_path, width, scale_dtype):
    configs = tiny_config(intermediate_size=width)
    apart = Layout(pow2_scales=False, scale_dtype=scale_dtype)
    fused = Layout(pow2_scales=False, scale_dtype=scale_dtype, fused_experts=True)
    expected = load(write_checkpoint(tmp_path / "apart", *configs, apart))
    assert_same(load(write_checkpoint(tmp_path / "fused", *configs, fused)), expected)


def test_layouts_really_differ(tmp_path):
    """Else the tests above would compare a layout with itself."""
    configs = tiny_config(intermediate_size=192)
    scales = {}
    for name, layout in {"apart": Layout(), "fused": Layout(fused_experts=True)}.items():
        tensors = read(write_checkpoint(tmp_path / name, *configs, layout) / "model.safetensors")
        scales[name] = {
            key: value for key, value in tensors.items() if ".layers.1.mlp.experts" in key and "scale" in key
        }
    assert scales["fused"]["model.layers.1.mlp.experts.fc_scale_inv"][1] == [8, 3, 1]
    assert scales["apart"]["model.layers.1.mlp.experts.0.up_proj.weight_scale_inv"][1] == [2, 1]
    grid = np.frombuffer(scales["fused"]["model.layers.1.mlp.experts.fc_scale_inv"][2], np.float32)
    assert len(set(grid)) > 3
    assert all(np.log2(scale) % 1 == 0 for scale in grid)


def test_seeds_and_tensors_differ(tmp_path):
    one = load(write_checkpoint(tmp_path / "one", *tiny_config(), seed=1))
    two = load(write_checkpoint(tmp_path / "two", *tiny_config(), seed=2))
    assert not np.array_equal(one["target.layers[1].mlp.up[0]"], two["target.layers[1].mlp.up[0]"])
    assert not np.array_equal(one["target.layers[1].mlp.up[0]"], one["target.layers[1].mlp.gate[0]"])
    assert not np.array_equal(one["target.layers[1].mlp.up[0]"], one["target.layers[1].mlp.up[1]"])
    assert not np.array_equal(one["target.lm_head"], one["draft.lm_head"])


def test_bf16_router(tmp_path):
    exact = load(write_checkpoint(tmp_path / "f32", *tiny_config()))["target.layers[1].mlp.router"]
    rounded = load(write_checkpoint(tmp_path / "bf16", *tiny_config(), Layout(router_dtype="BF16")))
    np.testing.assert_array_equal(
        rounded["target.layers[1].mlp.router"], exact.astype(ml_dtypes.bfloat16).astype(np.float32)
    )


def test_mixed_quantisation(tmp_path):
    """Linears without a scale are BF16, whatever the config declares."""
    expected = load(write_checkpoint(tmp_path / "fp8", *tiny_config(), seed=6))
    write_checkpoint(tmp_path / "bf16", *tiny_config(), Layout(fp8=False), seed=6)
    plain = read(tmp_path / "bf16" / "model.safetensors")

    def replace(tensors):
        for name in [name for name in tensors if ".q_proj." in name or ".experts.3." in name]:
            del tensors[name]
            if name in plain:
                tensors[name] = plain[name]

    edit(tmp_path / "fp8", replace)
    assert_same(load(tmp_path / "fp8"), expected)


def test_f32_linears_and_tables(tmp_path):
    expected = load(write_checkpoint(tmp_path / "m", *tiny_config(), Layout(fp8=False)))

    def widen(tensors):
        for name, (dtype, shape, data) in tensors.items():
            if dtype == "BF16":
                array = np.frombuffer(data, ml_dtypes.bfloat16).astype(np.float32)
                tensors[name] = ["F32", shape, array.tobytes()]

    edit(tmp_path / "m", widen)
    assert_same(load(tmp_path / "m"), expected)


def test_the_unused_final_norm_may_be_absent(tmp_path):
    expected = load(write_checkpoint(tmp_path / "m", *tiny_config()))
    edit(tmp_path / "m", lambda tensors: tensors.pop("target_final_norm.weight"), "mtp/model.safetensors")
    assert_same(load(tmp_path / "m"), expected)


@pytest.mark.parametrize("alias", DRAFT_ALIASES)
def test_draft_aliases(tmp_path, alias):
    target, draft = tiny_config()
    write_checkpoint(tmp_path / "m", target, {**draft, **DRAFT_ALIASES[alias]})
    assert Checkpoint.open(tmp_path / "m").draft_config is not None


def test_nano_is_what_the_library_reads():
    config, _ = load_config(NANO)
    share = Checkpoint.open(NANO).target()
    # as bytes: the library's NumPy front end has no FP8
    stored = dict(deserialize((NANO / "model.safetensors").read_bytes()))

    def plain(name):
        info = stored.pop(name)
        dtypes = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn}
        return np.frombuffer(info["data"], dtypes[info["dtype"]]).reshape(info["shape"]).astype(np.float32)

    def linear(prefix):
        scale = plain(f"{prefix}.weight_scale_inv").repeat(128, 0).repeat(128, 1)
        weight = plain(f"{prefix}.weight")
        return weight * scale[: weight.shape[0], : weight.shape[1]]

    expected = {"embed_tokens": plain("model.embed_tokens.weight"), "lm_head": plain("lm_head.weight")}
    expected["norm"] = plain("model.norm.weight")
    for i, layer in enumerate(share.layers):
        theirs, ours = f"model.layers.{i}", f"layers[{i}]"
        for name in ("attention_norm", "attn_out_norm", "feed_forward_norm", *["ffn_out_norm"] * (i == 0)):
            expected[f"{ours}.{name}"] = plain(f"{theirs}.{name}.weight")
        for name in "qkvo":
            expected[f"{ours}.attention.{name}"] = linear(f"{theirs}.self_attn.{name}_proj")
        for name in ("q_norm", "k_norm"):
            expected[f"{ours}.attention.{name}"] = plain(f"{theirs}.self_attn.{name}.weight")
        expected[f"{ours}.attention.sink_k"] = plain(f"{theirs}.self_attn.sink_k")
        moe = isinstance(layer.mlp, MoeShare)
        if moe:
            expected[f"{ours}.mlp.router"] = plain(f"{theirs}.mlp.router.weight")
        for name in ("gate", "up", "down"):
            for expert in range(config.num_experts if moe else 0):
                expected[f"{ours}.mlp.{name}[{expert}]"] = linear(f"{theirs}.mlp.experts.{expert}.{name}_proj")
            if not moe:
                expected[f"{ours}.mlp.{name}"] = linear(f"{theirs}.mlp.{name}_proj")
    assert not stored
    assert_same(values(share), expected)
