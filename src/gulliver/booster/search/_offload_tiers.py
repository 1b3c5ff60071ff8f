"""Memory tiers that state is offloaded to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from gulliver.booster._tiers import split_disk
from gulliver.errors import GulliverError
from gulliver.hardware import Cluster, host_rates
from gulliver.options import byte_size, size_text


@dataclass(frozen=True)
class OffloadTiers:
    """Host memory and disk of a rank, for what does not fit its device."""

    # Bytes of page-locked host memory of a rank; 0 for none.
    host: int = 0
    # Folder on the disk of a rank; None for none.
    disk: str | None = None
    # Bytes of a rank that may lie there.
    disk_bytes: int = 0

    def __bool__(self) -> bool:
        return self.host > 0 or self.disk is not None

    def __str__(self) -> str:
        names = ["host"] * (self.host > 0) + ["disk"] * (self.disk is not None)
        return " and ".join(names)

    @classmethod
    def of(cls, host: int | str | None, disk: str | None) -> Self:
        """Parses a user's options."""
        folder, size = (None, "0") if disk is None else split_disk(disk)
        return cls(
            0 if host is None else byte_size("host", host),
            folder,
            0 if folder is None else byte_size("disk", size),
        )

    @property
    def bytes(self) -> int:
        """Bytes of host memory and disk together."""
        return self.host + self.disk_bytes

    def check(self, cluster: Cluster) -> None:
        """Refuses tiers that the machines do not have, or whose speed is not known."""
        if self.host and host_rates(cluster.device) is None:
            raise GulliverError(
                f"host={size_text(self.host)}: ranks of {cluster.name} compute in the host's "
                "memory, which the limit is of; name a disk"
            )
        if self.disk is not None and cluster.disk is None:
            raise GulliverError(
                f"disk={self.disk!r}: {cluster.name} tells no rates of a disk; gulliver probe "
                f"--folder {self.disk} measures them, or write them into the cluster's file"
            )


NOTHING = OffloadTiers()
"""No memory behind the ranks'."""
