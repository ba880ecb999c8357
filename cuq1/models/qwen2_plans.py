"""A Qwen2 model's plans, as the GPU engine asks for them (cuq1.models.plans)."""

from dataclasses import replace

from cuq1.models import qwen2, qwen2_decode, qwen2_prefill
from cuq1.models.steps import Step, Sum
from cuq1.plan.qwen2_dims import PAGE
from cuq1.plan.types import Buffer, Plan


class Qwen2Plans:
    """A round has one row and no drafts. Raises ValueError for another."""

    most_rows = 1

    def __init__(self, model: qwen2.Model) -> None:
        self._model = model

    @property
    def scored(self) -> int:
        return qwen2_prefill.scored(self._model)

    def buffers(self) -> list[Buffer]:
        return [*qwen2.working_buffers(self._model), *qwen2_prefill.prompt_buffers(self._model)]

    def round_of(self, rows: int, drafts: int, *, short: bool) -> Plan:
        _refuse(rows, drafts)
        return qwen2_decode.round_of(self._model, short=short)

    def first_of(self, drafts: int) -> Plan:
        _refuse(1, drafts)
        return qwen2_decode.first_of(self._model)

    def target_of(self, rows: int, *, short: bool) -> Plan:
        _refuse(rows, 0)
        return qwen2_decode.target_of(self._model, short=short)

    def depth_of(self, depth: int, *, sample: bool = False, settle_only: bool = False) -> Plan:
        raise ValueError("a Qwen2 model has no draft")

    def logits_of(self) -> Plan:
        return qwen2_decode.logits_of(self._model)

    def chunk_steps(self) -> list[Step | Sum]:
        return qwen2_prefill.chunk_steps(self._model)

    def logits_steps(self) -> list[Step | Sum]:
        return qwen2_prefill.logits_steps(self._model)

    def scoring(self, positions: int) -> "tuple[qwen2.Model, Qwen2Plans, list[Buffer]]":
        model = replace(self._model, capacity=-(-positions // PAGE) * PAGE)
        own = [buffer for buffer in qwen2.working_buffers(model) if buffer.name == "hidden16"]
        return model, Qwen2Plans(model), own + qwen2.cache_buffers(model)


def _refuse(rows: int, drafts: int) -> None:
    if rows != 1 or drafts != 0:
        raise ValueError(f"a Qwen2 model computes one row a round, not {rows} and {drafts} drafts")
