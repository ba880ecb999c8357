"""Reading a checkpoint: indexed by headers, complete or refused, one rank's bytes at a time."""

from cuq1.checkpoint.linear import Linear
from cuq1.checkpoint.loader import Checkpoint
from cuq1.checkpoint.shard import RankShare
from cuq1.checkpoint.shares import AttentionShare, DenseShare, DraftShare, LayerShare, MoeShare, TargetShare

__all__ = [
    "AttentionShare",
    "Checkpoint",
    "DenseShare",
    "DraftShare",
    "LayerShare",
    "Linear",
    "MoeShare",
    "RankShare",
    "TargetShare",
]
