"""The words of docstrings: a first line is a sentence or a noun phrase, an entry names its thing.

Engineers skim: "size of a chunk, in bytes" says what an argument is, "of a chunk" makes them guess.
`python -m tests.test_words src/gulliver/comm` lists what is to be mended in a folder or a file.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "gulliver"
FRAGMENT = (
    "of|by|in|on|to|at|as|for|from|with|without|whose|that|which|what|where|when|who|whether|if|"
    "because|between|under|over|beside|until|before|after|them|it|its|they|their|one|so|only"
)
OPENS_WITH = re.compile(rf"({FRAGMENT})\b", re.IGNORECASE)
# "Whether ..." is how the standard library tells booleans; clauses before a main one are sentences.
SENTENCES = re.compile(r"(whether|where|only|one|what|if|when|before|after)\b", re.IGNORECASE)
SECTION = re.compile(r"^(\s*)(Args|Attributes):\s*$")
ENTRY = re.compile(r"^(\s+)\*{0,2}(\w+)(?: \([^)]*\))?: (.+)$")
# Rooms that are not mended yet, or parts of them: paths below `SOURCE` without a suffix.
LATER = ("cli", "data", "io")
LATER += ("video", "_compat", "options")


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Lines and texts of a file's docstrings, those under attributes included."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.lineno, value.value


def fragment(text: str) -> bool:
    """Whether a text begins in the middle of a sentence."""
    return bool(OPENS_WITH.match(text)) and not SENTENCES.match(text)


def faults(path: Path) -> Iterator[str]:
    """What a reader would stumble over in a file."""
    for number, text in docstrings(path):
        lines = text.splitlines() or [""]
        if fragment(lines[0]):
            yield f"{path}:{number}: opens with a fragment: {lines[0]}"
        indent = None
        for offset, line in enumerate(lines):
            if section := SECTION.match(line):
                indent, first = len(section[1]), None
            elif indent is not None and line.strip() and (entry := ENTRY.match(line)):
                first = first or len(entry[1])
                if len(entry[1]) == first > indent and fragment(entry[3]):
                    yield f"{path}:{number + offset}: {entry[2]} lacks a noun: {entry[3]}"
            elif indent is not None and line.strip() and len(line) - len(line.lstrip()) <= indent:
                indent = None


def later(path: Path) -> bool:
    """Whether a file belongs to what is not mended yet."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return any("/".join(parts[:count]) in LATER for count in range(1, len(parts) + 1))


ROOMS = sorted({path.relative_to(SOURCE).parts[0] for path in SOURCE.rglob("*.py")})


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_say_what_things_are(room: str) -> None:
    place = SOURCE / room
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
    files = [path for path in files if not later(path)]
    if not files:
        pytest.skip("not mended yet")
    assert [fault for path in files for fault in faults(path)] == []


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for path in sorted(Path(name).rglob("*.py")) if Path(name).is_dir() else [Path(name)]:
            for fault in faults(path):
                print(fault)
