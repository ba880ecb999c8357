"""The sizes of one rank's share, as kernels are compiled for them."""

from dataclasses import dataclass

from cuq1.config import DraftConfig, Q1Config

ROWS = 8  # rows of a verification pass
HEAD_DIM = 128
KV_TILE = 64
MAX_TOP_K = 32
MULTIPROCESSORS = 132  # of an H100 SXM or H200: what a plan is made for where no GPU says otherwise
DRAFT = -1  # the draft's layer number


@dataclass(frozen=True)
class Dims:
    """Elements of a rank's share; `fp8_*` say in which precision weights and activations reach the tensor cores.

    inner: columns of one expert on this rank. slice_width: columns of the residual that this rank adds to the
    router's logits. vocab: lm_head rows of this rank. eh_rows: rows of the draft's eh_proj on this rank. ranks: how
    many exchange their results; 1 where the others' are taken as zero, as when one rank of several is measured alone.
    """

    hidden: int
    q_heads: int
    kv_heads: int
    experts: int
    top_k: int
    inner: int
    slice_width: int
    vocab: int
    vocab_total: int
    eh_rows: int
    rotary: int
    eps: float
    fp8_attention: bool = True
    fp8_experts: bool = True
    fp8_activations: bool = False
    ranks: int = 1

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.q_heads // self.kv_heads

    @property
    def q_width(self) -> int:
        return self.q_heads * HEAD_DIM


def dims_of(config: Q1Config, tp: int) -> Dims:
    """The share of one of `tp` ranks, in FP8 where the config declares block FP8."""
    fp8 = config.fp8_block is not None
    return Dims(
        hidden=config.hidden_size,
        q_heads=config.num_attention_heads // tp,
        kv_heads=max(1, config.num_key_value_heads // tp),
        experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        inner=config.intermediate_size // tp,
        slice_width=config.hidden_size // tp,
        vocab=config.vocab_size // tp,
        vocab_total=config.vocab_size,
        eh_rows=config.hidden_size // tp,
        rotary=config.rotary_dim,
        eps=config.rms_norm_eps,
        fp8_attention=fp8,
        fp8_experts=fp8,
    )


def draft_dims(draft: DraftConfig, tp: int) -> Dims:
    return dims_of(draft.layer, tp)
