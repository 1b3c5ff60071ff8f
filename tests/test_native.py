"""Instructions of the extensions: kernels on an emulated processor, and the check of the build."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
EXTENSIONS = (
    "gulliver.io._core",
    "gulliver.precision.int8._kernels",
    "gulliver.serve._decoder",
)
QEMU = shutil.which("qemu-x86_64")
WITH_LEAK = """
#include <vector>
const int* leak(std::vector<float>& v, unsigned long n) { v.assign(n, 1.0f); return nullptr; }
"""
WITHOUT = """
namespace gulliver { using Kernel = void (*)(float*); extern const Kernel {isa}; }
static void kernel(float* x) { for (int i = 0; i < 64; ++i) x[i] *= 2.0f; }
const gulliver::Kernel gulliver::{isa} = &kernel;
"""


def on(processor: str) -> subprocess.CompletedProcess[str]:
    """The extensions that are installed, with numpy only, on an emulated processor."""
    files = []
    for name in EXTENSIONS:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            pytest.skip(f"{name} is not built")
        files.append(spec.origin)
    openmp = sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*"))
    if QEMU is None or not openmp:
        pytest.skip("qemu-x86_64 is not installed, or torch brings no libgomp")
    command = (QEMU, "-cpu", processor, sys.executable, str(ROOT / "tests/native_kernels.py"))
    return subprocess.run(
        (*command, str(openmp[0]), *files),
        env={**os.environ, "OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_kernels_run_on_a_processor_without_avx512() -> None:
    done = on("Haswell")
    assert done.returncode == 0, done.stderr
    ran = done.stdout.splitlines()
    assert ran == ["checksums", "_kernels avx2", "_decoder avx2"]


@pytest.mark.full
def test_extensions_load_on_a_processor_without_avx() -> None:
    done = on("Nehalem")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["checksums"]


@pytest.mark.skipif(not all(map(shutil.which, ("g++", "nm", "objdump"))), reason="no binutils")
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="for x86-64")
@pytest.mark.parametrize(
    ("name", "source", "options", "problem"),
    [
        ("a_avx512", WITH_LEAK, "-mavx512f", "leak"),
        ("a_avx512", WITHOUT.replace("{isa}", "avx512"), "-mavx512f", None),
        ("a_avx2", WITHOUT.replace("{isa}", "avx2"), "-mavx2", None),
        ("a_avx2", WITHOUT.replace("{isa}", "avx2"), "-mavx512f -mprefer-vector-width=512", "zmm"),
        ("a_avx2", "struct A { A(); }; static A a;", "-mavx2", "_GLOBAL__sub_I"),
        ("a", WITH_LEAK, "-mavx2", "leak"),
        ("a", WITH_LEAK, "", None),
    ],
)
def test_the_build_fails_where_other_objects_reach_special_code(
    tmp_path: Path, name: str, source: str, options: str, problem: str | None
) -> None:
    cpp, built = tmp_path / f"{name}.cpp", tmp_path / f"{name}.cpp.o"
    cpp.write_text(source)
    subprocess.run(["g++", "-O3", "-c", *options.split(), str(cpp), "-o", str(built)], check=True)
    check = [sys.executable, str(ROOT / "native/check_objects.py"), "--objdump", "objdump"]
    done = subprocess.run([*check, "nm", str(built)], capture_output=True, text=True)
    assert done.returncode == (problem is not None), done.stderr
    assert problem is None or problem in done.stderr
