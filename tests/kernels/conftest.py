"""The GPU that kernel tests run on."""

import pytest

from cuq1.errors import DeviceError
from tests.kernels.harness import Gpu


@pytest.fixture(scope="session")
def gpu():
    """The first GPU; tests that ask for it are skipped where it, its driver or CuPy is missing."""
    try:
        found = Gpu()
    except DeviceError as error:
        pytest.skip(str(error))
    yield found
    found.close()
