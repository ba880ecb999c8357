"""The steps of IQuest-Q1's prompts in the making, and as a plan."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from cuq1.models import q1
from cuq1.models.prefill_buffers import working_buffers
from cuq1.models.q1 import Model
from cuq1.models.steps import Chunk, Step, StepList, Sum, plan_over
from cuq1.plan.dims import Dims
from cuq1.plan.types import Plan


class Steps(StepList):
    """Steps in the making."""

    def __init__(self, model: Model) -> None:
        super().__init__(model.weights.tensors)
        self.model = model

    def sum(
        self,
        buffer: str,
        layer: int,
        rows: Callable[[Chunk], int] = lambda chunk: chunk.rows,
        *,
        first: int = 0,
        columns: int | None = None,
    ) -> None:
        """Over ranks, of [rows, hidden], where there are several."""
        d = self.model.dims
        if d.ranks > 1:
            own = d.hidden if columns is None else columns
            self.steps.append(Sum("sum", layer, f"prefill.{buffer}", d.hidden, rows, first, own))


def plan_of(model: Model, steps: Sequence[Step | Sum], chunk: Chunk) -> Plan:
    """The steps' launches for a chunk, over the buffers that they name, without sums. Bytes count weights alone."""
    return plan_over((*q1.working_buffers(model), *working_buffers(model)), model.weights.tensors, steps, chunk)


def plain(dims: Dims) -> Dims:
    """The sizes that these kernels are compiled for: activations are halves in all precisions.

    Ranks' parts are summed between these kernels, not by them.
    """
    return replace(dims, fp8_activations=False, ranks=1)
