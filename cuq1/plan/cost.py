"""The bytes that one tensor-parallel rank must read in a decode round, from the config alone.

At one stream a round is bound by memory: its floor is these bytes over the bandwidth.
Counted are weight matrices and KV rows, each read once. Block scales, norms, sinks and
activations are not: together they are below 0.2 % of the released model's floor.
`tp` must divide the config, as checkpoint.RankShare checks.
"""

from dataclasses import dataclass

from cuq1.config import SLIDING, DraftConfig, Q1Config

BF16_BYTES = 2
FP32_BYTES = 4
FLOOR_DEPTHS = 5  # draft depths of the round that the floor is quoted for; it verifies one row more
# Distinct experts a layer of the released model at six rows: repeated tokens, real requests, nothing shared.
MEASURED_DISTINCT = (11.0, 37.7, 48.0)


@dataclass(frozen=True)
class TargetCost:
    """Bytes of one target pass, by part."""

    attention: float
    router: float
    experts: float
    dense: float
    lm_head: float

    @property
    def total(self) -> float:
        return self.attention + self.router + self.experts + self.dense + self.lm_head


def _weight_bytes(config: Q1Config) -> int:
    """Bytes of one element of a quantisable linear."""
    return 1 if config.fp8_block else BF16_BYTES


def kv_heads_per_rank(config: Q1Config, tp: int) -> int:
    """At least one: KV heads are replicated where there are more ranks than heads."""
    return max(1, config.num_key_value_heads // tp)


def attention_bytes(config: Q1Config, tp: int) -> float:
    """The q, k, v and o projections of one layer."""
    rows = 2 * config.num_attention_heads // tp + 2 * kv_heads_per_rank(config, tp)
    return rows * config.head_dim * config.hidden_size * _weight_bytes(config)


def expert_bytes(config: Q1Config, tp: int) -> float:
    """Gate, up and down of one expert."""
    return 3 * config.intermediate_size * config.hidden_size * _weight_bytes(config) / tp


def dense_bytes(config: Q1Config, tp: int) -> float:
    """Gate, up and down of one dense layer."""
    return 3 * config.dense_intermediate_size * config.hidden_size * _weight_bytes(config) / tp


def router_bytes(config: Q1Config, tp: int) -> float:
    """One layer's FP32 router: whole, or folded into the rank's o projection and its slice of the input.

    The folded form is [experts, q width / tp + hidden / tp]. It is the smaller one only at higher tp.
    """
    q_width = config.num_attention_heads * config.head_dim
    row = min(config.hidden_size, (q_width + config.hidden_size) / tp)
    return config.num_experts * row * FP32_BYTES


def lm_head_bytes(config: Q1Config, tp: int) -> float:
    return config.vocab_size * config.hidden_size * BF16_BYTES / tp


def target_cost(config: Q1Config, tp: int, distinct: float) -> TargetCost:
    """One pass over the target's weights, whose rows route to `distinct` experts a layer on average."""
    dense = len(config.mlp_only_layers)
    moe = config.num_layers - dense
    return TargetCost(
        attention=config.num_layers * attention_bytes(config, tp),
        router=moe * router_bytes(config, tp),
        experts=moe * distinct * expert_bytes(config, tp),
        dense=dense * dense_bytes(config, tp),
        lm_head=lm_head_bytes(config, tp),
    )


def draft_depth_bytes(draft: DraftConfig, tp: int, context: int | None = None) -> float:
    """One draft depth of one row: its layer, eh_proj, lm_head and the KV rows of its window.

    The window counts as full where no `context` is given.
    """
    config = draft.layer
    eh_proj = 2 * config.hidden_size**2 * BF16_BYTES / tp
    experts = config.num_experts_per_tok * expert_bytes(config, tp)
    rows = config.sliding_window if context is None else min(context, config.sliding_window)
    weights = attention_bytes(config, tp) + router_bytes(config, tp) + experts + eh_proj + lm_head_bytes(config, tp)
    return weights + rows * kv_row_bytes(config, tp)


def pushed_bytes(config: Q1Config, tp: int, rows: int) -> int:
    """What a rank sends to its `tp - 1` peers in a pass of `rows` rows over the target's layers.

    FP32 partials of attention and MLP, and the router's two.
    """
    layers, dense = config.num_layers, len(config.mlp_only_layers)
    words = layers * 2 * config.hidden_size + (layers - dense) * 2 * config.num_experts
    return (tp - 1) * rows * words * FP32_BYTES


def kv_row_bytes(config: Q1Config, tp: int) -> int:
    """K and V of one position in one layer, cached in BF16."""
    return 2 * kv_heads_per_rank(config, tp) * config.head_dim * BF16_BYTES


def kv_bytes(config: Q1Config, tp: int, context: int) -> int:
    """K and V that the target reads at `context` positions: all in a full layer, the window in a sliding one."""
    sliding = config.layer_types.count(SLIDING)
    rows = (config.num_layers - sliding) * context + sliding * min(context, config.sliding_window)
    return rows * kv_row_bytes(config, tp)


def distinct_levels(config: Q1Config, rows: int = FLOOR_DEPTHS + 1) -> list[float]:
    """Distinct experts a layer worth quoting: the bounds for 1 and for `rows` rows, and measured values between."""
    low, high = config.num_experts_per_tok, min(config.num_experts, rows * config.num_experts_per_tok)
    return sorted({float(low), float(high), *(level for level in MEASURED_DISTINCT if low < level < high)})


def _layer_parameters(config: Q1Config, moe: bool, experts: int) -> int:
    hidden, head = config.hidden_size, config.head_dim
    attention = 2 * (config.num_attention_heads + config.num_key_value_heads) * head * hidden
    small = 3 * hidden + 2 * head + config.num_key_value_heads * head  # norms, q_norm, k_norm, sinks
    if not moe:
        return attention + small + 3 * config.dense_intermediate_size * hidden
    return attention + small + 3 * experts * config.intermediate_size * hidden + config.num_experts * hidden


def parameters(config: Q1Config, active: bool = False) -> int:
    """Parameters of the target; with `active`, those that one token uses (the embedding table counted whole)."""
    experts = config.num_experts_per_tok if active else config.num_experts
    layers = sum(_layer_parameters(config, config.is_moe(i), experts) for i in range(config.num_layers))
    # the sandwich norm of layer 0, and the final norm
    return layers + 2 * config.hidden_size + 2 * config.vocab_size * config.hidden_size


def draft_parameters(draft: DraftConfig, active: bool = False) -> int:
    """Parameters of the draft, its own embedding and lm_head included; the unused target_final_norm is not."""
    config = draft.layer
    experts = config.num_experts_per_tok if active else config.num_experts
    layer = _layer_parameters(config, True, experts) + config.hidden_size  # its sandwich norm
    return layer + 2 * config.hidden_size**2 + 3 * config.hidden_size + 2 * config.vocab_size * config.hidden_size


def resident_bytes(config: Q1Config, tp: int) -> float:
    """Weights that a rank holds for the target: matrices, and the embedding table whole.

    As the floor, without scales, norms and sinks.
    """
    embedding = config.vocab_size * config.hidden_size * BF16_BYTES
    routers = (config.num_layers - len(config.mlp_only_layers)) * config.num_experts * config.hidden_size * FP32_BYTES
    cost = target_cost(config, tp, config.num_experts)
    return cost.total - cost.router + routers + embedding


def draft_resident_bytes(draft: DraftConfig, tp: int) -> float:
    """Weights that a rank holds for the draft, counted as `resident_bytes` counts."""
    config = draft.layer
    embedding = config.vocab_size * config.hidden_size * BF16_BYTES
    router = config.num_experts * config.hidden_size * FP32_BYTES
    eh_proj = 2 * config.hidden_size**2 * BF16_BYTES / tp
    experts = config.num_experts * expert_bytes(config, tp)
    return attention_bytes(config, tp) + router + experts + eh_proj + lm_head_bytes(config, tp) + embedding
