"""What prompt processing leaves in the draft's cache, as steps (cuq1.models.prefill)."""

from collections.abc import Callable

from cuq1.cuda.kernels import prefill
from cuq1.models.prefill_steps import Steps, plain
from cuq1.models.q1 import Layer
from cuq1.models.steps import Chunk, Fields, maker
from cuq1.plan.dims import DRAFT
from cuq1.plan.types import Ref


def settle(b: Steps, layer: Layer, own: Fields, *, before: bool) -> None:
    """Rows into the draft's cache: the one before the chunk, or those of the chunk (the newest that its ring keeps)."""
    d = plain(layer.dims)
    pairs = d.rotary // 2

    def span(chunk: Chunk) -> tuple[int, int]:
        """First row, counted from the chunk's first, and how many."""
        if before:
            return -1, int(chunk.settle_from < min(chunk.start, chunk.settle_to))
        first = max(chunk.start, chunk.settle_from, chunk.settle_to - layer.slots)
        return first - chunk.start, max(0, chunk.settle_to - first)

    def at(fields: Callable[[int], Fields]) -> Callable[[Chunk], Fields | None]:
        def found(chunk: Chunk) -> Fields | None:
            first, count = span(chunk)
            return {"rows": count, **fields(first)} if count else None

        return found

    def at_start(chunk: Chunk) -> Fields | None:
        first, count = span(chunk)
        rope = {"rope": Ref(f"prefill.rope.{layer.theta:g}", first * pairs * 8)} if pairs and not before else {}
        return {"rows": count, "start": chunk.start + first, **rope} if count else None

    if before and pairs:
        table: Fields = {"inverse_frequencies": Ref(f"rope.{layer.theta:g}"), "table": Ref("prefill.rope_before")}
        b.add("rope", DRAFT, maker(prefill.rope, d), table, at_start)
    entry: Fields = {
        "table": b.weight("draft.embed"),
        "enorm": b.weight("draft.enorm"),
        "hnorm": b.weight("draft.hnorm"),
        "out": Ref("prefill.entry"),
    }
    hidden = "hidden" if before else "prefill.hidden"
    b.add(
        "entry",
        DRAFT,
        maker(prefill.entry, d),
        entry,
        at(
            lambda first: {
                "tokens": Ref("prefill.tokens", (first + 1) * 4),
                "hidden": Ref(hidden, 0 if before else first * d.hidden * 4),
            }
        ),
    )
    eh: Fields = {
        "in": Ref("prefill.entry"),
        "weights": b.weight("draft.eh_proj"),
        "scales": 0,
        "out": Ref("prefill.entered"),
        "out_stride": d.hidden,
        "first_column": b.model.rank * d.eh_rows,
        "scale": 1.0,
    }
    b.add("eh_proj", DRAFT, maker(prefill.eh_proj, d), eh, at(lambda _: {}))
    b.sum("entered", DRAFT, lambda chunk: span(chunk)[1], first=b.model.rank * d.eh_rows, columns=d.eh_rows)
    norm: Fields = {
        "in": Ref("prefill.entered"),
        "norm": b.weight(f"{layer.prefix}.attention_norm"),
        "normed": Ref("prefill.normed"),
    }
    b.add("entry_norm", DRAFT, maker(prefill.norm, d), norm, at(lambda _: {}))
    qkv = {**own, "first_position": 0, "first_head": d.q_heads}
    if before and pairs:
        qkv["rope"] = Ref("prefill.rope_before")
    b.add("qkv", DRAFT, maker(prefill.qkv, d, kv_only=True), qkv, at_start)
