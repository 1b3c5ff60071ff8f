"""Folders of PEFT's adapters: what ``PeftModel.save_pretrained`` writes, from any `Weights`.

A folder with the names of a PEFT model and no ``adapter_config.json`` would be loaded as a model
with random weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from gulliver.checkpoint._weights import Weights
from gulliver.checkpoint._writing import (
    DTypes,
    Progress,
    new_folder,
    plan_file,
    refuse_existing,
    write_files,
)
from gulliver.errors import GulliverError

FILE = "adapter_model.safetensors"
DEFAULT = "default"
"""Adapter that lies in the folder itself; others lie in folders of their names."""


def has_adapters(model: Any) -> bool:
    """Whether PEFT has put adapters into a model."""
    return isinstance(model, nn.Module) and bool(getattr(model, "peft_config", None))


def adapter_names(model: Any) -> dict[str, dict[str, str]]:
    """Returns for each adapter of a model the names of its file, each with the model's own."""
    from peft import PeftModel, get_peft_model_state_dict

    # PEFT chooses and renames by names alone, so that nothing need be gathered to ask it.
    own = {name: name for name in model.state_dict(keep_vars=True)}
    prefix = "" if isinstance(model, PeftModel) else "base_model.model."
    found = dict[str, dict[str, str]]()
    for adapter, config in model.peft_config.items():
        refusal = GulliverError(
            f"adapter {adapter!r} is {config.peft_type}, which cannot be written as a folder of "
            "its own: save a step, or the model with save_model"
        )
        try:
            names: Any = get_peft_model_state_dict(model, own, adapter)
        except (AttributeError, TypeError) as error:
            raise refusal from error
        if not names or not all(isinstance(source, str) for source in names.values()):
            raise refusal
        found[adapter] = {prefix + name: source for name, source in names.items()}
    return found


def write_adapters(
    weights: Weights,
    model: Any,
    folder: Path,
    dtype: DTypes = None,
    progress: Progress | None = None,
    names: Mapping[str, Mapping[str, str]] | None = None,
) -> Path:
    """Writes the adapters of a model, whole or not at all."""
    refuse_existing(folder)
    found = names or adapter_names(model)
    plans = {n: plan_file(folder / FILE, weights, own, dtype) for n, own in found.items()}
    with new_folder(folder, sum(plan.image.nbytes for plan in plans.values())) as partial:
        for adapter, plan in plans.items():
            plan.path = (partial if adapter == DEFAULT else partial / adapter) / FILE
            plan.path.parent.mkdir(exist_ok=True)
        write_files(weights, list(plans.values()), dtype, progress, str(folder))
        for adapter, plan in plans.items():
            config = model.peft_config[adapter]
            was, config.inference_mode = config.inference_mode, True
            try:
                config.save_pretrained(str(plan.path.parent))
            finally:
                config.inference_mode = was
    return folder
