"""A reader of .nanoqwen files, written from cuq1/checkpoint/NANOQWEN.md alone: it imports nothing of cuq1.

Plain loops over numbers and bytes, to be compared with the product's reader and packer.
"""

import struct
import zlib
from pathlib import Path

import numpy as np

SLOTS = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
BIT_OFFSET = [0, 16, 4, 20, 8, 24, 12, 28]


class BadFileError(Exception):
    """The file is not what NANOQWEN.md describes."""


def need(condition, what):
    if not condition:
        raise BadFileError(what)


def up(n):
    return (n + 127) // 128 * 128


def u32(raw, byte):
    return struct.unpack_from("<I", raw, byte)[0]


def u64(raw, byte):
    return struct.unpack_from("<Q", raw, byte)[0]


def f64(raw, byte):
    return struct.unpack_from("<d", raw, byte)[0]


def read(path):
    """{"header": ..., "files": name to bytes, "raw": name to array, "values": name to float32 array}."""
    raw = Path(path).read_bytes()
    need(len(raw) >= 256, "length")
    need(raw[:8] == bytes.fromhex("4E414E4F5157454E"), "magic")
    need((u32(raw, 8), u32(raw, 12), u32(raw, 16)) == (1, 1, 128), "version, layout, group")
    need(zlib.crc32(raw[:252]) == u32(raw, 252), "header_crc")
    flags = u32(raw, 20)
    need(flags & 1 and flags < 8, "flags")
    need(raw[176:248] == bytes(72), "reserved")
    tied, int4_head = bool(flags & 2), bool(flags & 4)
    names = ["H", "I", "L", "heads", "kv_heads", "head_dim", "V", "context"]
    size = {name: u32(raw, 24 + 4 * place) for place, name in enumerate(names)}
    need(all(1 <= value < 2**31 for value in size.values()), "dimensions")
    need(size["heads"] * size["head_dim"] == size["H"] and size["head_dim"] in (64, 128), "heads")
    theta, eps = f64(raw, 56), f64(raw, 64)
    file_bytes, tensors_offset, checksums_offset = u64(raw, 72), u64(raw, 80), u64(raw, 88)
    need(file_bytes == len(raw), "file_bytes")

    files, position = {}, 256
    for slot, name in enumerate(SLOTS):
        offset, length = u64(raw, 96 + 16 * slot), u64(raw, 104 + 16 * slot)
        if length:
            need(offset == up(position), name)
            files[name] = raw[offset : offset + length]
            position = offset + length
        else:
            need(offset == 0, name)
    need(tensors_offset == up(position), "tensors_offset")

    arrays, values, position = {}, {}, tensors_offset
    for name, kind, shape in tensors(size, tied, int4_head):
        width = {"u32": 4, "FP16": 2}[kind]
        count = 1
        for side in shape:
            count *= side
        dtype = {"u32": "<u4", "FP16": "<f2"}[kind]
        arrays[name] = np.frombuffer(raw, dtype, count, position).reshape(shape)
        position = up(position + count * width)
    need(checksums_offset == position, "checksums_offset")
    chunks = [raw[start : min(start + 1048576, checksums_offset)] for start in range(256, checksums_offset, 1048576)]
    need(file_bytes == checksums_offset + 4 * len(chunks), "table")
    need(zlib.crc32(raw[checksums_offset:]) == u32(raw, 248), "checksums_crc")
    for number, chunk in enumerate(chunks):
        need(zlib.crc32(chunk) == u32(raw, checksums_offset + 4 * number), f"chunk {number}")

    for name, array in arrays.items():
        if name.endswith(".words"):
            linear = name.removesuffix(".words")
            values[linear] = linear_values(array, arrays[f"{linear}.scales"], inputs(linear, size))
        elif not name.endswith(".scales"):
            values[name] = array.astype(np.float32)
    header = {**size, "theta": theta, "eps": eps, "tied": tied, "int4_head": int4_head}
    return {"header": header, "files": files, "raw": arrays, "values": values}


def tensors(size, tied, int4_head):
    """The table of NANOQWEN.md."""
    hidden, wide, rows, keys = (
        size["H"],
        size["I"],
        size["heads"] * size["head_dim"],
        size["kv_heads"] * size["head_dim"],
    )
    table = [("embed_tokens", "FP16", [size["V"], hidden])]
    for n in range(size["L"]):
        layer = f"layers.{n}."
        table += [
            (layer + "input_norm", "FP16", [hidden]),
            (layer + "q.words", "u32", [rows, up(hidden) // 8]),
            (layer + "k.words", "u32", [keys, up(hidden) // 8]),
            (layer + "v.words", "u32", [keys, up(hidden) // 8]),
            (layer + "q.scales", "FP16", [rows, up(hidden) // 128]),
            (layer + "k.scales", "FP16", [keys, up(hidden) // 128]),
            (layer + "v.scales", "FP16", [keys, up(hidden) // 128]),
            (layer + "q.bias", "FP16", [rows]),
            (layer + "k.bias", "FP16", [keys]),
            (layer + "v.bias", "FP16", [keys]),
            (layer + "o.words", "u32", [hidden, up(rows) // 8]),
            (layer + "o.scales", "FP16", [hidden, up(rows) // 128]),
            (layer + "post_norm", "FP16", [hidden]),
            (layer + "gate.words", "u32", [wide, up(hidden) // 8]),
            (layer + "up.words", "u32", [wide, up(hidden) // 8]),
            (layer + "gate.scales", "FP16", [wide, up(hidden) // 128]),
            (layer + "up.scales", "FP16", [wide, up(hidden) // 128]),
            (layer + "down.words", "u32", [hidden, up(wide) // 8]),
            (layer + "down.scales", "FP16", [hidden, up(wide) // 128]),
        ]
    table.append(("norm", "FP16", [hidden]))
    if int4_head:
        table.append(("lm_head.words", "u32", [size["V"], up(hidden) // 8]))
        table.append(("lm_head.scales", "FP16", [size["V"], up(hidden) // 128]))
    elif not tied:
        table.append(("lm_head", "FP16", [size["V"], hidden]))
    return table


def inputs(linear, size):
    return {"o": size["heads"] * size["head_dim"], "down": size["I"]}.get(linear.rsplit(".", 1)[-1], size["H"])


def linear_values(words, scales, cols):
    """Every value of a linear, one lane after the other."""
    rows = len(words)
    values = np.zeros((rows, words.shape[1] * 8), np.float32)
    for lane, bit in enumerate(BIT_OFFSET):
        nibble = (words >> np.uint32(bit)) % 16
        code = np.where(nibble < 8, nibble.astype(np.int32), nibble.astype(np.int32) - 16)
        need((code > -8).all(), "codes")
        for word in range(words.shape[1]):
            column = 8 * word + lane
            values[:, column] = code[:, word].astype(np.float32) * scales[:, column // 128].astype(np.float32)
    need(not values[:, cols:].any(), "padding")
    return values[:, :cols]
