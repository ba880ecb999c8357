"""How the visible GPUs are linked, and which exchange among ranks that allows: python -m cuq1.parallel.topology

    GPU  name         PCI           NUMA  multicast  0            1
      0  NVIDIA H200  0000:1b:00.0     0  yes        -            NVLink
      1  NVIDIA H200  0000:43:00.0     1  yes        NVLink       -
    2 GPUs can push into each other's memory: --tp 2 can run on them.

All of it is what the CUDA driver says, except the NUMA node, which Linux does. The driver does not name a link; peers
whose atomics work on each other's memory are linked by NVLink, and peers on PCIe are not. Opens no context: it takes
no memory on any GPU. --json prints one object instead.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path

from cuq1.cli import Parser, guarded
from cuq1.cuda.abi import MAX_RANKS
from cuq1.cuda.driver import bindings, check
from cuq1.errors import DeviceError

PCI_DEVICES = Path("/sys/bus/pci/devices")


@dataclass(frozen=True)
class Gpu:
    """A GPU as this process sees it. bus: PCI domain:bus:device.function. numa: the node that it hangs on, if known."""

    ordinal: int
    name: str
    bus: str
    numa: int | None
    capability: tuple[int, int]
    multicast: bool


@dataclass(frozen=True)
class Link:
    """From one GPU to another's memory. rank: the driver's order of links, 0 the fastest."""

    access: bool
    atomics: bool
    rank: int

    @property
    def name(self) -> str:
        if not self.access:
            return "none"
        return "NVLink" if self.atomics else "PCIe"


@dataclass(frozen=True)
class Topology:
    """The GPUs, and links[i][j] from GPU i to GPU j, None from one to itself."""

    gpus: tuple[Gpu, ...]
    links: tuple[tuple[Link | None, ...], ...]

    def linked(self, one: int, other: int) -> bool:
        """Whether each of two GPUs can store into the other's memory."""
        pair = self.links[one][other], self.links[other][one]
        return all(link is not None and link.access for link in pair)

    def group(self) -> tuple[int, ...]:
        """The most GPUs that are all linked with each other, at most as many as can exchange."""
        for size in range(min(len(self.gpus), MAX_RANKS), 1, -1):
            for chosen in combinations(range(len(self.gpus)), size):
                if all(self.linked(one, other) for one, other in combinations(chosen, 2)):
                    return chosen
        return (0,)

    def verdict(self) -> str:
        """One sentence: which exchange is possible."""
        group = self.group()
        if len(self.gpus) == 1:
            return "One GPU is visible: there is nothing to exchange."
        if len(group) == 1:
            return "No two GPUs can access each other's memory (no NVLink or peer-to-peer): only --tp 1 can run here."
        which = f"{len(group)} GPUs"
        if len(group) < len(self.gpus):
            which += f" ({', '.join(map(str, group))})"
        slow = any(link is not None and not link.atomics for one in group for link in self._among(one, group))
        over = ", some over PCIe, which is slow," if slow else ""
        return f"{which} can push into each other's memory{over}: --tp {len(group)} can run on them."

    def _among(self, one: int, group: Sequence[int]) -> list[Link | None]:
        return [self.links[one][other] for other in group]


def read() -> Topology:
    """The topology of this process's GPUs; raises DeviceError where there is no driver or no GPU."""
    try:
        driver = bindings()
    except DeviceError as error:
        raise DeviceError(str(error).removesuffix(", or use --device cpu")) from None
    devices = [check(driver.cuDeviceGet(ordinal)) for ordinal in range(check(driver.cuDeviceGetCount()))]
    of, between = driver.CUdevice_attribute, driver.CUdevice_P2PAttribute

    def gpu(ordinal: int) -> Gpu:
        def attribute(name: str) -> int:
            return int(check(driver.cuDeviceGetAttribute(getattr(of, f"CU_DEVICE_ATTRIBUTE_{name}"), devices[ordinal])))

        bus = _text(check(driver.cuDeviceGetPCIBusId(32, devices[ordinal]))).lower()
        return Gpu(
            ordinal=ordinal,
            name=_text(check(driver.cuDeviceGetName(128, devices[ordinal]))),
            bus=bus,
            numa=_numa(bus),
            capability=(attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
            multicast=bool(attribute("MULTICAST_SUPPORTED")),
        )

    def link(one: int, other: int) -> Link | None:
        def attribute(name: str) -> int:
            asked = getattr(between, f"CU_DEVICE_P2P_ATTRIBUTE_{name}")
            return int(check(driver.cuDeviceGetP2PAttribute(asked, devices[one], devices[other])))

        if one == other:
            return None
        access = bool(check(driver.cuDeviceCanAccessPeer(devices[one], devices[other])))
        return Link(access, bool(attribute("NATIVE_ATOMIC_SUPPORTED")), attribute("PERFORMANCE_RANK"))

    numbers = range(len(devices))
    return Topology(
        tuple(gpu(ordinal) for ordinal in numbers),
        tuple(tuple(link(one, other) for other in numbers) for one in numbers),
    )


def _text(value: bytes) -> str:
    return value.decode(errors="replace").partition("\0")[0].strip()


def _numa(bus: str) -> int | None:
    try:
        node = int((PCI_DEVICES / bus / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def table(topology: Topology) -> str:
    """The topology in lines."""
    rows = [["GPU", "name", "PCI", "NUMA", "multicast", *(str(gpu.ordinal) for gpu in topology.gpus)]]
    for gpu, links in zip(topology.gpus, topology.links, strict=True):
        numa = "?" if gpu.numa is None else str(gpu.numa)
        row = [str(gpu.ordinal), gpu.name, gpu.bus, numa, "yes" if gpu.multicast else "no"]
        rows.append(row + ["-" if link is None else link.name for link in links])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, topology.verdict()])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = Parser(prog="cuq1.parallel.topology", description="How the visible GPUs are linked.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return guarded("cuq1.parallel.topology", lambda: _run(parser.parse_args(argv)))


def _run(options: argparse.Namespace) -> int:
    topology = read()
    found = {**asdict(topology), "group": topology.group(), "verdict": topology.verdict()}
    print(json.dumps(found) if options.json else table(topology))
    return 0


if __name__ == "__main__":
    sys.exit(main())
