"""Memory tiers (device, host, disk), and chunks of tensors that move between them together.

Start with `chunk.py`. `prefetch.py` loads chunks ahead of use; `manager.py` keeps tensors within a
memory limit; `traffic.py` moves them to and from the stores of `stores.py` and `host.py`.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.memory.activations import offload_activations as offload_activations
    from gulliver.memory.budget import BudgetController as BudgetController
    from gulliver.memory.budget import Footprint as Footprint
    from gulliver.memory.parts import region_of as region_of
    from gulliver.memory.symbolic import activation_peak as activation_peak

__getattr__, __dir__ = lazy_exports(__name__)
