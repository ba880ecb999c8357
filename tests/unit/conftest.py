"""Checkpoints and command line calls that several test modules share."""

import json

import pytest
from hypothesis import HealthCheck, settings

from cuq1.generate import main
from tests.paths import NANO
from tools.make_checkpoint import tiny_config, write_checkpoint

# How long an example takes depends on what else the machine does.
settings.register_profile("cuq1", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("cuq1")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A folder with a random model: sliding window 24 (a ring of 88), draft window 8 (a ring of 72), context 512."""
    target, draft = tiny_config()
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny", target, draft, seed=5)


@pytest.fixture
def generate(capsys):
    """In this process: (status, stdout, stderr) of one call."""

    def call(*args):
        status = main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.fixture
def files(tmp_path):
    """Writes JSON or bytes to a file and returns its path."""

    def write(name, value):
        path = tmp_path / name
        path.write_bytes(value if isinstance(value, bytes) else json.dumps(value).encode())
        return path

    return write


@pytest.fixture
def model(tmp_path):
    """A copy of nano whose files can be replaced."""
    folder = tmp_path / "model"
    (folder / "mtp").mkdir(parents=True)
    for path in NANO.rglob("*"):
        if path.is_file():
            (folder / path.relative_to(NANO)).symlink_to(path)
    return folder
