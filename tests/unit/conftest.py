"""Random checkpoints that several test modules share."""

import pytest

from tools.make_checkpoint import tiny_config, write_checkpoint


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A folder with a random model: sliding window 24 (a ring of 88), draft window 8 (a ring of 72), context 512."""
    target, draft = tiny_config()
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny", target, draft, seed=5)
