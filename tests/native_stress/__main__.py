"""Builds and runs the stress program under each sanitizer."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.native_stress import SANITIZERS, build, run

failed = False
for sanitizer in sys.argv[1:] or SANITIZERS:
    with tempfile.TemporaryDirectory(dir=".") as name:
        done = run(build(Path(name), sanitizer), Path(name), rounds=12)
        print(f"{sanitizer}: {done.stdout.strip() or 'FAILED'}\n{done.stderr}", end="")
        failed |= done.returncode != 0
sys.exit(failed)
