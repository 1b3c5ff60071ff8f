"""Which modules of a model are the blocks that a pipeline cuts between, and what lies around them.

A model is modules before its blocks, the blocks, run in a row with the hidden state as their first
argument and first output, and modules after. A few families need telling more: an encoder-decoder
has two rows of blocks, the second of which reads what the first one finished. `FAMILIES` is that
table; any other model is looked through for its longest list of equal blocks (`stack_of`).

What it does not know: where to cut (`_cut.py`), how a stage is made (`_stage.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from gulliver.errors import GulliverError


@dataclass(frozen=True)
class Family:
    """What cannot be seen by looking at a model of some type.

    Attributes:
        lists: last parts of the paths of its lists of blocks, in running order; none: looked for.
        interleaved: the lists run in turns, one block of each.
        extra: entries that a block returns after the hidden state; None: a plain tensor.
        after: last parts of the paths of modules that run after the blocks although they are
            registered before them.
        everywhere: last parts of the paths of modules whose results go into every block.
        first_only: path inside a block of a module that only the first block of a list has, and
            whose result the others share.
    """

    lists: tuple[str, ...] = ()
    interleaved: bool = False
    extra: int | None = None
    after: tuple[str, ...] = ()
    everywhere: tuple[str, ...] = ()
    first_only: str | None = None


_DECODER = Family()
FAMILIES = {
    "llama": _DECODER,
    "mistral": _DECODER,
    "qwen2": _DECODER,
    "gpt2": _DECODER,
    "bloom": Family(extra=1),
    "opt": Family(after=("final_layer_norm", "project_out")),
    "bert": Family(),
    "vit": Family(),
    "t5": Family(
        lists=("encoder.block", "decoder.block"),
        extra=2,
        first_only="layer.0.SelfAttention.relative_attention_bias",
    ),
    "whisper": Family(lists=("encoder.layers", "decoder.layers")),
    "STDiT3": Family(
        lists=("spatial_blocks", "temporal_blocks"),
        interleaved=True,
        everywhere=("t_embedder", "fps_embedder", "t_block", "y_embedder", "rope"),
    ),
}


@dataclass(frozen=True)
class Stack:
    """The blocks of a model, in the order in which they run.

    Attributes:
        blocks: paths of the blocks.
        lists: paths of the lists that hold them.
        memory: path of the module around the first list, whose output every block of the second
            list reads; None where there is one row of blocks.
        border: how many blocks lie in it; 0 without one.
        extra: entries that a block returns after the hidden state; None: a plain tensor; -1: not
            known, found out when a block is passed by.
        after: paths of modules that run after the blocks although they are registered before.
        everywhere: paths of modules that every stage keeps.
        first_only: as of `Family`.
        family: the name under which the model stands in the table.
    """

    blocks: tuple[str, ...]
    lists: tuple[str, ...]
    memory: str | None = None
    border: int = 0
    extra: int | None = -1
    after: tuple[str, ...] = ()
    everywhere: tuple[str, ...] = ()
    first_only: str | None = None
    family: str | None = None

    @property
    def known(self) -> Family:
        """The family's entry of the table."""
        return FAMILIES.get(self.family or "", Family())

    def place(self) -> dict[str, int]:
        """Number of each block, by path."""
        return {path: number for number, path in enumerate(self.blocks)}


def family_name(model: nn.Module) -> str | None:
    """The name under which a model stands in the table; None where it does not."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if isinstance(kind, str) and kind in FAMILIES and _is_hugging_face(model):
        return kind
    return next((c.__name__ for c in type(model).__mro__ if c.__name__ == "STDiT3"), None)


def _is_hugging_face(model: nn.Module) -> bool:
    return any(c.__module__.startswith("transformers.") for c in type(model).__mro__)


def stack_of(
    model: nn.Module,
    path: str | None = None,
    *,
    extra: int | None = -1,
    after: Sequence[str] = (),
    everywhere: Sequence[str] = (),
) -> Stack:
    """Finds the blocks of a model.

    Args:
        model: whole; its parameters may be on meta.
        path: of its list of blocks, where it is not to be looked for.
        extra: entries that a block returns after the hidden state; None: a plain tensor; -1:
            found out by itself.
        after: paths of modules that run after the blocks although they are registered before.
        everywhere: paths of modules whose results go into every block.

    Returns:
        The blocks.

    Raises:
        GulliverError: there is no list of blocks, or no module at a path.
    """
    paths = dict(model.named_modules())
    for name in (*([path] if path is not None else []), *after, *everywhere):
        if name not in paths:
            raise GulliverError(f"the model has no module {name!r}")
    name = family_name(model)
    if path is None and name is not None:
        found = _of_family(paths, name)
        return replace(
            found,
            extra=found.extra if extra == -1 else extra,
            after=(*found.after, *after),
            everywhere=(*found.everywhere, *everywhere),
        )
    if path is None and isinstance(model, nn.Sequential):
        path = ""
    if path is None and _is_hugging_face(model):
        return _of_names(model, paths, extra, tuple(after), tuple(everywhere))
    path = _longest(paths) if path is None else path
    inner = paths[path]
    if not isinstance(inner, nn.ModuleList | nn.Sequential):
        raise GulliverError(
            f"{path!r} is a {type(inner).__name__}: blocks lie in a ModuleList or a Sequential"
        )
    blocks = tuple(_join(path, child) for child, _ in inner.named_children())
    if isinstance(inner, nn.Sequential) and extra == -1:
        extra = None
    return Stack(blocks, (path,), extra=extra, after=tuple(after), everywhere=tuple(everywhere))


AFTER = (
    "lm_head",
    "cls",
    "classifier",
    "embed_out",
    "output_projection",
    "generator_predictions",
    "generator_lm_head",
    "vocab_transform",
    "vocab_layer_norm",
    "vocab_projector",
    "pred_layer",
    "final_layer_norm",
    "final_norm",
    "project_out",
)
BEFORE = ("layernorm_embedding", "emb_norm", "embed_layer_norm", "embeddings_project")
ENCODERS = ("encoder.layers", "encoder.layer", "encoder.block")
"""What transformers calls modules that run after the blocks, or before them, wherever they are
registered, and the blocks of an encoder."""


_MORE = "its blocks return more than their hidden state, which later blocks read"
REFUSED = {
    "glm_moe_dsa": _MORE,
    "hy_v4": _MORE,
    "gpt_neox_japanese": _MORE,
    "inkling_text": "its blocks read what modules before them computed",
    "inkling2_text": "its blocks read what modules before them computed",
    **dict.fromkeys(("mt5", "longt5"), "its first block computes a bias for all the others"),
    "mpnet": "all its blocks use a bias which is computed around them",
    **dict.fromkeys(("xlm", "flaubert"), "its layers are lists of parts, not blocks"),
    "switch_transformers": "its encoder hands more on than its hidden state",
    "recurrent_gemma": "its blocks keep a state from call to call",
    "roformer": "its blocks read positions that the encoder around them embeds",
    **dict.fromkeys(("ibert", "squeezebert"), "its blocks hand on more than a hidden state"),
    "nllb-moe": "its encoder hands on what its routers chose",
    "hrm_text": "it runs its blocks several times",
}
"""Types that cannot be cut into stages, with the reason."""


def _of_names(
    model: nn.Module,
    paths: dict[str, nn.Module],
    extra: int | None,
    after: tuple[str, ...],
    everywhere: tuple[str, ...],
) -> Stack:
    """The blocks of a type that is not in the table, by the names that transformers uses."""
    kind = str(getattr(getattr(model, "config", None), "model_type", ""))
    if kind in REFUSED:
        raise GulliverError(
            f"{kind} is not cut into stages: {REFUSED[kind]}; take tp_size instead of pp_size"
        )
    if len({getattr(m, "has_relative_attention_bias", None) for m in model.modules()}) > 2:
        raise GulliverError(
            f"{type(model).__name__} has blocks that use a bias which the first one computes: it "
            "is not cut into stages; take tp_size instead of pp_size"
        )
    lists = [_longest(paths)]
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        encoder = next((p for end in ENCODERS if (p := _ending(paths, end)) is not None), None)
        decoder = None if encoder is None else encoder.replace("encoder.", "decoder.")
        if encoder is None or decoder not in paths:
            raise GulliverError(
                f"{type(model).__name__} is an encoder and a decoder, but has no two lists of "
                f"blocks of such names ({', '.join(ENCODERS)}): a pipeline cannot cut it"
            )
        lists = [encoder, decoder]
    rows = [[_join(path, child) for child, _ in paths[path].named_children()] for path in lists]
    late = tuple(p for end in AFTER for p in _all_ending(paths, end, lists))
    early = tuple(p for end in BEFORE for p in _all_ending(paths, end, lists))
    return Stack(
        tuple(block for row in rows for block in row),
        tuple(lists),
        memory=lists[0].rpartition(".")[0] if len(lists) > 1 else None,
        border=len(rows[0]) if len(lists) > 1 else 0,
        extra=extra,
        after=(*after, *late),
        everywhere=(*everywhere, *early),
    )


def _of_family(paths: dict[str, nn.Module], name: str) -> Stack:
    family = FAMILIES[name]
    # A part of an encoder-decoder may be a model of its own.
    lists = [found for end in family.lists if (found := _ending(paths, end)) is not None]
    lists = lists or [_longest(paths)]
    rows = [[_join(path, child) for child, _ in paths[path].named_children()] for path in lists]
    common: dict[str, Any] = {
        "lists": tuple(lists),
        "extra": family.extra,
        "after": tuple(p for end in family.after for p in _all_ending(paths, end, lists)),
        "everywhere": tuple(p for end in family.everywhere for p in _all_ending(paths, end, lists)),
        "first_only": family.first_only,
        "family": name,
    }
    if family.interleaved:
        return Stack(tuple(b for turn in zip(*rows, strict=True) for b in turn), **common)
    blocks = tuple(block for row in rows for block in row)
    if len(rows) == 1:
        return Stack(blocks, **common)
    memory = lists[0].rpartition(".")[0]
    return Stack(blocks, memory=memory, border=len(rows[0]), **common)


def _ending(paths: dict[str, nn.Module], end: str) -> str | None:
    return next((p for p in paths if p == end or p.endswith(f".{end}")), None)


def _all_ending(paths: dict[str, nn.Module], end: str, lists: Sequence[str]) -> Iterator[str]:
    inside = tuple(f"{path}." for path in lists)
    for path in paths:
        if (path == end or path.endswith(f".{end}")) and not path.startswith(inside):
            yield path


def _longest(paths: dict[str, nn.Module]) -> str:
    """The longest list of blocks of one class that hold parameters; the outermost of equals."""
    best, length = None, 1
    for path, module in paths.items():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) <= length:
            continue
        kinds = {type(block) for block in module}
        if len(kinds) == 1 and all(any(True for _ in b.parameters()) for b in module):
            best, length = path, len(module)
    # Blocks of several kinds lie in a list of this name.
    named = [p for p in paths if p.rpartition(".")[2] in LISTS and _many(paths[p])]
    if named and (best is None or best.startswith(f"{named[0]}.")):
        best = named[0]
    if best is None:
        raise GulliverError(
            "the model has no list of equal blocks to cut between: put them into an "
            "nn.ModuleList, or name the list (blocks=... of HybridParallelPlugin, path of stack_of)"
        )
    return best


LISTS = ("layers", "layer", "h", "blocks", "block")
"""Names of lists of blocks."""


def _many(module: nn.Module) -> bool:
    blocks = list(module.children())
    held = all(any(True for _ in block.parameters()) for block in blocks)
    return isinstance(module, nn.ModuleList) and len(blocks) > 1 and held


def _join(path: str, child: str) -> str:
    return f"{path}.{child}" if path else child


@dataclass(frozen=True)
class Unit:
    """A module around the blocks that holds parameters, kept or replaced as one.

    Attributes:
        path: of the module.
        home: number of the block whose stage it goes to; None: every stage keeps it.
    """

    path: str
    home: int | None


@dataclass
class _Walk:
    model: nn.Module
    stack: Stack
    units: list[Unit] = field(default_factory=list)
    seen: int = 0

    def visit(self, path: str, module: nn.Module) -> None:
        if path in self.stack.lists:
            self.seen += 1
            return
        around = any(_inside(inner, path) for inner in self.stack.lists)
        if not around and not _plain_container(module):
            if any(True for _ in module.parameters()):
                self.units.append(Unit(path, self._home(path)))
            return
        for name, child in module.named_children():
            self.visit(_join(path, name), child)

    def _home(self, path: str) -> int | None:
        """By where a module is registered: before a list of blocks, or after it."""
        stack, last = self.stack, len(self.stack.blocks) - 1
        if any(path == p or _inside(path, p) for p in stack.everywhere):
            return None
        if any(path == p or _inside(path, p) for p in stack.after):
            return last if not stack.memory or not _inside(path, stack.memory) else stack.border - 1
        if stack.memory is None:
            if self.seen == 0:
                return 0
            # Between two lists whose blocks run in turns anything may be.
            return last if self.seen == len(stack.lists) else None
        if _inside(path, stack.memory):
            return 0 if self.seen == 0 else stack.border - 1
        return (0, stack.border, last)[self.seen]


def units_of(model: nn.Module, stack: Stack) -> list[Unit]:
    """The modules around the blocks that hold parameters, with the blocks that they go with."""
    walk = _Walk(model, stack)
    walk.visit("", model)
    return walk.units


def around(model: nn.Module, stack: Stack) -> list[str]:
    """Paths of the modules that have blocks somewhere inside, and are none."""
    found = (path for path, _ in model.named_modules())
    return [p for p in found if p in stack.lists or any(_inside(i, p) for i in stack.lists)]


def _inside(path: str, outer: str) -> bool:
    return outer == "" or path == outer or path.startswith(f"{outer}.")


def _plain_container(module: nn.Module) -> bool:
    """Whether a module is only looked into, never called."""
    return isinstance(module, nn.ModuleDict | nn.ModuleList)
