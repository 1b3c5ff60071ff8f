"""What one GPU must show, in nine minutes at most: `python -m benchmarks.gpu --out FOLDER`.

Each part is a process of its own with a time limit, the most important first: a crash or a hang
ends that part alone. Results are written as they come, one file for each part
(``gpu-NAME.json``), so that a run that is cut off leaves what it measured. ``--out`` is by default
``$OUT``, else ``benchmarks/results``.

``--dry-run`` runs the same lines on the CPU with tiny sizes: only the device can surprise then.

Smoke parts are in `_gpu_smoke`, measurements in `_gpu_speed`.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import tyro

from benchmarks import _gpu_smoke as smoke
from benchmarks import _gpu_speed as speed
from benchmarks._gpu_run import GpuRun, PartSkipped
from benchmarks._harness import RESULTS, commit, hardware, instructions
from gulliver.errors import GulliverError, nearest

BUDGET_S = 530.0
"""Seconds of all parts together; less than nine minutes, for what starts and ends processes."""


@dataclass(frozen=True)
class Part:
    """A part and the most seconds that it may take."""

    run: Callable[[GpuRun], None]
    limit_s: float


PARTS = {
    "smoke-zero": Part(smoke.zero, 45),
    "smoke-loader": Part(smoke.loader, 25),
    "smoke-gemini": Part(smoke.gemini, 45),
    "smoke-fp8": Part(smoke.fp8, 30),
    "smoke-checkpoint": Part(smoke.checkpoint, 40),
    "smoke-flash": Part(smoke.flash, 30),
    "smoke-serving": Part(smoke.serving, 45),
    "smoke-autoencoder": Part(smoke.autoencoder, 40),
    "smoke-embedding": Part(smoke.embedding, 30),
    "fp8": Part(speed.fp8, 100),
    "step": Part(speed.step, 60),
    "offload": Part(speed.offload, 80),
    "stall": Part(speed.stall, 50),
    "loader": Part(speed.loader, 30),
    "decode": Part(speed.decode, 80),
}


@dataclass(frozen=True)
class Options:
    """Where and how parts run."""

    parts: tuple[str, ...] = ()  # Parts to run, in this order; none: all
    out: str = field(default_factory=lambda: os.environ.get("OUT") or str(RESULTS))
    """Folder of the result files."""
    dry_run: bool = False  # Tiny sizes on the CPU
    budget_s: float = BUDGET_S  # Seconds of all parts together
    inside: bool = False  # Runs the one part in this process (what the command itself starts)


def main(options: Options) -> int:
    for name in options.parts:
        if name not in PARTS:
            raise GulliverError(f"part {name!r} is unknown: {nearest(name, PARTS)}")
    if not options.dry_run and not torch.cuda.is_available():
        raise GulliverError("no CUDA device is available; --dry-run runs the parts on the CPU")
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    if options.inside:
        return run_here(options.parts[0], out, options.dry_run)
    begun, failed = time.monotonic(), 0
    for name in options.parts or PARTS:
        left = options.budget_s - (time.monotonic() - begun)
        result = run_apart(name, out, options.dry_run, left)
        failed += result["status"] not in ("ok", "skipped")
        print(f"{name:18} {result['status']:8} {result['seconds']:6.1f} s  {result['figures']}")
        sys.stdout.flush()
    print(f"{time.monotonic() - begun:.0f} s in all; results are in {out}")
    return int(failed > 0)


def result_file(out: Path, name: str) -> Path:
    return out / f"gpu-{name}.json"


def run_apart(name: str, out: Path, dry_run: bool, left_s: float) -> dict[str, Any]:
    """Runs a part in a process of its own, and returns what its file says in the end."""
    path, begun = result_file(out, name), time.monotonic()
    path.unlink(missing_ok=True)
    # A dry run has no device to hurry for: torch alone takes seconds to start on a busy machine.
    limit = 4 * PARTS[name].limit_s if dry_run else min(PARTS[name].limit_s, left_s)
    if limit < 5:
        return _write(path, name, {"status": "no time left", "seconds": 0.0, "figures": {}})
    command = [sys.executable, "-m", "benchmarks.gpu", "--parts", name, "--out", str(out)]
    command += ["--inside", *(["--dry-run"] if dry_run else [])]
    try:
        done = subprocess.run(command, timeout=limit, stderr=subprocess.PIPE, text=True)
        status, errors = f"exit code {done.returncode}", done.stderr
    except subprocess.TimeoutExpired as error:
        # Bytes or text, by the version of Python.
        kept = error.stderr or ""
        errors = kept if isinstance(kept, str) else kept.decode(errors="replace")
        status = f"stopped after {limit:.0f} s"
    found = json.loads(path.read_text()) if path.exists() else {"figures": {}}
    if found.get("status", "running") == "running":  # it ended before it could say how
        found = {**found, "status": status, "error": errors[-4000:]}
    return _write(path, name, {**found, "seconds": time.monotonic() - begun})


def run_here(name: str, out: Path, dry_run: bool) -> int:
    """Runs a part in this process, and writes each figure down as it comes."""
    path, device = result_file(out, name), "cpu" if dry_run else "cuda:0"
    state: dict[str, Any] = {"status": "running", "figures": {}, "checks": {}}
    run = GpuRun(torch.device(device), dry_run, state, lambda: _write(path, name, state))
    try:
        with run:
            PARTS[name].run(run)
        wrong = [check for check, found in state["checks"].items() if not found["holds"]]
        state["status"] = f"wrong: {', '.join(wrong)}" if wrong else "ok"
    except PartSkipped as reason:
        state.update(status="skipped", error=str(reason))
    except Exception:
        state.update(status="failed", error=traceback.format_exc()[-4000:])
    _write(path, name, state)
    return int(state["status"] not in ("ok", "skipped"))


def _write(path: Path, name: str, state: dict[str, Any]) -> dict[str, Any]:
    facts = {"part": name, "hardware": hardware(), "instructions": instructions()}
    facts |= {"commit": commit(), "torch": torch.__version__, "python": platform.python_version()}
    result = {**facts, **state}
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
    return result


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
