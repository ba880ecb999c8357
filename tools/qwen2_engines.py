"""Qwen2 engines to measure: random weights of any family size without a checkpoint, launches by the host one by one,
and launches that leave their times."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from ctypes import sizeof
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple
from unittest import mock

from cuq1.checkpoint.nanoqwen import Nanoqwen
from cuq1.checkpoint.qwen2 import Qwen2Model, is_qwen2, open_qwen2
from cuq1.config_qwen2 import Qwen2Config, parse_qwen2
from cuq1.cuda import abi
from cuq1.cuda.driver import bindings, check, open_device
from cuq1.cuda.execute import Program
from cuq1.cuda.qwen2_engine import Qwen2CudaEngine
from cuq1.cuda.qwen2_weights import qwen2_layout
from cuq1.cuda.runtime import Runtime
from cuq1.errors import RequestError
from cuq1.models import qwen2, qwen2_decode
from cuq1.models.qwen2_forms import Form
from cuq1.plan.types import Launch, Plan
from tools.checkpoint_qwen2 import NAMES, qwen2_config
from tools.tracing import Tracer

# device: the device launches the next token's graph; host: the host does; eager: it launches every kernel.
Mode = Literal["device", "host", "eager"]


@dataclass(frozen=True)
class Subject:
    """What is measured; get it from `Subject.of`. opened: its checkpoint, or None where weights are random."""

    name: str
    config: Qwen2Config
    opened: Qwen2Model | None
    int4_head: bool
    form: Form | None

    @classmethod
    def of(cls, name: str, *, int4_head: bool = False, form: Form | None = None) -> "Subject":
        """One of NAMES with random weights, a Hugging Face folder, or a .nanoqwen file.

        int4_head: of random weights, the logits' matrix, too, is INT4. form: in which launches the layers run; None is
        the engine's default. Raises RequestError for anything else, and ConfigError or CheckpointError for a model that
        is not computed.
        """
        path, known = Path(name), name.lower()
        if path.exists() and is_qwen2(path):
            model = open_qwen2(path)
            return cls(path.name, model.config, model, isinstance(model, Nanoqwen) and model.int4_head, form)
        if known in NAMES:
            return cls(known, parse_qwen2(qwen2_config(known)), None, int4_head, form)
        raise RequestError(f"{name} is no Qwen2 model: name a folder, a .nanoqwen file, or {NAMES[0]} and the like")

    @contextmanager
    def engine(self, mode: Mode, context: int, tracer: Tracer | None = None) -> Iterator[Qwen2CudaEngine]:
        """An engine for sequences of `context` tokens. tracer: its labels' launches leave their times."""
        open_device()
        with ExitStack() as stack:
            if tracer is not None:
                stack.enter_context(_tracing(tracer))
            if mode == "eager":
                stack.enter_context(mock.patch.object(Runtime, "run", _EagerRun()))
            model = qwen2_layout(self.config, int4_head=self.int4_head) if self.opened is None else self.opened
            yield stack.enter_context(
                Qwen2CudaEngine(
                    model,
                    context=context,
                    loop="device" if mode == "device" else "host",
                    defines=None if tracer is None else tracer.defines,
                    say=_silent,
                    form=self.form,
                )
            )


def _silent(text: str) -> None:
    pass


@contextmanager
def _tracing(tracer: Tracer) -> Iterator[None]:
    bind = Runtime.program

    def program(own: Runtime, plan: Plan) -> Program:
        bound = bind(own, plan)
        tracer.attach(bound.plan.kernels())
        return bound

    with mock.patch.object(Runtime, "program", program):
        yield


class _EagerRun:
    """Runtime.run without a graph: every kernel by a launch of its own, bound once."""

    def __init__(self) -> None:
        self._programs: dict[tuple[str, int, int], Program] = {}

    def __get__(self, own: Runtime, kind: type[Runtime]) -> Callable[..., None]:
        return lambda *args: self._run(own, *args)

    def _run(self, own: Runtime, kind: str, rows: int, drafts: int, plan: Callable[[], Plan]) -> None:
        key = (kind, rows, drafts)
        if key not in self._programs:
            self._programs[key] = own.program(plan())
        self._programs[key].issue(own.stream)
        source = bindings().CUdeviceptr(own.addresses["state"])
        size, stream = sizeof(abi.State), bindings().CUstream(own.stream)
        check(bindings().cuMemcpyDtoHAsync(own._readback.address, source, size, stream))
        own.wait()


@contextmanager
def records(engine: Qwen2CudaEngine) -> Iterator[list[abi.Record]]:
    """The device loop's own log of what is decoded inside; nothing where the host launches."""
    loop = engine._loop
    found: list[abi.Record] = []
    if loop is None:
        yield found
        return
    own = loop.next

    def following() -> abi.Record:
        found.append(own())
        return found[-1]

    with mock.patch.object(loop, "next", following):
        yield found


# Of launches whose parts leave times: the parts in order, and which of the weights each reads.
_PARTS = {
    "chain": {"o_proj": "o_weights", "gate_up": "gate_up_weights", "down": "down_weights", "qkv": "qkv_weights"},
    "layers": {
        "qkv": "qkv_weights",
        "attention": "",  # the cache
        "o_proj": "o_weights",
        "gate_up": "gate_up_weights",
        "down": "down_weights",
    },
}


class Part(NamedTuple):
    """What leaves times where a plan is traced: a launch, or a part of one. read: bytes."""

    label: str
    layer: int
    read: int


def parts_of(plan: Plan) -> list[Part]:
    """In the order in which they end."""
    found = []
    for launch in plan.launches:
        if launch.label in _PARTS:
            found += _launch_parts(plan, launch)
        else:
            found.append(Part(launch.label, launch.layer, launch.read_bytes))
    return found


def _launch_parts(plan: Plan, launch: Launch) -> list[Part]:
    """Of every layer that the launch has; without those that a chain leaves out. What is no weight is shared evenly."""
    named = _PARTS[launch.label]
    sizes: dict[str, list[int]] = {field: [] for field in named.values()}
    for field, ref in launch.refs():
        if (array := field.partition("[")[0]) in sizes:
            sizes[array].append(plan.buffer(ref.buffer).bytes)
    layers = max(map(len, sizes.values()))
    if "" in sizes:
        sizes[""] = [(launch.read_bytes - sum(map(sum, sizes.values()))) // layers] * layers
    return [
        Part(f"{launch.label}.{part}", launch.layer + layer, sizes[field][layer])
        for layer in range(layers)
        for part, field in named.items()
        if sizes[field]
    ]


def model_of(engine: Qwen2CudaEngine) -> qwen2.Model:
    """What the engine launches."""
    model = engine._runtime.model
    assert isinstance(model, qwen2.Model)
    return model


def token_plan(engine: Qwen2CudaEngine, context: int) -> Plan:
    """The launches of a token at position `context` but the loop's own, with the bytes that they read there."""
    model = model_of(engine)
    return qwen2_decode.round_of(model, context=context, short=model.is_short(context))
