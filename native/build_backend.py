"""The build backend: scikit-build-core, and editable installs that only put ``src`` on the path.

scikit-build-core's own editable installs put a finder before `sys.path`, which then wins over
PYTHONPATH and knows just the modules of the day it was installed. Here the extension is built as
for a wheel and laid beside the sources, and the installed wheel has one ``.pth`` line.
"""

from __future__ import annotations

import base64
import hashlib
import os
import tempfile
import zipfile
from pathlib import Path

from scikit_build_core.build import (
    build_sdist,
    build_wheel,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
]

SOURCES = Path(__file__).resolve().parent.parent / "src"
PACKAGE = "gulliver"
EXTENSIONS = (".so", ".pyd", ".dylib")


def build_editable(
    wheel_directory: str,
    config_settings: dict[str, str | list[str]] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Builds the wheel, keeps its extension beside the sources and its metadata in the result."""
    with tempfile.TemporaryDirectory() as folder:
        name = build_wheel(folder, config_settings, metadata_directory)
        with zipfile.ZipFile(Path(folder, name)) as whole:
            _place_extension(whole)
            kept = {
                entry: whole.read(entry)
                for entry in whole.namelist()
                if ".dist-info/" in entry and not entry.endswith("RECORD")
            }
            record = next(entry for entry in whole.namelist() if entry.endswith("RECORD"))
    kept[f"__editable__.{PACKAGE}.pth"] = f"{SOURCES}\n".encode()
    with zipfile.ZipFile(Path(wheel_directory, name), "w", zipfile.ZIP_DEFLATED) as result:
        for entry, content in kept.items():
            result.writestr(entry, content)
        lines = [f"{entry},{_digest(content)},{len(content)}" for entry, content in kept.items()]
        result.writestr(record, "\n".join([*lines, f"{record},,", ""]))
    return name


def _place_extension(wheel: zipfile.ZipFile) -> None:
    """Beside the sources, by a rename: whoever has the old one loaded keeps it."""
    for entry in wheel.namelist():
        if entry.startswith(f"{PACKAGE}/") and entry.endswith(EXTENSIONS):
            target = SOURCES / entry
            partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
            partial.write_bytes(wheel.read(entry))
            partial.chmod(0o755)
            partial.replace(target)


def _digest(content: bytes) -> str:
    value = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"sha256={value}"
