"""Prints the requirements of the given extras of pyproject.toml, one per line.

`make` installs them while the extension is compiled, which `pip install -e '.[all]'` does first.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path


def requirements(extras: list[str]) -> list[str]:
    """Lists the package's own requirements and those of `extras`, without references to extras."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    found: dict[str, None] = dict.fromkeys(project["dependencies"])
    for extra in extras:
        for line in project["optional-dependencies"][extra]:
            inner = re.fullmatch(rf"{project['name']}\[(.+)\]", line)
            found.update(dict.fromkeys(requirements(inner[1].split(",")) if inner else [line]))
    return list(found)


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
