"""The safetensors header: what is accepted agrees with the safetensors library; what is damaged is refused by name."""

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize
from safetensors.numpy import load, save

from cuq1.checkpoint.header import parse_header
from cuq1.checkpoint.index import TensorFile
from cuq1.errors import CheckpointError
from tests.checkpoint_files import join

GOOD = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "U8", "shape": [5], "data_offsets": [24, 29]},
}


def parse(header, data_bytes=29):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return parse_header(text, 8 + len(text) + data_bytes, "x.safetensors")


def with_entry(**changes):
    return {**GOOD, "a": {**GOOD["a"], **changes}}


def test_offsets_count_from_the_start_of_the_file():
    text = json.dumps(GOOD).encode()
    entries = parse(GOOD)
    assert (entries["b"].begin, entries["b"].end) == (8 + len(text) + 24, 8 + len(text) + 29)
    assert entries["a"].shape == (2, 3)


@pytest.mark.parametrize(
    ("header", "data_bytes"),
    [
        ({**GOOD, "__metadata__": {"format": "pt"}}, 29),
        ({**GOOD, "empty": {"dtype": "F32", "shape": [0, 7], "data_offsets": [24, 24]}}, 29),
        ({**GOOD, "scalar": {"dtype": "F32", "shape": [], "data_offsets": [29, 33]}}, 33),
        (json.dumps(GOOD).encode() + b"   ", 29),
        ({}, 0),
    ],
    ids=["metadata", "zero-sized", "scalar", "padded", "no tensors"],
)
def test_legal_forms_are_accepted(header, data_bytes):
    parse(header, data_bytes)


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b'{"a":NaN}', "NaN is not JSON"),
        (b'{"a":1,"a":2}', "the key 'a' occurs twice"),
        (b'{"a":{"dtype":"U8","shape":[29],"data_offsets":[0,29],"dtype":"I8"}}', "'dtype' occurs twice"),
        (b'{"a":' + b"9" * 5000 + b"}", "not valid JSON"),
        ({**GOOD, "__metadata__": []}, "__metadata__"),
        ({**GOOD, "__metadata__": {"step": 3}}, "__metadata__"),
        ({"a": 1}, "tensor 'a' is not described"),
        ({"a": {"dtype": "F32", "shape": [1]}}, "tensor 'a' is not described"),
        (with_entry(extra=1), "tensor 'a' is not described"),
        (with_entry(dtype="F33"), "unknown dtype 'F33'"),
        (with_entry(dtype=["F32"]), "unknown dtype"),
        (with_entry(shape=6), "shape"),
        (with_entry(shape=[2, -3]), "shape"),
        (with_entry(shape=[2, 3.0]), "shape"),
        (with_entry(shape=[True, 6]), "shape"),
        (with_entry(shape=[1] * 9), "shape"),
        (with_entry(shape=[2**63, 0]), "shape"),
        (with_entry(shape=[2, 4]), "does not fit"),
        (with_entry(shape=[2**62] * 8), "does not fit"),
        (with_entry(data_offsets=[0]), "data_offsets"),
        (with_entry(data_offsets=[24, 0]), "does not fit"),
        (with_entry(data_offsets=[-24, 0]), "data_offsets"),
        (with_entry(data_offsets=[0, "24"]), "data_offsets"),
        (with_entry(data_offsets=[1, 25]), "leaves a hole"),
        (with_entry(data_offsets=[3, 27]), "leaves a hole"),
        ({**GOOD, "c": {"dtype": "U8", "shape": [4], "data_offsets": [20, 24]}}, "overlaps"),
        ({**GOOD, "c": {"dtype": "U8", "shape": [0], "data_offsets": [3, 3]}}, "overlaps"),
    ],
)
def test_damage_is_named(header, says):
    with pytest.raises(CheckpointError, match=r"^x\.safetensors is .*copy the file again$") as caught:
        parse(header)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_truncation_says_both_sizes(tmp_path):
    whole = save({"a": np.ones(100, np.float32)})
    path = tmp_path / "x.safetensors"
    for size in (0, 7, 8, 40, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=rf"truncated.*\b{size} bytes|truncated.*has {size}\b") as caught:
            TensorFile(path)
        if size == len(whole) - 1:
            assert str(len(whole)) in str(caught.value)


def test_bytes_after_the_last_tensor_are_refused():
    with pytest.raises(CheckpointError, match="describes"):
        parse(GOOD, 30)


def test_a_length_that_cannot_be_a_header_is_refused_without_reading_it(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        TensorFile(path)


def test_a_git_lfs_pointer_is_told_apart(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with pytest.raises(CheckpointError, match="git lfs pull"):
        TensorFile(path)


def test_a_folder_in_place_of_a_file_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        TensorFile(tmp_path)


@pytest.mark.parametrize("padding", range(8))
def test_views_of_unaligned_data_are_exact(tmp_path, padding):
    expected = np.random.default_rng().standard_normal((5, 3), dtype=np.float32)
    header = json.dumps({"a": {"dtype": "F32", "shape": [5, 3], "data_offsets": [0, 60]}}).encode()
    join(tmp_path / "x.safetensors", header + b" " * padding, expected.tobytes())
    view = TensorFile(tmp_path / "x.safetensors").view("a")
    np.testing.assert_array_equal(view, expected)
    assert not view.flags.writeable


def sample():
    return save(
        {
            "x": np.arange(12, dtype=np.float32).reshape(3, 4),
            "y": np.arange(3, dtype=np.uint8),
            "z": np.zeros((0, 2), np.float32),
        },
        {"format": "np"},
    )


def accepts(raw, path):
    """Whether the file opens; anything but CheckpointError is a failure of the test."""
    path.write_bytes(raw)
    try:
        return TensorFile(path)
    except CheckpointError as error:
        message = str(error)
    assert "\n" not in message
    return None


@given(edits=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4))
def test_flipped_bytes_never_escape(tmp_path_factory, edits):
    raw = bytearray(sample())
    for position, value in edits:
        raw[position % len(raw)] = value
    agrees(bytes(raw), tmp_path_factory)


@given(start=st.integers(0, 300), stop=st.integers(0, 300), inserted=st.binary(max_size=12))
def test_spliced_bytes_never_escape(tmp_path_factory, start, stop, inserted):
    raw = sample()
    agrees(raw[: min(start, stop)] + inserted + raw[max(start, stop) :], tmp_path_factory)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["F32", "U8", "F4"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(
    header=st.dictionaries(
        st.sampled_from(["a", "b", "c", "__metadata__"]),
        st.fixed_dictionaries(
            {"dtype": st.sampled_from(["F32", "U8", "BF16"]) | json_values},
            optional={
                "shape": st.lists(st.integers(0, 3), max_size=2) | json_values,
                "data_offsets": st.lists(st.integers(0, 24), min_size=2, max_size=2) | json_values,
            },
        )
        | json_values,
        max_size=3,
    ),
    data=st.integers(0, 24),
)
def test_any_json_header_never_escapes(tmp_path_factory, header, data):
    text = json.dumps(header).encode()
    agrees(len(text).to_bytes(8, "little") + text + bytes(data), tmp_path_factory)


def agrees(raw, tmp_path_factory):
    """cuq1 may refuse more than the library does, never accept more, and reads the same tensors."""
    opened = accepts(raw, tmp_path_factory.getbasetemp() / "fuzzed.safetensors")
    if opened is None:
        return
    try:
        theirs = {name: (info["dtype"], tuple(info["shape"])) for name, info in deserialize(raw)}
    except SafetensorError as error:
        pytest.fail(f"accepted what safetensors refuses: {error}")
    assert {name: (entry.dtype, entry.shape) for name, entry in opened.entries.items()} == theirs


def test_the_fuzzed_sample_itself_is_accepted(tmp_path):
    opened = accepts(sample(), tmp_path / "x.safetensors")
    for name, array in load(sample()).items():
        if re.match("[xz]", name):
            np.testing.assert_array_equal(opened.view(name), array)
