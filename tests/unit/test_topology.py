"""How GPUs are linked, as a recorded driver tells it."""

# ruff: noqa: N802  (the driver names its functions)

import json
from types import SimpleNamespace

import pytest

from cuq1.errors import DeviceError
from cuq1.parallel import topology

NVLINK, PCIE, NONE = (1, 1, 0), (1, 0, 1), (0, 0, 2)  # access, native atomics, performance rank


class Driver:
    """As many GPUs as `links` has rows; links[i][j] from GPU i to GPU j."""

    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=9,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=0,
        CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED=1,
    )
    CUdevice_P2PAttribute = SimpleNamespace(
        CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED=1, CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK=2
    )

    def __init__(self, links):
        self.links = links

    def cuDeviceGetCount(self):
        return 0, len(self.links)

    def cuDeviceGet(self, ordinal):
        return 0, ordinal

    def cuDeviceGetName(self, size, device):
        return 0, b"NVIDIA H200".ljust(size, b"\0")

    def cuDeviceGetPCIBusId(self, size, device):
        return 0, f"0000:{device + 1:02X}:00.0".encode().ljust(size, b"\0")

    def cuDeviceGetAttribute(self, attribute, device):
        return 0, attribute

    def cuDeviceCanAccessPeer(self, one, other):
        assert one != other
        return 0, self.links[one][other][0]

    def cuDeviceGetP2PAttribute(self, attribute, one, other):
        return 0, self.links[one][other][attribute]


@pytest.fixture
def visible(monkeypatch, tmp_path):
    """Makes GPUs with these links the visible ones; the second of them hangs on no NUMA node."""

    def show(links):
        for number in range(len(links)):
            folder = tmp_path / f"0000:{number + 1:02x}:00.0"
            folder.mkdir(exist_ok=True)
            (folder / "numa_node").write_text("-1\n" if number == 1 else "0\n")
        monkeypatch.setattr(topology, "PCI_DEVICES", tmp_path)
        monkeypatch.setattr(topology, "bindings", lambda: Driver(links))

    return show


def test_a_table_of_two_gpus(visible, capsys):
    visible([[None, NVLINK], [NVLINK, None]])
    assert topology.main([]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "GPU  name         PCI           NUMA  multicast  0       1",
        "0    NVIDIA H200  0000:01:00.0  0     yes        -       NVLink",
        "1    NVIDIA H200  0000:02:00.0  ?     yes        NVLink  -",
        "2 GPUs can push into each other's memory: --tp 2 can run on them.",
    ]


@pytest.mark.parametrize(
    ("links", "group", "verdict"),
    [
        ([[None]], [0], "One GPU is visible: there is nothing to exchange."),
        ([[None, NONE], [NONE, None]], [0], "No two GPUs can access each other's memory (no NVLink or peer-to-peer)"),
        ([[None, NVLINK], [NONE, None]], [0], "No two GPUs can access each other's memory"),  # one way is not enough
        ([[None, PCIE], [PCIE, None]], [0, 1], "2 GPUs can push into each other's memory, some over PCIe, which is"),
        (
            [[None, NONE, NVLINK], [NONE, None, NONE], [NVLINK, NONE, None]],
            [0, 2],
            "2 GPUs (0, 2) can push into each other's memory: --tp 2 can run on them.",
        ),
    ],
)
def test_which_exchange_is_possible(visible, capsys, links, group, verdict):
    visible(links)
    assert topology.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["group"] == group
    assert found["verdict"].startswith(verdict)
    assert [gpu["numa"] for gpu in found["gpus"]] == [0, None, 0][: len(links)]


def test_at_most_as_many_as_can_exchange(visible):
    visible([[NVLINK if other != one else None for other in range(10)] for one in range(10)])
    assert topology.read().group() == tuple(range(8))


@pytest.mark.parametrize("missing", ["NVIDIA's driver, which is not installed on this machine: install it", "a GPU"])
def test_without_a_driver_it_is_one_sentence(monkeypatch, capsys, missing):
    def bindings():
        raise DeviceError(f"device cuda needs {missing}, or use --device cpu")

    monkeypatch.setattr(topology, "bindings", bindings)
    assert topology.main([]) == 2
    assert capsys.readouterr().err == f"cuq1.parallel.topology: device cuda needs {missing}\n"
