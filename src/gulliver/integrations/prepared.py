"""Preparation of models and optimizers for an accelerator, and checks of its arguments."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import InitProcessGroupKwargs
from safetensors.torch import load_file
from torch import Tensor, nn

from gulliver.booster.booster import Booster
from gulliver.booster.plugins import GeminiPlugin, LowLevelZeroPlugin, Plugin
from gulliver.comm.world import current_world, init_world
from gulliver.errors import GulliverError
from gulliver.parallel.optimizer import BoostedOptimizer

if TYPE_CHECKING:
    from gulliver.integrations.accelerate import Accelerator

# Requests of ``accelerate launch`` through the variables ``ACCELERATE_USE_...``.
LAUNCHED = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG")

Options = Plugin | Mapping[str, Any] | str | None

_OTHER = "omit it, or omit gulliver"
# Unsupported arguments by class. None, 0 and False are allowed.
REFUSED: dict[str, dict[str, str]] = {
    "Accelerator": {
        "deepspeed_plugin": f"it lets DeepSpeed run the model; {_OTHER}",
        "deepspeed_plugins": f"it lets DeepSpeed run the model; {_OTHER}",
        "fsdp_plugin": f"it lets FSDP run the model; {_OTHER}",
        "megatron_lm_plugin": f"it lets transformers shard the model; {_OTHER}",
        "torch_tp_plugin": f"it lets accelerate shard the model; {_OTHER}",
        "parallelism_config": f"it lets accelerate cut the model; {_OTHER}",
    },
    "TrainingArguments": {
        "deepspeed": f"it lets DeepSpeed run the model; {_OTHER}",
        "fsdp": f"it lets FSDP run the model; {_OTHER}",
        "parallelism_config": f"it lets accelerate cut the model; {_OTHER}",
        "fp16": "use bf16=True, or gulliver={'precision': 'fp16'} for a model in float16",
        "fp16_full_eval": "it converts the model itself; use bf16=True",
        "bf16_full_eval": "it converts the model itself; use bf16=True",
        "auto_find_batch_size": "it retries in the middle of a step; give memory_limit=, or a size",
        "save_on_each_node": "a checkpoint is one folder of all ranks; save to a shared disk",
    },
}


def refuse_arguments(owner: str, given: Mapping[str, Any]) -> None:
    """Raises an error for arguments that would let another library run the model."""
    for name, instead in REFUSED[owner].items():
        if given.get(name):
            raise GulliverError(f"{owner}({name}={given[name]!r}) is not supported; {instead}")


def plugin_of(options: Options) -> Plugin:
    options = _read(options)
    if isinstance(options, LowLevelZeroPlugin | GeminiPlugin):
        return options
    if options is None or isinstance(options, Mapping):
        given = {"verbose": False, **(options or {})}
        return GeminiPlugin(**given) if "memory_limit" in given else LowLevelZeroPlugin(**given)
    raise GulliverError(
        f"gulliver={type(options).__name__} does not support a loop with one loss per batch and "
        "rank; pass LowLevelZeroPlugin(...), GeminiPlugin(...), or a dict of their arguments"
    )


def one_of(given: Options, of_arguments: Options) -> Options:
    """Returns the options of a trainer, given directly or in its arguments."""
    if given is None or of_arguments is None:
        return of_arguments if given is None else given
    if _read(given) != _read(of_arguments):
        raise GulliverError(
            f"Trainer(gulliver={given!r}) and TrainingArguments(gulliver={of_arguments!r}) "
            "differ; set one of them"
        )
    return given


def _read(options: Options) -> Plugin | Mapping[str, Any] | None:
    if not isinstance(options, str):
        return options
    try:
        return json.loads(options)
    except ValueError as error:
        raise GulliverError(f"gulliver={options!r} is not valid JSON: {error}") from error


def check_precision(name: str | None) -> None:
    """Raises an error for precisions whose scaler or kernels need full gradients."""
    if name in ("fp16", "fp8"):
        raise GulliverError(
            f"mixed_precision={name!r} is not supported; use 'bf16'"
            + (", or gulliver={'precision': 'fp16'} for a model in float16" * (name == "fp16"))
        )


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises an error for arguments and variables that let another library run the model."""
    refuse_arguments("Accelerator", arguments)
    for name in LAUNCHED:
        variable = f"ACCELERATE_USE_{name}"
        if os.environ.get(variable, "").lower() == "true":
            raise GulliverError(f"{variable} is set; launch without it, for instance with torchrun")
    check_precision(
        arguments.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION")
    )


def join_world(arguments: Mapping[str, Any]) -> None:
    """Initializes the world before accelerate, whose process group would lack a CPU backend."""
    # accelerate reuses an existing process group; ours also supports host memory (gloo).
    handlers = arguments.get("kwargs_handlers") or ()
    given = [h.to_kwargs() for h in handlers if isinstance(h, InitProcessGroupKwargs)]
    options = dict(given[0]) if given else {}
    timeout = options.pop("timeout", None)
    if options:
        raise GulliverError(
            f"InitProcessGroupKwargs({', '.join(options)}): only timeout is supported"
        )
    chosen = {} if timeout is None else {"timeout_s": timeout.total_seconds()}
    asked = arguments.get("cpu") or os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true"
    init_world(**chosen, device=torch.device("cpu") if asked else None)


def join_group(device: torch.device) -> None:
    on_gpu = device.type == "cuda" and dist.is_initialized() and dist.get_world_size() > 1
    if on_gpu and "cpu:" not in str(dist.get_backend_config()):
        raise GulliverError(
            "a process group without gloo already exists; use TrainingArguments from "
            "gulliver.integrations.trainer, or call gulliver.init_world() before creating them"
        )
    init_world(device=device if device.type == "cpu" else None)


# Marks models with their accelerator, and prepares them for another optimizer.
#
# A second Trainer may evaluate a boosted model as it is. For the optimizer of a second phase, from
# another Trainer or after `free_memory`, whole parameters are restored first.


_KEY = "_gulliver_owned"


class _Owned:
    """Module attribute that refers to its accelerator; copies of the module do not have it."""

    def __init__(self, owner: Accelerator | None = None) -> None:
        self.owner = owner

    def __deepcopy__(self, memo: dict[int, Any]) -> _Owned:
        return _Owned()

    def __reduce__(self) -> Any:
        return _Owned, ()


def mark_owned(model: nn.Module, owner: Accelerator | None) -> None:
    # Not with setattr or in a table: it lives as long as the model, without being a submodule.
    vars(model)[_KEY] = _Owned(owner)


def owner_of(model: nn.Module) -> tuple[nn.Module, Accelerator] | None:
    """Finds the boosted part of a model and its accelerator."""
    for part in model.modules():
        mark = vars(part).get(_KEY)
        if mark is not None and mark.owner is not None:
            return part, mark.owner
    return None


def model_of(optimizer: torch.optim.Optimizer, known: list[nn.Module]) -> nn.Module:
    stepped = {p for group in optimizer.param_groups for p in group["params"]}
    found = [model for model in dict.fromkeys(known) if not stepped.isdisjoint(model.parameters())]
    if not found:
        raise GulliverError(
            f"the model of {type(optimizer).__name__} is not prepared; prepare it before, or in "
            "the same call, and create a new optimizer if the model was trained before"
        )
    if len(found) > 1 or not stepped.issubset(found[0].parameters()):
        raise GulliverError(
            f"{type(optimizer).__name__} has parameters of several models; use one optimizer per "
            "model, or put the models into one nn.ModuleList"
        )
    return found[0]


def detach_earlier(model: nn.Module, optimizer: torch.optim.Optimizer, taker: Accelerator) -> None:
    """Ends an earlier training phase of a model, so that a new optimizer gets plain parameters."""
    found = owner_of(model)
    if found is None:
        return
    part, owner = found
    if owner is taker and not owner.has_ended(part):
        raise GulliverError(
            "the model already has an optimizer; use one with several groups, or, for a second "
            "phase, first call accelerator.free_memory(model, optimizer)"
        )
    if getattr(owner.booster.plugin, "memory", None) is not None:
        raise GulliverError(
            "the model was trained under a memory limit and cannot be restored in full; save it "
            "(trainer.save_model, accelerator.save_model), load a new model from there, and train "
            "that model"
        )
    before = list(model.parameters())
    owner.release(part)
    fresh: dict[Any, nn.Parameter] = dict(zip(before, model.parameters(), strict=True))
    for group in optimizer.param_groups:
        group["params"] = [fresh.get(p, p) for p in group["params"]]
    for old in [p for p in optimizer.state if p in fresh]:
        optimizer.state[fresh[old]] = optimizer.state.pop(old)


# Boosted models and optimizers in the form that Accelerate loops use.


class PreparedOptimizer(AcceleratedOptimizer):
    """A boosted optimizer that steps only when gradients are complete."""

    def __init__(self, boosted: BoostedOptimizer, accelerator: Accelerator) -> None:
        super().__init__(boosted, device_placement=False)
        self.boosted, self._accelerator = boosted, accelerator

    def step(self, closure: Any = None) -> None:
        accelerator, boosted = self._accelerator, self.boosted
        if accelerator.holds_back and accelerator.sync_gradients and accelerator.num_processes > 1:
            raise GulliverError(
                "a step inside no_sync would be local to this rank (LocalSGD), but optimizer "
                "state is sharded; step outside of it"
            )
        before = getattr(boosted, "skipped", 0)
        super().step(closure)
        self._is_overflow = getattr(boosted, "skipped", 0) > before

    def full_gradients(self) -> dict[str, Tensor]:
        """Returns full averaged gradients by name (collective)."""
        return self.boosted.full_gradients()

    def state_dict(self) -> dict[str, Any]:
        raise GulliverError("the optimizer's state is sharded; use accelerator.save_state")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise GulliverError("the optimizer's state is sharded; use accelerator.load_state")


def make_collective(model: nn.Module) -> None:
    """Makes generation and saving collective if parameters are sharded."""
    # Ranks generate until the last one is done, and save gathered state.
    for module in model.modules():
        if hasattr(type(module), "generate"):
            # A method, so that a copy of the model generates independently.
            module.generate = MethodType(_generate, module)  # type: ignore[assignment]
    if hasattr(type(model), "save_pretrained"):
        model.save_pretrained = MethodType(_save_pretrained, model)  # type: ignore[assignment]


def restore_methods(model: nn.Module) -> None:
    ours = (_generate, _save_pretrained)
    for module in model.modules():
        for name in ("generate", "save_pretrained"):
            if getattr(vars(module).get(name), "__func__", None) in ours:
                del vars(module)[name]


def _generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    return type(model).generate(model, *args, **{**kwargs, "synced_gpus": True})


def _save_pretrained(model: Any, *args: Any, **kwargs: Any) -> Any:
    state, save = kwargs.get("state_dict"), type(model).save_pretrained
    if state is None:
        return save(model, *args, **kwargs)
    if state:  # otherwise another rank has it, and writes
        with _states_from(model, state):
            return save(model, *args, **kwargs)
    return None


@contextmanager
def _states_from(model: nn.Module, state: Mapping[str, Any]) -> Iterator[None]:
    """Makes modules return gathered tensors from ``state_dict()``."""
    # peft asks the modules of ``modules_to_save`` for the names of their entries on the writing
    # rank only, but reading parameters is a collective operation.
    parts = [(name, part) for name, part in model.named_modules() if name]
    for name, part in parts:
        vars(part)["state_dict"] = partial(_state_below, part, f"{name}.", state)
    try:
        yield
    finally:
        for _, part in parts:
            del vars(part)["state_dict"]


def _state_below(
    part: nn.Module, prefix: str, state: Mapping[str, Any], *args: Any, **kwargs: Any
) -> dict[str, Any]:
    if args or kwargs:  # an outer call that needs the whole state
        return type(part).state_dict(part, *args, **kwargs)
    return {name.removeprefix(prefix): v for name, v in state.items() if name.startswith(prefix)}


def mapped_state(booster: Booster, model: nn.Module, folder: Path | None) -> dict[str, Tensor]:
    """Returns rank 0's full state, mapped from a file that is written tensor by tensor."""
    main = current_world().is_main
    with TemporaryDirectory(dir=folder if main else None, prefix=".gulliver-") as place:
        path = Path(place) / "model.safetensors"
        booster.save_model(model, path)
        # Pages of an unlinked file stay available to processes that have mapped it.
        read = load_file(path) if main else {}
    # Like the model's own state dict: in its order, and with ties.
    known, state = dict[int, str](), dict[str, Tensor]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in read:
            state[name] = read[known.setdefault(id(parameter), name)]
    return {**state, **{name: value for name, value in read.items() if name not in state}}
