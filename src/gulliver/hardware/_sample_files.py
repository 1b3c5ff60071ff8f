"""Files of costs of samples, which are good for one machine, one model, one dtype and one torch.

The file says what it was measured on. `load_samples` refuses another machine, model, dtype or
version by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from gulliver.errors import GulliverError
from gulliver.hardware._batch_costs import BlockKind
from gulliver.hardware._kept import machine_facts
from gulliver.hardware._samples import SampleFit, SampleModel, SampleShape
from gulliver.io import write_text

FORMAT = 2
WORDS = {"machine": "another machine", "model": "another model", "dtype": "another dtype"}


@dataclass(frozen=True)
class SavedSamples:
    """Costs of samples as a file has them, wherever they were measured."""

    # Sizes of the model.
    model: SampleModel
    fit: SampleFit
    # The machine in words.
    machine: str
    # Shapes of the samples that it was measured for; none where the file does not say.
    shapes: tuple[SampleShape, ...]


def sample_fingerprint(model: SampleModel) -> dict[str, Any]:
    """What costs of samples depend on: machine and torch, the model's sizes, and its dtype."""
    machine = {name: str(value) for name, value in machine_facts().items()}
    version = machine.pop("torch")
    kinds = [[kind.name, kind.count] for kind in model.kinds]
    sizes = {"name": model.name, "weights": model.weights, "hidden": model.hidden, "kinds": kinds}
    return {"machine": machine, "model": sizes, "dtype": model.dtype, "torch": version}


def save_samples(
    path: Path | str, model: SampleModel, fit: SampleFit, shapes: Iterable[SampleShape] = ()
) -> None:
    """Writes costs of samples with what they were measured on.

    Args:
        path: path to the file.
        model: sizes of the model.
        fit: rates.
        shapes: shapes of the samples, for who plans with the file alone.
    """
    values = {
        "format": FORMAT,
        "fingerprint": sample_fingerprint(model),
        "fit": asdict(fit),
        "kinds": [asdict(kind) for kind in model.kinds],
        "shapes": [asdict(shape) for shape in shapes],
    }
    write_text(Path(path), json.dumps(values, indent=1))


def load_samples(path: Path | str, model: SampleModel) -> SampleFit:
    """Reads costs of samples that were measured here, of this model.

    Raises:
        GulliverError: the file is of another machine, model, dtype or version, or is none.
    """
    values = _read(path)
    expected = json.loads(json.dumps(sample_fingerprint(model)))
    found = values["fingerprint"]
    for name, value in expected.items():
        if found.get(name) != value:
            raise GulliverError(
                f"{path} is of {WORDS.get(name, 'another version of torch')} "
                f"({_told(found.get(name))}, here {_told(value)}): measure it again"
            )
    return _fit(path, values["fit"])


def read_samples(path: Path | str) -> SavedSamples:
    """Reads costs of samples of any machine and model, to plan with."""
    values = _read(path)
    found = values["fingerprint"]
    try:
        sizes = found["model"]
        kinds = tuple(BlockKind(**kind) for kind in values["kinds"])
        model = SampleModel(sizes["name"], sizes["weights"], sizes["hidden"], kinds, found["dtype"])
        shapes = tuple(SampleShape(**shape) for shape in values.get("shapes", ()))
        machine = _told(found["machine"])
    except (KeyError, TypeError, ValueError) as error:
        raise GulliverError(f"{path} holds no costs of samples ({error!r})") from None
    return SavedSamples(model, _fit(path, values["fit"]), machine, shapes)


def holds_samples(path: Path | str) -> bool:
    """Whether a file looks like costs of samples, rather than a table or anything else."""
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and "fit" in values and "fingerprint" in values


def _read(path: Path | str) -> dict[str, Any]:
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        format_, found = values["format"], values["fingerprint"]
        whole = isinstance(found, Mapping) and isinstance(values["fit"], Mapping)
    except OSError as error:
        raise GulliverError(f"costs of samples {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise GulliverError(f"{path} holds no costs of samples ({error!r})") from None
    if not whole:
        raise GulliverError(f"{path} holds no costs of samples (no tables of fingerprint and fit)")
    if format_ != FORMAT:
        raise GulliverError(
            f"{path} has format {format_}, this version reads {FORMAT}: measure it again"
        )
    return values


def _fit(path: Path | str, rates: Mapping[str, Any]) -> SampleFit:
    """The rates of a file, each of which is looked at."""
    known = {field.name: field.default is MISSING for field in fields(SampleFit)}
    for name, needed in known.items():
        if needed and name not in rates:
            raise GulliverError(f"{path} has no rate {name}: measure it again")
    for name, rate in rates.items():
        if name not in known:
            raise GulliverError(f"{path} has a rate {name}, which nothing here knows")
        number = isinstance(rate, int | float) and not isinstance(rate, bool)
        if not number or not math.isfinite(rate) or rate < 0:
            raise GulliverError(
                f"{path}: its rate {name} is {rate}, and rates are finite numbers of at least 0: "
                "measure it again"
            )
    return SampleFit(**{name: float(rate) for name, rate in rates.items()})


def _told(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    return str(value)
