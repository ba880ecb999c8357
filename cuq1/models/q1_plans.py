"""IQuest-Q1's plans, as the GPU engine asks for them (cuq1.models.plans)."""

from cuq1.models import decode, prefill, prefill_buffers, q1
from cuq1.models.steps import Step, Sum
from cuq1.plan.dims import ROWS
from cuq1.plan.types import Buffer, Plan


class Q1Plans:
    """Of one rank's model."""

    most_rows = ROWS
    scored = prefill.SCORED

    def __init__(self, model: q1.Model) -> None:
        self._model = model

    def buffers(self) -> list[Buffer]:
        return [*q1.working_buffers(self._model), *prefill_buffers.working_buffers(self._model)]

    def round_of(self, rows: int, drafts: int, *, short: bool) -> Plan:
        return decode.round_of(self._model, rows, drafts, short=short)

    def first_of(self, drafts: int) -> Plan:
        return decode.first_of(self._model, drafts)

    def target_of(self, rows: int, *, short: bool) -> Plan:
        return decode.target_of(self._model, rows, short=short)

    def depth_of(self, depth: int, *, sample: bool = False, settle_only: bool = False) -> Plan:
        return decode.depth_of(self._model, depth, sample=sample, settle_only=settle_only)

    def logits_of(self) -> Plan:
        return decode.logits_of(self._model)

    def chunk_steps(self) -> list[Step | Sum]:
        return prefill.chunk_steps(self._model)

    def logits_steps(self) -> list[Step | Sum]:
        return [prefill.logits_step(self._model)]

    def scoring(self, positions: int) -> "tuple[q1.Model, Q1Plans, list[Buffer]]":
        """Without the draft, whose caches stay the sequence's."""
        base = self._model
        model = q1.resolve(
            base.config,
            None,
            base.weights,
            tp=base.tp,
            rank=base.rank,
            capacity=positions,
            sms=base.sms,
            ranks=base.dims.ranks,
            place=base.place,
        )
        own = [b for b in q1.working_buffers(model) if b.name in ("hidden", "hidden16")] + q1.cache_buffers(model)
        return model, Q1Plans(model), own
