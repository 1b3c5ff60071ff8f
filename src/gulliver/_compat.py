"""What differs between supported torch versions, and every private torch symbol, in one place.

Each name here has a test, in `tests/test_compat.py` or `tests/test_worlds.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed the flat collectives and warns of the old names; 2.11 knows only those.
_renamed = hasattr(dist, "all_gather_single")
all_gather_flat: Callable[..., Any] = getattr(
    dist, "all_gather_single" if _renamed else "all_gather_into_tensor"
)
reduce_scatter_flat: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single" if _renamed else "reduce_scatter_tensor"
)


def fake_store() -> dist.Store:
    """A store that the process group "fake" accepts; importing it registers that group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def local_tensor_mode(size: int) -> AbstractContextManager[Any]:
    """A mode in which one program computes the values of `size` ranks."""
    from torch.distributed._local_tensor import LocalTensorMode

    return LocalTensorMode(size)


def map_ranks(make: Callable[[int], Tensor]) -> Tensor:
    """Inside `local_tensor_mode`, the tensor whose value on each rank is ``make(rank)``."""
    from torch.distributed._local_tensor import rank_map

    return rank_map(make)


@contextmanager
def threaded_groups() -> Iterator[Callable[[BaseException], None]]:
    """Lets ranks be threads of this process, with the process group "threaded".

    Yields:
        What a rank that failed calls with its error, so that the others stop waiting for it.
    """
    from torch._C._distributed_c10d import (
        _set_thread_isolation_mode,  # pyright: ignore[reportAttributeAccessIssue]
    )
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    _set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    try:
        yield threaded.ProcessLocalGroup.exception_handle
    finally:
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        _set_thread_isolation_mode(False)
