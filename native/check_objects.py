"""Checks that code for one set of instructions stays in the objects compiled for it.

    python check_objects.py [--objdump PROGRAM] NM OBJECT...

CMake runs it before it links an extension. See [Note: files for one set of instructions] in
processor.hpp.

- An object of a file ``*_avx2.cpp`` or ``*_avx512.cpp`` defines one symbol that is visible to other
  objects, its table of kernels, which is data, and has no static constructors.
- Functions of ``*_avx2.cpp`` have no AVX-512 instructions, and in all other objects functions with
  AVX instructions (which have a ``target`` attribute) are local. This part needs objdump.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

SPECIAL = re.compile(r"_(avx\d+)\.")
FUNCTION = re.compile(r"^[0-9a-f]+ <([^>]+)>:")
AVX = re.compile(r"^\s*[0-9a-f]+:\s+v[a-z]")
# EVEX: 512 bits, the upper sixteen registers, masks.
AVX512 = re.compile(r"^\s*[0-9a-f]+:\s+(v|k)[a-z].*(%zmm|%[xy]mm(1[6-9]|2\d|3[01])|%k[0-7])")
DATA = "BDGRSbdgrs"


def linkage_problems(name: str, symbols: str) -> list[str]:
    """Says which symbols of a special object other objects could reach.

    Args:
        name: of the object.
        symbols: what ``nm --defined-only`` prints.
    """
    found = SPECIAL.search(name)
    if found is None:
        return []
    problems = []
    for line in symbols.splitlines():
        _, kind, symbol = line.split(maxsplit=2)
        visible = kind.isupper() or kind in "uvw"
        table = kind in DATA and re.fullmatch(rf"_ZN8gulliver\w*{found[1]}E", symbol)
        # Data, too: the address of the function that unwinds exceptions.
        table = table or symbol.startswith("DW.ref.")
        if (visible and not table) or symbol.startswith("_GLOBAL__sub_I"):
            problems.append(f"{name} defines {symbol} ({kind}), which other objects can reach")
    return problems


def instruction_problems(name: str, symbols: str, listing: str) -> list[str]:
    """Says which functions have instructions that they must not have.

    Args:
        name: of the object.
        symbols: what ``nm --defined-only`` prints.
        listing: what ``objdump -d --no-show-raw-insn`` prints.
    """
    special = SPECIAL.search(name)
    if special and special[1] == "avx512":
        return []
    pattern = AVX512 if special else AVX
    local = {
        line.split(maxsplit=2)[2]
        for line in symbols.splitlines()
        if not special and line.split(maxsplit=2)[1].islower() and line.split()[1] not in "uvw"
    }
    function, problems = "", {}
    for line in listing.splitlines():
        if found := FUNCTION.match(line):
            function = found[1]
        elif pattern.match(line) and function not in local:
            problems.setdefault(function, f"{name}: {function} has {line.strip()}")
    return list(problems.values())


def main() -> int:
    """Prints what is wrong; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--objdump", default="", help="empty: instructions are not looked at")
    parser.add_argument("nm")
    parser.add_argument("objects", nargs="+")
    options = parser.parse_args()
    problems = []
    for path in options.objects:
        name, symbols = Path(path).name, _output(options.nm, "--defined-only", path)
        problems += linkage_problems(name, symbols)
        if options.objdump:
            listing = _output(options.objdump, "-d", "--no-show-raw-insn", path)
            problems += instruction_problems(name, symbols, listing)
    for problem in problems:
        print(f"check_objects: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
