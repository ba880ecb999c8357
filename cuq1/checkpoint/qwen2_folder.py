"""A Qwen2 model in a Hugging Face folder: its tensors' names, checked to be complete, and read a piece at a time."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cuq1.checkpoint.claims import Claims
from cuq1.checkpoint.index import NUMPY_DTYPES, Index, open_index
from cuq1.checkpoint.int4 import Float32, check_finite
from cuq1.config_qwen2 import Qwen2Config, load_qwen2_config
from cuq1.errors import CheckpointError

DTYPES = ("BF16", "F16", "F32")
EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

# Written by old exports; it follows from rope_theta.
_INVERSE_FREQUENCIES = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
# Bounds memory: no more elements of a tensor are held at once.
_PIECE = 1 << 20


def layer_shapes(config: Qwen2Config, layer: int) -> dict[str, tuple[int, ...]]:
    """One layer's tensors and their shapes."""
    prefix = f"model.layers.{layer}."
    hidden, width = config.hidden_size, config.intermediate_size
    heads = {"q": config.q_size, "k": config.kv_size, "v": config.kv_size}
    return {
        f"{prefix}input_layernorm.weight": (hidden,),
        **{f"{prefix}self_attn.{name}_proj.weight": (rows, hidden) for name, rows in heads.items()},
        **{f"{prefix}self_attn.{name}_proj.bias": (rows,) for name, rows in heads.items()},
        f"{prefix}self_attn.o_proj.weight": (hidden, config.q_size),
        f"{prefix}post_attention_layernorm.weight": (hidden,),
        f"{prefix}mlp.gate_proj.weight": (width, hidden),
        f"{prefix}mlp.up_proj.weight": (width, hidden),
        f"{prefix}mlp.down_proj.weight": (hidden, width),
    }


@dataclass(frozen=True, eq=False)
class Qwen2Folder:
    """A folder whose headers are complete; get it from `Qwen2Folder.open`."""

    path: Path
    config: Qwen2Config
    index: Index

    @classmethod
    def open(cls, model_dir: str | Path) -> "Qwen2Folder":
        """Read the config and every file's header, and check that each tensor is there, as the config asks.

        Raises ConfigError for a config that is not computed, CheckpointError for files that are missing, damaged,
        incomplete or hold unknown tensors. No tensor data is read.
        """
        path = Path(model_dir)
        config = load_qwen2_config(path)
        index = open_index(path)
        claims = Claims(index, False, lambda name: _INVERSE_FREQUENCIES.fullmatch(name) is not None)
        size = config.vocab_size, config.hidden_size
        claims.tensor(EMBEDDING, size, dtypes=DTYPES)
        for layer in range(config.num_hidden_layers):
            for name, shape in layer_shapes(config, layer).items():
                claims.tensor(name, shape, dtypes=DTYPES)
        claims.tensor(NORM, (config.hidden_size,), dtypes=DTYPES)
        # a tied model's files may repeat the embedding under this name, which is then not read
        if HEAD in index or not config.tie_word_embeddings:
            claims.tensor(HEAD, size, dtypes=DTYPES)
        claims.finish()
        return cls(path, config, index)

    @property
    def head(self) -> str:
        """The name of the logits' matrix, which is the embedding's where they are tied."""
        return EMBEDDING if self.config.tie_word_embeddings else HEAD

    def source(self, name: str) -> str:
        """The file and the tensor, as messages name them."""
        return f"{self.index.path(name)}: {name!r}"

    def tensor(self, name: str) -> npt.NDArray[Any]:
        """The whole tensor in its stored dtype, a view of the mapped file; its values are not checked."""
        return self.index.view(name)

    def pieces(self, name: str) -> Iterator[Float32]:
        """The tensor's rows in order, as float32, a bounded number at a time.

        Raises CheckpointError where a value is not finite, or the file cannot be read.
        """
        entry, path = self.index.entry(name), self.index.path(name)
        dtype = NUMPY_DTYPES[entry.dtype]
        rows, inner = entry.shape[0], entry.shape[1:]
        cols = inner[0] if inner else 1
        height = max(1, _PIECE // cols)
        # read and not mapped: the pages of a mapping would count as this process's memory
        try:
            with path.open("rb") as file:
                file.seek(entry.begin)
                for top in range(0, rows, height):
                    count = min(height, rows - top)
                    stored = np.fromfile(file, dtype, count * cols)
                    if len(stored) != count * cols:
                        raise CheckpointError(f"{path} is truncated: it has become shorter; copy the file again")
                    values = stored.astype(np.float32)
                    check_finite(values, self.source(name))
                    yield values.reshape(count, *inner)
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read ({error.strerror}): check the path and its permissions"
            ) from None
