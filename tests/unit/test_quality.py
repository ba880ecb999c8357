"""What INT4 costs nano lies within what its rounding explains, and what a mistake costs does not."""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest

from cuq1.checkpoint import int4
from cuq1.engine import open_engine
from tests.commands import ROOT
from tools import check_quality
from tools.bench import NANO
from tools.check_cuda import perplexity
from tools.checkpoint_qwen2 import qwen2_config
from tools.make_checkpoint import write_qwen2_checkpoint
from tools.quality import Cost, Measure, exchanged, floored, random_signs, rounded, scaled, unchanged

# The same draws in every run, and a wide interval: nothing but a mistake may fail, which lies much further out.
DRAWS, SHARE = 8, 0.9999


@pytest.fixture(scope="module")
def measure():
    """Text that nano has not seen."""
    subject, tokenizer = check_quality.opened(NANO)
    text = (ROOT / "cuq1" / "reference" / "ops.py").read_text(encoding="utf-8")
    ids = np.asarray(tokenizer.encode(text, control=False))[:512]
    return Measure(subject, [ids[:256], ids[256:]])


@pytest.fixture(scope="module")
def draws(measure):
    return [measure.cost(random_signs(np.random.default_rng(seed))) for seed in range(DRAWS)]


def test_rounding_explains_what_int4_costs(measure, draws):
    cost = measure.cost(rounded)
    assert check_quality.explained(cost, draws, SHARE), (cost, draws)
    assert 0 < cost.divergence < 0.1


@pytest.mark.parametrize("mistake", [scaled(1.1), scaled(0.9), floored, exchanged])
def test_mistakes_are_not_explained(measure, draws, mistake):
    assert not check_quality.explained(measure.cost(mistake), draws, SHARE)


def test_signs_keep_each_errors_size(measure):
    rng = np.random.default_rng()
    matrix = rng.standard_normal((37, 300)).astype(np.float32)
    error = rounded(matrix) - matrix
    moved = random_signs(rng)(matrix) - matrix
    np.testing.assert_allclose(np.abs(moved), np.abs(error), atol=1e-6)
    assert abs(float(np.sign(moved * error).mean())) < 5 / matrix.size**0.5
    codes, scales = int4.quantise(matrix)
    assert np.array_equal(rounded(matrix), int4.dequantise(int4.pack(codes), scales, 300))


def test_no_change_costs_nothing(measure):
    cost = measure.cost(unchanged)
    assert (cost.loss, cost.divergence) == (0, 0)
    head = measure.cost(unchanged, rounded)
    assert 0 < head.divergence < measure.cost(rounded, rounded).divergence


def test_the_loss_is_that_of_the_engine(measure):
    """Against perplexity as another tool computes it."""
    with open_engine(NANO, "cpu") as engine:
        pieces = measure._pieces
        expected = perplexity([engine.score(piece.tolist()) for piece in pieces], [p.tolist() for p in pieces])
    assert measure.perplexity == pytest.approx(expected, rel=1e-4)


def test_an_interval_holds_the_next_draw_as_often_as_it_says():
    rng = np.random.default_rng()
    low, high = np.transpose([check_quality.interval(list(sample)) for sample in rng.standard_normal((4000, 6))])
    inside = (low < (drawn := rng.standard_normal(4000))) & (drawn < high)
    assert 0.995 < inside.mean() < 1
    assert check_quality.interval([1.0, 2.0, 3.0])[0] < -20  # few draws say little


def test_the_command_takes_qwen2_folders(tmp_path, capsys, monkeypatch):
    """A random model is measured as a trained one is; its figures fit, mistakes included, or the status says no."""
    logged = []
    monkeypatch.setattr(check_quality, "append_row", lambda name, row: logged.append((name, row)))
    folder = write_qwen2_checkpoint(tmp_path / "hf", qwen2_config("qwen2.5-coder-0.5b-tiny"))
    (tmp_path / "text.py").write_text("def f(x):\n    return x + 1\n" * 20)
    options = ["--model", str(folder), "--text", str(tmp_path / "text.py"), "--piece", "40", "--draws", "4", "--log"]
    status = check_quality.main(options)
    out = capsys.readouterr().out
    assert "layers and lm_head" in out
    ((name, row),) = logged
    assert out.count("PROBLEM: ") == len(row["problems"]) == row["failed"]
    assert (name, status) == ("quality", int(row["failed"] > 0))
    assert json.loads(json.dumps(row))["tokens"] > 100
    assert check_quality.main(["--model", str(tmp_path / "none")]) == 2
    (tmp_path / "short.py").write_text("a")
    assert check_quality.main(["--model", str(folder), "--text", str(tmp_path / "short.py")]) == 2
    (tmp_path / "binary.py").write_bytes(b"\xff")
    capsys.readouterr()
    for name in ("binary.py", "none.py"):
        assert check_quality.main(["--model", str(folder), "--text", str(tmp_path / name)]) == 2
        assert f"{tmp_path / name} cannot be read as UTF-8 text" in capsys.readouterr().err


def test_a_status_that_is_not_0_has_its_reason(monkeypatch):
    """Costs as draws have them, but for one mistake's; the other one is none, and is not noticed."""
    values = itertools.cycle([(1.0, 2.0), (1.1, 2.1), (0.9, 1.9)])
    large = scaled(2.0)
    measure = SimpleNamespace(
        tokens=9, perplexity=3.0, cost=lambda change, head=None: Cost(*((9, 9) if change is large else next(values)))
    )
    monkeypatch.setattr(check_quality, "MISTAKES", {"large": large, "none at all": rounded})
    found = check_quality.report(measure, 6)
    assert (found["failed"], found["problems"]) == (1, ["none at all: not noticed"])
    assert check_quality.lines(found)[-1] == "PROBLEM: none at all: not noticed"
    monkeypatch.setattr(check_quality, "MISTAKES", {"large": large})
    found = check_quality.report(measure, 6)
    assert found["failed"] == 0
    assert "PROBLEM" not in "".join(check_quality.lines(found))
