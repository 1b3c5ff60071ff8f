"""`load_streamed`: a folder's model whose weights stay within a limit, the others on a disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gulliver.serve._filling import Filling, is_quantised
from gulliver.serve._load import check_options, kept_dtype
from gulliver.serve._offload import StreamedWeights, Unit, group_units, unit_paths
from gulliver.serve._source import Source, build_on_meta
from gulliver.serve._ways import Ways


def load_streamed(folder: Path, ways: Ways, limit: int) -> tuple[Any, StreamedWeights]:
    """Reads a folder's model with weights that stay within a limit, the others on a disk."""
    check_options(folder, ways.dtype, ways.quantize)
    model = build_on_meta(folder, kept_dtype(folder, ways.dtype))
    paths = unit_paths(model)
    with Source(folder, model) as source:
        filling = Filling(model, source, ways.quantize, is_quantised(folder))
        return model, stream(model, paths, filling, limit, ways.disk)


def stream(
    model: Any, paths: list[str], filling: Filling, limit: int, disk: Path | str | None
) -> StreamedWeights:
    """Fills a model on meta with weights that stay within a limit."""

    def fill(unit: Unit) -> None:
        filling.fill(unit.path, unit.module)

    streamed = StreamedWeights(group_units(model, paths), fill, limit, disk)
    model.eval().requires_grad_(False)
    return streamed
