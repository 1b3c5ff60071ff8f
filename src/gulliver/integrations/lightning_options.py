"""Turns arguments of `GulliverStrategy` into a plugin, also those of Colossal-AI's strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from gulliver.booster.hybrid_plugin import HybridParallelPlugin
from gulliver.booster.plugins import GeminiPlugin, LowLevelZeroPlugin, Plugin, TorchDDPPlugin
from gulliver.errors import GulliverError
from gulliver.integrations.refusals import REFUSED, refuse_arguments
from gulliver.options import positive_number

# Stage of ``strategy="gulliver"``: values and messages of DDP, the optimizer's state sharded.
DEFAULT_STAGE = 1
# Memory limit of ``strategy="gulliver_gemini"``, of what the device or this process may have.
DEFAULT_LIMIT = "80%"
GEMINI_POLICIES = ("auto", "static")

# Arguments of the loss scale, with the fields of the `LossScaler` that they set.
SCALER = {
    "initial_scale": "scale",
    "min_scale": "smallest",
    "growth_factor": "growth",
    "backoff_factor": "backoff",
    "growth_interval": "interval",
    "max_scale": "largest",
}


def choose_plugin(
    plugin: Plugin | None,
    stage: int | None,
    memory_limit: int | float | str | None,
    given: Mapping[str, Any],
) -> tuple[Plugin, dict[str, float]]:
    """Returns the plugin that arguments of a strategy ask for, and fields of the loss scaler."""
    options = {name: value for name, value in given.items() if value is not None}
    refuse_arguments("GulliverStrategy", options)
    for name in REFUSED["GulliverStrategy"]:
        options.pop(name, None)
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
    # Lightning prints a summary of its own.
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
    return GeminiPlugin(limit, **options), scaler


def _without_limit(stage: int | None, policy: Any, options: dict[str, Any]) -> Plugin:
    if policy not in (None, "cuda"):
        raise _policy(policy)
    if stage is None:
        stage = 3 if policy == "cuda" else DEFAULT_STAGE
    return LowLevelZeroPlugin(stage, **options)


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


# Refuses modules that move or convert their parameters while these lie in chunks.
#
# Under stage 3 a parameter is a view of memory that comes and goes: ``.to`` or ``.cpu()`` would
# make a whole copy that nobody trains. Below stage 3 the step refuses parameters that were
# replaced.


DURING = (
    "and {strategy} keeps its parameters where they are: remove the call, or make it in __init__ "
    "or configure_model; batches are moved by Lightning"
)
AFTER = (
    "and a fit of {strategy} has left its parameters sharded: give other Trainers a new module, "
    "with the checkpoint (ckpt_path=)"
)


class _Unmoved:
    """Replaces the method of a module that ``.to``, ``.cpu()`` and others call."""

    def __init__(self, module: nn.Module, message: str) -> None:
        self._module, self._message = module, message

    def __call__(self, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
        raise GulliverError(self._message)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        copy = memo[id(self._module)]  # a copy of the module may be moved
        return type(copy)._apply.__get__(copy)


def refuse_moves(module: nn.Module, strategy: str, why: str = DURING) -> None:
    """Refuses moves of a module and of each part that has parameters."""
    for name, part in module.named_modules():
        if next(part.parameters(), None) is not None:
            told = type(part).__name__ + (f" ({name})" if name else "")
            moves = "is moved or converted (.to, .cpu(), .half() ...)"
            message = f"{told} {moves}, {why.format(strategy=strategy)}"
            # In the instance, so that its class and other modules of it are left alone.
            vars(part)["_apply"] = _Unmoved(part, message)
