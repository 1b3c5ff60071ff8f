"""The plan: everything that decides how a model runs, as values that can be read and edited.

For example:

    plan = Plan.load("plan.yaml")          # checked, with the line of every value
    booster = Booster(plan=plan)           # runs it
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from gulliver.errors import GulliverError
from gulliver.io.files import to_yaml, write_text
from gulliver.options import size_at_least, size_text
from gulliver.plan.reading import END, LINES, Reader, parse, read_text
from gulliver.plan.results import MemoryPlan, Predicted
from gulliver.plan.tree import (
    ChunkPlan,
    DDPPlan,
    Mesh,
    Model,
    OperatorPlan,
    PipelineLayout,
    Precision,
    SequenceLayout,
    TensorLayout,
    Tiers,
    Wire,
    Work,
    ZeroPlan,
    choice,
)

VERSION = 1


@dataclass(frozen=True)
class Plan:
    """How a model runs. Fields marked "a result" are recomputed when the plan is applied.

    Attributes:
        version: version of the plan format.
        plugin: name of the plugin that made the plan; a label without effect.
        mesh: the ranks as a grid.
        zero: sharding over the replicas; None with DDP.
        ddp: torch's DDP; None with ZeRO.
        precision: number formats.
        wire: formats of messages between ranks.
        tensor: how modules are sharded over the tensor axis.
        sequence: how sequences are sharded over ranks.
        pipeline: how blocks are assigned to stages.
        operators: how each operator is sharded over all ranks; None without per-operator sharding.
        recompute: paths of the blocks that backward recomputes.
        max_norm: global norm to which gradients are clipped at every step; 0 disables clipping.
        dropout: how masks are drawn: ``exact`` by position, as in one process, ``alike`` as torch
            does on each rank, ``auto`` by position if ranks share a model.
        check_batches: whether ranks of one model compare their batches at every step.
        weights: folder of a Hugging Face checkpoint, loaded into a model on meta.
        model: the model that the plan was made for; a result.
        work: costs of a batch in one process, on which predictions are based.
        predicted: predicted seconds of a step and bytes of a rank; a result.
        reasons: the reason for each choice, by name; a result.
        lines: line of each value in the file that the plan was read from.
    """

    version: int = choice(VERSION, VERSION)
    plugin: str = ""
    mesh: Mesh = field(default_factory=Mesh)
    zero: ZeroPlan | None = None
    ddp: DDPPlan | None = None
    precision: Precision = field(default_factory=Precision)
    wire: Wire = field(default_factory=Wire)
    tensor: TensorLayout = field(default_factory=TensorLayout)
    sequence: SequenceLayout = field(default_factory=SequenceLayout)
    pipeline: PipelineLayout = field(default_factory=PipelineLayout)
    operators: OperatorPlan | None = None
    recompute: tuple[str, ...] = ()
    max_norm: float = choice(0.0, least=0)
    dropout: str = choice("auto", "auto", "exact", "alike")
    check_batches: bool = True
    weights: str | None = None
    model: Model = field(default_factory=Model)
    work: Work = field(default_factory=Work)
    predicted: Predicted = field(default_factory=Predicted)
    reasons: dict[str, str] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict, compare=False, repr=False)

    @property
    def stage(self) -> int | None:
        """ZeRO stage; None without ZeRO."""
        return None if self.zero is None else self.zero.stage

    @property
    def limited(self) -> bool:
        """Whether there is a memory limit."""
        return self.tiers is not None

    @property
    def tiers(self) -> Tiers | None:
        """Memory tiers under a limit; None without one."""
        return None if self.zero is None else self.zero.tiers

    def with_zero(self, **changes: Any) -> Self:
        """Returns the plan with changed fields in its section `zero`."""
        assert self.zero is not None, "the plan uses ZeRO"
        return replace(self, zero=replace(self.zero, **changes))

    @property
    def chunks(self) -> tuple[ChunkPlan, ...]:
        """Chunks of the first rank, in order of use."""
        return () if self.zero is None else self.zero.chunks

    @property
    def memory(self) -> MemoryPlan:
        """Predicted bytes of the rank that needs the most memory."""
        return self.predicted.bytes

    @property
    def mixed_precision(self) -> str:
        """Short description of the number formats."""
        if self.precision.parameters != "none":
            return f"{self.precision.parameters} with float32 copies"
        return self.precision.autocast

    def describe_field(self, name: str) -> str:
        """Describes a field for errors: name, value and, if read from a file, its line."""
        value: Any = self
        for part in name.split("."):
            value = value.get(part, 1) if isinstance(value, dict) else getattr(value, part)
        return f"{name}: {written(value)}{self.line_text(name)}"

    def line_text(self, name: str) -> str:
        """Formats a field's line in the file as ``" (line 7)"``; empty without one."""
        return f" (line {self.lines[name]})" if name in self.lines else ""

    def to_values(self) -> dict[str, Any]:
        """Returns the plan as plain dicts and lists."""
        values = asdict(self)
        del values[LINES]
        return values

    def to_yaml(self) -> str:
        return to_yaml(self.to_values())

    def save(self, path: Path | str) -> None:
        """Writes the plan as YAML, atomically; the last line marks the file as complete."""
        write_text(Path(path), f"{self.to_yaml()}{END}: true\n")

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Loads a plan, which may have been edited.

        Raises:
            GulliverError: the file is missing or broken, or does not end with ``end: true``; a key
                is unknown or a value invalid.
        """
        return cls._of_text(read_text(Path(path)), str(path), whole=True)

    @classmethod
    def from_yaml(cls, text: str, where: str = "the plan") -> Self:
        """Parses a plan's YAML; errors name its source, `where`."""
        return cls._of_text(text, where, whole=False)

    @classmethod
    def _of_text(cls, text: str, where: str, whole: bool) -> Self:
        values, lines = parse(text, where)
        if isinstance(values, dict):
            if "version" not in values:
                raise GulliverError(f"{where} has no version; add the line `version: {VERSION}`")
            # A file cut between two sections is still valid YAML, and would run with defaults.
            if values.pop(END, not whole) is not True:
                raise GulliverError(
                    f"{where} does not end with `{END}: true`, so it may be truncated; save the "
                    "plan again, or add that line if the file is complete"
                )
            lines.pop(END, None)
        read = Reader(where, lines).read(cls, values)
        object.__setattr__(read, LINES, lines)
        return read

    def show(self) -> None:
        """Prints the summary to stderr."""
        from rich.console import Console

        Console(stderr=True).print(self.summary(), soft_wrap=True, markup=False)

    def summary(self) -> str:
        """Summarizes the plan in a few lines, for the start of a run."""
        axes = " x ".join(f"{n} {s}" for n, s in self.mesh.axes.items() if s > 1) or "data 1"
        if self.mesh.torus:
            axes = " x ".join(f"{name} {size}" for name, size in self.mesh.torus.items())
        stage = "" if self.stage is None else f", stage {self.stage}"
        lines = [
            f"plan: {self.plugin}{stage} on {axes} ({self.mesh.device}), {self.model.optimizer}, "
            f"mixed precision {self.mixed_precision}",
            f"  {self.model.parameters:,} parameters, {self.model.trainable:,} trained",
            *self._axes_lines(),
        ]
        if self.precision.fp8 is not None:
            lines.append(f"  FP8: {self.precision.fp8}")
        if self.chunks:
            padding = sum(chunk.padding_bytes for chunk in self.chunks)
            whole = sum(chunk.bytes for chunk in self.chunks)
            lines.append(
                f"  {len(self.chunks)} chunks, {_mib(whole)} with "
                f"{100 * padding / whole:.2f} % padding"
            )
        memory, uneven = self.memory, self.mesh.of("pipeline") > 1 or self.mesh.of("tensor") > 1
        of = f"for rank {self.predicted.fullest}, the fullest" if uneven else "per rank"
        lines.append(
            f"  predicted {of}: {_mib(memory.total)} = parameters {_mib(memory.parameters)} + "
            f"gradients {_mib(memory.gradients)} + optimizer {_mib(memory.optimizer_state)}"
        )
        lines += [*self._tiers_lines(), *self._seconds_lines()]
        lines += [f"  {name}: {reason}" for name, reason in self.reasons.items()]
        return "\n".join(lines)

    def _axes_lines(self) -> list[str]:
        lines, line, sequence = [], self.pipeline, self.sequence
        if self.mesh.of("tensor") > 1:
            kinds = Counter(self.tensor.modules.values())
            told = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
            lines.append(f"  tensor axis: {told}")
        if sequence.mode is not None:
            lines.append(
                f"  sequences: {sequence.mode}, Ulysses {sequence.ulysses} x ring "
                f"{sequence.outer} x {sequence.inner}, {sequence.layout}"
            )
        if self.mesh.of("pipeline") > 1:
            stages = " | ".join(
                f"{count} blocks ({100 * share:.0f} % of the work)"
                for count, share in zip(line.cut, line.shares, strict=False)
            )
            count = f"{line.micro_batches} micro-batches"
            if self.zero is not None and self.zero.unequal:
                count = f"as many micro-batches as a step plans, {line.micro_batches} otherwise"
            lines.append(f"  pipeline {line.schedule} of {count}; stages: {stages}")
        if self.operators is not None:
            every = [choice for row in self.operators.blocks for choice in row.operators]
            fates = Counter(choice.saved for choice in every)
            told = ", ".join(f"{fate} {count}" for fate, count in sorted(fates.items()))
            lines.append(
                f"  operators of {len(self.operators.blocks)} kinds of blocks: {told}; at most "
                f"{size_text(self.operators.peak)} of {size_text(self.operators.budget)}"
            )
        formats = {k: f for k, f in self.wire.formats.items() if f != "identity"}
        if formats:
            told = ", ".join(f"{kind} {wire}" for kind, wire in formats.items())
            feedback = ", with error feedback" if self.wire.error_feedback else ""
            lines.append(f"  on the wire: {told}{feedback}")
        if self.recompute:
            lines.append(f"  backward recomputes {len(self.recompute)} blocks")
        return lines

    def _tiers_lines(self) -> list[str]:
        tiers, moved = self.tiers, self.predicted.moved
        if tiers is None or moved is None:
            return []
        behind = f"in {tiers.disk}" if tiers.disk is not None else "in the host's memory"
        behind = f"in the host's memory and {behind}" if tiers.host and tiers.disk else behind
        lines = [
            f"  memory limit {size_text(tiers.limit)}, at least {size_at_least(moved.minimum)} for "
            f"{moved.decides}",
            f"  {size_text(moved.stays.total)} of state stay, {size_text(moved.leaves.total)} "
            f"move, {behind}; a step reads {size_text(moved.read)} and writes "
            f"{size_text(moved.written)}",
        ]
        if tiers.host and tiers.disk:
            lines.append(
                f"  {size_text(moved.on_disk.total)} of it are on disk at times; a step reads "
                f"{size_text(moved.disk_read)} from there and writes "
                f"{size_text(moved.disk_written)}"
            )
        told = "; ".join(text for text in (moved.bottleneck, moved.price) if text)
        return [*lines, *([f"  {told}"] if told else [])]

    def _seconds_lines(self) -> list[str]:
        seconds, cluster = self.predicted.seconds, self.predicted.cluster
        how = "make_plan(..., sample=batch) measures compute, gulliver probe measures links"
        if not cluster:
            return [f"  no seconds are predicted: {how}"]
        if self.operators is not None:
            step = 1e3 * seconds.step
            return [f"  predicted forward and backward on {cluster}: {step:.1f} ms"]
        if not self.work.samples:
            return [
                f"  predicted messages of a step on {cluster}: {1e3 * seconds.exposed:.1f} ms, "
                f"excluding those that depend on the batch: {how}"
            ]
        parts = ", ".join(
            f"{name} {1e3 * value:.1f}"
            for name, value in asdict(seconds).items()
            if value and name != "step"
        )
        sent = f", {_mib(self.predicted.sent)} sent" if self.predicted.sent else ""
        return [f"  predicted step on {cluster}: {1e3 * seconds.step:.1f} ms ({parts}){sent}"]


def written(value: Any) -> str:
    return "null" if value is None else str(list(value) if isinstance(value, tuple) else value)


def _mib(count: int) -> str:
    return f"{count / 2**20:.2f} MiB"
