"""The pictures of the pages are those that the script draws; links and anchors lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tools.draw_docs import ASSETS, DRAWINGS

from gulliver.solve.packing import packer_problem

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
FENCES = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_picture_is_what_the_script_draws(name: str) -> None:
    if name == "data-centric-step" and packer_problem() is not None:
        pytest.skip("the picture is of the compiled packer")
    assert (ASSETS / f"{name}.svg").read_text(encoding="utf-8") == DRAWINGS[name]()


def test_every_picture_is_shown_on_a_page() -> None:
    pages = [ROOT / "README.md", *DOCS.rglob("*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert [path.name for path in ASSETS.glob("*.*") if path.name not in text] == []


def anchors(page: Path) -> set[str]:
    """Ids of a page's headings, as mkdocs makes them."""
    text = FENCES.sub(lambda found: found[0].strip("`"), page.read_text(encoding="utf-8"))
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", head) for head in heads]
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", head).strip().lower()) for head in plain}


def test_links_between_pages_lead_to_headings_that_exist() -> None:
    broken = []
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")]:
        text = FENCES.sub("", page.read_text(encoding="utf-8"))
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", text):
            if "://" in target or target.startswith("mailto:"):
                continue
            path = (page.parent / target).resolve() if target else page
            # mkdocs builds pages of its folder alone.
            outside = page.is_relative_to(DOCS) and not path.is_relative_to(DOCS)
            if outside or not path.exists() or (anchor and anchor not in anchors(path)):
                broken.append((page.name, f"{target}#{anchor}"))
    assert broken == []
