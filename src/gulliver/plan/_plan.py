"""The plan: all there is to say about how a model runs, readable and editable.

Saved as YAML. Writing needs nothing; reading back goes through PyYAML.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from gulliver.errors import GulliverError, nearest
from gulliver.io import named_errors, to_yaml, write_text


@dataclass(frozen=True)
class ChunkPlan:
    """A chunk: its tensors by name, and its size in bytes with padding."""

    tensors: tuple[str, ...]
    bytes: int
    padding_bytes: int
    dtype: str


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of model state that each rank holds, predicted from the layout."""

    parameters: int
    gradients: int
    optimizer_state: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer_state


@dataclass(frozen=True)
class Plan:
    """How a model runs.

    Attributes:
        plugin: what made the plan.
        mesh: ranks on each named axis.
        device: kind of device.
        stage: of ZeRO; None where nothing is sharded.
        mixed_precision: dtype of autocast, or none.
        optimizer: its class.
        parameters: elements of the model.
        trainable: elements that are trained.
        memory: bytes per rank.
        chunks: in the order of the model.
        tensor: how each module lies over the tensor axis; of this plan's first stage.
        sequence: how sequences lie over ranks, in words; empty where they are whole.
        stages: of the pipeline, first to last, in words.
        schedule: of the pipeline and its micro-batches; empty without one.
    """

    plugin: str
    mesh: dict[str, int]
    device: str
    stage: int | None
    mixed_precision: str
    optimizer: str
    parameters: int
    trainable: int
    memory: MemoryPlan
    chunks: tuple[ChunkPlan, ...] = ()
    tensor: dict[str, str] = field(default_factory=dict)
    sequence: str = ""
    stages: tuple[str, ...] = ()
    schedule: str = ""

    def to_yaml(self) -> str:
        """The plan as YAML."""
        return to_yaml(asdict(self))

    def save(self, path: Path) -> None:
        """Writes the plan as YAML, whole or not at all."""
        write_text(Path(path), self.to_yaml())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads a plan, perhaps edited.

        Raises:
            GulliverError: PyYAML is not installed; the file is missing, broken or has unknown keys.
        """
        try:
            import yaml
        except ImportError:
            raise GulliverError("reading a plan needs PyYAML: install gulliver[train]") from None
        path = Path(path)
        if not path.is_file():
            raise GulliverError(f"plan {path} does not exist")
        try:
            with named_errors(path):
                values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise GulliverError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
        return cls._from_values(values, path)

    @classmethod
    def _from_values(cls, values: Any, path: Path) -> Self:
        known = cls.__dataclass_fields__
        if not isinstance(values, dict):
            raise GulliverError(f"{path} holds no plan")
        for key in values:
            if key not in known:
                raise GulliverError(f"{path} has an unknown key {key!r}: {nearest(key, known)}")
        try:
            memory = MemoryPlan(**values.pop("memory"))
            chunks = tuple(
                ChunkPlan(**{**chunk, "tensors": tuple(chunk["tensors"])})
                for chunk in values.pop("chunks", ())
            )
            stages = tuple(values.pop("stages", ()))
            return cls(**values, memory=memory, chunks=chunks, stages=stages)
        except (KeyError, TypeError, AttributeError) as error:
            raise GulliverError(f"{path} is no complete plan: {error}") from error

    def show(self) -> None:
        """Prints the summary to stderr."""
        from rich.console import Console

        Console(stderr=True).print(self.summary(), soft_wrap=True, markup=False)

    def summary(self) -> str:
        """The plan in a few lines, for the start of a run."""
        axes = " x ".join(f"{name} {size}" for name, size in self.mesh.items())
        stage = "" if self.stage is None else f", stage {self.stage}"
        lines = [
            f"plan: {self.plugin}{stage} on {axes} ({self.device}), {self.optimizer}, "
            f"mixed precision {self.mixed_precision}",
            f"  {self.parameters:,} parameters, {self.trainable:,} trained",
        ]
        if self.tensor:
            kinds = Counter(self.tensor.values())
            told = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
            lines.append(f"  tensor axis: {told}")
        if self.sequence:
            lines.append(f"  sequences: {self.sequence}")
        if self.stages:
            lines.append(f"  {self.schedule}; stages: {' | '.join(self.stages)}")
        if self.chunks:
            padding = sum(chunk.padding_bytes for chunk in self.chunks)
            whole = sum(chunk.bytes for chunk in self.chunks)
            lines.append(
                f"  {len(self.chunks)} chunks, {_mib(whole)} with "
                f"{100 * padding / whole:.2f} % padding"
            )
        memory = self.memory
        lines.append(
            f"  predicted per rank: {_mib(memory.total)} = parameters {_mib(memory.parameters)} + "
            f"gradients {_mib(memory.gradients)} + optimizer {_mib(memory.optimizer_state)}"
        )
        return "\n".join(lines)


def _mib(count: int) -> str:
    return f"{count / 2**20:.2f} MiB"
