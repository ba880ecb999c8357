"""The structures that kernels share with the host, read from kernels_cu/abi*.cuh.

There they are declared and described. Pointers are device addresses.
"""

import re
from ctypes import Structure, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64
from functools import cache
from typing import Any

from cuq1.cuda.folders import folder
from cuq1.errors import Cuq1Error

_TYPES = {
    "int": c_int32,
    "int32_t": c_int32,
    "uint32_t": c_uint32,
    "int64_t": c_int64,
    "uint64_t": c_uint64,
    "float": c_float,
    "double": c_double,
}
_FIELD = re.compile(r"(?:const )?(\w+)(\s*\*)?\s*(.*)", re.DOTALL)
_NAME = re.compile(r"(\w+)((?:\[[^]]+\])*)")


@cache
def _header() -> str:
    """The headers, and the types that they include, without comments."""
    sources = folder("kernels_cu")
    paths = (sources / "common" / "types.cuh", *sorted(sources.glob("abi*.cuh")))
    return re.sub(r"//.*", "", "".join(path.read_text(encoding="utf-8") for path in paths))


@cache
def _constants() -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"\b([A-Z]\w+) = (\d+)\b", _header())}


@cache
def _bodies(text: str) -> dict[str, str]:
    """What stands between the braces of each structure."""
    return dict(re.findall(r"^struct (\w+) \{(.*?)^\};", text, re.MULTILINE | re.DOTALL))


def constant(name: str) -> int:
    """The value of a constant or enumerator of the headers. Raises Cuq1Error where they have none."""
    found = _constants().get(name)
    if found is None:
        raise Cuq1Error(f"kernels_cu/abi*.cuh have no constant {name}: they are not this version's")
    return found


def fields(name: str, text: str | None = None) -> list[tuple[str, Any]]:
    """ctypes' `_fields_` of a structure of the headers: types of four and eight bytes, pointers, and arrays of these.

    text: another header instead. Raises Cuq1Error where the structure is missing, or holds anything else.
    """
    body = _bodies(_header() if text is None else text).get(name)
    if body is None:
        raise Cuq1Error(f"kernels_cu/abi*.cuh have no structure {name}: they are not this version's")
    found: list[tuple[str, Any]] = []
    for statement in filter(None, map(str.strip, body.split(";"))):
        declared = _FIELD.fullmatch(statement)
        kind = declared and (c_uint64 if declared[2] else _TYPES.get(declared[1]))
        names = [_NAME.fullmatch(part.strip()) for part in declared[3].split(",")] if declared else [None]
        for named in names:
            if kind is None or named is None:
                raise Cuq1Error(f"kernels_cu/abi*.cuh: {name} has a field that ctypes is not told of: {statement!r}")
            whole: Any = kind
            for size in reversed(re.findall(r"[^][]+", named[2])):
                whole = whole * _size(size)
            found.append((named[1], whole))
    return found


def _size(text: str) -> int:
    """Of `32`, `ROWS` or `MAX_DRAFTS - MIN_AUTO_DRAFTS`."""
    first, *less = (int(part) if part.isdigit() else constant(part) for part in map(str.strip, text.split("-")))
    return first - sum(less)


def _structure(name: str) -> type[Structure]:
    return type(name, (Structure,), {"_fields_": fields(name)})


MAX_DRAFTS = constant("MAX_DRAFTS")
MIN_AUTO_DRAFTS = constant("MIN_AUTO_DRAFTS")
MAX_TOP_K = constant("MAX_TOP_K")
FEATURES = constant("FEATURES")
ROWS = constant("ROWS")
MAX_STOPS = constant("MAX_STOPS")
LOG_RECORDS = constant("LOG_RECORDS")
GRAPHS = constant("GRAPHS")
ROUTED_COPIES = constant("ROUTED_COPIES")
MAX_RANKS = constant("MAX_RANKS")
INBOXES = constant("INBOXES")
STATUS_WORDS = constant("STATUS_WORDS")
DEFAULT_PEER_TIMEOUT_MS = constant("DEFAULT_PEER_TIMEOUT_MS")

END_NONE, END_STOP, END_LENGTH, END_CANCELLED, END_FAULT, END_PAUSED, END_LAUNCH = (
    constant(f"END_{name}") for name in ("NONE", "STOP", "LENGTH", "CANCELLED", "FAULT", "PAUSED", "LAUNCH")
)

FAULTS = {
    1: "a value that is not finite",
    2: "a copy that did not arrive",
    3: "a token outside the vocabulary",
    4: "routing that did not come",
    5: "a result that did not arrive",
    6: "a peer's part that did not arrive",
    7: "a position without a free page of the KV cache",
}
KERNELS = {
    number: name.removeprefix("KERNEL_").lower() for name, number in _constants().items() if name.startswith("KERNEL_")
}


class Fault(Structure):
    _fields_ = fields("Fault")


class State(Structure):
    _fields_ = fields("State")


class Record(Structure):
    _fields_ = fields("Record")


class ExchangeFound(Structure):
    _fields_ = fields("ExchangeFound")


class Loop(Structure):
    _fields_ = fields("Loop")


class Mirror(Structure):
    _fields_ = fields("Mirror")


EmbedArgs = _structure("EmbedArgs")
QkvArgs = _structure("QkvArgs")
AttentionArgs = _structure("AttentionArgs")
ShortAttentionArgs = _structure("ShortAttentionArgs")
CombineArgs = _structure("CombineArgs")
OProjArgs = _structure("OProjArgs")
AttnTailArgs = _structure("AttnTailArgs")
RouterArgs = _structure("RouterArgs")
RouteArgs = _structure("RouteArgs")
GateUpArgs = _structure("GateUpArgs")
DownArgs = _structure("DownArgs")
MlpTailArgs = _structure("MlpTailArgs")
LmHeadArgs = _structure("LmHeadArgs")
TopKArgs = _structure("TopKArgs")
ControlArgs = _structure("ControlArgs")
AcceptArgs = _structure("AcceptArgs")
DraftSampleArgs = _structure("DraftSampleArgs")
EhProjArgs = _structure("EhProjArgs")
RearmArgs = _structure("RearmArgs")
MulticastSendArgs = _structure("MulticastSendArgs")
MulticastTailArgs = _structure("MulticastTailArgs")
ExchangeProbeArgs = _structure("ExchangeProbeArgs")
ExchangePushArgs = _structure("ExchangePushArgs")
BandwidthArgs = _structure("BandwidthArgs")
PackArgs = _structure("PackArgs")
FoldArgs = _structure("FoldArgs")
FillArgs = _structure("FillArgs")
PrefillRopeArgs = _structure("PrefillRopeArgs")
PrefillQkvArgs = _structure("PrefillQkvArgs")
PrefillRingArgs = _structure("PrefillRingArgs")
PrefillAttentionArgs = _structure("PrefillAttentionArgs")
PrefillMergeArgs = _structure("PrefillMergeArgs")
PrefillLinearArgs = _structure("PrefillLinearArgs")
PrefillRouterArgs = _structure("PrefillRouterArgs")
PrefillRouteArgs = _structure("PrefillRouteArgs")
PrefillTile = _structure("PrefillTile")
PrefillGroupArgs = _structure("PrefillGroupArgs")
PrefillGateUpArgs = _structure("PrefillGateUpArgs")
PrefillDownArgs = _structure("PrefillDownArgs")
PrefillCombineArgs = _structure("PrefillCombineArgs")
PrefillEntryArgs = _structure("PrefillEntryArgs")
PrefillNormArgs = _structure("PrefillNormArgs")
PAGE = constant("PAGE")


class Pages(Structure):
    _fields_ = fields("Pages")


Qwen2EmbedArgs = _structure("Qwen2EmbedArgs")
Qwen2QkvArgs = _structure("Qwen2QkvArgs")
Qwen2AttentionArgs = _structure("Qwen2AttentionArgs")
Qwen2CombineArgs = _structure("Qwen2CombineArgs")
Qwen2ProjectionArgs = _structure("Qwen2ProjectionArgs")
Qwen2GateUpArgs = _structure("Qwen2GateUpArgs")
Qwen2ChainArgs = _structure("Qwen2ChainArgs")
QWEN2_LAYERS = constant("QWEN2_LAYERS")
Qwen2LayersArgs = _structure("Qwen2LayersArgs")
Qwen2NormArgs = _structure("Qwen2NormArgs")
Qwen2HeadArgs = _structure("Qwen2HeadArgs")
Qwen2PrefillEmbedArgs = _structure("Qwen2PrefillEmbedArgs")
Qwen2PrefillNormArgs = _structure("Qwen2PrefillNormArgs")
Qwen2PrefillQkvArgs = _structure("Qwen2PrefillQkvArgs")
Qwen2PrefillAttentionArgs = _structure("Qwen2PrefillAttentionArgs")
Qwen2PrefillProjectionArgs = _structure("Qwen2PrefillProjectionArgs")
Qwen2PrefillGateUpArgs = _structure("Qwen2PrefillGateUpArgs")
