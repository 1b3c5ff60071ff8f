"""Attention of transformers' models over `Pages`, without copies of their code.

`attach` enters one function under transformers' attention interface and gives every attention layer
the pages that it reads. What an architecture hands to its attention beside q, k and v is either
understood here or refused. BLOOM's attention does not know the interface: its module gets a forward
of a few lines that does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn

from gulliver.errors import GulliverError

NAME = "gulliver_pages"
"""Name under transformers' attention interface."""


class Attends(Protocol):
    """What attention layers call: `Pages`, or what measures a model."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None = None,
        slopes: Tensor | None = None,
    ) -> Tensor:
        """See `Pages.attend`."""
        ...


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Computes attention as transformers' interface calls it."""
    known: Any = module
    odd = next((name for name in REFUSED if more.get(name) is not None), None)
    if odd is not None:
        raise GulliverError(f"attention with {odd} ({type(module).__name__}) is not served")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    pages: Attends = known.gulliver_pages
    out = pages.attend(known.layer_idx, query[0], key[0], value[0], scale, sliding_window)
    return out[None], None


REFUSED = ("softcap", "s_aux", "position_bias", "head_mask")
"""Arguments of attention that change its result and are not understood here."""


@contextmanager
def attached(model: Any, pages: Attends) -> Iterator[None]:
    """Attaches a model to pages within the context."""
    detach = attach(model, pages)
    try:
        yield
    finally:
        detach()


def attach(model: Any, pages: Attends) -> Callable[[], None]:
    """Makes a model attend over pages, until the returned function is called."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, paged_attention)
    layers: list[Any] = [m for m in model.modules() if isinstance(getattr(m, "layer_idx", 0), int)]
    layers = [layer for layer in layers if hasattr(layer, "layer_idx")]
    if any(hasattr(layer, "gulliver_pages") for layer in layers):
        raise GulliverError("this model is served already: close the other runner first")
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    before = [(config, config._attn_implementation) for config in configs.values()]
    for layer in layers:
        layer.gulliver_pages = pages
        if type(layer).__name__ in OWN_FORWARD:
            layer.forward = OWN_FORWARD[type(layer).__name__].__get__(layer)
    for config, _ in before:
        config._attn_implementation = NAME

    def detach() -> None:
        for config, implementation in before:
            config._attn_implementation = implementation
        for layer in layers:
            del layer.gulliver_pages
            layer.__dict__.pop("forward", None)

    return detach


def _bloom_attention(
    self: Any, hidden_states: Tensor, residual: Tensor, alibi: Tensor, *args: Any, **more: Any
) -> tuple[Tensor, None]:
    """Runs BLOOM's attention over pages: its projections, ours between them."""
    del args, more
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    slopes = _slopes(self, alibi)
    scale = self.inv_norm_factor
    out = self.gulliver_pages.attend(
        self.layer_idx, query[0], key[0], value[0], scale, None, slopes
    )
    return self.dense(out.flatten(1)[None]) + residual, None


def _slopes(layer: Any, alibi: Tensor) -> Tensor:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    if not hasattr(layer, "gulliver_slopes"):
        ones = alibi.new_ones(1, 2)
        layer.gulliver_slopes = build_alibi_tensor(ones, layer.num_heads, alibi.dtype)[:, 0, 1]
    return layer.gulliver_slopes


OWN_FORWARD: dict[str, Callable[..., Any]] = {"BloomAttention": _bloom_attention}
"""Attention layers that do not know transformers' interface, and what they run instead."""
