"""The names of a checkpoint: the one place that knows how layers, experts and the draft are spelled.

Everything is unsplit here, and a view of the mapped files. Vectors keep their stored dtype.
"""

from dataclasses import dataclass
from itertools import repeat

from cuq1.checkpoint.claims import Claims, Stored
from cuq1.checkpoint.linear import Linear
from cuq1.config import Q1Config

# Training's draft, kept in the main files by some exports; serving uses mtp/ instead.
TRAINING_DRAFT = "mtp_layers."


@dataclass(frozen=True, eq=False)
class StoredExperts:
    router: Stored
    gate: tuple[Linear, ...]
    up: tuple[Linear, ...]
    down: tuple[Linear, ...]


@dataclass(frozen=True, eq=False)
class StoredDense:
    gate: Linear
    up: Linear
    down: Linear


@dataclass(frozen=True, eq=False)
class StoredLayer:
    attention_norm: Stored
    attn_out_norm: Stored
    feed_forward_norm: Stored
    ffn_out_norm: Stored | None
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    q_norm: Stored
    k_norm: Stored
    sink_k: Stored
    mlp: StoredDense | StoredExperts


@dataclass(frozen=True, eq=False)
class StoredTarget:
    embed_tokens: Linear
    layers: tuple[StoredLayer, ...]
    norm: Stored
    lm_head: Linear


@dataclass(frozen=True, eq=False)
class StoredDraft:
    embed_tokens: Linear
    enorm: Stored
    hnorm: Stored
    eh_proj: Linear
    layer: StoredLayer
    final_layernorm: Stored
    lm_head: Linear


def claim_target(claims: Claims, config: Q1Config) -> StoredTarget:
    hidden, vocab = config.hidden_size, config.vocab_size
    return StoredTarget(
        embed_tokens=claims.plain_linear("model.embed_tokens.weight", vocab, hidden),
        layers=tuple(
            _layer(claims, config, f"model.layers.{i}.", moe=config.is_moe(i), sandwich=i == 0)
            for i in range(config.num_layers)
        ),
        norm=claims.stored("model.norm.weight", (hidden,)),
        lm_head=claims.plain_linear("lm_head.weight", vocab, hidden),
    )


def claim_draft(claims: Claims, config: Q1Config) -> StoredDraft:
    """`config` holds the dimensions of the draft's one layer."""
    hidden, vocab = config.hidden_size, config.vocab_size
    claims.optional("target_final_norm.weight", (hidden,))
    return StoredDraft(
        embed_tokens=claims.plain_linear("embed_tokens.weight", vocab, hidden),
        enorm=claims.stored("mtp.enorm.weight", (hidden,)),
        hnorm=claims.stored("mtp.hnorm.weight", (hidden,)),
        eh_proj=claims.plain_linear("mtp.eh_proj.weight", hidden, 2 * hidden),
        layer=_layer(claims, config, "mtp.mtp_model_layer.", moe=True, sandwich=True),
        final_layernorm=claims.stored("mtp.final_layernorm.weight", (hidden,)),
        lm_head=claims.plain_linear("lm_head.weight", vocab, hidden),
    )


def _layer(claims: Claims, config: Q1Config, prefix: str, moe: bool, sandwich: bool) -> StoredLayer:
    hidden, head = config.hidden_size, config.head_dim
    q_width, kv_heads = config.num_attention_heads * head, config.num_key_value_heads
    attention = f"{prefix}self_attn."
    mlp = f"{prefix}mlp."
    return StoredLayer(
        attention_norm=claims.stored(f"{prefix}attention_norm.weight", (hidden,)),
        attn_out_norm=claims.stored(f"{prefix}attn_out_norm.weight", (hidden,)),
        feed_forward_norm=claims.stored(f"{prefix}feed_forward_norm.weight", (hidden,)),
        ffn_out_norm=claims.stored(f"{prefix}ffn_out_norm.weight", (hidden,)) if sandwich else None,
        q=claims.linear(f"{attention}q_proj", q_width, hidden),
        k=claims.linear(f"{attention}k_proj", kv_heads * head, hidden),
        v=claims.linear(f"{attention}v_proj", kv_heads * head, hidden),
        o=claims.linear(f"{attention}o_proj", hidden, q_width),
        q_norm=claims.stored(f"{attention}q_norm.weight", (head,)),
        k_norm=claims.stored(f"{attention}k_norm.weight", (head,)),
        sink_k=claims.stored(f"{attention}sink_k", (kv_heads, head), (1, kv_heads, head)),
        mlp=_experts(claims, config, mlp) if moe else _dense(claims, config, mlp),
    )


def _dense(claims: Claims, config: Q1Config, prefix: str) -> StoredDense:
    hidden, width = config.hidden_size, config.dense_intermediate_size
    return StoredDense(
        gate=claims.linear(f"{prefix}gate_proj", width, hidden),
        up=claims.linear(f"{prefix}up_proj", width, hidden),
        down=claims.linear(f"{prefix}down_proj", hidden, width),
    )


def _experts(claims: Claims, config: Q1Config, prefix: str) -> StoredExperts:
    hidden, width, count = config.hidden_size, config.intermediate_size, config.num_experts
    name = f"{prefix}router.weight"
    if name not in claims.index and f"{prefix}gate.weight" in claims.index:
        name = f"{prefix}gate.weight"
    router = claims.stored(name, (count, hidden))
    both, down = f"{prefix}experts.fc", f"{prefix}experts.proj"
    if both not in claims.index and down not in claims.index:

        def each(projection: str, rows: int, cols: int) -> tuple[Linear, ...]:
            return tuple(claims.linear(f"{prefix}experts.{i}.{projection}", rows, cols) for i in range(count))

        return StoredExperts(
            router=router,
            gate=each("gate_proj", width, hidden),
            up=each("up_proj", width, hidden),
            down=each("down_proj", hidden, width),
        )
    gate_up = _stack(claims, both, count, 2 * width, hidden)
    return StoredExperts(
        router=router,
        # The scale grid is the fused matrix's: where the width is no multiple of a block, up begins inside one.
        gate=tuple(linear.part(slice(0, width)) for linear in gate_up),
        up=tuple(linear.part(slice(width, 2 * width)) for linear in gate_up),
        down=_stack(claims, down, count, hidden, width),
    )


def _stack(claims: Claims, name: str, count: int, rows: int, cols: int) -> tuple[Linear, ...]:
    """A fused tensor [count, rows, cols] as one linear an expert; its scales are `name`_scale_inv [count, .., ..]."""
    weight, scale = claims.quantizable(name, (count, rows, cols))
    source = claims.source(name)
    scales = repeat(None) if scale is None else scale
    # not strict: a failed claim leaves fewer of either, and is reported when the walk ends
    pairs = zip(weight, scales, strict=False)
    return tuple(Linear(f"{source}[{expert}]", *pair) for expert, pair in enumerate(pairs))
