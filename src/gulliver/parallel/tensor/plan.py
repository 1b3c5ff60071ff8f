"""Chooses each module's sharding style from the user's rules, the model family or the model's plan.

    plan = plan_tensor(model, 4)
    print(plan)

Planning only reads modules and shapes. Unknown modules raise an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from gulliver.errors import GulliverError, check_known
from gulliver.families.lookup import family_of, type_of
from gulliver.parallel.tensor.fitting import Choices, check_fitting
from gulliver.parallel.tensor.styles import (
    GATHERED,
    HEADS,
    HUGGING_FACE,
    KV_HEADS,
    STYLES,
    ParameterCut,
    ShardedModule,
    TensorPlan,
    best_match,
    cut_dims,
    dropouts_of,
    fits_kind,
    head_groups,
    is_scaled,
    layer_of,
    parts_of_experts,
    query_heads,
    rotary_width,
)

ROUTERS = ("gate", "router", "gate_proj_router", "wg")
"""Path suffixes of linear layers that route tokens to experts; they are replicated."""


def plan_tensor(
    model: nn.Module,
    size: int,
    rules: Mapping[str, str] | None = None,
    replicate_rest: bool = False,
    allow_dropout: bool = False,
) -> TensorPlan:
    """Plans the sharding of a model.

    Args:
        model: unsharded model, which may be on meta; modules without parameters are unchanged.
        size: number of ranks.
        rules: style by module path pattern, which overrides built-in plans. A pattern is the end of
            a path, with ``*`` for any one part. See `STYLES`.
        replicate_rest: replicate modules that no rule matches.
        allow_dropout: accept models with dropout. The caller must give all tensor ranks the same
            random state; heads of different ranks then draw the same masks.

    Returns:
        The plan.

    Raises:
        GulliverError: a module or style is unknown, a size cannot be distributed, or the model has
            dropout, whose masks would differ between ranks and from those of one process.
    """
    return _Planner(model, size, rules or {}, replicate_rest, allow_dropout).plan()


class _Planner:
    def __init__(
        self,
        model: nn.Module,
        size: int,
        rules: Mapping[str, str],
        replicate_rest: bool,
        allow_dropout: bool,
    ) -> None:
        self.model, self.size, self.rest = model, size, replicate_rest
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.known = family_of(model).tensors
        self.own = _own_plan(model) if self.known is None or self.known.own else {}
        self.rules = dict(rules)
        self.opaque: list[str] = []
        for style in rules.values():
            check_known("style", style, STYLES)
        refused = self.known.refused if self.known else ""
        if refused and not rules and size > 1:
            raise GulliverError(
                f"{type_of(model)} does not support tensor parallelism: {refused}; use pp_size, or "
                "pass tensor_rules"
            )
        if not allow_dropout and size > 1:
            self._refuse_dropout()

    def plan(self) -> TensorPlan:
        placed: dict[str, ShardedModule] = {}
        replicated: list[str] = []
        unknown: list[str] = []
        for path, module in self.modules.items():
            if not module._parameters or not any(
                p is not None for p in module._parameters.values()
            ):
                continue
            style = self._style(path, module)
            if style in ("vocabulary", "embedding by heads") and is_scaled(module):
                style = "replicate" if best_match(path, self.rules) is None else style
            if self._automatic and not fits_kind(module, style):
                style = "replicate" if best_match(path, self.rules) is None else style
            if style is None:
                (replicated if self.rest else unknown).append(path)
            elif style == "replicate":
                replicated.append(path)
            else:
                placed[path] = self._place(path, module, style)
        self._keep_scaled(placed, replicated)
        stacks = self._stacks(placed)
        if self._automatic:
            self._gather_opaque(placed, replicated, stacks)
        cut = {id(p) for path in placed for p in self.modules[path].parameters(recurse=False)}
        unknown = [path for path in unknown if not self._tied(path, cut)]
        if unknown:
            raise GulliverError(
                f"no rule shards {_listed(unknown)}: pass rules={{pattern: style}} (tensor_rules "
                "of the plugin), or replicate_rest=True to replicate them on all ranks"
            )
        replicated = [path for path in replicated if not self._tied(path, cut)]
        self._check_ties(placed)
        sites = self._sites(placed, stacks)
        own = self._local_sites(placed)
        self._check_sites([s for s in sites if s in own], replicated)
        # Built-in plans are tested against a single process; user rules are checked here.
        if self.size > 1 and (self.rules or not self._automatic):
            near = self._known_of, self._by_heads, self._attention_of
            check_fitting(Choices(self.modules, placed, stacks, self.size, *near))
        attention = {
            self._attention(path)[0]: self._attention(path)[1]
            for path, one in placed.items()
            if one.how.heads
        }
        return TensorPlan(
            self.size,
            placed,
            attention,
            sites,
            stacks,
            self._sliced(attention),
            tuple(replicated),
            self.known is not None or bool(self.own),
            self._whole(placed, replicated, stacks),
        )

    def _whole(
        self, placed: dict[str, ShardedModule], replicated: list[str], stacks: tuple[str, ...]
    ) -> tuple[str, ...]:
        """Returns modules that need the full sequence instead of a shard."""
        found = [path for path, one in placed.items() if one.how.kind in ("experts", "latent")]
        if self._automatic:
            found += self.opaque
            found += [
                path
                for path in replicated
                if any(path.startswith(f"{stack}.") for stack in stacks)
                and not type(self.modules[path]).__name__.endswith("Norm")
                and not layer_of(path)[1]
            ]
        return tuple(dict.fromkeys(found))

    @property
    def _automatic(self) -> bool:
        return bool(self.own) or (self.known is not None and self.known.rest)

    def _keep_scaled(self, placed: dict[str, ShardedModule], replicated: list[str]) -> None:
        whole = {
            id(module._parameters.get("weight"))
            for path, module in self.modules.items()
            if (path not in placed or is_scaled(module))
            and not any(True for _ in module.children())
        }
        for path in list(placed):
            if best_match(path, self.rules) is not None or placed[path].how.kind not in (
                "vocabulary",
                "column",
            ):
                continue
            if id(self.modules[path]._parameters.get("weight")) in whole:
                del placed[path]
                replicated.append(path)

    def _gather_opaque(
        self, placed: dict[str, ShardedModule], replicated: list[str], stacks: tuple[str, ...]
    ) -> None:
        """Chooses gathered styles, which are exact in any context, next to unknown modules."""
        # [Note: opaque modules] If a module between columns and rows uses all features, such as a
        # norm over all heads, columns are gathered and rows take their part of a full input.
        # Weights and products are still sharded, and everything in between equals a single process.
        # Linear layers of blocks without a rule are treated in the same way.
        own = self._local_sites(placed)
        sites = [s for s in self._sites(placed, stacks) if s in own]
        for site in sites:
            inside = [path for path in placed if path.startswith(f"{site}.")]
            whole = [
                r
                for r in replicated
                if (r == site or r.startswith(f"{site}.")) and not layer_of(r)[1]
            ]
            norms = [r for r in whole if self._is_head_norm(r, site)]
            if norms == whole:
                for path in norms:
                    placed[path] = ShardedModule("summed", STYLES["summed"], {})
                    replicated.remove(path)
                continue
            self.opaque.append(site)
            for path in [*inside, *([site] if site in placed else [])]:
                self._gather(placed, path, replicated)
        own = self._local_sites(placed)
        local = [s for s in self._sites(placed, stacks) if s in own]
        lists = [p for p, m in self.modules.items() if isinstance(m, nn.ModuleList)]
        for path in list(replicated):
            inside = any(path.startswith(f"{stack}.") for stack in lists)
            if not inside or any(path.startswith(f"{site}.") for site in local):
                continue
            module = self.modules[path]
            alone = path.rpartition(".")[2] in ROUTERS or best_match(path, self.rules) is not None
            parent = self.modules[path.rpartition(".")[0]]
            # State-space mixers read weights without calling the layers that hold them.
            alone = alone or "A_log" in parent._parameters or bool(layer_of(path)[1])
            if alone or type(module) is not nn.Linear or module.out_features < 2 * self.size:
                continue
            placed[path] = self._place(path, module, "column, gathered")
            replicated.remove(path)
            self.opaque.append(path)

    def _gather(self, placed: dict[str, ShardedModule], path: str, replicated: list[str]) -> None:
        style = GATHERED.get(placed[path].how.kind)
        if style is None or placed[path].how.gather or placed[path].how.split:
            if placed[path].how.kind in ("parameters", "latent", "summed"):
                del placed[path]
                replicated.append(path)
            return
        placed[path] = self._place(path, self.modules[path], style)

    def _is_head_norm(self, path: str, site: str) -> bool:
        module, width = self.modules[path], vars(self.modules[site]).get("head_dim")
        if "norm" not in path.rpartition(".")[2].lower() or not isinstance(width, int):
            return False
        sizes = {p.numel() for p in module.parameters()}
        return sizes == {width} and not any(True for _ in module.children())

    def _style(self, path: str, module: nn.Module) -> str | None:
        # For a column layer, the second factor is also a column layer; for a row layer, the first
        # is also a row layer. The other factor, and the features between the two, are replicated.
        layer, factor = layer_of(path)
        style = self._style_of(layer, module)
        if factor == "other":
            raise GulliverError(
                f"{path}: LoRA is the only adapter supported with tp_size; remove DoRA and other "
                "adapters"
            )
        kind = STYLES[style].kind if style in STYLES else None
        if not factor or kind in (None, "replicate"):
            return style
        return style if (factor == "lora_B") == (kind == "column") else "replicate"

    def _style_of(self, path: str, module: nn.Module) -> str | None:
        found = best_match(path, self.rules)
        return self._known_style(path, module) if found is None else self.rules[found]

    def _known_style(self, path: str, module: nn.Module) -> str | None:
        known = self.known.rules if self.known else {}
        found = best_match(path, known)
        if found is not None:
            return known[found]
        if self.own:
            found = best_match(path, self.own)
            return "replicate" if found is None else self._translated(path, self.own[found])
        if self.known is not None and self.known.rest:
            return "replicate"
        return "replicate" if type(module).__name__.endswith("Norm") else None

    def _known_of(self, path: str) -> str | None:
        layer = layer_of(path)[0]
        if best_match(layer, self.rules) is None or (self.known is None and not self.own):
            return None
        try:
            return self._known_style(layer, self.modules[path])
        except GulliverError:
            return None

    def _translated(self, path: str, name: str) -> str:
        if name not in HUGGING_FACE:
            if isinstance(self.modules[path], nn.ModuleList | nn.ModuleDict):
                return "replicate"
            raise GulliverError(
                f"the model's own plan shards {path} as {name!r}, which is not supported: pass a "
                f"rule for it; known styles are {', '.join(HUGGING_FACE)}"
            )
        style = HUGGING_FACE[name]
        parent = self.modules[path.rpartition(".")[0]]
        by_heads = {"column": "column by heads", "row": "row by heads"}
        return by_heads.get(style, style) if head_groups(parent) else style

    def _place(self, path: str, module: nn.Module, style: str) -> ShardedModule:
        how = STYLES[style]
        if how.kind == "latent":
            rotary_width(path, module, self.modules[path.rpartition(".")[0]])
        if how.kind in ("summed", "latent"):
            return ShardedModule(style, how, {})
        if how.kind == "experts":
            parts = parts_of_experts(path, module, self.size)
            return ShardedModule(
                style, how, {n: part.dim for n, part in parts.items()}, parts=parts
            )
        if how.kind == "parameters":
            held = {n: p.shape[0] for n, p in module._parameters.items() if p is not None}
            units = self._units(f"{path}.", max(held.values()))[0]
            parts = {n: ParameterCut(0, count, units) for n, count in held.items()}
            return ShardedModule(style, how, dict.fromkeys(parts, 0), parts=parts)
        dims = cut_dims(path, module, how)
        total = module._parameters["weight"].shape[dims["weight"]]  # pyright: ignore[reportOptionalMemberAccess]
        units, copies = total // how.blocks, 1
        if how.heads:
            units, copies = self._units(path, total, how.blocks)
        if total % (units * how.blocks):
            raise GulliverError(
                f"{path} has {total} features, which cannot be split into {how.blocks} x {units} "
                "equal parts: use another rule"
            )
        if not how.heads and units < self.size:
            raise GulliverError(
                f"{path} has {units} features, fewer than {self.size} tensor ranks: use tp_size "
                f"from 1 to {units}"
            )
        return ShardedModule(style, how, dims, total, units, copies)

    def _attention_of(self, path: str) -> str:
        return self._attention(path)[0]

    def _by_heads(self, path: str, one: ShardedModule) -> ShardedModule:
        units, copies = self._units(path, one.total, one.how.blocks)
        return replace(one, units=units, copies=copies)

    def _units(self, path: str, total: int, blocks: int = 0) -> tuple[int, int]:
        """Returns the number of heads to distribute, and the number of ranks that share each."""
        # Without blocks of features, there is one number per query head.
        #
        # [Note: copies of key-value heads] With more ranks than key-value heads, each of these
        # heads is on several ranks, which share its query heads. A rank's gradient of the head only
        # covers its own query heads, so gradients are summed over the copies where the layer uses
        # its weights (`sum_gradients`); the optimizer updates all copies equally, and a norm counts
        # each once (`Region.copies`).
        name, groups = self._attention(path)
        if self.size <= groups:
            return groups, 1
        heads, width = query_heads(self.modules[name], groups)
        more = [n for n in range(2 * groups, heads + 1, groups) if heads % n == 0]
        whole = {groups * width: groups, heads * width: heads} if blocks else {heads: heads}
        if self.size not in more or blocks > 1 or total not in whole:
            others = f", or {' or '.join(map(str, more))}" if more and blocks < 2 else ""
            raise GulliverError(
                f"{path} has {groups} heads (key-value heads if grouped), fewer than {self.size} "
                f"tensor ranks: use tp_size from 1 to {groups}{others}"
            )
        return whole[total], self.size // groups if whole[total] == groups else 1

    def _attention(self, path: str) -> tuple[str, int]:
        above = path
        while above:
            above = above.rpartition(".")[0]
            near = [(above, self.modules[above])]
            near += [(f"{above}.{n}", m) for n, m in self.modules[above].named_children()]
            for name, module in near:
                if groups := head_groups(module):
                    return name, groups
        raise GulliverError(
            f"{path} should be sharded by heads, but no module around it has a head count; looked "
            f"for {', '.join((*KV_HEADS, *HEADS))}"
        )

    def _tied(self, path: str, cut: set[int]) -> bool:
        return all(id(p) in cut for p in self.modules[path].parameters(recurse=False))

    def _check_ties(self, placed: dict[str, ShardedModule]) -> None:
        seen: dict[int, tuple[str, Any]] = {}
        for path, module in self.modules.items():
            one = placed.get(path)
            for name, parameter in module._parameters.items():
                dim = one.dims.get(name) if one else None
                cut = None if one is None or dim is None else (dim, one.runs(self.size, 0, name))
                if parameter is None or (cut is None and any(module.children())):
                    continue
                other, before = seen.setdefault(id(parameter), (f"{path}.{name}", cut))
                if before != cut:
                    raise GulliverError(
                        f"{path}.{name} and {other} are tied, but would be sharded differently: "
                        "use the same style for both"
                    )

    def _stacks(self, placed: dict[str, ShardedModule]) -> tuple[str, ...]:
        found: list[str] = []
        for path, module in self.modules.items():
            if not isinstance(module, nn.ModuleList) or any(
                path.startswith(f"{above}.") for above in found
            ):
                continue
            if any(inner.startswith(f"{path}.") for inner in placed):
                found.append(path)
        return tuple(found)

    def _sites(self, placed: dict[str, ShardedModule], stacks: tuple[str, ...]) -> tuple[str, ...]:
        """Returns parents of column layers, but not blocks: their input is also used elsewhere."""
        parents = {
            layer_of(path)[0].rpartition(".")[0]: None
            for path, one in placed.items()
            if one.how.kind == "column" and any(path.startswith(f"{s}.") for s in stacks)
        }
        return tuple(p for p in parents if p.rpartition(".")[0] not in stacks)

    @staticmethod
    def _local_sites(placed: dict[str, ShardedModule]) -> set[str]:
        return {
            layer_of(path)[0].rpartition(".")[0]
            for path, one in placed.items()
            if one.how.kind == "column" and not one.how.gather
        }

    def _check_sites(self, sites: list[str], replicated: list[str]) -> None:
        """Rejects replicated parameters whose gradients would be partial."""
        wrong = [
            r
            for r in replicated
            if any(r.startswith(f"{s}.") or r == s for s in sites) and not layer_of(r)[1]
        ]
        if wrong:
            raise GulliverError(
                f"{_listed(wrong)} are between column and row layers, where features are sharded: "
                "pass "
                "a rule ('summed' for modules that treat all heads equally)"
            )

    def _sliced(self, attention: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
        patterns = self.known.sliced if self.known else {}
        found = {path: best_match(path, patterns) for path in attention}
        return {path: patterns[pattern] for path, pattern in found.items() if pattern is not None}

    def _refuse_dropout(self) -> None:
        names = dropouts_of(self.model)
        if names:
            raise GulliverError(
                f"dropout masks would depend on the number of ranks: {_listed(names)} must be 0 "
                "(in the model's config), or pass allow_dropout=True"
            )


def _own_plan(model: nn.Module) -> dict[str, str]:
    found = getattr(model, "tp_plan", None) or {}
    return dict(found) if isinstance(found, Mapping) else {}


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:6])
    return shown if len(names) <= 6 else f"{shown} and {len(names) - 6} more"
