"""What the GPU engine asks of a model, whichever it is: its sizes, its buffers, and its plans."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from cuq1.models.steps import Step, Sum
from cuq1.plan.dims import Dims
from cuq1.plan.types import Buffer, Plan


class DeviceLayer(Protocol):
    """What rewinding has to know of a layer: a sliding one holds the last `slots` positions, and sees a window."""

    @property
    def prefix(self) -> str:
        """What the names of its buffers begin with."""

    @property
    def sliding(self) -> bool: ...

    @property
    def window(self) -> int: ...

    @property
    def slots(self) -> int: ...


class DeviceModel(Protocol):
    """A model on a GPU, resolved. draft: its draft's layer, where it has one."""

    @property
    def dims(self) -> Dims:
        """What lm_head, sampling and the loop are compiled for."""

    @property
    def capacity(self) -> int:
        """Positions that the caches hold."""

    @property
    def layers(self) -> Sequence[DeviceLayer]: ...

    @property
    def draft(self) -> DeviceLayer | None: ...

    @property
    def short_context(self) -> int:
        """Positions up to which a pass may use the plans for short contexts."""

    @property
    def inverse_frequencies(self) -> Mapping[str, NDArray[Any]]:
        """What buffers hold for good, by name."""

    @property
    def empty(self) -> Mapping[str, NDArray[Any]]:
        """What buffers hold where the sequence is empty, by name; of others nothing is asked."""

    def is_short(self, done: int) -> bool:
        """Whether a pass at positions done, done + 1, … may use the plans for short contexts."""


class Plans(Protocol):
    """A model's plans. most_rows: of a round; scored: rows whose logits `logits_steps` compute at once, at most."""

    @property
    def most_rows(self) -> int: ...

    @property
    def scored(self) -> int: ...

    def buffers(self) -> list[Buffer]:
        """All that the plans name besides weights, and what a loop has."""

    def round_of(self, rows: int, drafts: int, *, short: bool) -> Plan:
        """A whole round: `rows` rows are verified and judged, then up to `drafts` drafts are made."""

    def first_of(self, drafts: int) -> Plan:
        """A request's first token from the logits' row 0, and the drafts after it."""

    def target_of(self, rows: int, *, short: bool) -> Plan:
        """The target's forward pass alone: logits of `rows` rows, for sampling on the host."""

    def depth_of(self, depth: int, *, sample: bool = False, settle_only: bool = False) -> Plan:
        """One draft depth: up to its logits, for sampling on the host, or up to the drawn draft."""

    def logits_of(self) -> Plan:
        """Logits' row 0 from row 0 of the target's hidden states, after a prompt."""

    def chunk_steps(self) -> Sequence[Step | Sum]:
        """The launches of a prompt's chunk, in order."""

    def logits_steps(self) -> Sequence[Step | Sum]:
        """`prefill.logits` float32 [rows, vocab] of rows of the last chunk."""

    def scoring(self, positions: int) -> "tuple[DeviceModel, Plans, list[Buffer]]":
        """The same model with caches of its own for so many positions, its plans, and these buffers."""
