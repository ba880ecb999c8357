"""Both forms of routing from the same inputs, on one GPU: nano alone and as two ranks, and a share of the released sizes."""

import pytest

from cuq1.cuda.driver import open_device
from cuq1.errors import DeviceError
from tools import check_routing

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def device():
    try:
        open_device()
    except DeviceError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    "argv",
    [
        ["--tp", "1", "--prompts", "3"],
        ["--tp", "2", "--prompts", "3"],
        ["--random", "iquest-q1", "--tp", "8", "--layers", "2", "--prompts", "2", "--tokens", "16"],
    ],
)
def test_both_forms_choose_alike(argv, capsys):
    assert check_routing.main(argv) == 0
    out = capsys.readouterr().out
    ranks, layers = int(argv[argv.index("--tp") + 1]), 1 if "--random" in argv else 5
    assert f"wrong folds noticed: {layers * (3 if ranks > 1 else 2)}" in out
