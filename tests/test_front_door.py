"""What a newcomer meets first: the names of `gulliver`, and the pages."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks._harness import Bar, at_least, at_most
from benchmarks._index import CLAIMS, Claim, Result, newest, read, rows, worst
from benchmarks._which_plugin import MARKS, MEMORIES, state_bytes, table

import gulliver
from gulliver.cli import dispatch as _main
from gulliver.hardware import described
from tests import plain_installation
from tests.patience import patient

ROOT = Path(__file__).resolve().parent.parent


def _names_for_type_checkers() -> dict[str, str]:
    """Package by name, of the imports that only type checkers see."""
    tree = ast.parse(Path(gulliver.__file__).read_text(encoding="utf-8"))
    guarded = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for part in guarded for node in part.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def test_top_level_names_equal_package_names() -> None:
    known = _names_for_type_checkers()
    assert sorted(known) == sorted(gulliver.__all__)
    assert set(gulliver.__all__) <= set(dir(gulliver))
    for name, package in known.items():
        assert getattr(gulliver, name) is getattr(importlib.import_module(package), name)


def test_unknown_top_level_name_is_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'boost'"):
        _ = gulliver.boost  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="cannot import name 'boost'"):
        from gulliver import boost  # type: ignore[attr-defined]  # noqa: F401


LAZY = """
import sys
import gulliver
dir(gulliver), gulliver.GulliverError
assert not {"torch", "numpy", "safetensors", "gulliver.booster"} & set(sys.modules)
assert gulliver.solve is sys.modules["gulliver.solve"]
assert not {"torch", "safetensors", "gulliver.booster"} & set(sys.modules)
"""


def test_importing_gulliver_imports_no_torch() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LAZY], capture_output=True, text=True, timeout=patient(60)
    )
    assert ended.returncode == 0, ended.stderr


def test_closed_pipe_ends_without_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def piped(arguments: list[str]) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(_main, "run", piped)
    with (tmp_path / "out").open("w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        with pytest.raises(SystemExit) as ended:
            _main.main(["plan", "--help"])
    assert ended.value.code == 141


def test_the_page_of_benchmarks_shows_the_worst_case_and_missed_bars() -> None:
    claim = Claim("ZeRO", "step", "DDP", "zero", "times faster", speed=True)
    bars = tuple(
        at_least(f"ZeRO {stage}: times faster", value, 1.2) for stage, value in ((1, 1.5), (2, 1.1))
    )
    made = [
        Result("zero", "2026-11-01", "abc", "4 cores", bars, "zero.md"),
        Result("zero", "2026-11-02", "def-dirty", "4 cores", bars[:1], "dirty.md"),
        Result("zero", "2026-11-03", "fed", "4 cores", (at_least("bytes", 1, 1),), "other.md"),
    ]
    result, bar = worst(claim, newest(made))
    assert (result.file, bar.value, bar.holds) == ("zero.md", 1.1, False)
    at_mosts = tuple(
        at_most(f"{case}: off", value, 0.1) for case, value in (("a", 0.01), ("b", 0.3))
    )
    loss = Claim("ZeRO", "loss", "DDP", "zero", "off")
    assert worst(loss, {"zero": [replace(made[0], bars=at_mosts)]})[1].value == 0.3


def test_every_claim_of_the_page_has_a_kept_result_of_a_commit() -> None:
    results = newest([read(path) for path in (ROOT / "benchmarks" / "results").glob("*.md")])
    found = rows(results)
    assert len(found) == len(CLAIMS) <= 25
    assert all(
        every[0].bars and all(isinstance(bar, Bar) for bar in every[0].bars)
        for every in results.values()
    )
    missed = [row for row in found if row[5] != "yes"]
    assert len(missed) == sum(not worst(claim, results)[1].holds for claim in CLAIMS)


PAGES = ROOT / "docs"


@pytest.mark.parametrize("ranks", [2, 64])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("stage", [None, 1, 2, 3])
def test_the_formulas_of_memory_are_those_of_plans(
    stage: int | None, half: bool, ranks: int
) -> None:
    import torch

    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(200)))
    optimizer = torch.optim.AdamW(model.parameters())
    precision, half = ("bf16", True) if half and stage else (None, False)
    plugin = (
        gulliver.LowLevelZeroPlugin(stage, chunk_mb=4, precision=precision, gather_ahead=2)
        if stage
        else gulliver.TorchDDPPlugin()
    )
    plan = plugin.make_plan(model, optimizer, described("8xh100-infiniband").resized(ranks))
    found = plan.memory.total / plan.model.parameters
    # At most 5 chunks of gradients and 4 of parameters are under way, of 4 MiB and little more.
    under_way = 9 * 2 * 4 * 2**20 / plan.model.parameters if stage else 0
    assert 0 <= found - state_bytes(stage, ranks, half) <= under_way + 1e-3


def test_the_page_of_plugins_has_the_tables_that_are_computed() -> None:
    kept = MARKS.search((PAGES / "which-plugin.md").read_text(encoding="utf-8"))
    assert kept is not None
    for memory in MEMORIES:
        assert table(memory) in kept[0]


def _fragments() -> list[str]:
    """Parts of the error messages that the page of troubleshooting quotes."""
    text = (PAGES / "troubleshooting.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`.*`) \| ", text, re.MULTILINE)
    quoted = [quote for cell in cells for quote in re.findall(r"`([^`]+)`", cell)]
    assert len(quoted) > 30
    parts = (part.strip(" :;,=?!") for quote in quoted for part in quote.split("..."))
    return [part for part in parts if len(part) > 8]


def test_the_page_of_troubleshooting_quotes_errors_that_exist() -> None:
    source = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "src").rglob("*.py"))
    everything = re.sub(r"([\"'])\n\s+[rf]?\1", "", source)  # strings over several lines
    assert [part for part in _fragments() if part not in everything] == []


def test_every_page_is_at_most_two_clicks_from_the_start_page() -> None:
    def links(name: str) -> set[str]:
        path = PAGES / name
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        return set(re.findall(r"\]\(([a-z0-9-]+\.md)(?:#[^)]*)?\)", text))

    first = links("index.md")
    reached = {"index.md", *first, *(page for name in first for page in links(name))}
    assert {path.name for path in PAGES.glob("*.md")} <= reached


@pytest.mark.parametrize(
    "command",
    [
        "python plan.py",
        "gulliver embedding plan criteo-1tb",
        "gulliver plan llama-3-70b --cluster h100x64",
        "gulliver quantize pipe",
    ],
)
def test_an_installation_without_extras_works_or_names_the_extra(
    command: str, tmp_path: Path
) -> None:
    environment = plain_installation.prepare(tmp_path, hidden=True)
    assert plain_installation.problem(command, tmp_path, environment) is None


def test_extras_that_messages_and_pages_name_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(project["optional-dependencies"])
    files = [ROOT / "README.md", *PAGES.glob("*.md"), *(ROOT / "src").rglob("*.py")]
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert not re.findall(r"gulliver\[\w+[\],]", text), path  # published under no such name
        named = re.findall(r"pip install '?\.\[([\w,]+)\]", text)
        named += re.findall(r'missing_extra\([^()]*(?:\([^()]*\))?[^()]*, "(\w+)"\s*\)', text)
        assert {one for part in named for one in part.split(",")} <= extras, path
