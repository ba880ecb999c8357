"""Files that are not what their header says: one sentence each, before anything of them is used."""

import os
import re
import struct
import zlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cuq1.checkpoint.nanoqwen import Nanoqwen
from cuq1.checkpoint.nanoqwen_header import decode_header
from cuq1.errors import CheckpointError, Cuq1Error
from cuq1.pack import pack
from tools.checkpoint_qwen2 import qwen2_config
from tools.make_checkpoint import write_qwen2_checkpoint


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A small file's bytes: about 1.5 MB, so two chunks."""
    base = tmp_path_factory.mktemp("whole")
    pack(write_qwen2_checkpoint(base / "hf", qwen2_config("qwen2.5-coder-0.5b-tiny")), base / "m.nanoqwen")
    return (base / "m.nanoqwen").read_bytes()


@pytest.fixture
def refusal(tmp_path):
    """The sentence that refuses these bytes."""

    def refuse(raw):
        path = tmp_path / "m.nanoqwen"
        path.write_bytes(raw)
        with pytest.raises(Cuq1Error) as caught:
            Nanoqwen.open(path)
        message = str(caught.value)
        assert message.startswith(str(path))
        assert "\n" not in message
        assert len(message) < 400
        return message

    return refuse


def signed(raw):
    """With a header_crc, checksums and checksums_crc that fit, wherever the header says that those are."""
    raw = bytearray(raw)
    table = struct.unpack_from("<Q", raw, 88)[0]
    sums = [zlib.crc32(raw[start : min(start + 2**20, table)]) for start in range(256, table, 2**20)]
    if table + 4 * len(sums) == len(raw):
        struct.pack_into(f"<{len(sums)}I", raw, table, *sums)
        struct.pack_into("<I", raw, 248, zlib.crc32(raw[table:]))
    struct.pack_into("<I", raw, 252, zlib.crc32(raw[:252]))
    return bytes(raw)


def put(raw, byte, kind, value):
    raw = bytearray(raw)
    struct.pack_into(f"<{kind}", raw, byte, value)
    return bytes(raw)


def get(raw, byte, kind):
    return struct.unpack_from(f"<{kind}", raw, byte)[0]


def test_signing_an_unchanged_file_changes_nothing(whole, tmp_path):
    assert signed(whole) == whole
    (tmp_path / "m").write_bytes(whole)
    Nanoqwen.open(tmp_path / "m")


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "is not a .nanoqwen file, which begins with NANOQWEN: make one with python -m cuq1.pack"),
        (b"NANO", "is truncated: it has 4 bytes, less than the 256 of a header"),
        (b"NANOQWEN" + bytes(247), "is truncated: it has 255 bytes"),
        (b"NANOQWEM" + bytes(500), "is not a .nanoqwen file"),
        (b"nanoqwen" + bytes(500), "is not a .nanoqwen file"),
        (b"PK\x03\x04", "is not a .nanoqwen file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a Git LFS pointer"),
        (b"NANOQWEN" + bytes(300), "has version 0, and only 1 is read here"),
    ],
)
def test_other_files(refusal, raw, says):
    assert says in refusal(raw)


@pytest.mark.parametrize(
    ("byte", "value", "says"),
    [
        (8, 2, "has version 2, and only 1 is read here: pack it again"),
        (12, 0, "has layout 0, and only 1 is read here"),
        (12, 2, "has layout 2, and only 1 is read here"),
        (16, 64, "has group size 64, and only 128 is read here"),
    ],
)
def test_another_version_layout_or_group(whole, refusal, byte, value, says):
    assert says in refusal(put(whole, byte, "I", value))
    assert says in refusal(signed(put(whole, byte, "I", value)))


@pytest.mark.parametrize("length", [257, 1000, 1 << 20, -5, -4, -1])
def test_truncated_files(whole, refusal, length):
    part = whole[:length]
    message = refusal(part)
    assert f"is truncated: its header describes {len(whole)} bytes, but the file has {len(part)}" in message


def test_a_longer_file(whole, refusal):
    assert f"its header describes {len(whole)} bytes, but the file has {len(whole) + 1}" in refusal(whole + b"\0")


@pytest.mark.parametrize(
    ("byte", "kind", "value", "says"),
    [
        (24, "I", 0, "header's hidden_size is 0"),
        (28, "I", 2**31, "header's intermediate_size is 2147483648"),
        (32, "I", 0, "header's num_hidden_layers is 0"),
        (32, "I", 2**31 - 1, "but its dimensions and files make it"),
        (32, "I", 3, "but its dimensions and files make it"),
        (36, "I", 8, "8 heads of 64 are not its hidden_size 448"),
        (40, "I", 2, "7 heads are no multiple of its 2 KV heads"),
        (40, "I", 7, "but its dimensions and files make it"),
        (44, "I", 32, "head_dim is 32, not 64 or 128"),
        (44, "I", 0, "head_dim is 0"),
        (48, "I", 513, "but its dimensions and files make it"),
        (20, "I", 1, "but its dimensions and files make it"),
        (20, "I", 7, "but its dimensions and files make it"),
        (20, "I", 2, "its flags are 0x2, which this version does not define"),
        (20, "I", 11, "its flags are 0xb"),
        (56, "d", float("nan"), "header's rope_theta is nan"),
        (56, "d", -1.0, "header's rope_theta is -1.0"),
        (64, "d", 0.0, "header's rms_norm_eps is 0.0"),
        (64, "d", float("inf"), "header's rms_norm_eps is inf"),
        (72, "Q", 2**64 - 1, "its header says that it has 18446744073709551615 bytes"),
        (80, "Q", 2**63, "offsets are not those that its dimensions and files make"),
        (80, "Q", 256, "offsets are not those"),
        (88, "Q", 384, "offsets are not those"),
        (96, "Q", 0, "offsets are not those"),
        (104, "Q", 0, "it holds no config.json"),
        (104, "Q", 2**64 - 1, "but its dimensions and files make it"),
        (136, "Q", 2**63, "but its dimensions and files make it"),
        (160, "Q", 256, "offsets are not those"),
        (176, "B", 1, "reserved bytes are not 0"),
        (247, "B", 1, "reserved bytes are not 0"),
    ],
)
def test_headers_that_do_not_fit(whole, refusal, byte, kind, value, says):
    assert get(whole, byte, kind) != value
    message = refusal(signed(put(whole, byte, kind, value)))
    assert says in message
    assert message.endswith("; copy the file again, or pack it again")


@pytest.mark.parametrize("value", [16384, 1])
def test_a_context_that_config_json_does_not_give(whole, refusal, value):
    message = refusal(signed(put(whole, 52, "I", value)))
    assert (
        f"header's max_position_embeddings is {value}, but the config.json inside says 8192: pack it again" in message
    )


def test_a_rope_base_that_config_json_does_not_give(whole, refusal):
    assert "header's rope_theta is 10000.0, but the config.json inside says 1000000.0" in refusal(
        signed(put(whole, 56, "d", 1e4))
    )


def inside(whole, old, new):
    """The file with a text of one of its files replaced by one as long."""
    old, new = old.encode(), new.encode()
    assert whole.count(old) >= 1
    assert len(old) == len(new)
    return signed(whole.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"model_type": "qwen2"', '"model_type": "qwen3"', "config.json: model_type is 'qwen3', and qwen2 is computed"),
        ('"architectures": [', '"architectures": {', "config.json is not valid JSON"),
        ('"temperature": 0.7', '"temperature":-0.7', "generation_config.json: temperature must be at least 0"),
        ('"use_sliding_window": false', '"use_sliding_window": true ', "use_sliding_window is True"),
        (
            '"num_hidden_layers": 2',
            '"num_hidden_layers": 3',
            "num_hidden_layers is 2, but the config.json inside says 3",
        ),
    ],
)
def test_configs_inside(whole, refusal, old, new, says):
    assert says in refusal(inside(whole, old, new))


@pytest.mark.parametrize("part", range(40))
def test_a_flipped_bit_is_found_wherever_it_is(whole, refusal, part):
    byte = 256 + part * 7919 * 5 % (len(whole) - 256)
    raw = bytearray(whole)
    raw[byte] ^= 1 << part % 8
    message = refusal(raw)
    table = get(whole, 88, "Q")
    if byte >= table:
        assert "its table of checksums has changed" in message
    else:
        start, end = map(int, re.search(r"its bytes (\d+) to (\d+) do not have their checksum", message).groups())
        assert start <= byte <= end < table
        assert (start - 256) % 2**20 == 0


@pytest.mark.parametrize("byte", range(256))
def test_a_flipped_bit_of_the_header(whole, byte):
    raw = bytearray(whole[:256])
    for bit in range(8):
        raw[byte] ^= 1 << bit
        with pytest.raises(CheckpointError, match=r"^m(: | has | is )"):
            decode_header(bytes(raw), len(whole), "m")
        raw[byte] ^= 1 << bit
    decode_header(bytes(raw), len(whole), "m")


def test_without_checksums_a_flipped_bit_would_not_be_found(whole, tmp_path):
    """The negative control: the same damage, with checksums made to fit it."""
    raw = bytearray(whole)
    raw[len(raw) // 2] ^= 1
    (tmp_path / "m").write_bytes(signed(raw))
    Nanoqwen.open(tmp_path / "m")


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(8, 251), st.integers(0, 255)), min_size=1, max_size=12),
    st.booleans(),
    st.integers(0, 2**40),
)
def test_any_header_is_read_or_refused_in_a_sentence(whole, changes, sign, size):
    raw = bytearray(whole[:256])
    for byte, value in changes:
        raw[byte] = value
    if sign:
        struct.pack_into("<I", raw, 252, zlib.crc32(raw[:252]))
    for file_bytes in (size, len(whole)):
        message = None
        try:
            header, _ = decode_header(bytes(raw), file_bytes, "m")
        except CheckpointError as error:
            message = str(error)
        if message is None:
            assert header.file_bytes == file_bytes
        else:
            assert re.match(r"^m (is|has) [^\n]*$", message)


@settings(max_examples=200)
@given(st.binary(max_size=300), st.integers(0, 2**70))
def test_any_bytes_are_refused_in_a_sentence(raw, size):
    for start in (b"", b"NANOQWEN", b"NANOQWEN\1\0\0\0\1\0\0\0\x80\0\0\0"):
        with pytest.raises(CheckpointError, match=r"^m (is|has) "):
            decode_header((start + raw)[:256], size, "m")


def test_paths_that_cannot_be_read(tmp_path):
    with pytest.raises(CheckpointError, match=r"m\.nanoqwen does not exist: make it with python -m cuq1\.pack"):
        Nanoqwen.open(tmp_path / "m.nanoqwen")
    with pytest.raises(CheckpointError, match=r"cannot be read \(Is a directory\)"):
        Nanoqwen.open(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        Nanoqwen.open("a\0b")
    os.mkfifo(tmp_path / "pipe.nanoqwen")
    with pytest.raises(CheckpointError, match=r"pipe\.nanoqwen is a pipe, and a packed model is mapped"):
        Nanoqwen.open(tmp_path / "pipe.nanoqwen")
