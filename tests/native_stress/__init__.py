"""The native engine without Python under a sanitizer: `python -m tests.native_stress [thread]`."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = tuple(f"native/{name}.cpp" for name in ("engine", "ring", "crc32", "gather"))
SANITIZERS = ("thread", "address,undefined")


class CannotBuild(Exception):
    """No compiler here, or one without the sanitizer's library."""


def compiler() -> str:
    found = shutil.which(os.environ.get("CXX") or "c++") or shutil.which("g++")
    if found is None:
        raise CannotBuild("no C++ compiler")
    return found


def build(folder: Path, sanitizer: str) -> Path:
    """Builds the stress program.

    Raises:
        CannotBuild: the machine lacks what it takes. That our sources do not compile is none of it.
    """
    options = ["-std=c++17", "-O1", "-g", f"-fsanitize={sanitizer}", "-pthread"]
    empty, program = folder / "empty.cpp", folder / "stress"
    empty.write_text("int main() {}\n")
    able = subprocess.run(
        [compiler(), *options, str(empty), "-o", str(program)], capture_output=True, text=True
    )
    if able.returncode:
        raise CannotBuild(able.stderr.strip().splitlines()[-1])
    sources = [str(ROOT / name) for name in (*SOURCES, "tests/native_stress/stress.cpp")]
    options += ["-Wall", "-Wextra", "-I", str(ROOT / "native"), "-o", str(program)]
    subprocess.run([compiler(), *options, *sources], check=True)
    return program


def run(program: Path, folder: Path, rounds: int) -> subprocess.CompletedProcess[str]:
    """Runs it; a report of the sanitizer makes it end with another code than 0."""
    command = [str(program), str(folder), str(rounds)]
    # Sanitizers want memory where the kernel's random layout may put other things.
    if shutil.which("setarch"):
        command = ["setarch", "-R", *command]
    environment = {
        **os.environ,
        "TSAN_OPTIONS": "halt_on_error=0 exitcode=66",
        "ASAN_OPTIONS": "detect_leaks=1",
        "UBSAN_OPTIONS": "halt_on_error=1 print_stacktrace=1",
    }
    return subprocess.run(command, capture_output=True, text=True, env=environment)
