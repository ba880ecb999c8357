"""Engines: the interface that they share, and the one place that picks between cpu and cuda."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from cuq1.errors import DeviceError, RequestError
from cuq1.sampling.params import DecodeParams
from cuq1.sampling.rounds import DecodeStream

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

    def decode(self, params: DecodeParams | None = None) -> DecodeStream:
        """Generate from the sequence's end; iterate over the result for the committed tokens of each round."""

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
    model_dir: str | Path,
    device: Device = "auto",
    tp: int = 1,
    *,
    progress: Callable[[int, int], None] | None = None,
    activations: Activations = "f16",
    loop: Loop = "device",
) -> Engine:
    """Load a checkpoint folder into an engine.

    device: "cpu" is the NumPy engine, "cuda" one GPU; "auto" takes the GPU where there is a usable one. tp: the
    number of ranks whose shares compute (on the CPU one after the other, as a check of the split). progress(done,
    total) is called as layers are loaded. activations: "fp8" quantises what enters the experts to E4M3, on the GPU
    alone. loop: who launches a request's rounds on the GPU, the device itself or the host. Raises ConfigError,
    CheckpointError, DeviceError or RequestError.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise RequestError(f"device must be auto, cpu or cuda, not {device!r}")
    if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1:
        raise RequestError(f"tp must be an integer of at least 1, not {tp!r}")
    if activations not in ("f16", "fp8"):
        raise RequestError(f"activations must be f16 or fp8, not {activations!r}")
    if loop not in ("device", "host"):
        raise RequestError(f"loop must be device or host, not {loop!r}")
    if device == "cuda" or (device == "auto" and tp == 1 and _usable_gpu()):
        return _open_cuda(model_dir, tp, progress, activations, loop)
    if activations != "f16":
        raise RequestError("activations fp8 are computed on the GPU alone: use --device cuda")
    return _open_cpu(model_dir, tp, progress)


def _usable_gpu() -> bool:
    from cuq1.cuda.driver import open_device  # noqa: PLC0415  (an engine's imports are paid for by its users)

    try:
        open_device()
    except DeviceError:
        return False
    return True


def _open_cpu(model_dir: str | Path, tp: int, progress: Callable[[int, int], None] | None) -> Engine:
    from cuq1.reference.engine import ReferenceEngine  # noqa: PLC0415

    return ReferenceEngine(model_dir, tp, progress=progress)


def _open_cuda(
    model_dir: str | Path,
    tp: int,
    progress: Callable[[int, int], None] | None,
    activations: Activations,
    loop: Loop,
) -> Engine:
    from cuq1.cuda.engine import CudaEngine  # noqa: PLC0415

    return CudaEngine(model_dir, tp, progress=progress, activations=activations, loop=loop)
