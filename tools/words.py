"""Checks the wording of docstrings, error messages, pages and the README.

A docstring's first line is a sentence or a noun phrase, and an entry of `Args` starts with a noun:
"size of a chunk, in bytes" describes an argument, "of a chunk" does not. `HABITS` lists phrases
that have a plainer form. `python tools/words.py` fails on new findings, with a path it lists those
of a file or folder, and with `--write` it lowers the allowances of files to what is found.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "gulliver"
PAGES = sorted({ROOT / "README.md", *(ROOT / "docs").glob("*.md")})
HABITS = {
    r"\banew\b": "again, from scratch",
    r"\bbeside\b": "next to, compared with, in addition to",
    r"\bhangs? on\b": "depends on",
    r"\bnobody\b": "no one; name the subject",
    r"\bwho(ever|soever)\b": "all that, any rank that",
    r"\bwhatever there is\b": "all of",
    r"\brefused by name\b": "raises an error that names it",
    r"\b(is|are) told\b": "is reported, is printed",
    r"\btold (by|of|apart)\b": "reported, distinguished",
    r"\bkept apart\b": "kept separate",
    r"\bone (after|behind) the other\b": "in sequence, one at a time",
    r"\bunder way\b": "in flight, in progress",
    r"\bon (its|their) way\b": "in flight",
    r"\bgoes? on\b": "continues",
    r"\bthere is \w+ that\b": "name the subject",
}
ANY_HABIT = re.compile("|".join(HABITS), re.IGNORECASE)
# Files that have not been cleaned yet, with their number of findings: numbers may only fall.
ALLOWANCES = Path(__file__).with_name("words_allowed.json")
ALLOWED: dict[str, int] = json.loads(ALLOWANCES.read_text()) if ALLOWANCES.exists() else {}
FRAGMENT = (
    "of|by|in|on|to|at|as|for|from|with|without|whose|that|which|what|where|when|who|whether|if|"
    "because|between|under|over|beside|until|before|after|them|it|its|they|their|one|so|only"
)
OPENS_WITH = re.compile(rf"({FRAGMENT})\b", re.IGNORECASE)
# "Whether ..." is how the standard library tells booleans; clauses before a main one are sentences.
SENTENCES = re.compile(r"(whether|where|only|one|what|if|when|before|after)\b", re.IGNORECASE)
SECTION = re.compile(r"^(\s*)(Args|Attributes):\s*$")
ENTRY = re.compile(r"^(\s+)\*{0,2}(\w+)(?: \([^)]*\))?: (.+)$")


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
    """Yields the phrases of a file that break the rules."""
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


def literals(path: Path) -> Iterator[tuple[int, str]]:
    """Lines and texts of all strings of a file: docstrings, messages and help."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def paragraphs(path: Path) -> Iterator[tuple[int, str]]:
    """Lines and texts of a page, without code."""
    fenced = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, re.sub(r"`[^`]*`", "", line)


def habits(path: Path) -> Iterator[str]:
    """Phrases of a file that have a plainer form."""
    for number, text in literals(path) if path.suffix == ".py" else paragraphs(path):
        line = " ".join(text.split())
        if not ANY_HABIT.search(line):
            continue
        for pattern, instead in HABITS.items():
            for found in re.finditer(pattern, line, re.IGNORECASE):
                yield f"{path.relative_to(ROOT)}:{number}: {found[0]!r}: write {instead}"


def above_allowance(paths: list[Path]) -> list[str]:
    """Findings of the files that have more than they are allowed."""
    found = {path: list(habits(path)) for path in paths}
    counts = {path: ALLOWED.get(path.relative_to(ROOT).as_posix(), 0) for path in paths}
    return [line for path, lines in found.items() if len(lines) > counts[path] for line in lines]


def faults_above_allowance() -> list[str]:
    """All faults of the package and the pages, except those that are still allowed."""
    files = sorted(SOURCE.rglob("*.py"))
    found = [fault for path in files for fault in faults(path)]
    return found + above_allowance([*files, *PAGES])


def lower_allowances() -> None:
    """Writes each file's number of findings where it has fallen; drops clean files."""
    found = {
        name: sum(1 for _ in habits(ROOT / name)) for name in ALLOWED if (ROOT / name).exists()
    }
    lower = {name: min(count, ALLOWED[name]) for name, count in found.items() if count}
    ALLOWANCES.write_text(json.dumps(lower, indent=1) + "\n")


if __name__ == "__main__":
    if "--write" in sys.argv:
        lower_allowances()
    for name in [arg for arg in sys.argv[1:] if arg != "--write"]:
        chosen = Path(name).resolve()
        for path in sorted(chosen.rglob("*.py")) if chosen.is_dir() else [chosen]:
            for line in (*(faults(path) if path.suffix == ".py" else ()), *habits(path)):
                print(line)
    if len(sys.argv) == 1 and (problems := faults_above_allowance()):
        sys.exit("\n".join(problems))
