"""What a command line has to know of a model before its weights are read, whatever its architecture."""

from dataclasses import dataclass
from pathlib import Path

from cuq1.checkpoint import RankShare
from cuq1.checkpoint.nanoqwen import Nanoqwen
from cuq1.checkpoint.qwen2 import Qwen2Model, is_qwen2, open_qwen2
from cuq1.config import Q1Config, SamplingDefaults, load_config, load_sampling_defaults, parse_json, unapplied_settings
from cuq1.text import PackedText, TextSource
from cuq1.text.source import label, read_file

_GENERATION = "generation_config.json"


@dataclass(frozen=True)
class Description:
    """A model, by its configs; get it from `Description.open`.

    source: what `open_engine` takes. text: where tokenizer and template are. vocab_size: token ids are below it.
    context: the most tokens of a sequence. max_drafts: of a round, 0 without a draft model. shared: the configs whose
    weights ranks share.
    """

    source: Path | Qwen2Model
    text: TextSource
    vocab_size: int
    context: int
    max_drafts: int
    sampling: SamplingDefaults
    shared: tuple[Q1Config, ...]

    @classmethod
    def open(cls, path: Path) -> "Description":
        """Of a folder's configs, or a .nanoqwen file, which is checked whole; raises ConfigError or CheckpointError."""
        return _qwen2(open_qwen2(path)) if is_qwen2(path) else _q1(path)

    @property
    def is_qwen2(self) -> bool:
        return not isinstance(self.source, Path)

    @property
    def unapplied(self) -> tuple[str, ...]:
        """What the checkpoint asks of sampling and no engine computes, as `repetition_penalty 1.1`."""
        content = read_file(self.text, _GENERATION)
        return () if content is None else unapplied_settings(parse_json(content, label(self.text, _GENERATION)))

    def check_ranks(self, tp: int) -> None:
        """ConfigError for a number of ranks that does not divide the model."""
        for config in self.shared:
            RankShare(config, tp)


def _q1(folder: Path) -> Description:
    config, draft = load_config(folder)
    return Description(
        source=folder,
        text=folder,
        vocab_size=config.vocab_size,
        context=config.max_position_embeddings,
        max_drafts=0 if draft is None else draft.num_draft_slots,
        sampling=load_sampling_defaults(folder, config),
        shared=(config,) if draft is None else (config, draft.layer),
    )


def _qwen2(opened: Qwen2Model) -> Description:
    config = opened.config
    return Description(
        source=opened,
        text=PackedText(opened.path, opened.files) if isinstance(opened, Nanoqwen) else opened.path,
        vocab_size=config.vocab_size,
        context=config.max_position_embeddings,
        max_drafts=0,
        sampling=config.sampling,
        shared=(),
    )
