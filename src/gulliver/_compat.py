"""What differs between supported torch versions, and every private torch symbol, in one place.

Each name here has a test in `tests/test_compat.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

# torch 2.13 renamed the flat collectives and warns of the old names; 2.11 knows only those.
_renamed = hasattr(dist, "all_gather_single")
all_gather_flat: Callable[..., Any] = getattr(
    dist, "all_gather_single" if _renamed else "all_gather_into_tensor"
)
reduce_scatter_flat: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single" if _renamed else "reduce_scatter_tensor"
)
