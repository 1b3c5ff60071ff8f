"""Arguments of `GulliverStrategy` become a plugin; those that Colossal-AI's strategy had, too.

An argument is honoured or refused by its name. `REFUSED` lists those that say how something is
searched for that is planned here, or what another argument says better.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from gulliver.booster import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
)
from gulliver.errors import GulliverError, nearest
from gulliver.options import positive_number

DEFAULT_STAGE = 1
"""Stage of ``strategy="gulliver"``: values and messages of DDP, the optimizer's state sharded."""
DEFAULT_LIMIT = "80%"
"""Memory limit of ``strategy="gulliver_gemini"``, of what the device or this process may have."""
GEMINI_POLICIES = ("auto", "static")

SCALER = {
    "initial_scale": "scale",
    "min_scale": "smallest",
    "growth_factor": "growth",
    "backoff_factor": "backoff",
    "growth_interval": "interval",
    "max_scale": "largest",
}
"""Arguments of the loss scale, with the fields of the `LossScaler` that they set."""

REFUSED = {
    "chunk_search_range": "sizes of chunks are planned, not searched: leave it out, or say "
    "chunk_mb=, a number of MiB",
    "chunk_search_n_grids": "sizes of chunks are planned, not searched: leave it out, or say "
    "chunk_mb=, a number of MiB",
    "min_chunk_size": "sizes of chunks are planned, not searched: leave it out, or say chunk_mb=, "
    "a number of MiB",
    "gpu_margin_mem_ratio": "what the optimizer may take follows from the plan: say memory_limit=, "
    "such as '80%'",
    "force_outputs_fp32": "outputs keep the dtype that they are computed in: call .float() on them "
    "in training_step",
    "hysteresis": "the loss scale falls with the first overflow: leave it out",
}
"""Arguments of Colossal-AI's strategy that have nothing to set here, with what to do instead."""
HARMLESS: dict[str, Any] = {"gpu_margin_mem_ratio": 0.0, "force_outputs_fp32": False}
"""Values of theirs that ask for what is done anyway, beside None."""


def choose_plugin(
    plugin: Plugin | None,
    stage: int | None,
    memory_limit: int | float | str | None,
    given: Mapping[str, Any],
) -> tuple[Plugin, dict[str, float]]:
    """Makes the plugin that the arguments of a strategy ask for.

    Args:
        plugin: plugin to take as it is.
        stage: stage of ZeRO.
        memory_limit: memory of each rank for the state, as of `GeminiPlugin`.
        given: all other arguments, by name.

    Returns:
        The plugin, and the fields of the loss scaler to set.

    Raises:
        GulliverError: an argument that has no counterpart, or contradicts another.
    """
    options = {name: value for name, value in given.items() if value is not None}
    _refuse(options)
    scaler = _scaler(options)
    if plugin is not None:
        rest = [*options, *(["stage"] if stage is not None else [])]
        rest += ["memory_limit"] if memory_limit is not None else []
        _check_plugin(plugin, rest)
        if scaler and getattr(plugin, "precision", None) != "fp16":
            raise _no_scale(next(name for name in SCALER if name in given))
        return plugin, scaler
    policy = options.pop("placement_policy", None)
    stage = _stage(stage, options.pop("enable_distributed_storage", None))
    if options.pop("use_chunk", True) is not True:
        raise GulliverError(
            "use_chunk=False is not supported: parameters always lie in chunks, of chunk_mb= MiB"
        )
    if (elements := options.pop("chunk_size", None)) is not None:
        options["chunk_mb"] = _chunk_mb(elements, options)
    if scaler and options.get("precision") != "fp16":
        raise _no_scale(next(name for name in SCALER if given.get(name) is not None))
    options.setdefault("verbose", False)
    if memory_limit is None and policy not in GEMINI_POLICIES:
        return _without_limit(stage, policy, options), scaler
    if stage not in (None, 3):
        raise GulliverError(
            f"stage={stage} and a memory limit exclude each other: a limit needs stage 3"
        )
    if policy not in (None, *GEMINI_POLICIES):
        raise _policy(policy)
    limit = DEFAULT_LIMIT if memory_limit is None else memory_limit
    options["placement_policy"] = policy or "auto"
    return _made(GeminiPlugin, {"memory_limit": limit, **options}), scaler


def _without_limit(stage: int | None, policy: Any, options: dict[str, Any]) -> Plugin:
    if policy not in (None, "cuda"):
        raise _policy(policy)
    for name in ("disk", "host_limit"):
        if name in options:
            raise GulliverError(
                f"{name}= takes what does not fit a memory limit: say memory_limit= as well"
            )
    if stage is None:
        stage = 3 if policy == "cuda" else DEFAULT_STAGE
    return _made(LowLevelZeroPlugin, {"stage": stage, **options})


def _made(kind: type[Plugin], options: dict[str, Any]) -> Plugin:
    """Makes a plugin; unknown names are those of the strategy."""
    known = [n for n in inspect.signature(kind.__init__).parameters if n != "self"]
    for name in options:
        if name not in known:
            raise GulliverError(
                f"GulliverStrategy has no argument {name!r}: {nearest(name, known)}"
            )
    return kind(**options)


def _refuse(options: dict[str, Any]) -> None:
    """Refuses what has no counterpart, and drops values that ask for what is done anyway."""
    for name, right in REFUSED.items():
        if name not in options:
            continue
        value = options.pop(name)
        if name not in HARMLESS or value != HARMLESS[name]:
            raise GulliverError(f"{name}={value!r} has no counterpart here: {right}")


def _scaler(options: dict[str, Any]) -> dict[str, float]:
    """The fields of the loss scaler that are asked for."""
    found = {
        field: positive_number(name, options.pop(name))
        for name, field in SCALER.items()
        if name in options
    }
    if found.get("smallest", 0.0) > found.get("largest", float("inf")):
        raise GulliverError("min_scale is more than max_scale: give the smaller one first")
    return found


def _no_scale(name: str) -> GulliverError:
    return GulliverError(
        f"{name} is of the loss scale of float16: say precision='fp16' as well, or leave it out"
    )


def _stage(stage: int | None, distributed: Any) -> int | None:
    """The stage, where storage that is distributed or not says it, too."""
    if distributed is None:
        return stage
    if stage is not None and (stage == 3) != bool(distributed):
        raise GulliverError(
            f"enable_distributed_storage={distributed!r} and stage={stage} contradict each other: "
            "parameters are distributed with stage 3 only, so say the stage alone"
        )
    return stage if stage is not None else 3 if distributed else 2


def _chunk_mb(elements: Any, options: Mapping[str, Any]) -> float:
    if "chunk_mb" in options:
        raise GulliverError("chunk_size and chunk_mb say the same: give chunk_mb alone")
    width = 2 if options.get("precision") in ("bf16", "fp16") else 4
    return positive_number("chunk_size", elements) * width / 2**20


def _policy(policy: Any) -> GulliverError:
    return GulliverError(
        f"placement_policy={policy!r} is not supported: 'auto' and 'static' keep to memory_limit= "
        "with disk= or host_limit= behind it, 'cuda' keeps all on the device without a limit"
    )


def _check_plugin(plugin: Plugin, rest: list[str]) -> None:
    if rest:
        raise GulliverError(f"plugin= and {rest[0]}= exclude each other: give it to the plugin")
    if isinstance(plugin, HybridParallelPlugin) or not isinstance(
        plugin, TorchDDPPlugin | LowLevelZeroPlugin | GeminiPlugin
    ):
        what = type(plugin).__name__ if isinstance(plugin, Plugin) else repr(plugin)
        raise GulliverError(
            f"plugin={what} cannot run a LightningModule: LowLevelZeroPlugin, GeminiPlugin and "
            "TorchDDPPlugin can; models are cut over ranks by a Booster in a loop of your own"
        )
