"""Tensor-parallel shares: together they are the model, and each needs no byte of another's."""

import itertools
import shutil

import numpy as np
import pytest

from cuq1.checkpoint import Checkpoint, RankShare
from cuq1.config import load_config, parse_target
from cuq1.errors import CheckpointError, ConfigError
from tests.checkpoint_files import join, split, values
from tests.paths import NANO, RELEASED
from tools.make_checkpoint import Layout, tiny_config, write_checkpoint

RANKS = [1, 2, 4, 8]  # with 2 KV heads: split at 2, shared by two and by four ranks at 4 and 8
# Experts' shares at 8 ranks: 192 rows, one and a half scale blocks; 64, half of one; 16.
WIDTHS = [1536, 512, 128]


@pytest.fixture(scope="module", params=itertools.product(WIDTHS, (False, True)), ids=str)
def model(request, tmp_path_factory):
    width, fused = request.param
    configs = tiny_config(intermediate_size=width, num_experts=4, num_hidden_layers=2, num_hybrid_layers_block=0)
    return write_checkpoint(tmp_path_factory.mktemp("ranks") / "m", *configs, Layout(fused_experts=fused), seed=8)


def kv_heads(tp, rank):
    """Of 2 KV heads and 8 query heads, those that this rank's query heads use."""
    mine = range(rank * 8 // tp, (rank + 1) * 8 // tp)
    return sorted({head // 4 for head in mine})


@pytest.mark.parametrize("tp", RANKS)
@pytest.mark.parametrize("part", ["target", "draft"])
def test_shares_together_are_the_whole(model, tp, part):
    checkpoint = Checkpoint.open(model)
    whole = values(getattr(checkpoint, part)())
    shares = [values(getattr(checkpoint, part)(tp, rank)) for rank in range(tp)]
    for path, expected in whole.items():
        parts = [share[path] for share in shares]
        name = path.split(".")[-1].split("[")[0]
        if name in ("k", "v", "sink_k"):
            heads = expected.reshape(2, -1, expected.shape[1])
            for rank, got in enumerate(parts):
                np.testing.assert_array_equal(got, np.concatenate(heads[kv_heads(tp, rank)]), err_msg=path)
        elif name in ("q", "gate", "up", "lm_head", "eh_proj"):
            np.testing.assert_array_equal(np.concatenate(parts), expected, err_msg=path)
            assert len({got.shape for got in parts}) == 1
        elif name in ("o", "down"):
            np.testing.assert_array_equal(np.concatenate(parts, axis=1), expected, err_msg=path)
            assert len({got.shape for got in parts}) == 1
        else:
            for got in parts:
                np.testing.assert_array_equal(got, expected, err_msg=path)


@pytest.mark.parametrize("tp", RANKS)
def test_the_ranks_outputs_add_up(model, tp):
    checkpoint = Checkpoint.open(model)
    x = np.random.default_rng(0).standard_normal(64)

    def expert(share):
        mlp = share.layers[1].mlp
        gate, up, down = (linears[2].dequantize().astype(float) for linears in (mlp.gate, mlp.up, mlp.down))
        return down @ (np.tanh(gate @ x) * (up @ x))

    summed = sum(expert(checkpoint.target(tp, rank)) for rank in range(tp))
    np.testing.assert_allclose(summed, expert(checkpoint.target()), rtol=1e-12, atol=1e-12)


def owned(name, shape, tp, rank, width):
    """The elements of a weight that a rank of the tiny model uses, as a mask; stated apart from RankShare."""
    mask = np.zeros(shape, bool)
    rows, cols = shape[-2] if len(shape) > 1 else 0, shape[-1]
    if name.startswith("mtp_layers.") or name == "target_final_norm.weight":
        return mask
    if (
        ".q_proj." in name
        or name.endswith(("lm_head.weight", "eh_proj.weight"))
        or ".gate_proj." in name
        or ".up_proj." in name
    ):
        mask[rows * rank // tp : rows * (rank + 1) // tp] = True
    elif ".k_proj." in name or ".v_proj." in name or ".sink_k" in name:
        heads = mask.reshape(2, -1)
        heads[kv_heads(tp, rank)] = True
    elif name.endswith(("o_proj.weight", "down_proj.weight", "experts.proj")):
        mask[..., cols * rank // tp : cols * (rank + 1) // tp] = True
    elif name.endswith("experts.fc"):
        for half in (0, width):
            mask[:, half + width * rank // tp : half + width * (rank + 1) // tp] = True
    else:
        mask[...] = True
    return mask


def blocks_owned(mask):
    """The scale blocks that a mask touches."""
    mask = np.pad(mask, [(0, 0)] * (mask.ndim - 2) + [(0, -size % 128) for size in mask.shape[-2:]])
    rows, cols = mask.shape[-2] // 128, mask.shape[-1] // 128
    return mask.reshape(*mask.shape[:-2], rows, 128, cols, 128).any(axis=(-3, -1))


def poison(path, tp, rank, width, outside=True, only=None):
    """Overwrite a file's elements outside the rank's share with NaN, or spoil one inside it, of tensor `only`."""
    header, data = split(path)
    data = bytearray(data)
    sizes = {"F32": 4, "BF16": 2, "F8_E4M3": 1}
    for name, entry in header.items():
        if name == "__metadata__" or only not in (None, name):
            continue
        if name.endswith("_scale_inv"):
            weight = name.removesuffix("_scale_inv")
            mask = blocks_owned(owned(weight, header[weight]["shape"], tp, rank, width))
        else:
            mask = owned(name, entry["shape"], tp, rank, width)
        begin, size = entry["data_offsets"][0], sizes[entry["dtype"]]
        if outside:
            for element in np.flatnonzero(~mask):
                data[begin + element * size : begin + (element + 1) * size] = b"\xff" * size
        else:
            last = np.flatnonzero(mask)[-1]
            data[begin + (last + 1) * size - 1] ^= 0x04  # its top byte: an exponent bit, or a mantissa bit of FP8
    join(path, header, data)


@pytest.mark.parametrize(("tp", "rank"), [(2, 1), (4, 0), (8, 3), (8, 7)])
def test_a_rank_needs_no_byte_outside_its_share(model, tmp_path, tp, rank):
    width = load_config(model)[0].intermediate_size
    folder = shutil.copytree(model, tmp_path / "m")
    clean = Checkpoint.open(model)
    poison(folder / "model.safetensors", tp, rank, width)
    poison(folder / "mtp" / "model.safetensors", tp, rank, width)
    spoilt = Checkpoint.open(folder)
    for part in ("target", "draft"):
        expected, got = (values(getattr(checkpoint, part)(tp, rank)) for checkpoint in (clean, spoilt))
        for path, array in expected.items():
            np.testing.assert_array_equal(got[path], array, err_msg=path)
    # the poison is real: another rank meets it
    with pytest.raises(CheckpointError, match="not finite"):
        values(spoilt.target(tp, (rank + 1) % tp))


@pytest.mark.parametrize("fused", [False, True])
def test_every_tensor_of_the_share_is_needed(tmp_path, fused):
    """The control of the test above: spoiling one element inside the share, of any tensor, shows in it."""
    configs = tiny_config(intermediate_size=512, num_experts=2, num_hidden_layers=2, num_hybrid_layers_block=0)
    folder = write_checkpoint(tmp_path / "m", *configs, Layout(fused_experts=fused))
    path = folder / "model.safetensors"
    clean = path.read_bytes()
    expected = values(Checkpoint.open(folder).target(8, 5))
    header, _ = split(path)
    for name in header.keys() - {"__metadata__"}:
        path.write_bytes(clean)
        poison(path, 8, 5, 512, outside=False, only=name)
        got = values(Checkpoint.open(folder).target(8, 5))
        assert any(not np.array_equal(got[leaf], array) for leaf, array in expected.items()), name


def test_weights_stay_views_of_the_file():
    share = Checkpoint.open(NANO).target(4, 1)
    for linear in (
        share.lm_head,
        share.layers[1].mlp.gate[3],
        share.layers[1].mlp.down[3],
        share.layers[0].attention.o,
    ):
        assert not linear.weight.flags.owndata
        assert not linear.weight.flags.writeable
    assert share.lm_head.weight.flags.c_contiguous


def test_the_released_model_at_eight_ranks():
    share = RankShare(load_config(RELEASED)[0], 8, 3)
    assert (share.q_rows, share.kv_rows) == (slice(3 * 768, 4 * 768), slice(3 * 128, 4 * 128))
    assert share.expert_rows == slice(3 * 192, 4 * 192)
    assert share.vocab_rows == slice(60_000, 80_000)
    assert share.o_cols == share.q_rows
    assert share.kv_heads == slice(3, 4)


@pytest.mark.parametrize(
    ("change", "tp", "says"),
    [
        ({}, 3, "num_attention_heads is 8): choose one of 1, 2, 4, 8"),
        ({}, 16, "num_attention_heads is 8): choose one of 1, 2, 4, 8"),
        ({"intermediate_size": 100}, 8, "intermediate_size is 100): choose one of 1, 2, 4"),
        ({"dense_intermediate_size": 100}, 8, "dense_intermediate_size is 100): choose one of 1, 2, 4"),
        ({"vocab_size": 98}, 4, "vocab_size is 98): choose one of 1, 2"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3, "intermediate_size": 96}, 2, "num_key_value_heads is 3"),
        ({}, 0, "tp 0 must be from 1 to 1024"),
    ],
)
def test_shares_that_are_not_equal_are_refused(change, tp, says):
    with pytest.raises(ConfigError) as caught:
        RankShare(parse_target(tiny_config(**change)[0]), tp)
    assert says in str(caught.value)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_is_refused(rank):
    with pytest.raises(ConfigError, match="choose one from 0 to 1"):
        RankShare(parse_target(tiny_config()[0]), 2, rank)
