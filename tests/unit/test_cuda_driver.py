"""What is said where the GPU, its driver or a package is missing."""

import enum
from types import SimpleNamespace

import pytest

from cuq1.cuda import driver
from cuq1.errors import DeviceError


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100


class nvrtcResult(enum.IntEnum):  # noqa: N801  (the library's name)
    NVRTC_ERROR_COMPILATION = 6


class Bindings(SimpleNamespace):
    """As much of cuda.bindings.driver as a test needs."""

    CUresult = CUresult

    def cuGetErrorName(self, status):  # noqa: N802
        return CUresult.CUDA_SUCCESS, status.name.encode()

    def cuGetErrorString(self, status):  # noqa: N802
        return CUresult.CUDA_SUCCESS, b"out of memory"


def install(monkeypatch, **modules):
    """Lets `require` find these, and nothing else."""

    def import_module(name):
        found = modules.get(name.rpartition(".")[2])
        if found is None:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return found

    monkeypatch.setattr(driver, "import_module", import_module)


@pytest.mark.parametrize("name", ["cupy", "cuda.bindings.driver", "cuda.bindings.nvrtc"])
def test_a_missing_package_names_the_extras(monkeypatch, name):
    install(monkeypatch)
    with pytest.raises(DeviceError) as told:
        driver.require(name)
    message = str(told.value)
    assert message.startswith(f"device cuda needs the Python module {name}, ")
    assert "pip install 'cuq1[cuda12]'" in message
    assert "'cuq1[cuda13]'" in message
    assert "\n" not in message


def test_a_missing_driver_is_one_sentence(monkeypatch):
    def absent(flags):
        raise RuntimeError("libcuda.so.1\nnot found\nanywhere")

    install(monkeypatch, driver=Bindings(cuInit=absent))
    with pytest.raises(
        DeviceError, match=r"^device cuda needs NVIDIA's driver, which is not installed on this machine: "
    ):
        driver.bindings.__wrapped__()


def test_a_missing_gpu_is_one_sentence(monkeypatch):
    install(monkeypatch, driver=Bindings(cuInit=lambda flags: (CUresult.CUDA_ERROR_NO_DEVICE,)))
    with pytest.raises(DeviceError, match="the driver sees none: check CUDA_VISIBLE_DEVICES"):
        driver.bindings.__wrapped__()


@pytest.mark.parametrize("ordinal", [-1, 2])
def test_a_gpu_that_does_not_exist_is_refused(monkeypatch, ordinal):
    fake = Bindings(cuDeviceGetCount=lambda: (CUresult.CUDA_SUCCESS, 2))
    monkeypatch.setattr(driver, "bindings", lambda: fake)
    with pytest.raises(DeviceError, match=f"^GPU {ordinal} does not exist: the driver sees 2, numbered from 0$"):
        driver.open_device(ordinal)


def test_an_architecture_without_kernels_is_refused():
    assert driver.architecture("NVIDIA H200", (9, 0)) == "sm_90a"
    for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
        with pytest.raises(DeviceError, match=r"which cuq1 has no kernels: use a GPU of compute capability 9\.0"):
            driver.architecture("some GPU", capability)


def test_results_are_unpacked_and_statuses_raised(monkeypatch):
    install(monkeypatch, driver=Bindings(), nvrtc=SimpleNamespace(nvrtcGetErrorString=lambda status: (0, status.name)))
    assert driver.check((CUresult.CUDA_SUCCESS,)) is None
    assert driver.check((CUresult.CUDA_SUCCESS, 7)) == 7
    assert driver.check((CUresult.CUDA_SUCCESS, 7, 8)) == (7, 8)
    with pytest.raises(DeviceError, match=r"failed with CUDA_ERROR_OUT_OF_MEMORY \(out of memory\)"):
        driver.check((CUresult.CUDA_ERROR_OUT_OF_MEMORY, None))
    with pytest.raises(DeviceError, match="NVRTC failed with NVRTC_ERROR_COMPILATION"):
        driver.check((nvrtcResult.NVRTC_ERROR_COMPILATION,))
