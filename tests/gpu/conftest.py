"""The GPU that tests of whole parts run on."""

from tests.kernels.conftest import gpu  # noqa: F401
