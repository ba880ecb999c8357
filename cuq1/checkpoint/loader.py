"""A checkpoint folder: opened and checked as a whole, read a rank's share at a time."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cuq1.checkpoint.claims import Claims, Stored
from cuq1.checkpoint.index import SHARD_INDEX, SINGLE, Index, open_index, present
from cuq1.checkpoint.linear import Float32, Linear
from cuq1.checkpoint.shard import RankShare
from cuq1.checkpoint.shares import AttentionShare, DenseShare, DraftShare, LayerShare, MoeShare, TargetShare, leaves
from cuq1.checkpoint.stored import (
    TRAINING_DRAFT,
    StoredDense,
    StoredDraft,
    StoredLayer,
    StoredTarget,
    claim_draft,
    claim_target,
)
from cuq1.config import DraftConfig, Q1Config, load_config
from cuq1.errors import CheckpointError


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """An IQuest-Q1 checkpoint whose headers are complete; get it from `Checkpoint.open`.

    draft_config is None where the folder has no mtp/. The indexes list every tensor, used or not.
    """

    path: Path
    config: Q1Config
    draft_config: DraftConfig | None
    target_index: Index
    draft_index: Index | None
    _target: StoredTarget
    _draft: StoredDraft | None

    @classmethod
    def open(cls, model_dir: str | Path) -> "Checkpoint":
        """Read the configs and every file's header, and check that each tensor is there, as the config asks.

        Raises ConfigError for a config that is not computed, CheckpointError for files that are
        missing, damaged, incomplete or hold unknown tensors. No tensor data is read.
        """
        path = Path(model_dir)
        config, draft_config = load_config(path)
        index = open_index(path)
        claims = Claims(index, config.fp8_block is not None, lambda name: name.startswith(TRAINING_DRAFT))
        target = claim_target(claims, config)
        claims.finish()
        if draft_config is None:
            for name in (SINGLE, SHARD_INDEX):
                if present(path / "mtp" / name):
                    raise CheckpointError(f"{path / 'mtp'} has {name} but no config.json: copy it, or remove mtp/")
            return cls(path, config, None, index, None, target, None)
        draft_index = open_index(path / "mtp")
        claims = Claims(draft_index, draft_config.layer.fp8_block is not None, lambda _: False, "mtp/config.json")
        draft = claim_draft(claims, draft_config.layer)
        claims.finish()
        return cls(path, config, draft_config, index, draft_index, target, draft)

    def target(self, tp: int = 1, rank: int = 0) -> TargetShare:
        """The target's share of one rank; large matrices stay unread views.

        Raises ConfigError where tp does not divide the model, CheckpointError where a scale or a
        small tensor of the share is damaged.
        """
        split = RankShare(self.config, tp, rank)
        share = TargetShare(
            embed_tokens=self._target.embed_tokens,
            layers=tuple(_layer(layer, split) for layer in self._target.layers),
            norm=_read(self._target.norm),
            lm_head=self._target.lm_head.part(split.vocab_rows),
        )
        _check_scales(share)
        return share

    def draft(self, tp: int = 1, rank: int = 0) -> DraftShare:
        """The draft's share of one rank; errors as `target`, and CheckpointError where there is no draft."""
        if self.draft_config is None or self._draft is None:
            raise CheckpointError(
                f"{self.path} has no mtp/config.json: copy the draft's folder, or decode without drafts"
            )
        split = RankShare(self.draft_config.layer, tp, rank)
        stored = self._draft
        share = DraftShare(
            embed_tokens=stored.embed_tokens,
            enorm=_read(stored.enorm),
            hnorm=_read(stored.hnorm),
            eh_proj=stored.eh_proj.part(split.hidden_rows),
            layer=_layer(stored.layer, split),
            final_layernorm=_read(stored.final_layernorm),
            lm_head=stored.lm_head.part(split.vocab_rows),
        )
        _check_scales(share)
        return share


def _layer(stored: StoredLayer, split: RankShare) -> LayerShare:
    return LayerShare(
        attention_norm=_read(stored.attention_norm),
        attn_out_norm=_read(stored.attn_out_norm),
        feed_forward_norm=_read(stored.feed_forward_norm),
        ffn_out_norm=None if stored.ffn_out_norm is None else _read(stored.ffn_out_norm),
        attention=AttentionShare(
            q=stored.q.part(split.q_rows),
            k=stored.k.part(split.kv_rows),
            v=stored.v.part(split.kv_rows),
            o=stored.o.part(slice(None), split.o_cols),
            q_norm=_read(stored.q_norm),
            k_norm=_read(stored.k_norm),
            sink_k=_read(stored.sink_k, split.kv_heads),
        ),
        mlp=_mlp(stored, split),
    )


def _mlp(stored: StoredLayer, split: RankShare) -> DenseShare | MoeShare:
    mlp = stored.mlp
    if isinstance(mlp, StoredDense):
        rows = split.dense_rows
        return DenseShare(mlp.gate.part(rows), mlp.up.part(rows), mlp.down.part(slice(None), rows))
    rows = split.expert_rows
    return MoeShare(
        router=_read(mlp.router),
        gate=tuple(linear.part(rows) for linear in mlp.gate),
        up=tuple(linear.part(rows) for linear in mlp.up),
        down=tuple(linear.part(slice(None), rows) for linear in mlp.down),
    )


def _read(stored: Stored, rows: slice = slice(None)) -> Float32:
    """A float32 copy of a small tensor, or of some of its rows."""
    values = stored.array[rows].astype(np.float32)
    if not np.isfinite(values).all():
        raise CheckpointError(f"{stored.source} holds values that are not finite: copy the checkpoint again")
    return values


def _check_scales(share: TargetShare | DraftShare) -> None:
    """Refuse NaN, infinite and negative scales among those that the share uses.

    Zero is legal: quantisers write it for a block of zeros, whose values are then zeros.
    """
    linears = [leaf for _, leaf in leaves(share) if isinstance(leaf, Linear)]
    scales = [(linear, part) for linear in linears if (part := linear.scales()) is not None]
    if not scales:
        return
    # one pass over all of them: there are thousands, of a few elements each
    together = np.concatenate([part.ravel() for _, part in scales]).astype(np.float32)
    if _usable(together):
        return
    faulty = next(linear for linear, part in scales if not _usable(part.astype(np.float32)))
    raise CheckpointError(f"{faulty.source} has a scale that is negative or not finite: copy the checkpoint again")


def _usable(scales: Float32) -> bool:
    return bool((np.isfinite(scales) & (scales >= 0)).all())
