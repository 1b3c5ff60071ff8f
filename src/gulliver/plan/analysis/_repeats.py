"""Equal calls of equal modules are followed once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gulliver._compat import hooks_of
from gulliver.plan.analysis._recorder import Recorder
from gulliver.plan.analysis._records import FORWARD
from gulliver.plan.analysis._replay import Given, Template, replay

FEWEST = 3
"""Number of equal modules from which on it is worth looking."""
PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


# [Note: equal calls] Modules are equal if they have the same class, the same plain attributes
# (except numbers such as `layer_idx`), and parameters, buffers and children of the same form. Calls
# are equal if their arguments also have the same form: shapes, strides, dtypes, requires_grad, and
# which of them are the same tensor. The first two calls of a kind are followed. The second one
# finds values that are made once and shared (rotations, masks), as all later ones will, so it
# represents them if both ran the same operators.
#
# [Note: calls that are not replayed] A call represents others only if everything it leaves behind
# is known: its output, and memory that autograd saves. Modules that keep more (a key-value cache, a
# list of router logits) are found by a tensor that is still alive without either, and are followed
# each time. So are calls inside a checkpoint, and modules with hooks.
@dataclass
class CallKind:
    """Equal calls of equal modules."""

    # Operators of the first.
    first: list[Any] | None = None
    # What the second call left behind.
    template: Template | None = None
    # Reason why no call can stand for others.
    refused: str = ""


@dataclass
class Repeats:
    """Follows the first two calls of each kind and replays the others."""

    model: nn.Module
    # Paths of replayed modules, and of those followed in their place.
    alike: dict[str, str] = field(default_factory=dict)
    # Calls that represent others.
    templates: list[Template] = field(default_factory=list)
    # Reasons why a class of modules is followed each time.
    refused: dict[str, str] = field(default_factory=dict)
    _recorder: Recorder | None = None
    _busy: bool = False

    def __post_init__(self) -> None:
        self._forms: dict[Any, int] = {}
        self._kinds: dict[Any, CallKind] = {}
        self._candidates = dict(self._equal_modules())

    @contextmanager
    def replaying(self, recorder: Recorder) -> Iterator[None]:
        """Replays equal calls inside the context."""
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
        """A number that equal modules share."""
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
        """Names the configurations that enable a cache, if that prevented the replay."""
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
        """Follows a call, and keeps a template of the second of its kind."""
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
            held = sum(_nbytes(leaf) for leaf in found.leaves if isinstance(leaf, Given))
            if ran != kind.first:
                found = "its first calls differ"
            elif recorder.live - live != held + found.inside:
                found = "it keeps memory that is neither saved nor given"
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
    """What a call leaves behind, or why it cannot be replayed."""
    given, spec = pytree.tree_flatten(output)
    tensors = _distinct(leaves)
    storages = {recorder.serial(t): n for n, t in reversed(list(enumerate(tensors)))}
    fresh, found = list[Tensor](), list[Any]()
    for leaf in given:
        same = next((n for n, t in enumerate(tensors) if t is leaf), None)
        if same is not None:
            found.append(same)
        elif isinstance(leaf, Tensor):
            found.append(Given.of(leaf, recorder.producer(leaf)))
            fresh.append(leaf)
        elif isinstance(leaf, PLAIN) or any(leaf is other for other in leaves):
            found.append((leaf,))
        else:
            return f"it returns a {type(leaf).__name__}"
    own = {recorder.serial(t): n for n, t in enumerate(fresh)}
    dense = all(t.untyped_storage().nbytes() == _nbytes(Given.of(t, -1)) for t in fresh)
    if len(own) < len(fresh) or own.keys() & storages.keys() or not dense:
        return "its output is a view"
    alive = [tensor for ref in made if (tensor := ref()) is not None]
    if any(t.untyped_storage().nbytes() and not any(t is o for o in fresh) for t in alive):
        return "something keeps what it computes, such as a cache of keys and values"
    template = Template(path, spec, found)
    for one in {p.serial: p for p in recorder.packed[packed:]}.values():
        if one.serial in storages:
            template.inputs.append(storages[one.serial])
        elif one.serial in own:
            template.outputs.append(own[one.serial])
        elif not one.name:
            template.inside += one.nbytes
        elif one.name in ("input", "outside"):
            return "it saves what it was not given"
        elif one.name.startswith(f"{path}."):
            template.own.append(one.name.removeprefix(f"{path}."))
    return template


@contextmanager
def calls_through(call: Any, modules: list[nn.Module]) -> Iterator[None]:
    """Routes calls of modules through a function."""
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
    """The form of arguments; objects count as themselves."""
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
    """The tensors of a list, each once."""
    return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _is_number(name: str) -> bool:
    """Whether an attribute only numbers a module among its kind."""
    return any(part in name for part in ("idx", "index", "layer_id", "layer_number"))


def _comparable(value: Any) -> Any:
    """A value that compares equal for equal attributes; other objects equal only themselves."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, list | tuple | set | frozenset):
        return type(value), tuple(_comparable(inner) for inner in value)
    if isinstance(value, dict):
        return tuple((str(key), _comparable(inner)) for key, inner in value.items())
    # Checkpointed calls, or methods bound to a module of the same form.
    return id(getattr(value, "around", getattr(value, "__func__", value)))


def _nbytes(given: Given) -> int:
    count = 1
    for size in given.shape:
        count *= size
    return count * given.dtype.itemsize
