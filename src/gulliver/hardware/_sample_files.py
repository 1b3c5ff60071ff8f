"""Files of costs of samples, which are good for one machine, one model, one dtype and one torch.

The file says what it was measured on. Another machine, model, dtype or version is refused by name;
`kept_samples` measures anew instead.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gulliver.errors import GulliverError
from gulliver.hardware._kept import machine_facts
from gulliver.hardware._samples import SampleFit, SampleModel
from gulliver.io import write_text

FORMAT = 1
WORDS = {"machine": "another machine", "model": "another model", "dtype": "another dtype"}


def sample_fingerprint(model: SampleModel) -> dict[str, Any]:
    """What costs of samples depend on: machine and torch, the model's sizes, and its dtype."""
    machine = {name: str(value) for name, value in machine_facts().items()}
    version = machine.pop("torch")
    kinds = [[kind.name, kind.count] for kind in model.kinds]
    sizes = {"name": model.name, "weights": model.weights, "hidden": model.hidden, "kinds": kinds}
    return {"machine": machine, "model": sizes, "dtype": model.dtype, "torch": version}


def save_samples(path: Path | str, model: SampleModel, fit: SampleFit) -> None:
    """Writes costs of samples with what they were measured on."""
    values = {
        "format": FORMAT,
        "fingerprint": sample_fingerprint(model),
        "fit": asdict(fit),
    }
    write_text(Path(path), json.dumps(values, indent=1))


def load_samples(path: Path | str, model: SampleModel) -> SampleFit:
    """Reads costs of samples that were measured here, of this model.

    Raises:
        GulliverError: the file is of another machine, model, dtype or version, or is none.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        found, format_ = values["fingerprint"], values["format"]
        fit = SampleFit(**{name: float(rate) for name, rate in values["fit"].items()})
    except OSError as error:
        raise GulliverError(f"costs of samples {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise GulliverError(f"{path} holds no costs of samples ({error!r})") from None
    if format_ != FORMAT:
        raise GulliverError(f"{path} has format {format_}, this version reads {FORMAT}")
    expected = json.loads(json.dumps(sample_fingerprint(model)))
    for name, value in expected.items():
        if found.get(name) != value:
            raise GulliverError(
                f"{path} is of {WORDS.get(name, 'another version of torch')} "
                f"({_told(found.get(name))}, here {_told(value)}): measure it again"
            )
    if not all(math.isfinite(rate) and rate >= 0 for rate in asdict(fit).values()):
        raise GulliverError(
            f"{path} holds rates that are no numbers of at least 0: measure it again"
        )
    return fit


def kept_samples(
    path: Path | str, model: SampleModel, measure: Callable[[], SampleFit]
) -> tuple[SampleFit, str]:
    """Costs of a file that is still good, or measured anew, and which of both and why."""
    if Path(path).exists():
        try:
            return load_samples(path, model), f"costs of samples from {path}"
        except GulliverError as error:
            reason = str(error)
    else:
        reason = f"{path} does not exist yet"
    fit = measure()
    save_samples(path, model, fit)
    return fit, f"costs of samples measured anew: {reason}"


def _told(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    return str(value)
