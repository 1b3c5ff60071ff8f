"""The pages that are written from the code are current, and the notebooks run."""

from __future__ import annotations

import ast
import importlib.util
import io
import json
import re
from contextlib import chdir, redirect_stdout
from pathlib import Path
from types import ModuleType

import pytest

from gulliver.cli.dispatch import TOP
from gulliver.comm import World
from tests.pool import Pool

IMPORT = re.compile(r"^from gulliver[\w.]* import (?:\([^)]*\)|.+)$", re.MULTILINE)
ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def _tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.full
@pytest.mark.deadline(300)
def test_pages_of_the_reference_are_those_of_the_code() -> None:
    for path, text in _tool("reference").pages().items():
        assert path.read_text(encoding="utf-8") == text, "run python tools/reference.py"


def test_the_page_of_the_command_line_has_every_command() -> None:
    text = (DOCS / "cli.md").read_text(encoding="utf-8")
    assert re.findall(r"^## gulliver (\S+)", text, re.MULTILINE) == list(TOP)


def test_every_name_that_pages_import_is_in_the_reference() -> None:
    reference = (DOCS / "api.md").read_text(encoding="utf-8")
    known = set(re.findall(r"[\w]+", reference))
    missing = []
    for page in DOCS.glob("*.md"):
        for found in IMPORT.findall(page.read_text(encoding="utf-8")):
            (node,) = ast.parse(found).body
            assert isinstance(node, ast.ImportFrom)
            missing += [(page.name, n.name) for n in node.names if n.name not in known]
    assert missing == []


def test_notebooks_are_those_of_their_pages() -> None:
    for path, text in _tool("notebooks").notebooks().items():
        assert path.read_text(encoding="utf-8") == text, "run python tools/notebooks.py"


def _cells(world: World, path: Path, folder: Path) -> str:
    """Runs the cells of a notebook one after the other, and returns what they print."""
    book = json.loads(path.read_text(encoding="utf-8"))
    space = {"__name__": "__main__"}
    with chdir(folder), redirect_stdout(io.StringIO()) as printed:
        for cell in book["cells"]:
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), path.name, "exec"), space)
    return printed.getvalue()


def test_the_first_notebook_runs(pool: Pool, tmp_path: Path) -> None:
    (printed,) = pool.run(_cells, 1, DOCS / "notebooks" / "first_run.ipynb", tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert losses[-1] < losses[0] / 2
    assert "step 100, equal: True" in printed


@pytest.mark.deadline(300)
def test_the_notebook_that_fine_tunes_runs(pool: Pool, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (printed,) = pool.run(_cells, 1, DOCS / "notebooks" / "finetune_and_chat.ipynb", tmp_path)
    found = re.search(r"held-out loss ([\d.]+) after 60 steps", printed)
    assert found is not None
    assert float(found[1]) < 4
