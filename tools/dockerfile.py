"""Reads the part of Dockerfiles that launch/Dockerfile uses, and says what is wrong with one.

Every instruction that this does not know is an error: what cannot be judged is not let pass.
"""

import json
import re
import shlex
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from cuq1.errors import RequestError

KNOWN = ("ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "STOPSIGNAL", "ENTRYPOINT")
DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")
COMPILERS = ("gcc", "g++", "clang", "nvcc", "cuda-toolkit", "build-essential", "apt-get", "apt ")


@dataclass(frozen=True)
class Step:
    """An instruction, with the text behind it as it is written: variables are not replaced."""

    line: int
    name: str
    text: str


@dataclass
class Stage:
    """From a FROM to the next one: its base, the name that others copy from, and its steps."""

    base: str
    name: str
    steps: list[Step] = field(default_factory=list)

    def all(self, name: str) -> list[Step]:
        """The steps with one instruction."""
        return [step for step in self.steps if step.name == name]

    def environment(self) -> dict[str, str]:
        """What ENV sets."""
        pairs = (word.partition("=") for step in self.all("ENV") for word in shlex.split(step.text))
        return {name: value for name, _, value in pairs}


@dataclass(frozen=True)
class Copy:
    """A COPY: from the context, or from a stage's files, to a folder or a file."""

    stage: str | None
    sources: tuple[str, ...]
    target: str


def parse(text: str) -> tuple[dict[str, str], list[Stage]]:
    """The arguments' defaults, and the stages. Raises RequestError, with the line, for what is no Dockerfile."""
    arguments: dict[str, str] = {}
    stages: list[Stage] = []
    lines = iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        whole = line
        while whole.endswith("\\"):
            whole = whole[:-1] + next(lines, (0, ""))[1]
        if not whole.strip() or whole.lstrip().startswith("#"):
            continue
        name, _, rest = whole.strip().partition(" ")
        step = Step(number, name.upper(), rest.strip())
        if step.name not in KNOWN:
            raise RequestError(f"Dockerfile, line {number}: {name} is no instruction that can be checked")
        if step.name == "ARG":
            key, _, value = step.text.partition("=")
            arguments[key] = value
        if step.name == "FROM":
            words = step.text.split()
            named = len(words) == 3 and words[1].upper() == "AS"
            if len(words) != 1 and not named:
                raise RequestError(f"Dockerfile, line {number}: FROM takes an image, and AS with a name")
            stages.append(Stage(expand(words[0], arguments), words[2] if named else ""))
        elif stages:
            stages[-1].steps.append(step)
        elif step.name != "ARG":
            raise RequestError(f"Dockerfile, line {number}: {name} stands before FROM")
    if not stages:
        raise RequestError("Dockerfile: there is no FROM")
    return arguments, stages


def expand(text: str, values: dict[str, str]) -> str:
    """`${NAME}` replaced, where it is known."""
    return re.sub(r"\$\{(\w+)\}", lambda found: values.get(found[1], found[0]), text)


def copy_of(step: Step) -> Copy:
    """A COPY's parts; raises RequestError for options that are not known."""
    options = [word for word in step.text.split() if word.startswith("--")]
    words = [word for word in step.text.split() if not word.startswith("--")]
    stages = [option.removeprefix("--from=") for option in options if option.startswith("--from=")]
    if len(stages) != len(options) or len(words) < 2:
        raise RequestError(f"Dockerfile, line {step.line}: COPY {step.text} cannot be checked")
    return Copy(stages[0] if stages else None, tuple(words[:-1]), words[-1])


def problems(root: Path, text: str, ignored: str) -> list[str]:
    """What is wrong with a Dockerfile's `text` and .dockerignore's `ignored`, for a build in `root`; none if empty."""
    _, stages = parse(text)
    final, names = stages[-1], {stage.name for stage in stages}
    found = [f"the base {stage.base} is not pinned by digest" for stage in stages if not DIGEST.search(stage.base)]
    for number, stage in enumerate(stages):
        for step in stage.all("COPY"):
            found += _copy_problems(root, ignored, step, [one.name for one in stages[:number]])
        for step in stage.all("RUN"):
            found += _run_problems(step)
    found += [f"line {step.line}: the image itself runs {step.text}" for step in final.all("RUN")]
    found += [
        f"line {step.line}: the image takes {step.text} from the checkout, not from a stage"
        for step in final.all("COPY")
        if copy_of(step).stage is None
    ]
    if final.environment().get("CUQ1_NO_JIT") != "1":
        found.append("the image does not set CUQ1_NO_JIT=1")
    users = [step.text.partition(":")[0] for step in final.all("USER")]
    if not users or not users[-1].isdecimal() or int(users[-1]) == 0:
        found.append("the image runs as root, or as a user whose number is not said")
    if [step.text for step in final.all("STOPSIGNAL")] != ["SIGINT"]:
        found.append("the image is stopped by a signal that the first process of a container does not heed")
    unused = names - {copy_of(step).stage for stage in stages for step in stage.all("COPY")} - {final.name}
    found += [f"nothing is copied from stage {name}" for name in sorted(unused)]
    return found + _entry_problems(root, final)


def _copy_problems(root: Path, ignored: str, step: Step, before: list[str]) -> list[str]:
    copy, found = copy_of(step), []
    if copy.stage is not None:
        return [] if copy.stage in before else [f"line {step.line}: there is no stage {copy.stage} before"]
    for source in copy.sources:
        if not (root / source).exists():
            found.append(f"line {step.line}: {source} does not exist")
        elif is_ignored(source, ignored):
            found.append(f"line {step.line}: {source} is left out by .dockerignore")
    return found


def _run_problems(step: Step) -> list[str]:
    found = [f"line {step.line}: {tool.strip()} is not to be used" for tool in COMPILERS if tool in step.text]
    if re.search(r"[;&|<>`]|\$\(", step.text):
        found.append(f"line {step.line}: a RUN is one command, without the shell's syntax")
    if re.search(r"\bpip\b.* install\b", step.text):
        for option in ("--no-deps", "--no-cache-dir"):
            if option not in step.text.split():
                found.append(f"line {step.line}: pip installs without {option}")
        if not {"--require-hashes", "--no-index"} & set(step.text.split()):
            found.append(f"line {step.line}: pip installs what no hash pins")
    return found


def _entry_problems(root: Path, final: Stage) -> list[str]:
    entries = final.all("ENTRYPOINT")
    try:
        command = json.loads(entries[-1].text) if entries else None
    except ValueError:
        command = None
    if not isinstance(command, list) or command[:2] != ["python", "-m"] or len(command) != 3:
        return ["the entry point is no [python, -m, MODULE], which signals reach"]
    path = root.joinpath(*str(command[2]).split("."))
    exists = path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
    return [] if exists else [f"the entry point's module {command[2]} does not exist"]


def is_ignored(path: str, ignored: str) -> bool:
    """Whether a .dockerignore leaves a path out: the last line that matches it, or a folder above it, decides."""
    result = False
    for line in ignored.splitlines():
        pattern = line.strip().removeprefix("!")
        if not pattern or pattern.startswith("#"):
            continue
        places = [path, *(str(parent) for parent in PurePosixPath(path).parents if str(parent) != ".")]
        if any(_matches(place, pattern) for place in places):
            result = not line.strip().startswith("!")
    return result


def _matches(path: str, pattern: str) -> bool:
    """`*` stays within a name, `**/` stands for any folders."""
    parts, wanted = path.split("/"), pattern.split("/")
    if wanted[0] == "**":
        return any(_matches("/".join(parts[start:]), "/".join(wanted[1:])) for start in range(len(parts)))
    return len(parts) == len(wanted) and all(fnmatch(*pair) for pair in zip(parts, wanted, strict=True))
