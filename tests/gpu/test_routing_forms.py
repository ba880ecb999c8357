"""Both forms of routing from the same inputs: nano alone and as two ranks, and a layer of the released sizes."""

import pytest

from tools import check_routing

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "argv",
    [
        ["--tp", "1", "--prompts", "3"],
        ["--tp", "2", "--prompts", "3"],
        ["--random", "iquest-q1", "--tp", "8", "--layers", "2", "--prompts", "2", "--tokens", "16"],
    ],
)
def test_both_forms_choose_alike(gpu, argv, capsys):
    assert check_routing.main(argv) == 0
    out = capsys.readouterr().out
    ranks, layers = int(argv[argv.index("--tp") + 1]), 1 if "--random" in argv else 5
    assert f"wrong folds noticed: {layers * (3 if ranks > 1 else 2)}" in out
