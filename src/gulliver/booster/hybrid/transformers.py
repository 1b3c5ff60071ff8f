"""Sequence parallelism of Hugging Face models.

    wire_sequence(model, make_groups(SequencePlan(inner=2, layout="zigzag")))
    loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss      # unchanged

Every rank calls the model with the full batch and gets the loss of all tokens, or full logits.
Three hooks around the model's forward do this:

1. `SequenceAdapter.enter` selects this rank's tokens and their positions;
2. attention is `attend`, which transformers looks up by a name in the configuration;
3. `SequenceAdapter.leave` computes the loss from each rank's tokens, or gathers logits and hidden
   states.

The *region* of a model is the part that runs on sharded sequences. If a head works token by token
(`TASKS`), the region is the full model with its loss, if that can be computed from shards
(`own_loss`); otherwise it is the base model, and all ranks continue with gathered hidden states.
Differences between models are in their family records (`gulliver.families.Sequences`).

With tensor but no sequence parallelism, only the loss is changed: the head's columns stay sharded
and the cross-entropy is computed over them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from gulliver.booster.hybrid.inputs import (
    ALONG_TOKENS,
    KEY,
    NAME,
    WHOLE,
    CallArguments,
    OpenedForward,
    SequenceCall,
    attend,
    check_length,
    cut_tokens,
    leave,
    leave_tail,
    mean_over_ranks,
    sharded_labels,
    token_losses,
)
from gulliver.booster.hybrid.mesh import Degree, put_degree
from gulliver.comm.groups import ALONE, RankGroup
from gulliver.errors import GulliverError
from gulliver.families.lookup import all_families, family_of, type_of
from gulliver.families.loss import ModelLoss, asks_routers, has_known_forward, own_loss, router_loss
from gulliver.families.record import Sequences
from gulliver.parallel.sequence.layout import SequenceGroups, Tail
from gulliver.parallel.sequence.sharding import shard

# Suffixes of class names whose head works token by token.
TASKS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM")

# Kinds of rotary embedding that depend on the largest position in a call, which differs by rank.
LOCAL_ROPE = ("dynamic", "longrope")


def wire_sequence(model: nn.Module, groups: SequenceGroups, tensor: RankGroup = ALONE) -> None:
    """Makes a Hugging Face model shard its sequences over ranks, in place."""
    # Parameters do not change, and may be sharded by tensor parallelism; blocks may be missing. All
    # ranks of a sequence must call the model with the same batch. Gradients of parameters are right
    # after averaging over the ranks of the sequence.
    #
    # In training with labels, logits are None, because no rank has all of them; without labels, and
    # in evaluation, they are gathered.
    task = type(model).__name__.endswith(TASKS)
    shared = groups.plan.degree > 1
    if not shared and (tensor.size == 1 or not task):
        return
    if not shared and not has_known_forward(model):
        # A custom forward may do anything with its logits, so it gets all of them.
        head: Any = getattr(model, "get_output_embeddings", lambda: None)()
        if hasattr(head, "gather_output"):
            head.gather_output = True
        return
    experts = shared and family_of(model).experts
    task = task and (not shared or own_loss(model, experts) is not None)
    _check_unwired(model)
    known = check_sequence(model) if shared else Sequences()
    degree = Degree(groups)
    put_degree(model, degree)
    adapter = SequenceAdapter(degree, tensor, known, task, experts)
    region = model if task else _base_of(model)
    region.register_forward_pre_hook(adapter.enter, with_kwargs=True)
    region.register_forward_hook(adapter.leave, with_kwargs=True, always_call=True)
    # Set outside of the module's tables, so that it is neither saved nor copied.
    object.__setattr__(model, "gulliver_adapter", adapter)
    if groups.plan.degree > 1:
        _use_attention(model)
        _hook_inside(_base_of(model), adapter, whole_region=task)
        if hasattr(model, "generate"):
            object.__setattr__(model, "generate", _refuse_generating)


def check_sequence(model: nn.Module) -> Sequences:
    """Returns the family record of a model whose sequences can be sharded; rejects other models."""
    _check_unwired(model)
    known = _sequences_of(model)
    _check_config(model, known)
    return known


def _check_unwired(model: nn.Module) -> None:
    if getattr(model, "gulliver_adapter", None) is not None:
        raise GulliverError("this model already shards sequences: build a new one")


def keep_logits(model: nn.Module, keep: bool = True) -> None:
    """Sets whether a sequence-parallel model also gathers its logits when called with labels.

    Use it for criteria that take both labels and logits.

    Args:
        model: model with sequence parallelism; others are left unchanged.
        keep: True always gathers them; False only if the loss cannot be computed otherwise.
    """
    adapter: SequenceAdapter | None = getattr(model, "gulliver_adapter", None)
    if adapter is not None:
        adapter.keeps_logits = keep


@contextmanager
def gathered_logits(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Context in which a sequence-parallel model returns full logits, if `wanted`."""
    adapter: SequenceAdapter | None = getattr(model, "gulliver_adapter", None)
    if adapter is None or not wanted:
        yield
        return
    before, adapter.keeps_logits = adapter.keeps_logits, True
    try:
        yield
    finally:
        adapter.keeps_logits = before


class SequenceAdapter:
    """State shared by the hooks of a model and of its copies."""

    def __init__(
        self,
        degree: Degree,
        tensor: RankGroup,
        known: Sequences,
        task: bool,
        experts: bool,
    ) -> None:
        self.degree, self.tensor, self.known, self.task = degree, tensor, known, task
        self.experts = experts
        self.keeps_logits = False
        # State of the current forward. Blocks, which may be recomputed, get it as an argument.
        self.opened: OpenedForward | None = None

    def __deepcopy__(self, memo: Any) -> SequenceAdapter:
        return self

    @property
    def groups(self) -> SequenceGroups:
        return self.degree.now

    @property
    def shared(self) -> bool:
        """Whether sequences are sharded; at degree 1 the same code runs on one shard."""
        return self.degree.planned.plan.degree > 1

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        batch = CallArguments.of(module, args, dict(kwargs))
        if self.shared:
            self._check_call(module, batch)
        opened = OpenedForward(SequenceCall(self.groups), shared=self.shared)
        opened.as_tuple = not batch.take("return_dict", _returns_dict(module))
        own = self._own_loss(module, batch)
        if own is not None:
            opened.targets = sharded_labels(batch, self.groups, own)
        if self.shared and self.known.entry is None:
            opened.call = cut_tokens(batch, self.groups, self.known)
        if self.shared:
            known = (*ALONG_TOKENS, *WHOLE, "logits_to_keep")
            batch.check_all_known(known)
            self._keep_tail(batch, opened)
            batch.kwargs[KEY] = opened.call
        opened.hold = opened.targets is not None and module.training and not self.keeps_logits
        opened.balances = opened.shared and self.task and asks_routers(module, batch.kwargs)
        self._switch_head(module, opened)
        self.opened = opened
        return (), {**batch.kwargs, "return_dict": True}

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Returns the user's outputs; also called when a forward fails."""
        opened, self.opened = self.opened, None
        if opened is None or output is None:
            return None
        fields = dict(output)
        if opened.targets is not None:
            fields = {"loss": self._loss(module, fields["logits"], opened), **fields}
        if opened.balances:
            self._balance(module, fields, opened)
        if opened.hold:
            fields["logits"] = None
        if opened.shared:
            self._gather(fields, opened)
        found = type(output)(**fields)
        return found.to_tuple() if opened.as_tuple else found

    def cut_made_tokens(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Returns this rank's shard of a module's output tokens; its gradient covers that shard."""
        if self.opened is None:
            return output
        call = self.opened.call
        check_length(call.groups, output.shape[1])
        call.length = output.shape[1]
        return shard(output, call.groups, gradient="own")

    def join(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self.opened is None or not self.opened.shared:
            return output
        call = self.opened.call
        if isinstance(output, Tensor):
            return leave(output, call.groups, call.length)
        output.last_hidden_state = leave(output.last_hidden_state, call.groups, call.length)
        return output

    def _own_loss(self, module: nn.Module, batch: CallArguments) -> ModelLoss | None:
        """Computes the loss from shards; None if the model needs full logits for it."""
        if not self.task:
            return None
        # Checked at every call, because a loss_function may be set after boost.
        added = self.experts
        asked = asks_routers(module, batch.kwargs) and not added
        known = None if asked else own_loss(module, added)
        if known is None and self.shared and batch.kwargs.get("labels") is not None:
            raise GulliverError(
                f"{type(module).__name__} got a custom loss after boost, which would see only "
                "part of the logits: set it before boost, or omit labels and compute the loss "
                "from the logits"
            )
        return known

    def _loss(self, module: nn.Module, logits: Tensor, opened: OpenedForward) -> Tensor:
        targets = opened.targets
        assert targets is not None
        head = self._head(module)
        columns = head.columns if opened.hold and head is not None else None
        ignored = targets.counting.ignore_index
        losses = token_losses(logits, targets.labels, self.tensor, columns, ignored)
        return mean_over_ranks(losses, targets.labels, opened.call.groups, targets.counting)

    def _balance(self, module: Any, fields: dict[str, Any], opened: OpenedForward) -> None:
        """Adds the router loss over all tokens, as in a single process."""
        assert self.experts, "other routers are rejected before"
        count, call = len(fields["logits"]), opened.call
        pieces = [piece.unflatten(0, (count, -1)) for piece in fields["router_logits"]]
        whole = tuple(leave(piece, call.groups, call.length).flatten(0, 1) for piece in pieces)
        fields["router_logits"] = whole
        fields["aux_loss"] = added = router_loss(module, whole, call.keys)
        if opened.targets is not None:
            fields["loss"] = fields["loss"] + module.router_aux_loss_coef * added

    def _gather(self, fields: dict[str, Any], opened: OpenedForward) -> None:
        groups, length = opened.call.groups, opened.call.length
        last = fields.get("last_hidden_state")
        if self.known.exit is None and isinstance(last, Tensor):
            fields["last_hidden_state"] = leave(last, groups, length)
        if fields.get("hidden_states") is not None:
            # The last one may be the tensor that was already gathered.
            fields["hidden_states"] = tuple(
                fields["last_hidden_state"] if h is last else leave(h, groups, length)
                for h in fields["hidden_states"]
            )
        if not self.task or opened.hold:
            return
        if opened.tail is None:
            fields["logits"] = leave(fields["logits"], groups, length)
        else:
            fields["logits"] = leave_tail(fields["logits"], groups, opened.tail)

    def _keep_tail(self, batch: CallArguments, opened: OpenedForward) -> None:
        """Makes each rank compute logits only for its share of the last `logits_to_keep` tokens."""
        keep = batch.kwargs.get("logits_to_keep", 0)
        if not isinstance(keep, int):
            raise GulliverError(
                "logits_to_keep by index is not supported with sequence parallelism: pass the "
                "number of last tokens"
            )
        if not keep or not opened.shared:
            return
        if opened.targets is not None:
            raise GulliverError("logits_to_keep with labels is not supported: omit one of them")
        call = opened.call
        opened.tail = Tail(call.groups.plan.lay(call.length), min(keep, call.length))
        batch.kwargs["logits_to_keep"] = opened.tail.local(call.groups.rank)

    def _switch_head(self, module: nn.Module, opened: OpenedForward) -> None:
        """Keeps the head's columns sharded if only the loss reads them."""
        head = self._head(module)
        if head is not None:
            head.gather_output = not opened.hold

    def _head(self, module: nn.Module) -> Any:
        """Returns the head if its columns are sharded over the tensor ranks."""
        if not self.task or self.tensor.size == 1:
            return None
        head = module.get_output_embeddings()  # pyright: ignore[reportCallIssue]
        return head if hasattr(head, "gather_output") and hasattr(head, "columns") else None

    def _check_call(self, module: nn.Module, batch: CallArguments) -> None:
        if module.training:
            check_dropout(module, self.known)
        if batch.take("use_cache"):
            raise GulliverError(
                "use_cache=True is not supported, because keys and values are sharded; to "
                "generate, save the model and use gulliver.LLM"
            )
        if _accepts(module, "use_cache"):
            batch.kwargs["use_cache"] = False
        if not self.known.masked and batch.kwargs.get("attention_mask") is not None:
            raise GulliverError(
                f"{type(module).__name__} does not support attention_mask with sequence parallelism"
            )


def check_dropout(model: nn.Module, known: Sequences) -> None:
    """Rejects random drops that would need the same draws on several ranks."""
    config: Any = model.config
    for name in known.dropouts:
        if getattr(config, name, 0):
            raise GulliverError(
                f"{name}={getattr(config, name)} is not supported with sequence parallelism: set "
                "it to 0"
            )


def _sequences_of(model: nn.Module) -> Sequences:
    known = family_of(model).sequences
    if known is not None and "ring_attn" in known.modes:
        return known
    why = known.why if known is not None else "its attention is unknown"
    others = [f.name for f in all_families() if f.sequences and "ring_attn" in f.sequences.modes]
    raise GulliverError(
        f"{type_of(model)} does not support sequence parallelism: {why}; use "
        f"sequence_parallelism_mode='split_gather', or one of {', '.join(others)}"
    )


def _check_config(model: nn.Module, known: Sequences) -> None:
    config: Any = model.config
    for name in known.refused:
        if getattr(config, name, False):
            raise GulliverError(
                f"{name}={getattr(config, name)} is not supported with sharded sequences"
            )
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in LOCAL_ROPE:
        raise GulliverError(
            f"rotary embeddings of type {rope!r} depend on the longest position that a rank sees: "
            "use 'default', 'linear', 'yarn' or 'llama3', or sequence_parallelism_mode="
            "'split_gather'"
        )
    if model.training:
        check_dropout(model, known)


def _refuse_generating(*_: Any, **__: Any) -> None:
    raise GulliverError(
        "generation is not supported with sequence parallelism: save the model, and use "
        "gulliver.LLM(folder, tensor=...)"
    )


def _base_of(model: nn.Module) -> nn.Module:
    return getattr(model, "base_model", model)


def _use_attention(model: nn.Module) -> None:
    """Selects our attention in a copy of the model's configuration."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    # Other models may have been built from the same configuration.
    old: Any = model.config
    new = copy.deepcopy(old)
    new._attn_implementation = NAME
    for module in model.modules():
        if getattr(module, "config", None) is old:
            module.config = new


def _hook_inside(base: nn.Module, adapter: SequenceAdapter, whole_region: bool) -> None:
    """Hooks the modules where the sharded region begins or ends inside the base model."""
    known = adapter.known
    if known.entry is not None:
        base.get_submodule(known.entry).register_forward_hook(adapter.cut_made_tokens)
    if known.exit is not None and not whole_region:
        base.get_submodule(known.exit).register_forward_hook(adapter.join)


def _returns_dict(module: nn.Module) -> bool:
    return bool(getattr(getattr(module, "config", None), "return_dict", True))


def _accepts(module: nn.Module, name: str) -> bool:
    import inspect

    return name in inspect.signature(module.forward).parameters
