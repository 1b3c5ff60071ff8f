"""Wire formats: the bytes that they send, and steps over links that are too slow.

`python -m benchmarks.wire` builds a network whose links carry what a step sends as it is in three
times its compute, and lets fp32 and formats take turns: ZeRO at stages 0, 2 and 3, tensor
parallelism, Ulysses and a ring. Layers sleep as long as they would compute, as on an accelerator
next to the processor, which packs and sends. It needs root, ``ip`` and ``tc``. ``--parts
convergence`` trains a GPT and the STDiT on four ranks in all formats, in a report of its own; it
takes a quarter of an hour on two cores.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import tyro
from torch import Tensor
from torch.autograd import Function

from benchmarks._harness import Report, alternate, at_least, at_most, finish, slowest_rank
from benchmarks._models import gpt
from benchmarks._slept import slept
from benchmarks._wire_training import report_convergence
from benchmarks.netlab import Net, foreign_load, run, wire_bytes
from gulliver.booster import Booster, LowLevelZeroPlugin
from gulliver.comm import barrier, init_world
from gulliver.comm.groups import RankGroup
from gulliver.comm.watchdog import sent_bytes
from gulliver.parallel.sequence import SequencePlan, make_groups, swap_sharded_dim
from gulliver.parallel.sequence.ring import RingCall, _Pack, round_trip, turn
from gulliver.parallel.tensor import collectives as tensor_parallel
from gulliver.precision.wire import wire_format

SLEPT_S = 0.15
RATIO = 3.0  # Seconds of communication in those of compute
LARGE = ", chunks of 4 MB"  # Ends the name of a contestant of ZeRO with fewer messages
PEERS = (
    "DeepSpeed's ZeRO++ was not run: the ranks are CPU processes, and its quantiser is a CUDA "
    "kernel alone (read in 0.19.8: on CPUs QuantizerBuilder is 'not implemented')."
)


@dataclass(frozen=True)
class Options:
    """Sizes of the run."""

    parts: tuple[str, ...] = ("steps",)
    formats: tuple[str, ...] = ("identity", "bf16", "fp8", "int8")
    workloads: tuple[str, ...] = ("ZeRO 0", "ZeRO 2", "ZeRO 3", "tensor", "Ulysses", "ring")
    ranks: int = 4
    rounds: int = 7
    """Turns of each format, of two steps; with three, medians of few steps differed by a fifth."""
    steps: int = 80  # Steps of each training
    seeds: int = 3  # Seeds of each training
    keep: bool = False  # Write benchmarks/results


# Steps.


class _Sleep(Function):
    """Sleeps forward and twice as long backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        time.sleep(seconds / 3)
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        time.sleep(2 * ctx.seconds / 3)
        return grads[0], None


def _zero(wire: str, ranks: int, stage: int) -> Callable[[], None]:
    wire, _, size = wire.partition(LARGE)
    task = slept(gpt(192, 4, 2, 64), SLEPT_S)
    asked = None if wire == "identity" else wire
    plugin = LowLevelZeroPlugin(
        stage=stage,
        chunk_mb=4 if size else 1,
        verbose=False,
        communication_dtype=asked,
        force_communication_dtype=asked is not None,
        wire_gate=False,
    )
    booster, model = Booster(plugin=plugin), task.model()
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), fused=True))

    def step() -> None:
        booster.backward(task.loss(model, 0), optimizer)
        optimizer.step()
        optimizer.zero_grad()

    step.settle = optimizer.gatherer.finish_all  # type: ignore[attr-defined]
    return step


def _tensor(wire: str, ranks: int) -> Callable[[], None]:
    group = RankGroup(tuple(range(ranks)), int(os.environ["RANK"]), None, wire_format(wire))
    x, layers = torch.randn(1024, 512, requires_grad=True), 4

    def step() -> None:
        y = x
        for _ in range(layers):
            y = tensor_parallel.copy(y, group)
            y = _Sleep.apply(y, SLEPT_S / layers)
            y = tensor_parallel.reduce(y, group)
        y.sum().backward()
        x.grad = None

    return step


def _ulysses(wire: str, ranks: int) -> Callable[[], None]:
    groups = make_groups(SequencePlan(ulysses=ranks, wire=wire_format(wire)))
    x, layers = torch.randn(1, 512, 1024, requires_grad=True), 4

    def step() -> None:
        y = x
        for _ in range(layers):
            y = swap_sharded_dim(y, 1, 2, groups, 512 * ranks)
            y = _Sleep.apply(y, SLEPT_S / layers)
            y = swap_sharded_dim(y, 2, 1, groups, 1024)
        y.sum().backward()
        x.grad = None

    return step


def _ring(wire: str, ranks: int) -> Callable[[], None]:
    groups = make_groups(SequencePlan(inner=ranks, wire=wire_format(wire)))
    tokens = 192
    layout = groups.plan.lay(ranks * tokens)
    call = RingCall(groups, layout, layout, cast("Any", None))  # nothing is attended to
    k, v = (torch.randn(1, 8, tokens, 64) for _ in range(2))
    layers = 4

    def step() -> None:
        each = SLEPT_S / layers / ranks
        for _ in range(layers):
            pack = _Pack([k, v], call)
            for visit in turn(pack.own(), pack.bytes, groups):
                pack.open(visit)
                time.sleep(each / 3 / pack.cuts.pieces)

            def compute(visit: Any, pack: Any = pack) -> Tensor:
                pack.open(visit)
                share = 1.0 if visit.half is None else 0.5
                time.sleep(2 * share * each / 3 / pack.cuts.pieces)
                return torch.ones(pack.numel(visit.place, visit.piece))

            round_trip(
                pack.own(),
                pack.bytes,
                pack.numel,
                groups,
                compute,
            )

    return step


WORKLOADS: dict[str, Callable[[str, int], Callable[[], None]]] = {
    **{f"ZeRO {stage}": partial(_zero, stage=stage) for stage in (0, 2, 3)},
    "tensor": _tensor,
    "Ulysses": _ulysses,
    "ring": _ring,
}


def steps(name: str, formats: tuple[str, ...], ranks: int, rounds: int) -> dict[str, Any]:
    """Seconds of a step, bytes that were posted and bytes on the link, by format."""
    torch.set_num_threads(1)
    init_world()
    made = {wire: WORKLOADS[name](wire, ranks) for wire in formats}
    sent: dict[str, list[tuple[int, int]]] = {wire: [] for wire in formats}

    def turn_of(wire: str) -> Callable[[], float]:
        settle: Callable[[], None] = getattr(made[wire], "settle", lambda: None)

        def once() -> float:
            barrier()
            made[wire]()
            settle()  # what is under way is counted when it is posted
            before = sent_bytes(), wire_bytes()[0]
            begun = time.perf_counter()
            for _ in range(2):
                made[wire]()
            took = (time.perf_counter() - begun) / 2
            settle()
            barrier()
            after = sent_bytes(), wire_bytes()[0]
            sent[wire].append(((after[0] - before[0]) // 2, (after[1] - before[1]) // 2))
            return slowest_rank(took)

        return once

    times = alternate({wire: turn_of(wire) for wire in formats}, rounds)
    return {
        wire: {
            "step": times[wire].median,
            "posted": sorted(p for p, _ in sent[wire])[len(sent[wire]) // 2],
            "link": sorted(b for _, b in sent[wire])[len(sent[wire]) // 2],
        }
        for wire in formats
    }


def _measured(name: str, options: Options) -> tuple[int, list[dict[str, Any]]]:
    """Rate of the link in kbit/s, and what each rank has found by format."""
    with Net(options.ranks, None) as net:
        free = run(steps, net, name, ("identity",), options.ranks, 1)[0]["identity"]
    kilobits = int(8e-3 * free["posted"] / (RATIO * SLEPT_S))
    with Net(options.ranks, f"{kilobits}kbit") as net:
        formats = _contestants(name, options)
        return kilobits, run(steps, net, name, formats, options.ranks, options.rounds)


def _contestants(name: str, options: Options) -> tuple[str, ...]:
    large = (f"identity{LARGE}",) if name.startswith("ZeRO") else ()
    return options.formats + large


def report_steps(options: Options, report: Report) -> None:
    """Rows and bars of each workload."""
    for name in options.workloads:
        formats = _contestants(name, options)
        kilobits, found = _measured(name, options)
        slowest = {w: max(rank[w]["step"] for rank in found) for w in formats}
        plain = min(s for w, s in slowest.items() if w.startswith("identity"))
        for wire in formats:
            entry = found[0][wire]
            ratio = entry["posted"] / found[0]["identity"]["posted"]
            stated = wire_format(wire.partition(LARGE)[0]).ratio()
            report.rows.append(
                (
                    name,
                    wire,
                    f"{1e3 * slowest[wire]:.0f} ms",
                    f"{plain / slowest[wire]:.2f} x",
                    f"{entry['posted'] / 2**20:.2f} MiB at {kilobits / 1e3:.0f} Mbit/s",
                    f"{ratio:.3f} ({stated:.3f})",
                )
            )
            report.figures[f"{name}, {wire}"] = entry | {"slowest": slowest[wire]}
            off = abs(ratio / stated - 1)
            report.bars.append(at_most(f"{name}, {wire}: bytes beside those stated", off, 0.03))
        gain = plain / slowest["fp8"]
        report.bars.append(at_least(f"{name}: fp8 over fp32", gain, 1.6))


def finish_convergence(options: Options) -> None:
    """Trainings in all formats, in a report of their own."""
    columns = ("training", "format", "final loss", "apart", "seeds")
    report = Report("wire-convergence", "Wire formats: final losses of four ranks", columns)
    report_convergence(report, options.seeds, options.steps)
    report.notes.append(
        f"{options.steps} steps of ZeRO 2, where nothing else is said; gradients and parameters "
        "travel packed. No time is measured."
    )
    finish(report, options.keep)


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    options = replace(options, formats=tuple(dict.fromkeys(("identity", *options.formats))))
    report = Report(
        "wire",
        "Wire formats: step and bytes where sending as it is takes 3 x compute",
        ("workload", "format", "step", "gain", "sent", "bytes (stated)"),
    )
    load = foreign_load()
    if "convergence" in options.parts:
        finish_convergence(options)
    if "steps" not in options.parts:
        return
    report_steps(options, report)
    report.notes.append(
        f"{options.ranks} ranks, layers sleep {1e3 * SLEPT_S:.0f} ms of a step; foreign load "
        f"{load:.1f} cores. Formats are forced, the gate of gradients is off; gains are over the "
        "faster float32. All ranks pack on the machine's own cores."
    )
    report.notes.append(PEERS)
    finish(report, options.keep)


if __name__ == "__main__":
    main()
