"""Arguments of an accelerator: the plugin, and what does not go with it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import InitProcessGroupKwargs

from gulliver.booster import GeminiPlugin, LowLevelZeroPlugin, Plugin
from gulliver.comm import init_world
from gulliver.errors import GulliverError
from gulliver.integrations._refusals import refuse_arguments

# What ``accelerate launch`` asks for by the variables ``ACCELERATE_USE_...``.
LAUNCHED = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG")

Options = Plugin | Mapping[str, Any] | str | None


def plugin_of(options: Options) -> Plugin:
    """The plugin that options ask for."""
    options = _read(options)
    if isinstance(options, LowLevelZeroPlugin | GeminiPlugin):
        return options
    if options is None or isinstance(options, Mapping):
        given = {"verbose": False, **(options or {})}
        return GeminiPlugin(**given) if "memory_limit" in given else LowLevelZeroPlugin(**given)
    raise GulliverError(
        f"gulliver={type(options).__name__} does not run in a loop of one loss per batch and rank: "
        "pass LowLevelZeroPlugin(...), GeminiPlugin(...), or a dict of their arguments"
    )


def one_of(given: Options, of_arguments: Options) -> Options:
    """The options of a trainer."""
    if given is None or of_arguments is None:
        return of_arguments if given is None else given
    if _read(given) != _read(of_arguments):
        raise GulliverError(
            f"Trainer(gulliver={given!r}) and TrainingArguments(gulliver={of_arguments!r}) differ: "
            "say it once"
        )
    return given


def _read(options: Options) -> Plugin | Mapping[str, Any] | None:
    if not isinstance(options, str):
        return options
    try:
        return json.loads(options)
    except ValueError as error:
        raise GulliverError(f"gulliver={options!r} is no JSON: {error}") from error


def check_precision(name: str | None) -> None:
    """Refuses precisions whose scaler or kernels need whole gradients."""
    if name in ("fp16", "fp8"):
        raise GulliverError(
            f"mixed_precision={name!r} is not supported: use 'bf16'"
            + (", or gulliver={'precision': 'fp16'} for a model in float16" * (name == "fp16"))
        )


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuses arguments and variables that let another library run the model."""
    refuse_arguments("Accelerator", arguments)
    for name in LAUNCHED:
        variable = f"ACCELERATE_USE_{name}"
        if os.environ.get(variable, "").lower() == "true":
            raise GulliverError(f"{variable} is set: launch without it, by torchrun for instance")
    check_precision(
        arguments.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION")
    )


def join_world(arguments: Mapping[str, Any]) -> None:
    """Joins the world before accelerate does, which would start a group that knows no host."""
    # accelerate takes a process group that is there; ours reaches host memory, too (gloo).
    handlers = arguments.get("kwargs_handlers") or ()
    given = [h.to_kwargs() for h in handlers if isinstance(h, InitProcessGroupKwargs)]
    options = dict(given[0]) if given else {}
    timeout = options.pop("timeout", None)
    if options:
        raise GulliverError(
            f"InitProcessGroupKwargs({', '.join(options)}): of these only timeout is supported"
        )
    chosen = {} if timeout is None else {"timeout_s": timeout.total_seconds()}
    asked = arguments.get("cpu") or os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true"
    init_world(**chosen, device=torch.device("cpu") if asked else None)


def join_group(device: torch.device) -> None:
    """Joins the world of a process group that a framework has made."""
    on_gpu = device.type == "cuda" and dist.is_initialized() and dist.get_world_size() > 1
    if on_gpu and "cpu:" not in str(dist.get_backend_config()):
        raise GulliverError(
            "a process group without gloo was made before: take TrainingArguments from "
            "gulliver.integrations.trainer, or call gulliver.init_world() before them"
        )
    init_world(device=device if device.type == "cpu" else None)
