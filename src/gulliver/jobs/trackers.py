"""Experiment trackers: TensorBoard, Weights & Biases and MLflow behind one writer.

Their packages are imported only for runs that use them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

from gulliver.checkpoint.files import read_json, write_json
from gulliver.errors import check_known, missing_extra
from gulliver.jobs.display import Scalars, tensorboard
from gulliver.options import Tracker

MOST_PARAMETERS = 100
"""Maximum number of parameters in one MLflow call."""


class WandbWriter:
    """Writes to a Weights & Biases run; continues the run stored in a run folder."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb  # type: ignore[import-not-found]

        known = _read_ids(folder).get("wandb")
        self.wandb = wandb
        self.run = wandb.init(
            name=folder.name, dir=str(folder), config=dict(config), id=known, resume="allow"
        )
        _keep_id(folder, "wandb", self.run.id)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.run.log({name: value}, step=step)

    def add_image(self, name: str, pixels: Any, step: int, dataformats: str = "HWC") -> None:
        self.run.log({name: self.wandb.Image(pixels)}, step=step)

    def close(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


class MlflowWriter:
    """Writes to an MLflow run; continues the run stored in a run folder."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import mlflow  # type: ignore[import-not-found]

        known = _read_ids(folder).get("mlflow")
        self.mlflow = mlflow
        run = mlflow.start_run(run_id=known, run_name=None if known else folder.name)
        _keep_id(folder, "mlflow", run.info.run_id)
        if known is None:
            plain = {n: v for n, v in config.items() if isinstance(v, str | int | float)}
            mlflow.log_params(dict(list(plain.items())[:MOST_PARAMETERS]))

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.mlflow.log_metric(name, value, step=step)

    def add_image(self, name: str, pixels: Any, step: int, dataformats: str = "HWC") -> None:
        self.mlflow.log_image(pixels, f"{name}-{step:08d}.png")

    def close(self, failed: bool) -> None:
        self.mlflow.end_run("FAILED" if failed else "FINISHED")


WRITERS = {"wandb": WandbWriter, "mlflow": MlflowWriter}


@dataclass(frozen=True)
class Several:
    """Writes to several trackers."""

    writers: Sequence[Any]

    def add_scalar(self, *arguments: Any) -> None:
        for writer in self.writers:
            writer.add_scalar(*arguments)

    def add_image(self, *arguments: Any, dataformats: str) -> None:
        for writer in self.writers:
            writer.add_image(*arguments, dataformats=dataformats)


def check_trackers(names: Sequence[str]) -> None:
    """Rejects unknown trackers, and trackers whose package is missing."""
    for name in names:
        check_known("tracker", name, get_args(Tracker))
        if name in WRITERS and find_spec(name) is None:
            raise missing_extra(f"--report-to {name} needs the package {name}", "trackers")


@contextmanager
def track(
    names: Sequence[str], folder: Path, step: int, enabled: bool, config: Mapping[str, Any]
) -> Iterator[Scalars]:
    """Yields a writer to the named trackers; it writes nothing unless `enabled`."""
    check_trackers(names)
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        writers = []
        if "tensorboard" in names:
            scalars = stack.enter_context(tensorboard(folder / "tensorboard", step, enabled))
            writers.append(scalars.writer)
        for name in (name for name in WRITERS if name in names and enabled):
            writers.append(writer := WRITERS[name](folder, config))
            stack.push(lambda kind, *_, end=writer.close: end(kind is not None))
        yield Scalars(folder, Several([writer for writer in writers if writer is not None]))


def _read_ids(folder: Path) -> dict[str, str]:
    file = folder / "trackers.json"
    return read_json(file) if file.is_file() else {}


def _keep_id(folder: Path, name: str, number: str) -> None:
    write_json(folder / "trackers.json", {**_read_ids(folder), name: number})
