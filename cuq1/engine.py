"""Engines: the interface that they share, and the one place that picks between cpu and cuda."""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from cuq1.checkpoint.qwen2 import Qwen2Model, is_qwen2, open_qwen2
from cuq1.errors import DeviceError, RequestError
from cuq1.parallel.rendezvous import WORLD, Rendezvous
from cuq1.sampling.mask import Mask
from cuq1.sampling.params import DecodeParams
from cuq1.sampling.rounds import DecodeStream

if TYPE_CHECKING:
    from cuq1.cuda.engine import CudaEngine

Device = Literal["auto", "cpu", "cuda"]
Activations = Literal["f16", "fp8"]
Loop = Literal["device", "host"]


class Engine(Protocol):
    """One model and one sequence of tokens, as a context manager.

    `prefill` sets the sequence, `decode` extends it, `rewind` shortens it,
    `score` leaves it alone.
    """

    @property
    def default_params(self) -> DecodeParams:
        """What the checkpoint's generation_config.json asks for, stop tokens included."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """The committed sequence: prompt and generated tokens."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""

    @property
    def context(self) -> int:
        """The largest number of tokens that the sequence can have."""

    def prefill(self, ids: Sequence[int], *, chunk: int | None = ...) -> int:
        """Make `ids` the sequence; returns how many of its tokens were already held and kept."""

    def held(self, ids: Sequence[int]) -> int:
        """How many of the first tokens of `ids` a prefill that begins with them would keep."""

    def keep_snapshots(self, first: int, second: int = 0) -> None:
        """Keep what is remembered in `first` bytes and, for a GPU, `second` of the host's; bounds of 0 end it."""

    def remember(self, hint: str = "", *, turn: bool = True) -> None:
        """Have a later `prefill` come back to where this sequence is now: a prompt's end, or a boundary within it."""

    def decode(self, params: DecodeParams | None = None, *, mask: Mask | None = None) -> DecodeStream:
        """Generate from the sequence's end; iterate over the result for the committed tokens of each round.

        mask: which tokens may come; a new one for each request.
        """

    def score(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Next-token logits float32 [len(ids), vocab]: row i follows ids[: i + 1]."""

    def rewind(self, length: int) -> None:
        """Keep the first `length` tokens of the sequence and forget the rest."""

    def close(self) -> None:
        """Give memory and devices back."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_engine(
    model: str | Path | Qwen2Model,
    device: Device = "auto",
    tp: int = 1,
    *,
    progress: Callable[[int, int], None] | None = None,
    activations: Activations = "f16",
    loop: Loop = "device",
    meeting: Rendezvous | None = None,
    context: int | None = None,
) -> Engine:
    """Load a model into an engine: a checkpoint folder, a .nanoqwen file, or a Qwen2 model that is open already.

    device: "cpu" is the NumPy engine, "cuda" a GPU a rank; "auto" takes GPUs where there is a usable one and, with
    several ranks, where this process is one of them. tp: the number of ranks whose shares compute: on the CPU one after
    the other, as a check of the split; on GPUs each in a process that cuq1-launch has started, all of which call this.
    On rank 0 it returns; on the others it does what rank 0's engine does, and ends the process with that
    (SystemExit). meeting: the run's rendezvous, where the caller has one already; it stays the caller's.

    progress(done, total) is called as layers are loaded. activations: "fp8" quantises what enters the experts to E4M3,
    on the GPU alone. loop: who launches a request's rounds on the GPU, the device itself or the host. context: tokens
    that a sequence can have at the most; on a GPU it decides what the caches take. Qwen2 models are computed by one
    rank, in INT4 on a GPU. Raises ConfigError, CheckpointError, DeviceError, RequestError or, where another
    rank failed, LaunchError.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise RequestError(f"device must be auto, cpu or cuda, not {device!r}")
    if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1:
        raise RequestError(f"tp must be an integer of at least 1, not {tp!r}")
    if activations not in ("f16", "fp8"):
        raise RequestError(f"activations must be f16 or fp8, not {activations!r}")
    if loop not in ("device", "host"):
        raise RequestError(f"loop must be device or host, not {loop!r}")
    if not isinstance(model, str | Path) or is_qwen2(model):
        check_qwen2(tp, activations)
        opened = open_qwen2(model) if isinstance(model, str | Path) else model
        if device == "cpu" or (device == "auto" and not usable_gpu()):
            return _open_qwen2(opened, progress, context)
        return _open_qwen2_cuda(opened, progress, loop, context)
    if device == "auto":
        device = "cuda" if (os.environ.get(WORLD) == str(tp) if tp > 1 else usable_gpu()) else "cpu"
    if device == "cuda":
        open_one = partial(_open_cuda, model, tp, progress, activations, loop, context)
        return open_one(None) if tp == 1 else _open_ranks(open_one, tp, meeting)
    if activations != "f16":
        raise RequestError("activations fp8 are computed on the GPU alone: use --device cuda")
    return _open_cpu(model, tp, progress, context)


def check_qwen2(tp: int, activations: Activations) -> None:
    """RequestError for what is not computed of a Qwen2 model."""
    if tp > 1 or activations != "f16":
        raise RequestError("Qwen2 models are computed by one rank, with activations f16: leave out tp and activations")


def usable_gpu() -> bool:
    """Whether there is a GPU that the engine can use."""
    from cuq1.cuda.driver import open_device  # noqa: PLC0415  (an engine's imports are paid for by its users)

    try:
        open_device()
    except DeviceError:
        return False
    return True


def has_gpus(count: int) -> bool:
    """Whether the driver sees any GPU; DeviceError where it sees some, but fewer than `count`. None is opened."""
    from cuq1.cuda.driver import require_devices  # noqa: PLC0415

    try:
        require_devices(1)
    except DeviceError:
        return False
    require_devices(count)
    return True


def _open_cpu(
    model_dir: str | Path, tp: int, progress: Callable[[int, int], None] | None, context: int | None
) -> Engine:
    from cuq1.reference.engine import ReferenceEngine  # noqa: PLC0415

    return ReferenceEngine(model_dir, tp, progress=progress, context=context)


def _open_qwen2(model: Qwen2Model, progress: Callable[[int, int], None] | None, context: int | None) -> Engine:
    from cuq1.reference.qwen2_engine import Qwen2Engine  # noqa: PLC0415

    return Qwen2Engine(model, progress=progress, context=context)


def _open_qwen2_cuda(
    model: Qwen2Model, progress: Callable[[int, int], None] | None, loop: Loop, context: int | None
) -> Engine:
    from cuq1.cuda.qwen2_engine import Qwen2CudaEngine  # noqa: PLC0415

    return Qwen2CudaEngine(model, progress=progress, loop=loop, context=context)


def _open_cuda(
    model_dir: str | Path,
    tp: int,
    progress: Callable[[int, int], None] | None,
    activations: Activations,
    loop: Loop,
    context: int | None,
    meeting: Rendezvous | None,
) -> "CudaEngine":
    from cuq1.cuda.engine import CudaEngine  # noqa: PLC0415

    return CudaEngine(
        model_dir, tp, progress=progress, activations=activations, loop=loop, capacity=context, meeting=meeting
    )


def _open_ranks(open_one: Callable[[Rendezvous], "CudaEngine"], tp: int, given: Rendezvous | None) -> Engine:
    """Rank 0's engine; on the others, this does not return."""
    from cuq1.parallel.follow import Leader, follow  # noqa: PLC0415

    if given is None and not os.environ.get(WORLD):
        raise RequestError(f"tp {tp} on GPUs takes {tp} processes: start this program with cuq1-launch -n {tp} --")
    with ExitStack() as stack:
        meeting = stack.enter_context(Rendezvous()) if given is None else given
        if meeting.world != tp:
            raise RequestError(f"tp {tp} does not go with a run of {meeting.world} ranks: give one of the two numbers")
        engine = open_one(meeting)
        if meeting.rank == 0:
            stack.pop_all()  # it lasts as long as the engine
            return Leader(engine, meeting, owned=given is None)
        follow(engine, meeting)
        raise SystemExit(0)
