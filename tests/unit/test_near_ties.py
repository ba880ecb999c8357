"""Greedy output against the reference, without a GPU: the reference itself with small and with large errors."""

import json
import re
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest

from cuq1.checkpoint.qwen2 import open_qwen2
from cuq1.errors import DeviceError
from cuq1.pack import pack
from cuq1.reference.qwen2_engine import Qwen2Engine
from tests.paths import ROOT
from tools import check_qwen2
from tools.checkpoint_qwen2 import qwen2_config
from tools.make_checkpoint import write_qwen2_checkpoint
from tools.near_ties import Comparison, Place


class Rounded(Qwen2Engine):
    """The reference with a relative error of each row of logits, as a GPU's: the same wherever the row is computed.

    wrong: every third position has another token. Rows that are verified are kept, as in caches.
    """

    error, wrong = 0.0, False

    def _blurred(self, row, position):
        noise = np.random.default_rng(position).standard_normal(row.shape).astype(np.float32)
        return row + noise * np.float32(self.error * np.linalg.norm(row) / row.size**0.5)

    def _next(self, params, seed, *, from_prompt):
        self._catch_up(self.chunk)
        self._logits = self._blurred(self._logits, len(self._tokens))
        one = super()._next(params, seed, from_prompt=from_prompt)
        if self.wrong and len(self._tokens) % 3 == 0:
            (token,) = one
            return type(one)(((token + 1) % 500,), 0, 0, from_prompt=from_prompt)
        return one

    def score(self, ids):
        return np.stack([self._blurred(row, i + 1) for i, row in enumerate(super().score(ids))])

    def prefill(self, ids, **more):
        self._fed = list(ids)
        return super().prefill(ids, **more)

    def verified_rows(self, rows, start):
        self._fed = [*self._fed[:start], *rows]
        return self.score(self._fed)[-len(rows) :]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    base = tmp_path_factory.mktemp("m")
    pack(write_qwen2_checkpoint(base / "hf", qwen2_config("qwen2.5-coder-0.5b-tiny")), base / "m.nanoqwen")
    return base / "m.nanoqwen"


@pytest.fixture
def run(file, monkeypatch, capsys):
    """check_qwen2 graph on the file with an engine of such errors: status, output, logged row."""

    def call(error, *argv, wrong=False):
        rows = []

        def opened(model, device, *, context):
            assert device == "cuda"
            engine = Rounded(model, context=context)
            engine.error, engine.wrong = error, wrong
            return engine

        monkeypatch.setattr(check_qwen2, "open_engine", opened)
        monkeypatch.setattr(check_qwen2, "append_row", lambda name, row: rows.append((name, row)))
        options = ["graph", "--model", str(file), "--prompts", "6", "--tokens", "12", "--log", *argv]
        status = check_qwen2.main(options)
        return status, capsys.readouterr().out, rows

    return call


def test_rounding_passes_and_near_ties_are_listed(run):
    status, out, ((name, row),) = run(1e-6)
    assert (status, name, row["equal"], row["places"]) == (0, "qwen2", 6, [])
    assert "6 of 6 prompts equal" in out
    assert "graph: passed: 6 prompts, 6 of them equal, 72 tokens" in out
    status, out, ((_, row),) = run(2e-3)
    assert status == 0
    assert 1e-3 < row["row_error_max"] < 3e-3
    assert all(place["gap"] <= 2 * place["error"] for place in row["places"])
    assert out.count("a near tie") == len(row["places"])


@pytest.mark.parametrize(("error", "wrong"), [(3e-2, False), (1e-6, True)])
def test_large_errors_and_other_tokens_fail(run, error, wrong):
    """An engine whose logits are far off explains its own choices; one that takes another token does not."""
    status, out, ((_, row),) = run(error, wrong=wrong)
    assert status == 1
    assert "graph: FAILED" in out
    assert ("NOT EXPLAINED" in out) == wrong
    assert row["failed"] > 0
    assert json.loads(json.dumps(row))


def test_random_models_of_all_shapes_are_made(monkeypatch):
    seen = []

    def judged(path, count, options):
        model = open_qwen2(path)
        seen.append((path.name, count, model.int4_head))
        return Comparison(count, 1, [Place(0, 1, 0.5, 0.1, 3, 4, 3)], [1e-4])

    monkeypatch.setattr(check_qwen2, "judged", judged)
    report = check_qwen2.graph("graph", SimpleNamespace(model=None, prompts=8, tokens=2, seed=1))
    assert [count for _, count, _ in seen] == [2, 2, 1, 1, 1, 1]
    assert {head for _, _, head in seen} == {False, True}
    assert (report["prompts"], report["failed"], report["equal"]) == (8, 6, 2)


def test_prompts_have_all_lengths():
    tokenizer = SimpleNamespace(encode=lambda text, control: [1] * len(text))
    lengths = [len(piece) for piece in check_qwen2.pieces(tokenizer, 400, 3)]
    assert min(lengths) == 1
    assert 300 < max(lengths) <= check_qwen2.LONGEST
    assert sum(length < 25 for length in lengths) > 100


@pytest.mark.parametrize(
    ("code", "output", "failed"),
    [
        (0, "..\n12 passed in 3.00s", 0),
        (1, "FAILED tests/kernels/test_qwen2_rows.py::test_norm\n1 failed, 2 passed in 1s", 1),
        (0, "SKIPPED [12] tests/kernels/conftest.py:9: no GPU\n12 skipped in 0.1s", 1),
        (5, "", 1),
    ],
)
def test_tiers_that_are_tests(monkeypatch, capsys, code, output, failed):
    """What is skipped has not been checked."""
    commands = []

    def run(command, **more):
        commands.append(command)
        return subprocess.CompletedProcess(command, code, output, "no tests ran")

    monkeypatch.setattr(check_qwen2.subprocess, "run", run)
    monkeypatch.setattr(check_qwen2, "require_devices", lambda count: None)
    assert check_qwen2.main(["unit", "layer"]) == (1 if failed else 0)
    assert "gpu" in commands[0]
    assert any("test_qwen2_gemv" in part for part in commands[0])
    assert any("test_qwen2_blocks" in part for part in commands[1])
    out = capsys.readouterr().out
    assert ("FAILED" in out) == bool(failed)
    assert ("no GPU" in out) == ("no GPU" in output)  # why something was skipped


@pytest.mark.parametrize("tier", ["unit", "layer"])
def test_a_tiers_tests_skip_nothing_themselves(tier):
    """With a GPU, a skip would fail the tier for good: cases that are not wanted are no parameters."""
    paths = list(ROOT.glob(check_qwen2.TESTS[tier]))
    assert paths
    assert not [path.name for path in paths if re.search(r"pytest\.(mark\.)?(skip|importorskip)", path.read_text())]


@pytest.mark.parametrize("tier", ["unit", "layer"])
def test_without_a_gpu_no_test_is_started(monkeypatch, capsys, tier):
    def none(count):
        raise DeviceError("device cuda needs an NVIDIA GPU, and the driver sees none")

    monkeypatch.setattr(check_qwen2.subprocess, "run", lambda *args, **more: pytest.fail("tests were started"))
    monkeypatch.setattr(check_qwen2, "require_devices", none)
    assert check_qwen2.main([tier]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "check_qwen2: device cuda needs an NVIDIA GPU, and the driver sees none\n")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["all"], "there is no tier all: choose from unit, layer, graph"),
        (["graph", "--model", "nowhere"], "nowhere"),
        (["graph", "--prompts", "0"], "--prompts"),
    ],
)
def test_bad_options(capsys, argv, says):
    assert check_qwen2.main(argv) == 2
    assert says in capsys.readouterr().err
