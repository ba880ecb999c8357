"""Reading and rewriting safetensors files byte by byte, without cuq1's own reader."""

import json
from pathlib import Path

from cuq1.checkpoint import Linear
from cuq1.checkpoint.shares import leaves

TINY_NORM = "model.layers.1.attention_norm.weight"

# At eight ranks: expert and dense shares of 192 rows, 1.5 scale blocks; 20 vocabulary rows; one KV head for four ranks.
SIZES = {
    "hidden_size": 256,
    "head_dim": 128,
    "rotary_dim": 32,
    "intermediate_size": 1536,
    "dense_intermediate_size": 1536,
    "num_experts": 4,
    "vocab_size": 160,
    "num_hidden_layers": 2,
    "num_hybrid_layers_block": 0,
}


def split(path):
    """(header, data): the JSON object and the bytes behind it."""
    raw = Path(path).read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    return json.loads(raw[8:start]), raw[start:]


def join(path, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    Path(path).write_bytes(len(text).to_bytes(8, "little") + text + data)


def read(path):
    """Each tensor of a file as [dtype, shape, bytes]."""
    header, data = split(path)
    header.pop("__metadata__", None)
    return {
        name: [entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])]] for name, entry in header.items()
    }


def write(path, tensors):
    """A file of tensors as `read` gives them, in their order, with no padding anywhere."""
    header, parts, position = {}, [], 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + len(data)]}
        position += len(data)
        parts.append(data)
    join(path, header, b"".join(parts))


def edit(folder, change, file="model.safetensors"):
    """Apply `change` to the dict of a file's tensors."""
    tensors = read(folder / file)
    change(tensors)
    write(folder / file, tensors)


def values(share):
    """Attribute path to float32 array, linears dequantised."""
    return {path: leaf.dequantize() if isinstance(leaf, Linear) else leaf for path, leaf in leaves(share)}
