"""Breaks lines that matter, one at a time, and sees whether the tests notice: a mutation test.

`python -m tests.mutation` takes each mutant in turn: a copy of `src` with one piece of text
replaced, put first on the path, under which the tests run that `make test` runs; first the files
that are likely to notice, then all the others, until the first failure. The mutants are silent
mistakes such as happen: a wrong scale, a wait that is missing, a shifted index, a swapped shard, a
dropped mask. What is known of a mutant is kept in a file, so a run that was stopped goes on where
it was; `--only NAME` takes one of them, `--likely` only the first files.

Each text must occur exactly once, or the program ends: when code moves, its mutant moves with it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
MAY_SURVIVE = 1
FAILED = (1, 2)
"""Exit codes of pytest when tests failed, the second where pytest-xdist stopped its processes."""


@dataclass(frozen=True)
class Mutant:
    """A mistake.

    Attributes:
        name: of it.
        file: below `src/gulliver`.
        old: text that occurs once.
        new: what it becomes.
        likely: test files that are likely to notice.
    """

    name: str
    file: str
    old: str
    new: str
    likely: tuple[str, ...]


MUTANTS = (
    Mutant(
        "zero: shards get the sum of gradients",
        "parallel/zero/reduce.py",
        'return reduce_scatter(output, gradient, "mean", self.group',
        'return reduce_scatter(output, gradient, "sum", self.group',
        ("zero",),
    ),
    Mutant(
        "zero: a reduction is used before it is there",
        "parallel/zero/reduce.py",
        "        sharded.reduction.wait()\n",
        "",
        ("zero", "zero_loops"),
    ),
    Mutant(
        "zero: of accumulated gradients the last stays",
        "parallel/zero/reduce.py",
        "gradient += incoming",
        "gradient.copy_(incoming)",
        ("zero", "zero_loops"),
    ),
    Mutant(
        "zero: the norm is that of the own shard",
        "parallel/zero/optimizer.py",
        "            all_reduce(total, operation, self.group)\n",
        "            total *= self.shards.parts\n",
        ("zero", "zero_loops"),
    ),
    Mutant(
        "zero: what has no gradient on one rank is stepped in backward by none",
        "parallel/zero/step.py",
        "votes.amax(0)",
        "votes.amin(0)",
        ("step_in_backward",),
    ),
    Mutant(
        "zero: whole parameters lose their shapes",
        "parallel/zero/state.py",
        "self.has_whole = whole or self.parts == 1",
        "self.has_whole = self.parts == 1",
        ("zero_whole",),
    ),
    Mutant(
        "zero: a shard that was stepped leaves the fast tier as it came",
        "parallel/zero/tiers.py",
        "with sharded.chunk.opened(write=True, moments=True):",
        "with sharded.chunk.opened(write=False, moments=True):",
        ("zero_tiers", "gemini"),
    ),
    Mutant(
        "memory: what is used for writing counts as unchanged",
        "memory/manager.py",
        "self._decided(lambda: self._core.use(managed.number, write, fresh))",
        "self._decided(lambda: self._core.use(managed.number, False, fresh))",
        ("memory_manager", "zero_tiers"),
    ),
    Mutant(
        "sequence: merged parts keep the larger log-sum-exp",
        "parallel/sequence/kernels.py",
        "own_lse.copy_(torch.logaddexp(own_lse, lse))",
        "own_lse.copy_(torch.maximum(own_lse, lse))",
        ("sequence_virtual", "sequence"),
    ),
    Mutant(
        "sequence: a block is taken for that of the rank on the other side",
        "parallel/sequence/ring.py",
        "* inner.size + (inner.rank - b) % inner.size",
        "* inner.size + (inner.rank + b) % inner.size",
        ("sequence",),
    ),
    Mutant(
        "sequence: rows that see nothing have weight",
        "parallel/sequence/kernels.py",
        "lse = lse.masked_fill(unseen, -math.inf)",
        "lse = lse.clone()",
        ("sequence", "sequence_virtual"),
    ),
    Mutant(
        "sequence: the loss is a mean over the own tokens",
        "parallel/sequence/sharding.py",
        "share = kept.sum() / totals[1].clamp(min=1).to(losses.dtype)",
        "share = kept.sum() / max(kept.numel(), 1)",
        ("sequence", "hybrid_transformers"),
    ),
    Mutant(
        "tensor: every rank adds the bias before the sum",
        "parallel/tensor/layers.py",
        "y = product(x, weight, None, transposed).contiguous()",
        "y = product(x, weight, bias, transposed).contiguous()",
        ("tensor",),
    ),
    Mutant(
        "tensor: ranks keep each other's piece",
        "parallel/tensor/collectives.py",
        "start, stop = intervals(lengths)[rank_group.rank]",
        "start, stop = intervals(lengths)[rank_group.rank - 1]",
        ("tensor",),
    ),
    Mutant(
        "tensor: ignored labels have a gradient",
        "parallel/tensor/loss.py",
        "grad = grads[0].masked_fill(labels == ctx.ignored, 0).unsqueeze(-1)",
        "grad = grads[0].unsqueeze(-1)",
        ("tensor", "hybrid"),
    ),
    Mutant(
        "pipeline: a gradient that passes a stage by replaces the stage's own",
        "parallel/pipeline/runner.py",
        "return passing[tensor] if found is None else found + passing[tensor]",
        "return passing[tensor]",
        ("pipeline",),
    ),
    Mutant(
        "pipeline: micro-batches of other sizes count alike",
        "parallel/pipeline/batches.py",
        "term = loss * weight if weight else",
        "term = loss / len(self._weights) if weight else",
        ("pipeline",),
    ),
    Mutant(
        "pipeline: gradients of weights tied over two stages are not summed",
        "parallel/pipeline/stage.py",
        "if name in gradients and name in mine:",
        "if name in gradients and name in mine and len(places) > 2:",
        ("pipeline",),
    ),
    Mutant(
        "checkpoint: files are named before they are forced to the disk",
        "io/files.py",
        '        for found in sorted(partial.rglob("*")):\n            sync(found)\n',
        "",
        ("io", "checkpoint"),
    ),
    Mutant(
        "checkpoint: a step does not wait for what is being copied",
        "checkpoint/snapshot.py",
        "        for tickets in waited.values():\n"
        "            for ticket in tickets:\n"
        "                _wait_copied(ticket)\n",
        "",
        ("checkpoint", "booster", "checkpoint_faults"),
    ),
    Mutant(
        "checkpoint: a slice is read from where its row begins",
        "checkpoint/regions.py",
        "ours.local[our] + begin - ours.begin[our],",
        "ours.local[our],",
        ("regions",),
    ),
    Mutant(
        "checkpoint: what changed while it was saved is not noticed",
        "checkpoint/snapshot.py",
        "if t._version != version]",
        "if t._version < version]",
        ("checkpoint", "checkpoint_faults"),
    ),
    Mutant(
        "loader: a state repeats the last batch",
        "data/sampler.py",
        "(epoch, number + 1) if number + 1 < len(order)",
        "(epoch, number) if number + 1 < len(order)",
        ("bucket_sampler", "loader"),
    ),
)


@dataclass(frozen=True)
class Result:
    """What came of a mutant."""

    key: str
    name: str
    caught_by: str | None
    seconds: float


def key_of(mutant: Mutant) -> str:
    """Of the mutant and the file that it changes: what is known of others does not count."""
    text = repr(mutant) + (SOURCE / "gulliver" / mutant.file).read_text()
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def mutated(mutant: Mutant) -> str:
    """The file's text with the mistake in it.

    Raises:
        SystemExit: what is to be changed is not there exactly once.
    """
    text = (SOURCE / "gulliver" / mutant.file).read_text()
    if (count := text.count(mutant.old)) != 1:
        sys.exit(f"{mutant.name!r}: {mutant.file} has {count} times {mutant.old!r}, expected once")
    return text.replace(mutant.old, mutant.new)


def run(mutant: Mutant, likely_only: bool) -> Result:
    """Runs the tests under a mutant until one fails."""
    begun, caught_by = time.monotonic(), None
    files = {p.stem: str(p.relative_to(ROOT)) for p in sorted((ROOT / "tests").rglob("test_*.py"))}
    likely = [files[f"test_{name}"] for name in mutant.likely]
    others = list(files.values())
    # Texts of mutants are compared with the source itself, there.
    others = [p for p in others if p not in (*likely, "tests/test_infrastructure.py")]
    with tempfile.TemporaryDirectory(prefix="gulliver-mutant-") as folder:
        copy = Path(folder) / "src"
        shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        (copy / "gulliver" / mutant.file).write_text(mutated(mutant))
        side_by_side = ["-n", "auto", "--maxprocesses", "4", "--dist", "worksteal"]
        for arguments in (likely, [] if likely_only else [*side_by_side, *others]):
            if arguments and (caught_by := _first_failure(copy, arguments)) is not None:
                break
    return Result(key_of(mutant), mutant.name, caught_by, round(time.monotonic() - begun, 1))


def _first_failure(source: Path, arguments: list[str]) -> str | None:
    path = os.pathsep.join([str(source), str(ROOT), os.environ.get("PYTHONPATH", "")])
    options = ["-x", "-q", "--full", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    lines = done.stdout.splitlines()
    failed = [n for n in lines if n.startswith(("FAILED ", "ERROR ")) and "::" in n]
    if done.returncode not in FAILED or not failed:
        said = done.stdout[-3000:] + done.stderr[-3000:]
        sys.exit(f"pytest ended with {done.returncode}, which says nothing of the mutant:\n{said}")
    return failed[0].partition(" ")[2]


def main() -> None:
    """Runs the mutants; exit code 1 when more than one survives."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", action="append", metavar="NAME", help="mutants with this in name")
    parser.add_argument("--likely", action="store_true", help="only the test files likely to fail")
    parser.add_argument("--again", action="store_true", help="forget what is known")
    parser.add_argument("--results", type=Path, default=ROOT / "out" / "mutation.jsonl")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if not options.only or any(o in m.name for o in options.only)]
    for mutant in chosen:
        mutated(mutant)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    known: dict[str, Result] = {}
    if options.results.exists() and not options.again:
        lines = options.results.read_text().splitlines()
        known = {(found := Result(**json.loads(line))).key: found for line in lines}
    survived = []
    for mutant in chosen:
        result = known.get(key_of(mutant))
        # That nothing caught it may be out of date: there may be more tests now.
        if result is None or result.caught_by is None:
            result = run(mutant, options.likely)
            with options.results.open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")
        verdict = f"caught by {result.caught_by}" if result.caught_by else "SURVIVED"
        print(f"{mutant.name}: {verdict} ({result.seconds:.0f} s)", flush=True)
        survived += [] if result.caught_by else [mutant.name]
    print(f"{len(chosen) - len(survived)} of {len(chosen)} caught")
    sys.exit(1 if len(survived) > MAY_SURVIVE else 0)


if __name__ == "__main__":
    main()
