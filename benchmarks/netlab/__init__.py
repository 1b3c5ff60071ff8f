"""Networks with the bandwidth and latency that one asks for, on this machine, with a rank in each.

Every rank lives in a network namespace of its own and reaches the others through links that are
shaped in bandwidth, and with two levels (ranks in nodes) also in latency. So claims about
communication are measured here, and not simulated. It needs root, ``ip`` and ``tc``.

    with Net(4, rate="1gbit") as net:
        results = run(function, net, arguments)
"""

from benchmarks.netlab._net import LoadMeter, Net, NetlabError, check_tools, foreign_load
from benchmarks.netlab._ranks import run, wire_bytes

__all__ = ["LoadMeter", "Net", "NetlabError", "check_tools", "foreign_load", "run", "wire_bytes"]
