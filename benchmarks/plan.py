"""Plans: twelve that were edited by hand run as they say, and predictions beside measurements.

`python -m benchmarks.plan` starts two ranks. First a plugin's plan is edited in its YAML, line by
line, loaded, and run: what the edit says is looked for in the running model, and the weights are
those of plain PyTorch. Then ten settings of plugins are planned with a measured batch, and run:
seconds of a step and bytes of model state of each rank, predicted and measured.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from benchmarks._harness import Report, at_least, at_most, finish
from gulliver.booster import Booster, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from gulliver.comm import (
    all_gather,
    all_reduce,
    barrier,
    gather_objects,
    init_world,
    launch,
    make_axes,
    reduce_scatter,
    shutdown,
)
from gulliver.comm.messages import exchange, shift
from gulliver.hardware import Cluster, described
from gulliver.hardware.cluster import Along, Axis
from gulliver.hardware.links import probe_collectives, probe_links
from gulliver.memory import region_of
from gulliver.plan import Plan

Edit = dict[str, str]
EDITS: dict[str, Edit] = {
    "tensor 2": {"data": "1", "tensor": "2"},
    "pipeline 2": {"data": "1", "pipeline": "2"},
    "cut": {"data": "1", "pipeline": "2", "cut": "[1, 3]"},
    "schedule": {"data": "1", "pipeline": "2", "schedule": "gpipe"},
    "micro-batches": {"data": "1", "pipeline": "2", "micro_batches": "2"},
    "chunk bytes": {"chunk_bytes": "20000"},
    "stage": {"stage": "3"},
    "recompute": {"recompute": '["model.layers.1"]'},
    "Ulysses 2": {"data": "1", "sequence": "2", "mode": "all_to_all", "ulysses": "2"},
    "ring 2": {"data": "1", "sequence": "2", "mode": "ring_attn", "inner": "2"},
    "split gather": {"data": "1", "tensor": "2", "mode": "split_gather"},
    "precision": {"autocast": "bf16"},
}
"""New value of each key, by what is edited."""

SEEN: dict[str, Callable[[dict[str, Any]], bool]] = {
    "tensor 2": lambda s: any("q_proj" in name for name in s["cut"]),
    "pipeline 2": lambda s: s["blocks"] == 2,
    "cut": lambda s: s["blocks"] in (1, 3),
    "schedule": lambda s: s["schedule"][0] == "gpipe",
    "micro-batches": lambda s: s["schedule"][1] == 2,
    "chunk bytes": lambda s: s["largest"] <= 20000 < s["before"],
    "stage": lambda s: s["stage"] == 3,
    "recompute": lambda s: s["forwards"][1] == 2 * s["forwards"][0],
    "Ulysses 2": lambda s: s["sequence"] == (2, 1),
    "ring 2": lambda s: s["sequence"] == (1, 2),
    "split gather": lambda s: any("q_proj" in name for name in s["cut"]),
    "precision": lambda s: s["dtype"] == "torch.bfloat16",
}
"""What is looked for in the running model."""

RING = {"sp_size": 2, "sequence_parallelism_mode": "ring_attn"}
ULYSSES = {"sp_size": 2, "sequence_parallelism_mode": "all_to_all"}
SETTINGS: dict[str, Callable[[], Any]] = {
    "DDP": lambda: TorchDDPPlugin(verbose=False),
    **{
        f"ZeRO {stage}": lambda stage=stage: LowLevelZeroPlugin(stage, chunk_mb=1.0, verbose=False)
        for stage in range(4)
    },
    "tensor 2": lambda: HybridParallelPlugin(tp_size=2, verbose=False),
    "tensor 2, recompute": lambda: HybridParallelPlugin(
        tp_size=2, checkpoint_activations=True, verbose=False
    ),
    "pipeline 2": lambda: HybridParallelPlugin(pp_size=2, num_microbatches=4, verbose=False),
    "ring 2": lambda: HybridParallelPlugin(**RING, verbose=False),
    "Ulysses 2": lambda: HybridParallelPlugin(**ULYSSES, verbose=False),
}


KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 33)}
"""What lets glibc reuse memory; else a step's page faults are those of its process's past."""


@dataclass(frozen=True)
class Options:
    """Sizes of the run."""

    width: int = 256
    """Width of the model whose seconds are predicted."""
    length: int = 128
    """Length of its sequences."""
    batch: int = 8
    """Samples of one model's batch."""
    steps: int = 6
    """Timed steps of each setting in a round."""
    rounds: int = 3
    """Turns of predicting and running every setting: the machine's speed drifts."""
    keep: bool = False
    """Write the result to benchmarks/results."""


def llama(width: int, length: int) -> Any:
    """A model of four blocks, with the same values on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8 * width,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=length,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def batch_of(vocabulary: int, samples: int, length: int, seed: int) -> dict[str, torch.Tensor]:
    """Tokens that are their own labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocabulary, (samples, length), generator=generator)
    return {"input_ids": ids, "labels": ids}


def sgd(model: Any) -> torch.optim.Optimizer:
    """An optimizer whose step does not enlarge rounding, as Adam's first steps do."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def edited(text: str, edit: Edit) -> Plan:
    """The plan of a YAML text with the first line of each key replaced."""
    lines = text.splitlines()
    for key, value in edit.items():
        number = next(n for n, row in enumerate(lines) if row.strip().startswith(f"{key}:"))
        lines[number] = f"{lines[number].partition(':')[0]}: {value}"
    return Plan.from_yaml("\n".join(lines) + "\n")


def run_edits() -> dict[str, dict[str, Any]]:
    """Runs every edited plan; every rank calls it."""
    plugin = HybridParallelPlugin(zero_stage=1, chunk_mb=0.1, verbose=False)
    model = llama(64, 32)
    text = plugin.make_plan(model, sgd(model)).to_yaml()
    before = max(chunk.bytes for chunk in Plan.from_yaml(text).chunks)
    found = {}
    for name, edit in EDITS.items():
        plan, model = edited(text, edit), llama(64, 32)
        seen = {"before": before, **_train(plan, model)}
        wanted = _plain(plan, llama(64, 32))
        errors = [abs(a - b) for a, b in zip(seen.pop("losses"), wanted, strict=True)]
        everywhere = gather_objects((SEEN[name](seen), max(errors)))
        found[name] = {
            "seen": all(known for known, _ in everywhere),
            "error": max(error for _, error in everywhere),
            "bar": 2e-2 if "autocast" in edit else 1e-4,
        }
    return found


def _train(plan: Plan, model: Any, steps: int = 3) -> dict[str, Any]:
    """Losses of some steps, and what is seen of the model while it runs."""
    forwards, dtypes = [0] * 4, set[str]()
    for number, layer in enumerate(model.model.layers):

        def count(x: Any, number: int = number, inner: Any = layer.mlp.act_fn.forward) -> Any:
            forwards[number] += 1
            dtypes.add(str(x.dtype))
            return inner(x)

        layer.mlp.act_fn.forward = count
    booster = Booster(plan=plan, verbose=False)
    model, optimizer, *_ = booster.boost(model, sgd(model))
    data, losses = booster.plugin.data_place(), []
    for step in range(steps):
        batch = batch_of(512, 4, 32, seed=2 * step + data[0])
        losses.append(_step(booster, model, optimizer, batch))
    if data[1] > 1:
        losses = [sum(both) / data[1] for both in zip(*gather_objects(losses), strict=True)]
    pipeline, sequence = optimizer.pipeline, optimizer.mesh.sequence.plan
    return {
        "losses": losses,
        "cut": [n for n, p in model.named_parameters() if region_of(p) is not None],
        "blocks": sum(any(True for _ in b.parameters()) for b in model.model.layers),
        "schedule": (None, 0) if pipeline is None else (pipeline.style, pipeline.micro_batches),
        "largest": max((c.bytes for c in booster.plan.chunks if len(c.tensors) > 1), default=0),
        "stage": optimizer.stage,
        "forwards": forwards,
        "sequence": (sequence.ulysses, sequence.ring),
        "dtype": next(iter(dtypes), ""),
    }


def _step(booster: Booster, model: Any, optimizer: Any, batch: Any) -> float:
    if optimizer.pipeline is not None:
        loss = booster.execute_pipeline(iter([batch]), model, None, optimizer)["loss"]
    else:
        loss = model(**batch).loss
        booster.backward(loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def _plain(plan: Plan, model: Any, steps: int = 3) -> list[float]:
    """Losses of one process that knows nothing of plans."""
    optimizer, places, losses = sgd(model), plan.mesh.of("data"), []
    for step in range(steps):
        total = 0.0
        for place in range(places):
            loss = model(**batch_of(512, 4, 32, seed=2 * step + place)).loss / places
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def _reducing(count: int) -> Callable[[], object]:
    whole = torch.zeros(count // 4)
    return lambda: all_reduce(whole)


def _gathering(count: int) -> Callable[[], object]:
    whole, part = torch.zeros(count // 4), torch.zeros(count // 8)
    return lambda: all_gather(whole, part)


def _scattering(count: int) -> Callable[[], object]:
    whole, part = torch.zeros(count // 4), torch.zeros(count // 8)
    return lambda: reduce_scatter(part, whole)


def measured_cluster() -> Cluster:
    """This machine with two ranks; every rank calls it."""
    line = make_axes({"ranks": 2}).rank_group("ranks")

    def exchanging(count: int) -> Callable[[], object]:
        parts = [torch.zeros(count // 8) for _ in range(2)]
        return lambda: torch.cat(exchange(line, parts, [count // 8] * 2))

    def sending(count: int) -> Callable[[], object]:
        out, into = torch.zeros(count // 4), torch.empty(count // 4)
        return lambda: shift(line, out, into, 7).wait()

    collectives = {"all_reduce": _reducing, "all_gather": _gathering, "reduce_scatter": _scattering}
    collectives |= {"all_to_all": exchanging, "sends": sending}
    link = next(iter(probe_links().values()))
    alone, busy = (probe_collectives(collectives, 2, busy=busy) for busy in (False, True))
    along = (Along(2, alone, busy),)
    link = type(link)(link.alpha_s, link.bandwidth, messages=link.messages, along=along)
    device = described("cpu-loopback").device
    return Cluster("two ranks here", device, (Axis("ranks", 2, link),), measured=True)


def run_settings(options: Options) -> dict[str, dict[str, float]]:
    """Predicts and runs every setting in turns; every rank calls it."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in SETTINGS}
    for _ in range(options.rounds):
        cluster = measured_cluster()
        for name, make in SETTINGS.items():
            rows[name].append(_compared(make(), cluster, options))
            barrier()
    return {
        name: {key: statistics.median(row[key] for row in turns) for key in turns[0]}
        for name, turns in rows.items()
    }


def _compared(plugin: Any, cluster: Cluster, options: Options) -> dict[str, float]:
    model = llama(options.width, options.length)
    optimizer = torch.optim.AdamW(model.parameters())
    sample = batch_of(8 * options.width, options.batch, options.length, 0)
    plan = plugin.make_plan(model, optimizer, cluster, sample)
    booster = Booster(plan=plan, verbose=False)
    model, boosted, *_ = booster.boost(model, optimizer)
    for _ in range(options.steps + 1):
        _step(booster, model, boosted, sample)
    compared = booster.compare()
    step, held = compared["step"], compared["total"]
    sent = next((row for row in compared.rows if row.kind == "sent"), None)
    return {
        # The cluster of the boost is the described one: the plan's seconds are of ours.
        "predicted_s": plan.predicted.seconds.step,
        "measured_s": max(gather_objects(step.measured)),
        "predicted_bytes": held.predicted,
        # Of a pipeline the plan tells the bytes of the first rank, of shards those of a full one.
        "measured_bytes": gather_objects(held.measured)[0],
        "predicted_sent": plan.predicted.sent,
        "measured_sent": gather_objects(0.0 if sent is None else sent.measured)[0],
    }


def work(path: Path, options: Options) -> None:
    """What each rank does."""
    torch.set_num_threads(1)
    world = init_world()
    found = {"edits": run_edits(), "settings": run_settings(options)}
    if world.is_main:
        path.write_text(json.dumps(found), encoding="utf-8")
    shutdown()


def main() -> None:
    """Starts the ranks and reports."""
    if sys.argv[1:2] == ["--rank-of"]:
        width, length, batch, steps, rounds = map(int, sys.argv[3:8])
        work(Path(sys.argv[2]), Options(width, length, batch, steps, rounds))
        return
    options = tyro.cli(Options, description=__doc__)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        sizes = [options.width, options.length, options.batch, options.steps, options.rounds]
        os.environ.update(KEEP_MEMORY)
        launch("benchmarks.plan", ["--rank-of", str(path), *map(str, sizes)], 2)
        found = json.loads(path.read_text(encoding="utf-8"))
    report = Report(
        "plan",
        "plans: predicted and measured, two ranks",
        (
            "setting",
            "predicted ms",
            "measured ms",
            "error",
            "predicted MiB",
            "measured MiB",
            "error",
            "predicted MiB sent",
            "measured MiB sent",
            "error",
        ),
    )
    errors: dict[str, list[float]] = {"s": [], "bytes": [], "sent": []}
    for name, row in found["settings"].items():
        cells = [name]
        for unit, scale in (("s", 1e3), ("bytes", 2**-20), ("sent", 2**-20)):
            predicted, measured = row[f"predicted_{unit}"], row[f"measured_{unit}"]
            if not measured:  # torch's DDP does not tell what it sends
                cells += [f"{scale * predicted:.2f}", "", ""]
                continue
            errors[unit].append(abs(predicted / measured - 1))
            off = predicted / measured - 1
            cells += [f"{scale * predicted:.2f}", f"{scale * measured:.2f}", f"{off:+.1%}"]
        report.rows.append(cells)
    done = [
        name for name, row in found["edits"].items() if row["seen"] and row["error"] < row["bar"]
    ]
    report.figures = found
    report.bars = [
        at_least("edited plans that run as they say", len(done), len(EDITS)),
        at_most("median error of seconds", statistics.median(errors["s"]), 0.15),
        at_most("median error of bytes", statistics.median(errors["bytes"]), 0.03),
        at_most("median error of bytes sent", statistics.median(errors["sent"]), 0.03),
    ]
    failed = [name for name in EDITS if name not in done]
    report.notes = [
        f"LLaMA of 4 blocks, width {options.width}, {options.batch} samples of {options.length}; "
        f"one thread per rank; medians of {options.rounds} rounds of {options.steps} steps.",
        "Ranks keep the memory that they have freed: given back, it comes back page by page, which "
        "took 0 to 20,000 page faults a step, by what lies where in the heap.",
        f"Edited plans: {', '.join(EDITS)}." + (f" Not as they say: {failed}." if failed else ""),
    ]
    finish(report, options.keep)


if __name__ == "__main__":
    main()
