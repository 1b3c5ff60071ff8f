"""What the README promises of an installation without extras, run as a user would.

``python tests/plain_installation.py`` runs all commands with the Python that it is started with.
`hidden` makes a Python with extras look like one without: packages that are no dependency of
Gulliver's cannot be imported.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOOP = re.compile(r"<!-- run: \d+ ranks? -->\n```python\n(.*?)```", re.DOTALL)
PLAN = """
from gulliver.hardware.probe import named_cluster
from gulliver.plan import Plan
Plan().save("plan.yaml")
assert Plan.load("plan.yaml") == Plan()
assert named_cluster("h100x64").size == 64
"""
TINY = """
import torch
def made():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()), torch.randn(4, 8)
"""
WORKING = (
    "gulliver --help",
    "gulliver doctor --mib 8",
    "gulliver capabilities",
    "gulliver plan tiny:made --cluster h100x64",
    "gulliver embedding plan criteo-1tb",
    "gulliver jobs simulate fixed-batch",
    "python plan.py",
    "python loop.py",
    "python -m torch.distributed.run --nproc-per-node 2 loop.py",
)
"""Commands that work; ``loop.py`` is the program of the README."""
MISSING = {
    "gulliver plan llama-3-70b --cluster h100x64": "transformers",
    "gulliver finetune model --data chats.jsonl": "finetune",
    "gulliver dreambooth pipe --subject model --class-word dog": "dreambooth",
    "gulliver chat model": "serve",
    "gulliver serve model": "serve",
    "gulliver quantize model": "transformers",
    "gulliver quantize pipe": "dreambooth",
    "gulliver app run": "app",
    "gulliver train --steps 1 --ranks 1": "video",
    "gulliver data scan model": "data",
}
"""Commands that need an extra, and which one they must name."""
HIDE = """
from importlib.machinery import PathFinder
hidden, found = frozenset({names!r}), PathFinder.find_spec
def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in hidden else found(name, path, target)
PathFinder.find_spec = find_spec
"""


def _name(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def hidden_modules() -> list[str]:
    """Modules of installed packages that the declared dependencies do not bring with them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    waiting, needed = [_name(text) for text in project["dependencies"]], {"gulliver", "setuptools"}
    while waiting:
        if (name := waiting.pop()) not in needed:
            needed.add(name)
            try:
                requirements = metadata.requires(name) or []
            except metadata.PackageNotFoundError:
                continue
            waiting += [_name(text) for text in requirements if "extra ==" not in text]
    return [
        module
        for module, packages in metadata.packages_distributions().items()
        if not {_name(package) for package in packages} & needed
    ]


def prepare(folder: Path, hidden: bool = False) -> dict[str, str]:
    """Fills a folder with the files of the commands; returns the environment to run them in."""
    (found,) = LOOP.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    texts = {"loop.py": found, "plan.py": PLAN, "tiny.py": TINY, "chats.jsonl": "{}\n"}
    texts |= {"model/config.json": '{"model_type": "llama"}', "run/config.json": "{}"}
    texts["pipe/model_index.json"] = '{"_class_name": "StableDiffusionPipeline"}'
    if hidden:
        texts["hide/sitecustomize.py"] = HIDE.format(names=hidden_modules())
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "model" / "picture.png").touch()
    paths = [str(folder / "hide"), os.environ.get("PYTHONPATH", "")] if hidden else []
    return os.environ | ({"PYTHONPATH": os.pathsep.join(filter(None, paths))} if hidden else {})


def problem(command: str, folder: Path, environment: dict[str, str]) -> str | None:
    """Runs a command; returns what is wrong with it, None if it does what is promised."""
    tool, *rest = command.split()
    start = [sys.executable, *(["-m", "gulliver.cli"] if tool == "gulliver" else []), *rest]
    ended = subprocess.run(
        start, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    extra = MISSING.get(command)
    said = ended.stderr.strip().splitlines()
    if extra is None:
        return None if ended.returncode == 0 else "\n".join([command, *said[-5:]])
    named = said and said[-1].startswith("gulliver: ") and f"'.[{extra}]'" in said[-1]
    if ended.returncode == 1 and named and "Traceback" not in ended.stderr:
        return None
    return "\n".join([f"{command}: it does not name the extra {extra!r}", *said[-5:]])


def main() -> int:
    """Runs all commands; returns the number of those that do not do what is promised."""
    problems = []
    with tempfile.TemporaryDirectory() as text:
        environment = prepare(Path(text))
        for command in (*WORKING, *MISSING):
            found = problem(command, Path(text), environment)
            print("failed" if found else "ok    ", command, flush=True)
            problems += [found] if found else []
    print(*problems, sep="\n")
    return len(problems)


if __name__ == "__main__":
    sys.exit(main())
