"""What machines cost in the test cloud: list prices of AWS on one day in one region."""

from __future__ import annotations

__all__ = ["TABLE"]

# 2026-09-24, us-east-1.
# On-demand, Linux, shared tenancy, dollars an hour: the price of the smallest size listed, then the sizes and how
# many times that price each is. Only families in which that holds exactly are written so.
_DOUBLING = """
t3 0.0052 nano:1 micro:2 small:4 medium:8 large:16 xlarge:32 2xlarge:64
t3a 0.0047 nano:1 micro:2 small:4 medium:8 large:16 xlarge:32 2xlarge:64
t4g 0.0042 nano:1 micro:2 small:4 medium:8 large:16 xlarge:32 2xlarge:64
m5 0.096 large:1 xlarge:2 2xlarge:4 4xlarge:8 8xlarge:16 12xlarge:24 16xlarge:32 24xlarge:48
m5a 0.086 large:1 xlarge:2 2xlarge:4 4xlarge:8
m6i 0.096 large:1 xlarge:2 2xlarge:4 4xlarge:8 8xlarge:16 12xlarge:24
m6a 0.0864 large:1 xlarge:2 2xlarge:4 4xlarge:8
m6g 0.077 large:1 xlarge:2 2xlarge:4 4xlarge:8 8xlarge:16 12xlarge:24
m7i 0.1008 large:1 xlarge:2 2xlarge:4 4xlarge:8
m7g 0.0816 large:1 xlarge:2 2xlarge:4 4xlarge:8 8xlarge:16 12xlarge:24 16xlarge:32
c5 0.085 large:1 xlarge:2 2xlarge:4 4xlarge:8 9xlarge:18 18xlarge:36
c6i 0.085 large:1 xlarge:2 2xlarge:4 4xlarge:8 8xlarge:16
c6a 0.0765 large:1 xlarge:2 2xlarge:4 4xlarge:8
c6g 0.068 large:1 xlarge:2 2xlarge:4
c7g 0.0725 large:1 xlarge:2 2xlarge:4 4xlarge:8 8xlarge:16 12xlarge:24 16xlarge:32
c7i 0.08925 large:1 xlarge:2 2xlarge:4
r5 0.126 large:1 xlarge:2 2xlarge:4 4xlarge:8 8xlarge:16 12xlarge:24 16xlarge:32
r6i 0.126 large:1 xlarge:2 2xlarge:4 4xlarge:8 8xlarge:16
r6g 0.1008 large:1 xlarge:2 2xlarge:4
r7g 0.1071 large:1 xlarge:2 2xlarge:4 4xlarge:8 8xlarge:16 12xlarge:24 16xlarge:32
"""
_SINGLE = """
g4dn xlarge:0.526 2xlarge:0.752 4xlarge:1.204 8xlarge:2.176 12xlarge:3.912 16xlarge:4.352 metal:7.824
g5 xlarge:1.006 2xlarge:1.212 4xlarge:1.624 8xlarge:2.448 12xlarge:5.672 16xlarge:4.096 24xlarge:8.144 48xlarge:16.288
g6 xlarge:0.8048 2xlarge:0.9776 4xlarge:1.3232 8xlarge:2.0144 12xlarge:4.6016 16xlarge:3.3968 24xlarge:6.6752
g6 48xlarge:13.3504
g6e xlarge:1.861 2xlarge:2.24208 4xlarge:3.00424 8xlarge:4.52856 12xlarge:10.49264 16xlarge:7.57719
g6e 24xlarge:15.06559 48xlarge:30.13118
p4d 24xlarge:21.957642
p4de 24xlarge:27.44705
p5 48xlarge:55.04
p5en 48xlarge:63.296
trn1 2xlarge:1.34375 32xlarge:21.5
trn1n 32xlarge:24.78
inf1 xlarge:0.228 2xlarge:0.362 6xlarge:1.18 24xlarge:4.721
inf2 xlarge:0.7582 8xlarge:1.96786 24xlarge:6.49063 48xlarge:12.98127
"""


def _read() -> dict[str, float]:
    table: dict[str, float] = {}
    for line in _DOUBLING.strip().splitlines():
        family, price, *sizes = line.split()
        for size in sizes:
            name, times = size.split(":")
            table[f"{family}.{name}"] = round(float(price) * int(times), 6)
    for line in _SINGLE.strip().splitlines():
        family, *sizes = line.split()
        for size in sizes:
            name, price = size.split(":")
            table[f"{family}.{name}"] = float(price)
    return table


TABLE: dict[str, float] = _read()
"""Instance type -> dollars an hour in REGION on DATE."""
