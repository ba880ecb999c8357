"""Which rows and columns of each matrix a tensor-parallel rank holds."""

from dataclasses import dataclass

from cuq1.config import Q1Config
from cuq1.errors import ConfigError

MOST_RANKS = 1024  # far beyond one NVLink domain


@dataclass(frozen=True)
class RankShare:
    """Rank `rank` of `tp`: every property is a slice into an unsplit dimension.

    Attention is split by heads, MLPs by their inner width, lm_head by vocabulary rows and the
    draft's eh_proj by output rows. KV heads are replicated where there are more ranks than heads.
    Raises ConfigError where the model does not divide into `tp` equal shares.
    """

    config: Q1Config
    tp: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.tp <= MOST_RANKS:
            raise ConfigError(f"tp {self.tp} must be from 1 to {MOST_RANKS}: it is the number of ranks")
        if not 0 <= self.rank < self.tp:
            raise ConfigError(f"rank {self.rank} is outside tp {self.tp}: choose one from 0 to {self.tp - 1}")
        fault = _fault(self.config, self.tp)
        if fault:
            fits = [tp for tp in range(1, MOST_RANKS + 1) if not _fault(self.config, tp)]
            raise ConfigError(
                f"tp {self.tp} does not divide this model ({fault}): choose one of {', '.join(map(str, fits))}"
            )

    def _even(self, size: int) -> slice:
        share = size // self.tp
        return slice(self.rank * share, (self.rank + 1) * share)

    @property
    def q_heads(self) -> slice:
        return self._even(self.config.num_attention_heads)

    @property
    def kv_heads(self) -> slice:
        """The KV heads that the rank's query heads use: at least one, shared with other ranks where tp exceeds them."""
        total = self.config.num_key_value_heads
        if self.tp <= total:
            return self._even(total)
        head = self.rank * total // self.tp
        return slice(head, head + 1)

    @property
    def q_rows(self) -> slice:
        """Rows of q_proj [heads x head_dim, hidden]."""
        return self._of_heads(self.q_heads)

    @property
    def kv_rows(self) -> slice:
        """Rows of k_proj and v_proj [kv_heads x head_dim, hidden]."""
        return self._of_heads(self.kv_heads)

    @property
    def o_cols(self) -> slice:
        """Columns of o_proj [hidden, heads x head_dim]."""
        return self.q_rows

    @property
    def dense_rows(self) -> slice:
        """Rows of a dense layer's gate and up, columns of its down."""
        return self._even(self.config.dense_intermediate_size)

    @property
    def expert_rows(self) -> slice:
        """Rows of an expert's gate and up, columns of its down."""
        return self._even(self.config.intermediate_size)

    @property
    def vocab_rows(self) -> slice:
        """Rows of lm_head [vocab, hidden]."""
        return self._even(self.config.vocab_size)

    @property
    def hidden_rows(self) -> slice:
        """Rows of the draft's eh_proj [hidden, 2 x hidden]: the ranks' partial outputs concatenate."""
        return self._even(self.config.hidden_size)

    def _of_heads(self, heads: slice) -> slice:
        return slice(heads.start * self.config.head_dim, heads.stop * self.config.head_dim)


def _fault(config: Q1Config, tp: int) -> str | None:
    """Why the model does not divide into tp shares, or None."""
    for key in ("num_attention_heads", "intermediate_size", "vocab_size", "hidden_size"):
        size = getattr(config, key)
        if size % tp:
            return f"{key} is {size}"
    if config.mlp_only_layers and config.dense_intermediate_size % tp:
        return f"dense_intermediate_size is {config.dense_intermediate_size}"
    kv_heads = config.num_key_value_heads
    if kv_heads % tp and tp % kv_heads:
        return f"num_key_value_heads is {kv_heads}"
    return None
