"""What public weights depend on though nobody would build it so: each by name, with its reason.

Every model has those of its release switched on, so that public weights compute what they were
trained with; ``compat=()`` switches them off for a model that is trained from scratch.
"""

from __future__ import annotations

from collections.abc import Collection

from gulliver.errors import GulliverError, nearest

QUIRKS = {
    "final_norm_twice": (
        "the final layer norms given frames after their first modulation, not as they came: the "
        "public code overwrote its input, and trained with it"
    ),
    "first_clip_scale": (
        "height and width of the first clip decide the scale of positions for the whole batch; "
        "the batches of the public training have one size each"
    ),
    "final_size_of_given": (
        "the final layer adds size and aspect ratio to the noise level of given frames, and not to "
        "that of the others: the public code handed it two different embeddings"
    ),
    "rotate_before_norm": (
        "queries and keys are rotated before their norm, so its learnt scale applies to turned "
        "channels; later releases norm first"
    ),
    "null_text_cut": (
        "the null text that given frames read is cut to the length of the clip's own caption, "
        "because the public code has one list of lengths"
    ),
    "micro_frames": (
        "a clip is encoded and decoded in pieces of 17 frames, each by itself: public models were "
        "trained on such latents, seams and all; in 1.3 neighbours share a frame, decoded to the "
        "mean"
    ),
    "raster_causal_attention": (
        "a token of the middle block sees those before it in raster order, not all of its frame: "
        "the public code asked for plain causal attention over the flattened clip"
    ),
}
"""Names of quirks, and why weights need them."""

QUIRKS_OF = {
    "STDiT": (),
    "STDiT2": (
        "final_norm_twice",
        "first_clip_scale",
        "final_size_of_given",
        "rotate_before_norm",
    ),
    "STDiT3": ("final_norm_twice", "first_clip_scale", "null_text_cut"),
    "MMDiT": (),
    "PipelineAutoencoder": ("micro_frames",),
    "CausalAutoencoder": ("micro_frames", "raster_causal_attention"),
}
"""Quirks that each model can have, all of which its public weights need."""


def checked_quirks(model: str, compat: Collection[str] | None) -> frozenset[str]:
    """Returns the quirks that a model shall have."""
    having = QUIRKS_OF[model]
    if isinstance(compat, str):
        compat = (compat,)
    for name in compat or ():
        if name not in having:
            known = nearest(name, having) if having else "it has none"
            raise GulliverError(f"{model} has no quirk {name!r}: {known}")
    return frozenset(having if compat is None else compat)
