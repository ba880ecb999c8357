"""A Qwen2 model, as a Hugging Face folder or as a .nanoqwen file: which it is, and opening it."""

from pathlib import Path

from cuq1.checkpoint.nanoqwen import Nanoqwen, is_nanoqwen
from cuq1.checkpoint.qwen2_folder import Qwen2Folder
from cuq1.config import TARGET_ARCHITECTURES, TARGET_TYPES, Reader, read_json, refuse_other_models
from cuq1.config_qwen2 import ARCHITECTURE, MODEL_TYPE

Qwen2Model = Qwen2Folder | Nanoqwen


def is_qwen2(path: str | Path) -> bool:
    """Whether a path is a Qwen2 model's, by its config.json or because it is a .nanoqwen file.

    Raises ConfigError where there is no config.json, or where it is neither a Qwen2 nor an IQuest-Q1 model's.
    """
    if is_nanoqwen(path):
        return True
    config = Path(path) / "config.json"
    read = Reader(read_json(config), str(config))
    refuse_other_models(read, (*TARGET_TYPES, MODEL_TYPE), (*TARGET_ARCHITECTURES, ARCHITECTURE))
    return bool(read.raw["model_type"] == MODEL_TYPE)


def open_qwen2(path: str | Path) -> Qwen2Model:
    """The model, its headers checked, and of a file every byte; raises ConfigError or CheckpointError."""
    return Nanoqwen.open(path) if is_nanoqwen(path) else Qwen2Folder.open(path)
