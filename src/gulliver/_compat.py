"""Differences between supported torch versions, and every private torch symbol, in one place.

Each name here has a test, in `tests/test_compat.py` or `tests/comm/test_worlds.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

# Equals `torch.compiler.disable`, but imports torch._dynamo, which takes seconds, only when such a
# function is first called.
uncompiled: Callable[..., Any] = torch._disable_dynamo  # pyright: ignore
"""Keeps a function out of compiled graphs."""
COMPILER = "torch._dynamo"
"""Module that takes seconds to import; the first step of an optimizer needs it."""

DispatchMode = TorchDispatchMode

# torch 2.13 renamed the flat collectives and warns about the old names; 2.11 only has those.
_renamed = hasattr(dist, "all_gather_single")
all_gather_flat: Callable[..., Any] = getattr(
    dist, "all_gather_single" if _renamed else "all_gather_into_tensor"
)
reduce_scatter_flat: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single" if _renamed else "reduce_scatter_tensor"
)


def fake_store() -> dist.Store:
    """Creates a store for a "fake" process group; the import registers that backend."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def local_tensor_mode(size: int) -> AbstractContextManager[Any]:
    from torch.distributed._local_tensor import LocalTensorMode

    return LocalTensorMode(size)


def map_ranks(make: Callable[[int], Tensor]) -> Tensor:
    """Creates, in `local_tensor_mode`, a tensor whose value on each rank is ``make(rank)``."""
    from torch.distributed._local_tensor import rank_map

    return rank_map(make)


@contextmanager
def threaded_groups() -> Iterator[Callable[[BaseException], None]]:
    """Makes process groups use threads as ranks; yields the handler for a failed rank's error."""
    from torch._C._distributed_c10d import (
        _set_thread_isolation_mode,  # pyright: ignore[reportAttributeAccessIssue]
    )
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    _set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    try:
        yield threaded.ProcessLocalGroup.exception_handle
    finally:
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        _set_thread_isolation_mode(False)


def scaled_matmul(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    """Multiplies FP8 [m, k] by column-major [k, n]; scales are scalars, or [m, 1] and [1, n]."""
    return torch._scaled_mm(
        a, b, scale_a=a_scale, scale_b=b_scale, out_dtype=dtype, use_fast_accum=fast
    )


def storage_users(tensor: Tensor) -> int:
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1


without_torch_functions: Callable[[], AbstractContextManager[Any]] = (
    torch._C.DisableTorchFunctionSubclass
)
"""Context that bypasses ``__torch_function__``, so subclasses act as plain tensors."""


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Steps an optimizer without its step hooks, which `step_hooks` runs once per full step."""
    step = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]
    step(optimizer)


@contextmanager
def step_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Runs an optimizer's step hooks once around the block, so that schedulers count one step."""
    import torch.optim.optimizer as module

    for hook in (
        *module._global_optimizer_pre_hooks.values(),
        *optimizer._optimizer_step_pre_hooks.values(),
    ):
        hook(optimizer, (), {})
    yield
    for hook in (
        *optimizer._optimizer_step_post_hooks.values(),
        *module._global_optimizer_post_hooks.values(),
    ):
        hook(optimizer, (), {})
    optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]


def at_end_of_backward(function: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(function)


def backward_number() -> int:
    return torch._C._current_graph_task_id()


def compiled_call(module: torch.nn.Module) -> Callable[..., Any] | None:
    return getattr(module, "_compiled_call_impl", None)


def replace_compiled_call(module: torch.nn.Module, call: Callable[..., Any]) -> None:
    module._compiled_call_impl = call


def is_compiled(module: torch.nn.Module) -> bool:
    from torch._dynamo.eval_frame import OptimizedModule

    return isinstance(module, OptimizedModule)


def hooks_of(thing: Any, forward: bool = True) -> list[Any]:
    kinds = ["_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks"]
    kinds += ["_forward_hooks", "_forward_pre_hooks"] if forward else []
    return [hook for kind in kinds for hook in (getattr(thing, kind, None) or {}).values()]


@contextmanager
def fake_mode() -> Iterator[Any]:
    """Creates a mode whose tensors have shapes and storages but no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    # Operations without a shape rule raise, and torch also logs each traceback.
    logger = logging.getLogger(FakeTensorMode.__module__)
    was, logger.disabled = logger.disabled, True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield mode
    finally:
        logger.disabled = was


@contextmanager
def without_modes() -> Iterator[None]:
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        yield


def fake_kind() -> type[Tensor]:
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor


def needs_data(error: BaseException) -> bool:
    """Whether an error means that fake tensors have no data, or an operation has no shape rule."""
    from torch._subclasses import fake_tensor

    kinds = (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedFakeTensorException,
        fake_tensor.UnsupportedOperatorException,
    )
    said = ("tensor subclasses", "data pointer", "data is not allocated", "FakeTensor")
    return isinstance(error, kinds) or any(text in str(error) for text in said)


FORWARD_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


@contextmanager
def private_tables(module: torch.nn.Module, hooks: bool) -> Iterator[None]:
    """Restores a module's attributes after the block; disables its hooks inside unless `hooks`."""
    attributes = vars(module)
    before = dict(attributes)
    for name in (*FORWARD_HOOKS, "_backward_hooks", "_backward_pre_hooks"):
        attributes[name] = before[name].copy() if hooks else type(before[name])()
    for name in ("_parameters", "_buffers", "_modules"):
        attributes[name] = before[name].copy()
    attributes.pop("_compiled_call_impl", None)
    if isinstance(module, torch.nn.RNNBase):
        attributes["_flat_weights"] = list(before["_flat_weights"])
    try:
        yield
    finally:
        attributes.clear()
        attributes.update(before)


def replace_tensors(module: torch.nn.Module, replace: Callable[[Tensor], Tensor]) -> None:
    """Replaces a module's own parameters and buffers, bypassing all checks."""
    for table in (module._parameters, module._buffers):
        for name, tensor in table.items():
            if tensor is not None:
                table[name] = replace(tensor)  # pyright: ignore[reportArgumentType]
    if isinstance(module, torch.nn.RNNBase):
        names = module._flat_weights_names
        module._flat_weights = [module._parameters.get(name) for name in names]


def share_forward_hooks(old: torch.nn.Module, new: torch.nn.Module) -> None:
    """Moves the forward hooks of a module to its replacement; their handles stay valid."""
    for kind in FORWARD_HOOKS:
        setattr(new, kind, getattr(old, kind))


def outputs_hooks(module: torch.nn.Module) -> dict[int, Any]:
    return dict(module._forward_hooks)


def is_batch_norm(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.modules.batchnorm._BatchNorm)


def order_outputs_hooks(module: torch.nn.Module, last: list[int]) -> None:
    """Makes the output hooks with ids `last` run after the module's other output hooks."""
    hooks = module._forward_hooks
    for key in last:
        if key in hooks:
            hooks[key] = hooks.pop(key)


def saving_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    autograd = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
    return autograd._top_saved_tensors_default_hooks(False)


def _functorch() -> Any:
    return torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]


def is_transformed() -> bool:
    return _functorch().peek_interpreter_stack() is not None


def untransformed(tensor: Tensor) -> Tensor:
    while _functorch().is_functorch_wrapped_tensor(tensor):
        tensor = _functorch().get_unwrapped(tensor)
    return tensor


@contextmanager
def outside_transforms() -> Iterator[None]:
    """Runs the block outside of active `torch.func` transforms."""
    if not is_transformed():
        yield
        return
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with temporarily_clear_interpreter_stack():
        yield


def can_hook_saving() -> bool:
    """Whether saved-tensor hooks may be set; `torch.func` transforms forbid them."""
    autograd = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
    return autograd._saved_tensors_hooks_is_enabled()


def saving_is_hooked() -> bool:
    return saving_hooks() is not None


def newest_node() -> int:
    """Sequence number of this thread's newest autograd node, created before its operation runs."""
    return torch.autograd._get_sequence_nr() - 1  # pyright: ignore[reportAttributeAccessIssue]


def running_node() -> int:
    """Sequence number of the autograd node whose backward runs in this thread, or -1."""
    node = torch._C._current_autograd_node()
    # Nodes that accumulate gradients have the largest possible number, and stand for no operation.
    return -1 if node is None or (number := node._sequence_nr()) >= 1 << 63 else number


class Recomputed:
    """Reference to a tensor that non-reentrant checkpointing has recomputed.

    Args:
        value: tensor that the reference replaces.
        find: returns the recomputed tensor.
    """

    requires_grad = False

    def __init__(self, value: Tensor, find: Callable[[], Tensor]) -> None:
        self.shape, self.dtype, self.device = value.shape, value.dtype, value.device
        self.find = find

    def detach(self) -> Recomputed:
        return self


@cache
def replace_recomputed(refer: Callable[[Tensor], Recomputed | None]) -> None:
    """Makes non-reentrant checkpointing store references instead of parameters; installed once."""
    # It stores the parameter itself if that is frozen. If the parameter's memory is then freed and
    # reused, backward would read wrong data; a detached tensor keeps pointing at the old memory.

    def pack(x: Any) -> Any:
        kept = x.detach() if isinstance(x, torch.nn.Parameter) else x
        return refer(x) or kept

    def unpack(x: Any) -> Any:
        return x.find() if type(x) is Recomputed else x

    def wrap(hook: Any, packs: bool) -> None:
        begin = hook.__init__

        def init(self: Any, *arguments: Any, **options: Any) -> None:
            begin(self, *arguments, **options)
            first, last = self.pack_hook, self.unpack_hook
            self.pack_hook = (lambda x: first(pack(x))) if packs else first
            self.unpack_hook = lambda x: unpack(last(x))

        hook.__init__ = init

    wrap(checkpoint._recomputation_hook, packs=True)
    wrap(checkpoint._checkpoint_hook, packs=False)


def is_gloo(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    found = group or dist.group.WORLD
    if found is None or dist.get_backend(found) == "threaded":
        return False
    return isinstance(found._get_backend(device), getattr(dist, "ProcessGroupGloo", ()))
