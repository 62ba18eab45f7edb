"""The root disk of a machine: how large and fast it is, and what it costs an hour."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LIST_PRICES", "ROOM_GB", "Disk", "DiskPrices", "root_disk"]

_HOURS = 730  # of a month, as AWS's own calculator has it
_FREE_IOPS, _FREE_THROUGHPUT = 3000, 125  # are in the price of the size
_IOPS_A_MIB = 4  # a volume has to have so many for each MiB/s
# Images of this size have drivers and libraries in them that are read at boot and by the first import.
_LARGE_IMAGE = 30
_LARGE_THROUGHPUT = 300
ROOM_GB = 30
"""What a disk has on top of its image, unless the user says how large it is."""


@dataclass(frozen=True)
class Disk:
    """A gp3 volume."""

    gb: int
    throughput: int = _FREE_THROUGHPUT
    """MiB/s."""
    iops: int = _FREE_IOPS

    def __str__(self) -> str:
        fast = f", {self.throughput} MiB/s" if self.throughput > _FREE_THROUGHPUT else ""
        return f"{self.gb} GB gp3{fast}"


@dataclass(frozen=True)
class DiskPrices:
    """Dollars a month: for a GB, for one more IOPS, and for one more MiB/s than a volume has anyway."""

    gb: float
    iops: float
    throughput: float

    def hourly(self, disk: Disk) -> float:
        """What a disk costs an hour."""
        iops, throughput = max(0, disk.iops - _FREE_IOPS), max(0, disk.throughput - _FREE_THROUGHPUT)
        return (disk.gb * self.gb + iops * self.iops + throughput * self.throughput) / _HOURS


LIST_PRICES = DiskPrices(0.08, 0.005, 0.04)
"""Those of us-east-1, https://aws.amazon.com/ebs/pricing; counted with where AWS does not say others."""


def root_disk(image_gb: int, size: int | None = None, throughput: int | None = None, most: float = 0.0) -> Disk:
    """The disk of a machine that starts from an image of `image_gb`, with what the user asked for, if anything.

    `most` is what a machine can read in MB/s (0: not known); nothing faster is paid for unless it was asked for.
    """
    gb = max(size, image_gb) if size else max(50, image_gb + ROOM_GB)
    if throughput is None:
        raised = _LARGE_THROUGHPUT if image_gb >= _LARGE_IMAGE else _FREE_THROUGHPUT
        throughput = max(_FREE_THROUGHPUT, min(raised, int(most)) if most else raised)
    return Disk(gb, throughput, max(_FREE_IOPS, throughput * _IOPS_A_MIB))
