"""A plan: the launches of one pass over named buffers. Printable and checked without a GPU."""

from collections.abc import Iterator, Mapping
from ctypes import Array, Structure, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64
from dataclasses import dataclass, field, replace
from typing import Any

from cuq1.plan.kernel import Define, Kernel

_INTEGERS: dict[Any, tuple[int, int]] = {
    c_int32: (-(2**31), 2**31 - 1),
    c_uint32: (0, 2**32 - 1),
    c_int64: (-(2**63), 2**63 - 1),
}


@dataclass(frozen=True)
class Buffer:
    """Memory of the device. dtype: NumPy's name of it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True)
class Ref:
    """An address: `offset` bytes into a buffer."""

    buffer: str
    offset: int = 0


Value = int | float | Ref | tuple[Ref | int, ...]
Defines = tuple[tuple[str, Define], ...]


@dataclass(frozen=True)
class Launch:
    """One kernel with its arguments.

    label: what it computes, as printed; layer: -1 for the draft's; args: every field of kernel.args but `reserved`,
    pointers as Ref or 0 for null, arrays of pointers as tuples of these, with nulls behind a shorter one; read_bytes,
    write_bytes: memory traffic, each byte once; variant: what distinguishes it from the same label elsewhere, as
    "sliding".
    """

    kernel: Kernel
    label: str
    layer: int
    args: dict[str, Value]
    read_bytes: int
    write_bytes: int
    variant: str = ""

    def refs(self) -> Iterator[tuple[str, Ref]]:
        """(field, address) of every pointer that isn't null; of an array's, the field is `name[place]`."""
        for name, value in self.args.items():
            if isinstance(value, Ref):
                yield name, value
            elif isinstance(value, tuple):
                yield from ((f"{name}[{place}]", item) for place, item in enumerate(value) if isinstance(item, Ref))

    def structure(self, addresses: Mapping[str, int]) -> Structure:
        """The arguments with every Ref replaced by its address. Raises KeyError for a buffer without one."""
        found = self.kernel.args()
        for name, value in self.args.items():
            set_field(found, name, value, addresses)
        return found


def set_field(args: Structure, name: str, value: Value, addresses: Mapping[str, int]) -> None:
    """Writes an argument into a kernel's structure, every Ref as its address; places of an array behind a tuple stay.

    Raises KeyError for a buffer without an address.
    """
    if not isinstance(value, tuple):
        setattr(args, name, _bound(value, addresses))
        return
    array = getattr(args, name)
    for place, item in enumerate(value):
        array[place] = _bound(item, addresses)


def _bound(value: int | float | Ref, addresses: Mapping[str, int]) -> int | float:
    return addresses[value.buffer] + value.offset if isinstance(value, Ref) else value


@dataclass(frozen=True)
class Plan:
    """Launches in order, and every buffer that they name.

    Raises ValueError for a field or buffer that does not exist, a field that is missing or of another type, an offset
    outside its buffer, and for names that occur twice.
    """

    buffers: tuple[Buffer, ...]
    launches: tuple[Launch, ...]
    _by_name: dict[str, Buffer] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        for buffer in self.buffers:
            if buffer.name in self._by_name:
                raise ValueError(f"two buffers are named {buffer.name}")
            if buffer.bytes < 1:
                raise ValueError(f"buffer {buffer.name} has {buffer.bytes} bytes")
            self._by_name[buffer.name] = buffer
        for number, launch in enumerate(self.launches):
            try:
                _check(launch, self._by_name)
            except ValueError as error:
                raise ValueError(f"launch {number} ({launch.label}, layer {launch.layer}): {error}") from None

    def buffer(self, name: str) -> Buffer:
        return self._by_name[name]

    def total_bytes(self) -> int:
        """Bytes that all buffers take."""
        return sum(buffer.bytes for buffer in self.buffers)

    def read_bytes(self) -> int:
        """Bytes that all launches read."""
        return sum(launch.read_bytes for launch in self.launches)

    def with_defines(self, more: Mapping[str, Defines]) -> "Plan":
        """The plan with further -D constants for the kernels of some labels ("*" for all): for tools and tests."""
        if not more:
            return self
        launches = []
        for launch in self.launches:
            defines = (*launch.kernel.defines, *more.get("*", ()), *more.get(launch.label, ()))
            launches.append(replace(launch, kernel=replace(launch.kernel, defines=defines)))
        return Plan(self.buffers, tuple(launches))

    def kernels(self) -> list[Kernel]:
        """Each kernel once, in order of first use."""
        return list(dict.fromkeys(launch.kernel for launch in self.launches))


def _check(launch: Launch, buffers: dict[str, Buffer]) -> None:
    # ctypes allows a third item, a bit width; no structure here uses it.
    fields = {name: kind for name, kind, *_ in launch.kernel.args._fields_}
    wanted = {name for name in fields if not name.startswith("reserved")}
    missing, unknown = sorted(wanted - launch.args.keys()), sorted(launch.args.keys() - fields.keys())
    if unknown:
        raise ValueError(f"{launch.kernel.args.__name__} has no field {', '.join(unknown)}")
    if missing:
        raise ValueError(f"no value for {', '.join(missing)} of {launch.kernel.args.__name__}")
    for name, value in launch.args.items():
        _check_value(name, fields[name], value)
    for name, ref in launch.refs():
        if ref.buffer not in buffers:
            raise ValueError(f"{name} refers to {ref.buffer}, which is no buffer of this plan")
        size = buffers[ref.buffer].bytes
        if not 0 <= ref.offset < size:
            raise ValueError(f"{name} lies {ref.offset} bytes into {ref.buffer}, which has {size}")


def _check_value(name: str, kind: Any, value: Value) -> None:
    if issubclass(kind, Array):
        if kind._type_ is not c_uint64 or not isinstance(value, tuple):
            raise ValueError(f"{name} is an array: of these, arguments are tuples of pointers alone, not {value!r}")
        if len(value) > kind._length_:
            raise ValueError(f"{name} has {kind._length_} places, not {len(value)}")
        for place, item in enumerate(value):
            _check_value(f"{name}[{place}]", kind._type_, item)
        return
    if isinstance(value, tuple):
        raise ValueError(f"{name} is no array: give one value, not {value!r}")
    if kind is c_uint64:  # every 64-bit unsigned field of a kernel in a plan is a pointer
        if not isinstance(value, Ref) and value != 0:
            raise ValueError(f"{name} is a pointer: give a Ref or 0, not {value!r}")
        return
    if isinstance(value, Ref):
        raise ValueError(f"{name} is no pointer: give a number, not {value!r}")
    if kind in (c_float, c_double):
        return
    if kind in _INTEGERS:
        low, high = _INTEGERS[kind]
        if not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"{name} is an integer from {low} to {high}, not {value!r}")
