"""Where bytes live: tensors that are used together lie in one contiguous chunk.

Read `chunk.py` first: the buffers of a chunk. `prefetch.py` brings chunks ahead of use,
`_record.py` notes what a step uses when, `_bytes.py` counts. `manager.py` keeps objects within a
limit of memory: `traffic.py` moves them to and from what `stores.py` and `host.py` hold;
`host.py` is host memory that has a disk behind it. `activations.py` keeps what a
forward saved in host memory until its backward.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.memory.activations import offload_activations
    from gulliver.memory.budget import BudgetController, Footprint
    from gulliver.memory.parts import region_of
    from gulliver.memory.pending import before_write
    from gulliver.memory.symbolic import activation_peak, block_activations

__all__ = [
    "BudgetController",
    "Footprint",
    "activation_peak",
    "before_write",
    "block_activations",
    "offload_activations",
    "region_of",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "gulliver.memory.activations": ["offload_activations"],
        "gulliver.memory.budget": ["BudgetController", "Footprint"],
        "gulliver.memory.parts": ["region_of"],
        "gulliver.memory.pending": ["before_write"],
        "gulliver.memory.symbolic": ["activation_peak", "block_activations"],
    },
)
