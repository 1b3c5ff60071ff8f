"""``gulliver precision``: predicts which layers of a model FP8 would speed up.

The model is built on meta; seconds come from the rates of the cluster, measured or described.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from rich.table import Table

from gulliver.cli.options import PrecisionConfig, Search
from gulliver.cli.plan_models import subject_of
from gulliver.hardware.cluster import Cluster, Device
from gulliver.hardware.operators import fp8_break_even, fp8_seconds
from gulliver.hardware.probe import named_cluster
from gulliver.jobs.display import print_json, report_console, working
from gulliver.options import size_text
from gulliver.planner.fp8 import gate_fp8
from gulliver.precision.fp8.conversion import Selection, select_layers
from gulliver.precision.fp8.layers import COPIES


@dataclass(frozen=True)
class LayerSize:
    """All layers of one size."""

    inputs: int
    outputs: int
    layers: int
    example: str
    # Seconds of one layer in 16 bits, forward and backward.
    plain_s: float
    fp8_s: float
    # Reason to keep their precision; empty if they are converted.
    why_not: str


@dataclass(frozen=True)
class Report:
    """Gain of FP8 on a rank, in seconds and bytes."""

    cluster: str
    # Whether the cluster's rates were measured.
    measured: bool
    # Number of rows of a layer's input.
    tokens: int
    scaling: str
    # Linear layers by size.
    layers: list[LayerSize]
    # Seconds of all linear layers in 16 bits, forward and backward.
    plain_s: float
    # The same, with FP8 in the selected layers.
    fp8_s: float
    # Smallest square layer that gains; None if none does.
    break_even: int | None
    # Bytes of the FP8 weights that are kept from forward to backward.
    copies: int
    # Bytes of the inputs of FP8 layers that backward needs, in 16 bits.
    saved_plain: int
    # The same bytes, as FP8 layers save them.
    saved_fp8: int


def precision_command(config: PrecisionConfig) -> int:
    cluster = named_cluster(config.cluster)
    with working(f"reading {config.model}"):
        subject = subject_of(Search(model=config.model))
        found = select_layers(subject.model, config.exclude)
        found, reason = gate_fp8(found, cluster.device, config.tokens, config.scaling)
        report = report_of(found, cluster, config)
    if config.json:
        print_json(asdict(report))
    else:
        _show(report, reason)
    return 0


def report_of(found: Selection, cluster: Cluster, config: PrecisionConfig) -> Report:
    shapes = shapes_of(found, cluster.device, config)
    inputs = sum(layer.inputs for layer in found.taken) * config.tokens
    return Report(
        cluster=cluster.name,
        measured=cluster.measured,
        tokens=config.tokens,
        scaling=config.scaling,
        layers=shapes,
        plain_s=sum(s.layers * s.plain_s for s in shapes),
        fp8_s=sum(s.layers * (s.plain_s if s.why_not else s.fp8_s) for s in shapes),
        break_even=fp8_break_even(cluster.device, config.tokens, config.scaling),
        copies=COPIES[config.scaling] * found.weights,
        saved_plain=2 * inputs,
        saved_fp8=(2 if config.scaling == "rowwise" else 1) * inputs,
    )


def shapes_of(found: Selection, device: Device, config: PrecisionConfig) -> list[LayerSize]:
    """Groups layers by size and by the reason for keeping their precision."""
    alike: dict[tuple[int, int, str], list[str]] = {}
    for layer in found.layers:
        key = layer.inputs, layer.outputs, layer.why_not
        alike.setdefault(key, []).append(layer.path)
    shapes = []
    for (inputs, outputs, why_not), paths in alike.items():
        took = fp8_seconds(device, config.tokens, inputs, outputs, config.scaling)
        quick = took.products + took.casts
        shapes.append(LayerSize(inputs, outputs, len(paths), paths[0], took.plain, quick, why_not))
    return shapes


def _show(report: Report, reason: str) -> None:
    table = Table()
    for name in ("layers", "inputs", "outputs", "bf16, ms", "fp8, ms", "gain", "", "such as"):
        table.add_column(name, justify="left" if name in ("", "such as") else "right")
    for shape in report.layers:
        numbers = f"{1e3 * shape.plain_s:.3f}", f"{1e3 * shape.fp8_s:.3f}"
        gain = f"{shape.plain_s / shape.fp8_s:.2f} x"
        what = f"kept: {shape.why_not}" if shape.why_not else "fp8"
        sizes = f"{shape.layers}", f"{shape.inputs}", f"{shape.outputs}"
        table.add_row(*sizes, *numbers, gain, what, shape.example)
    console = report_console()
    console.print(table)
    how = "measured" if report.measured else "described, from published figures"
    console.print(
        f"linear layers, forward and backward of {report.tokens} tokens on a rank: "
        f"{1e3 * report.plain_s:.1f} ms in bf16, {1e3 * report.fp8_s:.1f} ms with FP8, "
        f"{report.plain_s / report.fp8_s:.2f} x; predicted for compiled layers on "
        f"{report.cluster} ({how})"
    )
    console.print(
        f"memory: {size_text(report.copies)} of FP8 weights are kept from forward to backward "
        "(none under ZeRO 3 and in pipelines); inputs saved for backward "
        f"{size_text(report.saved_fp8)} instead of "
        f"{size_text(report.saved_plain)}, at most: layers with one input share it"
    )
    console.print(reason, soft_wrap=True)
