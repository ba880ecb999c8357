"""Which plans belong to which model."""

from cuq1.models import q1, qwen2
from cuq1.models.plans import DeviceModel, Plans
from cuq1.models.q1_plans import Q1Plans
from cuq1.models.qwen2_plans import Qwen2Plans


def plans_of(model: DeviceModel) -> Plans:
    """A model's plans. Raises TypeError for one that has none."""
    if isinstance(model, q1.Model):
        return Q1Plans(model)
    if isinstance(model, qwen2.Model):
        return Qwen2Plans(model)
    raise TypeError(f"there are no plans for {type(model).__name__}")
