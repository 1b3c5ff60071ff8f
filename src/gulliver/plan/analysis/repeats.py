"""Replays repeated module calls: recreates the effects of an equal call without running it.

A replay creates the outputs and one storage for everything saved inside, keeps the inputs that the
call kept, and creates the inputs' gradients in backward. So the bytes before and after the call
are exact, and its peak is known from the traced call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gulliver._compat import hooks_of
from gulliver.plan.analysis.recorder import ModuleCall, Recorder
from gulliver.plan.analysis.records import FORWARD


@dataclass(frozen=True)
class CallOutput:
    """An output tensor of a call."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    producer: int

    @classmethod
    def of(cls, tensor: Tensor, producer: int) -> CallOutput:
        place = tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device
        return cls(*place, tensor.requires_grad, producer)

    def make(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass
class Template:
    """Effects of a call, to be replayed."""

    # Path of its module.
    path: str
    # Form of the output.
    spec: Any
    # Leaves of the output: a new tensor, the number of a tensor of the input, or a constant in a
    # tuple of one.
    leaves: list[Any]
    # Numbers of the tensors of the input that it saves.
    inputs: list[int] = field(default_factory=list)
    # Numbers of the new tensors that it saves.
    outputs: list[int] = field(default_factory=list)
    # Other bytes that it saves.
    inside: int = 0
    # Names of the parameters and buffers of its module that it saves.
    own: list[str] = field(default_factory=list)
    # Bytes of the gradients of its parameters.
    gradients: int = 0
    # The call itself; None if it was not traced.
    call: ModuleCall | None = None
    # First operator of its forward, and the one after the last.
    operators: tuple[int, int] = (0, 0)
    # Number of replays.
    forwards: int = 0
    # Number of replays whose backward ran.
    backwards: int = 0
    # Called when the backward of a replay runs.
    on_backward: Callable[[], None] = lambda: None


def replay(recorder: Recorder, template: Template, tensors: Sequence[Tensor]) -> Any:
    template.forwards += 1
    recorder.replayed(template, False)
    quiet, recorder.quiet = recorder.quiet, True
    try:
        anchor = torch.empty(0, requires_grad=True)
        made = list(_Replay.apply(recorder, template, anchor, *tensors))  # type: ignore[arg-type]
    finally:
        recorder.quiet = quiet
    leaves = []
    for leaf in template.leaves:
        if isinstance(leaf, CallOutput):
            leaves.append(made.pop(0))
            recorder.given_by(leaves[-1], leaf.producer)
        else:
            leaves.append(tensors[leaf] if isinstance(leaf, int) else leaf[0])
    return pytree.tree_unflatten(leaves, template.spec)


class _Replay(torch.autograd.Function):
    """A call in the autograd graph; the anchor attaches it even if no input requires grad."""

    @staticmethod
    def forward(
        ctx: Any, recorder: Recorder, template: Template, anchor: Tensor, *tensors: Tensor
    ) -> Any:
        given = [leaf for leaf in template.leaves if isinstance(leaf, CallOutput)]
        made = [leaf.make() for leaf in given]
        ctx.mark_non_differentiable(
            *(t for t, leaf in zip(made, given, strict=True) if not leaf.requires_grad)
        )
        ctx.set_materialize_grads(False)
        ctx.recorder, ctx.template, ctx.owner = recorder, template, recorder.running
        ctx.wanted = [
            (tuple(t.shape), t.dtype, t.device) if t.requires_grad else None for t in tensors
        ]
        inside = torch.empty(template.inside, dtype=torch.uint8, device=anchor.device)
        ctx.save_for_backward(
            *(tensors[n] for n in template.inputs), *(made[n] for n in template.outputs), inside
        )
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        recorder, template = ctx.recorder, ctx.template
        template.backwards += 1
        recorder.replayed(template, True, ctx.owner)
        template.on_backward()
        quiet, recorder.quiet = recorder.quiet, True
        try:
            found = [
                None
                if wanted is None
                else torch.empty(wanted[0], dtype=wanted[1], device=wanted[2])
                for wanted in ctx.wanted
            ]
        finally:
            recorder.quiet = quiet
        recorder.gradients += template.gradients
        return None, None, None, *found


# Equal calls of equal modules are traced once.


FEWEST = 3
PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


# [Note: equal calls] Modules are equal if they have the same class, the same plain attributes
# (except numbers such as `layer_idx`), and parameters, buffers and children of the same form. Calls
# are equal if their arguments also have the same form: shapes, strides, dtypes, requires_grad, and
# which of them are the same tensor. The first two calls of a kind are traced. The second one uses
# values that are computed once and shared (rotations, masks), like all later ones, so it represents
# them if both ran the same operators.
#
# [Note: calls that are not replayed] A call represents others only if everything it leaves behind
# is known: its output, and memory that autograd saves. Modules that keep more (a key-value cache, a
# list of router logits) are detected by another tensor that is still alive, and are traced each
# time. So are calls inside a checkpoint, and modules with hooks.
@dataclass
class CallKind:
    """Equal calls of equal modules."""

    # Operators of the first.
    first: list[Any] | None = None
    # Effects of the second call.
    template: Template | None = None
    # Reason why no call can represent others.
    refused: str = ""


@dataclass
class Repeats:
    """Traces the first two calls of each kind and replays the others."""

    model: nn.Module
    # Paths of replayed modules, and of those traced instead.
    alike: dict[str, str] = field(default_factory=dict)
    # Calls that represent others.
    templates: list[Template] = field(default_factory=list)
    # Reasons why a class of modules is traced each time.
    refused: dict[str, str] = field(default_factory=dict)
    _recorder: Recorder | None = None
    _busy: bool = False

    def __post_init__(self) -> None:
        self._forms: dict[Any, int] = {}
        self._kinds: dict[Any, CallKind] = {}
        self._candidates = dict(self._equal_modules())

    @contextmanager
    def replaying(self, recorder: Recorder) -> Iterator[None]:
        self._recorder = recorder
        with calls_through(self._call, list(self._candidates)):
            yield

    # Modules.

    def _equal_modules(self) -> Iterator[tuple[nn.Module, tuple[str, int]]]:
        """Yields the outermost modules that occur several times, with path and form."""
        forms = dict[nn.Module, int]()
        paths = dict(self.model.named_modules())
        for module in reversed(paths.values()):
            self._form(module, forms)
        counts = dict[int, int]()
        for form in forms.values():
            counts[form] = counts.get(form, 0) + 1
        inside = ""
        for path, module in paths.items():
            if inside and path.startswith(inside):
                continue
            if path and counts[forms[module]] >= FEWEST and any(True for _ in module.children()):
                inside = f"{path}."
                yield module, (path, forms[module])

    def _form(self, module: nn.Module, forms: dict[nn.Module, int]) -> int:
        if module not in forms:
            own = [
                (n, f"{tuple(t.shape)} {t.dtype} {t.requires_grad}") for n, t in _tensors(module)
            ]
            inner = [(name, self._form(child, forms)) for name, child in module.named_children()]
            known = vars(nn.Module()).keys() - {"training"}
            plain = [
                (name, _comparable(value))
                for name, value in vars(module).items()
                if name not in known and not _is_number(name)
            ]
            form = type(module), module.training, tuple(own), tuple(inner), tuple(plain)
            forms[module] = self._forms.setdefault(form, len(self._forms))
        return forms[module]

    def _cached(self, path: str, why: str) -> str:
        """Names the configurations that enable a cache, if that prevented replay."""
        if not why.startswith("something keeps"):
            return ""
        parts = path.split(".")
        around = [".".join(parts[:end]) for end in range(len(parts))]
        asks = [
            f"{outer}.config.use_cache".lstrip(".")
            for outer in around
            if getattr(getattr(self.model.get_submodule(outer), "config", None), "use_cache", False)
        ]
        return f": set {' and '.join(asks)} to False" if asks else ""

    # Calls.

    def _call(self, module: nn.Module, run: Any, args: Any, kwargs: Any) -> Any:
        recorder = self._recorder
        assert recorder is not None
        path, form = self._candidates[module]
        if self._busy or recorder.phase != FORWARD or not recorder.saves:
            return run(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        context = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        kind = self._kinds.setdefault((form, context, spec, _signature(leaves)), CallKind())
        if kind.template is not None:
            self.alike[path] = kind.template.path
            for name in kind.template.own:
                owner, _, last = name.rpartition(".")
                recorder.keep(getattr(module.get_submodule(owner), last))
            return replay(recorder, kind.template, _distinct(leaves))
        if kind.refused:
            return run(*args, **kwargs)
        self._busy = True
        try:
            return self._followed(kind, module, path, leaves, lambda: run(*args, **kwargs))
        finally:
            self._busy = False

    def _followed(
        self, kind: CallKind, module: nn.Module, path: str, leaves: list[Any], run: Any
    ) -> Any:
        """Traces a call, and makes a template of the second one of each kind."""
        recorder = self._recorder
        assert recorder is not None
        operators, packed, live = len(recorder.operators), len(recorder.packed), recorder.live
        calls, recorder.made = len(recorder.calls), []
        try:
            output = run()
            made, recorder.made = recorder.made, None
        finally:
            recorder.made = None
        ran = [(d.name, d.inputs and d.inputs[0].shape) for d in recorder.operators[operators:]]
        if kind.first is None:
            kind.first = ran
            return output
        found = _left(recorder, path, leaves, output, made, packed)
        if isinstance(found, Template):
            found.call = recorder.calls[calls]
            found.operators = operators, len(recorder.operators)
            trained = (p for p in module.parameters() if p.requires_grad)
            found.gradients = sum(p.nbytes for p in trained)
            held = sum(_nbytes(leaf) for leaf in found.leaves if isinstance(leaf, CallOutput))
            if ran != kind.first:
                found = "its first calls differ"
            elif recorder.live - live != held + found.inside:
                found = "it keeps memory that is neither saved for backward nor an output"
            elif any(hooks_of(m) for m in module.modules()):
                found = "it has hooks"
        if isinstance(found, str):
            kind.refused = self.refused[type(module).__name__] = found + self._cached(path, found)
        else:
            kind.template = found
            self.templates.append(found)
        return output


def _left(
    recorder: Recorder, path: str, leaves: list[Any], output: Any, made: list[Any], packed: int
) -> Template | str:
    """Returns the effects of a call, or the reason why it cannot be replayed."""
    given, spec = pytree.tree_flatten(output)
    tensors = _distinct(leaves)
    storages = {recorder.serial(t): n for n, t in reversed(list(enumerate(tensors)))}
    fresh, found = list[Tensor](), list[Any]()
    for leaf in given:
        same = next((n for n, t in enumerate(tensors) if t is leaf), None)
        if same is not None:
            found.append(same)
        elif isinstance(leaf, Tensor):
            found.append(CallOutput.of(leaf, recorder.producer(leaf)))
            fresh.append(leaf)
        elif isinstance(leaf, PLAIN) or any(leaf is other for other in leaves):
            found.append((leaf,))
        else:
            return f"it returns a {type(leaf).__name__}"
    own = {recorder.serial(t): n for n, t in enumerate(fresh)}
    dense = all(t.untyped_storage().nbytes() == _nbytes(CallOutput.of(t, -1)) for t in fresh)
    if len(own) < len(fresh) or own.keys() & storages.keys() or not dense:
        return "its output is a view"
    alive = [tensor for ref in made if (tensor := ref()) is not None]
    if any(t.untyped_storage().nbytes() and not any(t is o for o in fresh) for t in alive):
        return "something keeps its results, such as a KV cache"
    template = Template(path, spec, found)
    for one in {p.serial: p for p in recorder.packed[packed:]}.values():
        if one.serial in storages:
            template.inputs.append(storages[one.serial])
        elif one.serial in own:
            template.outputs.append(own[one.serial])
        elif not one.name:
            template.inside += one.nbytes
        elif one.name in ("input", "outside"):
            return "it saves tensors that are not its inputs"
        elif one.name.startswith(f"{path}."):
            template.own.append(one.name.removeprefix(f"{path}."))
    return template


@contextmanager
def calls_through(call: Any, modules: list[nn.Module]) -> Iterator[None]:
    # Each module's class is replaced by a subclass, so that calls are intercepted outside of the
    # checkpoint that transformers installs inside `__call__`.
    before = [(module, type(module)) for module in modules]
    made = dict[type, type]()
    try:
        for module, kind in before:
            if kind not in made:
                made[kind] = type(kind.__name__, (kind,), {"__call__": _through(call, kind)})
            module.__class__ = made[kind]
        yield
    finally:
        for module, kind in before:
            module.__class__ = kind


def _through(call: Any, kind: type) -> Any:
    def through(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = partial(kind.__call__, self)
        return call(self, own, args, kwargs)

    return through


def _signature(leaves: list[Any]) -> tuple[Any, ...]:
    """Describes arguments for comparison; objects are compared by identity."""
    numbers = dict[int, int]()
    found = list[Any]()
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            number = numbers.setdefault(id(leaf), len(numbers))
            place = tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device
            found.append((number, *place, leaf.requires_grad))
        else:
            found.append(leaf if isinstance(leaf, PLAIN) else id(leaf))
    return tuple(found)


def _distinct(leaves: list[Any]) -> list[Tensor]:
    return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _is_number(name: str) -> bool:
    """Whether an attribute only numbers a module among others of its class."""
    return any(part in name for part in ("idx", "index", "layer_id", "layer_number"))


def _comparable(value: Any) -> Any:
    """Returns a value that is equal for equal attributes; other objects by identity."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, list | tuple | set | frozenset):
        return type(value), tuple(_comparable(inner) for inner in value)
    if isinstance(value, dict):
        return tuple((str(key), _comparable(inner)) for key, inner in value.items())
    # Checkpointed calls, or methods bound to a module of the same form.
    return id(getattr(value, "around", getattr(value, "__func__", value)))


def _nbytes(given: CallOutput) -> int:
    count = 1
    for size in given.shape:
        count *= size
    return count * given.dtype.itemsize
