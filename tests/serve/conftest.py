import pytest

pytest.importorskip("uvicorn", reason="the server's packages are not installed (cuq1[serve])")

from tests.serve.running import LIMIT, nano_service, serving


@pytest.fixture(scope="session")
def service():
    """A service on nano for the whole session."""
    service = nano_service()
    yield service
    assert service.close(drain=False, timeout=LIMIT)


@pytest.fixture(scope="session")
def base_url(service):
    """Where that service answers."""
    with serving(service) as url:
        yield url
