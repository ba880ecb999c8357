"""Collects the launches of IQuest-Q1's decode plans."""

from cuq1.models.collect import Collector
from cuq1.models.q1 import Model, working_buffers
from cuq1.plan.types import Ref


class Builder(Collector):
    """A plan in the making.

    distinct: distinct experts a layer, and context: positions cached, of which the bytes are counted. short: full
    layers see no more than Model.short_context positions.
    """

    def __init__(self, model: Model, distinct: float, context: int, *, short: bool = False) -> None:
        super().__init__(model.weights.tensors, working_buffers(model))
        self.model, self.distinct, self.context, self.short = model, distinct, context, short

    @property
    def peers(self) -> Ref | int:
        """The distances to the ranks' inboxes, for what pushes into them."""
        return Ref("peers") if self.model.inbox is not None else 0
