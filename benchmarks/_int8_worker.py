"""A scaled-down BLOOM on four ranks, each in a control group, streamed from a checkpoint.

The limit of a rank is its shard, one tensor, a tenth of both, and a constant: what the interpreter,
torch and transformers take with a model of two tiny layers in the same group, which is measured
first, and the buffers of reading.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import gulliver
from benchmarks._harness import Report, at_least, at_most
from benchmarks.limits import Group, LimitsError
from gulliver.booster.hybrid.checks import lazy_parameters
from gulliver.comm.groups import RankGroup
from gulliver.comm.world import init_world, shutdown
from gulliver.parallel.tensor import apply_tensor, plan_tensor
from gulliver.precision.int8.replace import model_bytes
from gulliver.quantize import stream_quantized

RANKS, SEED, MIB = 4, 0, 1 << 20
SIZES = {"vocab_size": 32000, "hidden_size": 2048, "n_layer": 10, "n_head": 16}
TINY = {"vocab_size": 64, "hidden_size": 64, "n_layer": 2, "n_head": 4}
READING = 48 * MIB
"""Bytes that reading takes whatever is read: a batch, and two pages."""
PROMPT = [[11, 503, 7, 1999, 42, 8, 23, 77]]
NEW = 12


def run_ranks(report: Report) -> None:
    """Streams on four ranks within their limits, and holds tokens against one rank's."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/tmp")) as place:
        folder = Path(place)
        _save(folder / "model", SIZES)
        _save(folder / "tiny", TINY)
        alone = _ranks(folder / "model", 1, None)[0]
        try:
            constant = max(said["peak"] for said in _ranks(folder / "tiny", RANKS, 4 << 30))
            shard, largest = _shard_bytes()
            needed = 1.1 * (shard + largest)
            limit = int(needed + constant + READING)
            found = _ranks(folder / "model", RANKS, limit)
        except LimitsError as error:
            report.notes.append(f"ranks: {error}")
            return
    peak = max(said["peak"] for said in found)
    same = min(
        sum(a == b for a, b in zip(said["tokens"][0], alone["tokens"][0], strict=True))
        / len(said["tokens"][0])
        for said in found
    )
    whole = f"{alone['float'] / MIB:.0f} MiB (whole, fp32)"
    ours = f"{peak / MIB:.0f} MiB of {limit / MIB:.0f}"
    report.rows.append(("BLOOM, 4 ranks streamed, peak of a rank", whole, ours, "", ""))
    report.notes.append(
        f"ranks: limit = 1.1 x (shard {shard / MIB:.0f} + largest tensor "
        f"{largest / MIB:.0f} MiB) + {constant / MIB:.0f} MiB for the interpreter, torch, "
        f"transformers and gloo + {READING // MIB} MiB of buffers"
    )
    report.bars.append(at_most("peak of a streaming rank, of its limit", peak / limit, 1.0))
    report.bars.append(at_least("tokens of 4 ranks that are one rank's", same, 1.0))


def _config(sizes: dict[str, Any]) -> Any:
    from transformers import BloomConfig

    return BloomConfig(**sizes)


def _save(folder: Path, sizes: dict[str, Any]) -> None:
    from transformers import BloomForCausalLM

    from gulliver.checkpoint import save_huggingface

    torch.manual_seed(SEED)
    made: Any = BloomForCausalLM(_config(sizes))
    model = made.to(torch.bfloat16)
    save_huggingface(model, folder)
    model.config.save_pretrained(folder)


def _shard_bytes() -> tuple[int, int]:
    """Returns bytes of a rank's quantised shard, and of the model's largest tensor."""
    from transformers import BloomForCausalLM

    with torch.device("meta"):
        model: Any = BloomForCausalLM(_config(SIZES))
    # Building a model makes its parameters one at a time, whole, before they go to meta.
    largest = max(p.nbytes for p in model.parameters())
    group = RankGroup(tuple(range(RANKS)), 0, None)
    apply_tensor(model, plan_tensor(model, RANKS), group)
    gulliver.replace_module(model)
    return model_bytes(model), largest


def _ranks(folder: Path, ranks: int, limit: int | None) -> list[dict[str, Any]]:
    """Runs this file once for each rank, each in a group of its own where there is a limit."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks._int8_worker", str(folder)]
    groups = [] if limit is None else [Group(memory=limit) for _ in range(ranks)]
    processes: list[subprocess.Popen[Any]] = []
    try:
        for group in groups:
            group.__enter__()
        for rank in range(ranks):
            told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
            env = os.environ | {name: str(value) for name, value in told.items()}
            env |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
            options: dict[str, Any] = {"env": env, "stdout": subprocess.PIPE, "text": True}
            start = groups[rank].start if groups else subprocess.Popen
            processes.append(start(command, **options))
        said = [process.communicate(timeout=300)[0] for process in processes]
        if any(process.returncode for process in processes):
            kills = [group.kills for group in groups]
            raise RuntimeError(f"a rank failed; kills by the limit: {kills}\n" + "\n".join(said))
        found = [json.loads(text.strip().splitlines()[-1]) for text in said]
        for number, group in enumerate(groups):
            found[number]["peak"] = group.peak
        return found
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
        for group in groups:
            group.__exit__(None, None, None)


def _rank(folder: Path) -> dict[str, Any]:
    from transformers import BloomConfig, BloomForCausalLM

    world = init_world()
    with lazy_parameters():
        model: Any = BloomForCausalLM(BloomConfig.from_pretrained(folder))
    whole = sum(p.nbytes for p in model.parameters())
    group = RankGroup(tuple(range(world.size)), world.rank, None)
    stream_quantized(model, folder, rank_group=group)
    ids = torch.tensor(PROMPT) % model.config.vocab_size
    with torch.no_grad():
        tokens = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
            pad_token_id=0,
        )
    return {"tokens": tokens.tolist(), "float": whole}


if __name__ == "__main__":
    said = _rank(Path(sys.argv[1]))
    print(json.dumps(said), flush=True)
    shutdown()
