"""python -m cuq1.inspect DIR --plan: from the configs alone, on a machine without any GPU library."""

import json
import subprocess
import sys

import pytest

from cuq1.config import load_config
from cuq1.inspect.__main__ import main
from cuq1.inspect.plan import _places
from cuq1.plan.cost import pushed_bytes, target_cost
from tests.paths import NANO, RELEASED, ROOT


def shown(capsys, *arguments):
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert (status, captured.err) == (0, "")
    return captured.out


def test_the_released_round_is_printed_with_identical_layers_on_one_line(capsys):
    text = shown(capsys, RELEASED, "--plan", "--tp", 8, "--rank", 3)
    lines = text.splitlines()
    assert "a round of rank 3 of 8, 8 rows verified, 5 drafts, context 1024, 37.7 distinct experts a layer" in lines[0]
    assert len(lines) < 60
    (moe,) = [line for line in lines if line.split()[0:2] == ["attn_tail", "1-87"]]
    assert moe.split()[2] == "87"
    entries = [line.split() for line in lines if line.strip().startswith("eh_proj")]
    assert [line[1:3] for line in entries] == [["draft", "1"], ["draft", "4"]]  # the first depth's has more rows
    assert lines[-2].split()[1] == "launches"


def test_what_goes_to_the_peers_is_printed(capsys):
    lines = shown(capsys, RELEASED, "--plan", "--tp", 8, "--rows", 8, "--link", "400GB/s").splitlines()
    (head,) = (line.split() for line in lines if line.split()[:1] == ["launch"])
    assert head[-4:] == ["pushes", "us", "each", "us"]
    # 8 rows of 3072 and twice 256 floats, to each of 7 peers
    (o_proj,) = (line.split() for line in lines if line.split()[:2] == ["o_proj", "1-87"])
    assert o_proj[-4:] == ["803", "kB", "2.01", "174.6"]
    assert lines[-1] == "they push 133 MB to 7 peers: 332.0 us at 400 GB/s"
    alone = shown(capsys, NANO, "--plan")
    assert "push" not in alone


@pytest.mark.parametrize(("folder", "tp"), [(RELEASED, 8), (NANO, 2), (NANO, 1)])
@pytest.mark.parametrize("rows", [1, 6])
def test_pushed_bytes_are_what_the_cost_model_counts(capsys, folder, tp, rows):
    found = json.loads(shown(capsys, folder, "--plan", "--tp", tp, "--rows", rows, "--json"))
    launches = found["launches"]
    config, _ = load_config(folder)
    layers = sum(launch["pushed_bytes"] for launch in launches if 0 <= launch["layer"] < config.num_layers)
    assert layers == pushed_bytes(config, tp, rows)
    assert found["pushed_bytes"] == sum(launch["pushed_bytes"] for launch in launches)
    assert found["link_us"] == pytest.approx(found["pushed_bytes"] / found["link_bandwidth"] * 1e6)
    assert {launch["label"] for launch in launches if launch["pushed_bytes"] > 0} == (
        {"o_proj", "down", "eh_proj", "top_k"} if tp > 1 else set()
    )


@pytest.mark.parametrize(
    ("folder", "tp", "distinct"), [(RELEASED, 8, 37.7), (RELEASED, 8, 8), (NANO, 1, 20), (NANO, 2, 8)]
)
def test_every_launch_is_listed_and_adds_up(capsys, folder, tp, distinct):
    found = json.loads(shown(capsys, folder, "--plan", "--tp", tp, "--distinct", distinct, "--json"))
    launches = found["launches"]
    assert found["read_bytes"] == sum(launch["read_bytes"] for launch in launches)
    assert found["floor_us"] == pytest.approx(sum(launch["floor_us"] for launch in launches))
    assert found["floor_us"] == pytest.approx(found["read_bytes"] / found["bandwidth"] * 1e6)
    # the target's part is what the model's costs say, but for scales, norms, tables and activations
    config, _ = load_config(folder)
    target = sum(launch["read_bytes"] for launch in launches if launch["layer"] >= 0)
    cost = target_cost(config, tp, distinct).total
    assert 0.98 * cost < target < (1.1 if folder == RELEASED else 1.6) * cost


def test_fewer_rows_cost_fewer_experts(capsys):
    reads = [
        json.loads(shown(capsys, RELEASED, "--plan", "--tp", 8, "--rows", rows, "--json"))["read_bytes"]
        for rows in (1, 8)
    ]
    assert reads[0] < 0.5 * reads[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--plan", "--rank", 8, "--tp", 8], "rank 8 is outside tp 8: choose one from 0 to 7"),
        (["--plan", "--rank", -1], "rank -1 is outside tp 1: choose one from 0 to 0"),
        (["--plan", "--rows", 0], "a round verifies 1 to 8 rows, not 0"),
        (["--plan", "--rows", 9], "a round verifies 1 to 8 rows, not 9"),
        (["--plan", "--context", 0], "context 0 is outside this round's: choose one from 8 to"),
        (["--plan", "--distinct", 7], "8 rows choose 8 to 64 distinct experts a layer, not 7"),
        (["--plan", "--distinct", "nan"], "8 rows choose 8 to 64 distinct experts a layer, not nan"),
        (["--plan", "--rows", 1, "--distinct", 9], "1 rows choose 8 to 8 distinct experts a layer, not 9"),
        (["--plan", "--tp", 0], "tp 0 must be from 1"),
        (["--plan", "--tp", 7], "tp 7 does not divide this model"),
        (["--rank", 0], "--rank, --rows, --distinct and --link choose what --plan prints"),
        (["--rows", 3], "--rank, --rows, --distinct and --link choose what --plan prints"),
        (["--link", "1GB/s"], "--rank, --rows, --distinct and --link choose what --plan prints"),
        (["--plan", "--link", "0"], "'0' is not a bandwidth"),
        (["--plan", "--tp", 16], "16 ranks are more than exchange their results: choose at most 8"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(capsys, arguments, message):
    assert main([str(RELEASED), *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


BLOCKED = """
import sys
for name in ("cupy", "cuda"):
    sys.modules[name] = None  # as if it were not installed
import cuq1
from cuq1.inspect.__main__ import main
sys.exit(main([sys.argv[1], "--plan"]))
"""


def test_it_needs_no_gpu_library():
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, str(NANO)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "qkv" in done.stdout


@pytest.mark.parametrize(
    ("layers", "text"),
    [([3], "3"), ([0, 1, 2, 5], "0-2, 5"), ([-1, -1], "draft"), ([9], "head"), ([0, 2, 4, 6, 8], "0, 2, 4 and 2 more")],
)
def test_layers_are_printed_as_ranges(layers, text):
    assert _places(layers, 9) == text
