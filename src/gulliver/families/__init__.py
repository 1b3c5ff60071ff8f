"""What is particular to a model family, said once: a record in a file of its own.

    from gulliver.families import family_of
    family_of(model).sequences.modes

Read `_record.py` (what a record says), `_lookup.py` (which record a model has), `llama.py` for one
of them, and `hugging_face.py` for what is done without one. `_loss.py` finds out which loss a model
computes itself. To add a family, add a file: `docs/families.md`.

What it does not know: how anything is cut or run. Tensor, pipeline and sequence parallelism ask
here; nothing here asks them.
"""

from gulliver.families._lookup import (
    UNKNOWN,
    all_families,
    family_of,
    is_hugging_face,
    register,
    type_of,
)
from gulliver.families._loss import (
    OwnLoss,
    asks_routers,
    has_known_forward,
    hugging_face_of,
    own_loss,
    router_loss,
)
from gulliver.families._record import (
    AUTO,
    SHARED_BY_SEQUENCE,
    SHARED_BY_TENSOR,
    Blocks,
    Experts,
    Family,
    Sequences,
    Tensors,
)
from gulliver.families.hugging_face import HUGGING_FACE

__all__ = [
    "AUTO",
    "HUGGING_FACE",
    "SHARED_BY_SEQUENCE",
    "SHARED_BY_TENSOR",
    "UNKNOWN",
    "Blocks",
    "Experts",
    "Family",
    "OwnLoss",
    "Sequences",
    "Tensors",
    "all_families",
    "asks_routers",
    "family_of",
    "has_known_forward",
    "hugging_face_of",
    "is_hugging_face",
    "own_loss",
    "register",
    "router_loss",
    "type_of",
]
