"""State of a sharded optimizer, found under the model's parameters as well as under pieces.

Between steps ``optimizer.param_groups`` shows the model's parameters, so ``optimizer.state[p]`` has
to find what belongs to them: the state of this rank's piece, and what users keep there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import nn


class StateByParameter(defaultdict[Any, Any]):
    """An optimizer's state by parameter; a piece has the entry of the parameter it is of."""

    def __init__(self, parameter_of: Mapping[Any, nn.Parameter]) -> None:
        super().__init__(dict)
        self.parameter_of = parameter_of

    def __reduce__(self) -> Any:
        """Copies and pickles are plain: their pieces are other tensors."""
        return defaultdict, (dict,), None, None, iter(self.items())

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(self.parameter_of.get(key, key))

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(self.parameter_of.get(key, key), value)

    def __contains__(self, key: Any) -> bool:
        return super().__contains__(self.parameter_of.get(key, key))

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(self.parameter_of.get(key, key), default)
