"""The deployment image: its packages against what is imported, its Dockerfile against what it must not do, its build.

No Docker engine is needed. What `python -m tools.check_image --emulate FOLDER` downloads and compiles is not, here.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from cuq1.errors import RequestError
from tests.paths import ROOT
from tools import check_image, dockerfile, image_emulation, image_lock
from tools.image_imports import imports

LAUNCH = ROOT / "launch"
DOCKERFILE = (LAUNCH / "Dockerfile").read_text()
IGNORED = (LAUNCH / "Dockerfile.dockerignore").read_text()
PACKAGES = image_lock.read("requirements")
BYTES = sum(package.installed_bytes for package in PACKAGES)
IMPORTED = imports(ROOT, "cuq1", check_image.PROGRAMS)


def named(name, **changes):
    (found,) = [package for package in PACKAGES if package.name == name]
    return replace(found, **changes)


def without(*names):
    return [package for package in PACKAGES if package.name not in names]


def test_the_image_is_as_it_should_be():
    assert check_image.wrong() == []


def test_what_is_imported():
    found = {name.split(".")[0] for name in IMPORTED}
    assert found == {"cuda", "cupy", "jinja2", "ml_dtypes", "numpy", "threadpoolctl", "tokenizers"}
    assert "cupy.cuda.nccl" in IMPORTED


OTHER = image_lock.Package("torch", "2.9.0", "torch.whl", "0" * 64, 900_000_000, 1_700_000_000, ("torch",), ())


@pytest.mark.parametrize(
    ("packages", "found"),
    [
        (
            [*PACKAGES, OTHER],
            [
                "torch is locked, and nothing needs it",
                f"packages of {BYTES / 1e6 + 1700:.0f} MB are locked, more than 600 MB",
            ],
        ),
        ([*PACKAGES, replace(OTHER, name="jax", installed_bytes=1)], ["jax is locked, and nothing needs it"]),
        (without("jinja2"), ["jinja2", "markupsafe is locked, and nothing needs it"]),
        (without("nvidia-nccl-cu13"), ["cupy.cuda.nccl is imported, and the library that it loads, nvidia-nccl-cu13"]),
        (without("markupsafe"), ["jinja2 needs MarkupSafe>=2.0, which is not locked"]),
        (
            [*without("numpy"), named("numpy", version="1.26.4")],
            ["cupy-cuda13x needs numpy<2.6,>=2.0, and 1.26.4 is locked", "ml-dtypes needs numpy>=2.0.0, and 1.26.4 is"],
        ),
        (
            [*without("cuda-bindings"), named("cuda-bindings", modules=("cuda.core",))],
            ["cuda.bindings", "cuda-bindings is locked, and nothing needs it"],
        ),
        (
            [*without("threadpoolctl"), named("threadpoolctl", requires=("old; python_version < '3.12'", "new"))],
            ["threadpoolctl needs new, which is not locked"],
        ),
    ],
)
def test_packages_more_or_fewer_than_are_imported(packages, found):
    problems = check_image.judge(packages, IMPORTED)
    assert all(any(problem.startswith(one) for problem in problems) for one in found), problems
    assert all(problem.startswith(tuple(found)) for problem in problems), problems


def test_an_exception_that_no_longer_applies_is_noticed(monkeypatch):
    monkeypatch.setattr(check_image, "LEFT_OUT", {})
    (problem,) = check_image.judge(PACKAGES, IMPORTED)
    assert problem.startswith("tokenizers needs huggingface-hub")


def test_imports_of_functions_and_of_programs_count(tmp_path):
    package = tmp_path / "p"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text(
        "import os, first.part\nfrom p import b\n"
        "def f():\n    from second import x\n    require('third.part')\n    run('-m', 'p.c')\n"
    )
    (package / "b.py").write_text("import fourth")
    (package / "c.py").write_text("import fifth")
    (package / "d.py").write_text("import unreached")
    names = imports(tmp_path, "p", ["p.a"])
    assert names == {"first.part", "second", "second.x", "third.part", "fourth", "fifth"}
    with pytest.raises(FileNotFoundError, match=r"p\.e is no module"):
        imports(tmp_path, "p", ["p.e"])


def test_a_lock_and_what_is_known_of_it_belong_together(tmp_path):
    for suffix in ("lock", "json"):
        (tmp_path / f"requirements.{suffix}").write_text((LAUNCH / f"requirements.{suffix}").read_text())
    assert image_lock.read("requirements", tmp_path) == PACKAGES
    path = tmp_path / "requirements.lock"
    whole = path.read_text()
    for broken in (
        whole.replace("sha256:", "sha256:0", 1),
        whole + "torch==2.9.0\n",
        whole.rpartition("tokenizers")[0],
    ):
        path.write_text(broken)
        with pytest.raises(RequestError, match=r"requirements\.lock and requirements\.json differ"):
            image_lock.read("requirements", tmp_path)


def test_every_locked_line_is_asked_for_and_every_hash_whole():
    for name in image_lock.NAMES:
        lines = [line.split("#")[0].strip() for line in (LAUNCH / f"{name}.in").read_text().splitlines()]
        asked = {image_lock.normal(line.split("=")[0].split(">")[0]) for line in lines if line}
        packages = image_lock.read(name)
        assert {package.name for package in packages} == asked
        assert all(len(bytes.fromhex(package.sha256)) == 32 for package in packages)
        assert all(0 < package.wheel_bytes < package.installed_bytes for package in packages)
        assert json.loads((LAUNCH / f"{name}.json").read_text())["python"] == check_image.MARKERS["python_version"]


def test_modules_of_installed_files():
    files = [
        "cuda/bindings/__init__.py",
        "cuda/bindings/driver.so",
        "cuda/bindings/x/y.py",
        "single.py",
        "a-1.dist-info/R",
    ]
    assert image_lock._modules(files) == {"cuda.bindings", "single"}


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("@sha256:593", "@sha256:59", "is not pinned by digest"),
        ("slim-bookworm@sha256:", "slim-bookworm #", "is not pinned by digest"),
        ("USER 10001:10001\n", "", "the image runs as root"),
        ("USER 10001:10001", "USER 0", "the image runs as root"),
        ("USER 10001:10001", "USER cuq1", "whose number is not said"),
        (" CUQ1_NO_JIT=1", "", "the image does not set CUQ1_NO_JIT=1"),
        ("CUQ1_NO_JIT=1", "CUQ1_NO_JIT=0", "the image does not set CUQ1_NO_JIT=1"),
        ("STOPSIGNAL SIGINT\n", "", "the image is stopped by a signal"),
        ("COPY kernels_cu kernels_cu", "COPY kernels kernels", "line 20: kernels does not exist"),
        ("COPY tools/build_ptx.py tools/", "COPY tools tools", "line 22: tools is left out by .dockerignore"),
        ("--from=site", "--from=sight", "there is no stage sight before"),
        ("COPY --from=site /opt/cuq1 /opt/cuq1", "COPY cuq1 /opt/cuq1", "not from a stage"),
        (
            "USER 10001",
            "RUN pip install --no-deps --no-cache-dir --no-index x\nUSER 10001",
            "the image itself runs pip",
        ),
        (" --require-hashes -r requirements.lock", " -r requirements.lock", "pip installs what no hash pins"),
        (
            " --no-deps --require-hashes -r build.lock",
            " --require-hashes -r build.lock",
            "pip installs without --no-deps",
        ),
        ("RUN python -m venv", "RUN apt-get install gcc\nRUN python -m venv", "gcc is not to be used"),
        ("RUN python -m venv", "RUN true && python -m venv", "a RUN is one command"),
        ('["python", "-m", "cuq1.generate"]', "python -m cuq1.generate", "the entry point is no [python, -m, MODULE]"),
        ("cuq1.generate", "cuq1.generator", "the entry point's module cuq1.generator does not exist"),
        ("COPY --from=kernels /build/wheels wheels\n", "", "nothing is copied from stage kernels"),
    ],
)
def test_a_dockerfile_with_something_wrong(old, new, found):
    assert DOCKERFILE.count(old) >= 1
    problems = dockerfile.problems(ROOT, DOCKERFILE.replace(old, new), IGNORED)
    assert any(found in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "there is no FROM"),
        ("RUN true\nFROM x", "line 1: RUN stands before FROM"),
        ("FROM x\nADD a b", "line 2: ADD is no instruction that can be checked"),
        ("FROM x y", "line 1: FROM takes an image"),
        ("FROM x\nCOPY --chown=1 a b", "line 2: COPY --chown=1 a b cannot be checked"),
    ],
)
def test_a_dockerfile_that_cannot_be_checked(text, found):
    with pytest.raises(RequestError, match=found):
        dockerfile.problems(ROOT, text, IGNORED)


@pytest.mark.parametrize(
    ("path", "ignored"),
    [
        ("cuq1", False),
        ("cuq1/config.py", False),
        ("cuq1/__pycache__", True),
        ("cuq1/cuda/__pycache__/x.pyc", True),
        ("launch/build.lock", False),
        ("launch/Dockerfile", True),
        ("ptx/a.cubin", True),
        ("tools/build_ptx.py", False),
        ("tools/bench.py", True),
    ],
)
def test_what_dockerignore_leaves_out(path, ignored):
    assert dockerfile.is_ignored(path, IGNORED) == ignored


GATE = """
import runpy, sys
allowed = set(sys.argv[1].split(","))
class Gate:
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] not in allowed | sys.stdlib_module_names:
            raise ModuleNotFoundError(f"{name} is not in the image")
sys.meta_path.insert(0, Gate)
sys.argv = sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
ROOTS = {module.split(".")[0] for package in PACKAGES for module in package.modules} | {"cuq1"}


@pytest.mark.parametrize("missing", [None, "markupsafe"])
def test_it_runs_with_what_it_copies_and_locks(tmp_path, missing):
    """With modules of other packages out of reach, in a folder that has only what the Dockerfile copies."""
    for folder in ("cuq1", "kernels_cu"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path), "CUQ1_NO_JIT": "1"}

    def run(module, *arguments):
        command = [sys.executable, "-c", GATE, ",".join(sorted(ROOTS - {missing})), module, *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    done = run("cuq1.generate", "--device", "cpu", "--chat", "hi", "--max-tokens", "4")
    if missing is not None:
        assert done.returncode == 1
        assert "markupsafe is not in the image" in done.stderr
        return
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()
    dummy = [sys.executable, "-c", image_emulation.RENDEZVOUS]
    done = run("cuq1.parallel.launch", "-n", "2", "--", *dummy)
    assert (done.returncode, done.stdout) == (0, "[b'0', b'1']\n")


SMALL = f"""
ARG WHO=nobody
FROM x@sha256:{"0" * 64} AS first
WORKDIR /build
COPY a.txt sub/ ./
COPY sub kept
RUN python -c "import sys; open('made', 'w').write(open('a.txt').read() + sys.argv[1])" ${{WHO}}
FROM x@sha256:{"0" * 64}
COPY --from=first /build /opt/app
ENV PATH=/usr/local/bin:/usr/bin GREETING=hello
USER 10001:10001
"""


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Builds a small Dockerfile, in which a file is ignored; returns the emulation of `text`."""
    context = tmp_path / "context"
    (context / "launch").mkdir(parents=True)
    (context / "sub").mkdir()
    (context / "launch" / "Dockerfile.dockerignore").write_text("*\n!a.txt\n!sub\n**/secret")
    for name in ("a.txt", "sub/b.txt", "sub/secret"):
        (context / name).write_text(f"{name};")
    monkeypatch.setattr(image_emulation, "VENV", ("-m", "venv", "--without-pip"))

    def build(text=SMALL, arguments=None):
        (context / "launch" / "Dockerfile").write_text(text)
        image = image_emulation.Emulation(context, tmp_path / "image", sys.executable, arguments or {})
        image.build()
        return image

    return build


def test_a_build_is_carried_out_as_it_is_written(small):
    image = small(arguments={"WHO": "me"})
    app = image.root / "opt" / "app"
    assert {str(path.relative_to(app)) for path in app.rglob("*") if path.is_file()} == {
        "a.txt", "b.txt", "made", "kept/b.txt",
    }  # fmt: skip
    assert (app / "made").read_text() == "a.txt;me"
    assert image.installed_bytes() == sum(path.stat().st_size for path in app.rglob("*") if path.is_file())
    done = image.run("sh", "-c", "echo $GREETING $HOME $(id -u)")
    assert done.stdout == f"hello {10001 if os.geteuid() == 0 else os.geteuid()}\n"


@pytest.mark.parametrize(
    ("text", "arguments", "found"),
    [
        (SMALL.replace("'a.txt'", "'b'"), {}, r"line 7: .* ends with 1 \(FileNotFoundError"),
        (SMALL, {"WHOM": "me"}, "the Dockerfile has no ARG WHOM"),
    ],
)
def test_a_build_that_fails_says_where(small, text, arguments, found):
    with pytest.raises(RequestError, match=found):
        small(text, arguments)


def test_a_build_needs_an_empty_folder(small, tmp_path):
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "file").touch()
    with pytest.raises(RequestError, match="is not empty"):
        small()


def test_the_command_line_reports_sizes_and_problems(monkeypatch, capsys):
    assert check_image.main([]) == 0
    shown = capsys.readouterr()
    assert f"the image adds {check_image.expected_bytes() / 1e6:.0f} MB to its base" in shown.out
    assert shown.err == "as it should be\n"
    monkeypatch.setattr(check_image, "MOST_BYTES", 1)
    assert check_image.main([]) == 1
    assert f"packages of {BYTES / 1e6:.0f} MB are locked, more than 0 MB" in capsys.readouterr().out
