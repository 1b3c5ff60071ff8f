"""Builds and removes the namespaces, links and their shaping.

One namespace holds a bridge for each node and, with several nodes, one between them; it has no
route out. Each rank has a namespace with one end of a virtual cable, ``eth0``; the other end hangs
on its node's bridge. Both ends of a cable are shaped by ``tbf``, so that each direction has the
whole rate. The kernel may lack ``netem``: latency between nodes comes from a small relay program.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import shutil
import subprocess
import time
from pathlib import Path

RELAY_SOURCE = Path(__file__).parent / "relay.c"
PREFIX = "gvl"
ORDERS = ("node", "round-robin")
_CLONE_NEWNET = 0x40000000
_BURST = 70000
"""Bytes: the kernel's largest packet passes whole. Cutting it takes the cores of the ranks."""
_numbers = itertools.count()


class NetlabError(RuntimeError):
    """A network that cannot be built here; says what is missing."""


class Net:
    """A shaped network with a namespace for every rank."""

    def __init__(
        self,
        ranks: int,
        rate: str | None = None,
        nodes: int | None = None,
        uplink: str | None = None,
        delay_us: int = 0,
        order: str = "node",
    ) -> None:
        check_tools()
        if nodes and ranks % nodes:
            raise NetlabError(f"{ranks} ranks do not divide over {nodes} nodes")
        if order not in ORDERS:
            raise NetlabError(f"unknown order {order!r}: choose {' or '.join(ORDERS)}")
        for given in filter(None, (rate, uplink)):
            bits_per_second(given)
        self.ranks, self.rate, self.nodes = ranks, rate, nodes or 1
        self.uplink, self.delay_us, self.order = uplink, delay_us, order
        self._prefix = f"{PREFIX}{os.getpid()}_{next(_numbers)}"
        self._core = f"{self._prefix}_core"
        self.namespaces = [f"{self._prefix}_r{r}" for r in range(ranks)]
        self.addresses = [f"10.77.{r // 200}.{r % 200 + 1}" for r in range(ranks)]
        self._relay: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Net:
        remove_left_behind()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def node_of(self, rank: int) -> int:
        return rank % self.nodes if self.order == "round-robin" else rank * self.nodes // self.ranks

    def close(self) -> None:
        """Removes everything."""
        if self._relay is not None:
            self._relay.kill()
            self._relay.wait()
            self._relay = None
        for name in (*self.namespaces, self._core):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def _build(self) -> None:
        for name in (self._core, *self.namespaces):
            _run("ip", "netns", "add", name)
        several = self.nodes > 1
        lines = ["link set lo up"]
        for node in range(self.nodes):
            lines += [f"link add br{node} type bridge", f"link set br{node} up"]
        if several:
            lines += ["link add core type bridge", "link set core up"]
            if not self.delay_us:
                for node in range(self.nodes):
                    lines += [f"link add up{node} type veth peer name dn{node}"]
        for rank, name in enumerate(self.namespaces):
            lines += [
                f"link add p{rank} type veth peer name eth0 netns {name}",
                f"link set p{rank} master br{self.node_of(rank)} up",
            ]
        _batch(self._core, lines)
        for rank, name in enumerate(self.namespaces):
            self._join(rank, name)
        if several:
            self._connect_nodes()

    def _join(self, rank: int, name: str) -> None:
        # Fixed addresses and permanent neighbours: the kernel's table of neighbours is shared.
        others = [peer for peer in range(self.ranks) if peer != rank]
        lines = [
            "link set lo up",
            f"link set eth0 address {_mac(rank)}",
            f"addr add {self.addresses[rank]}/16 dev eth0",
            "link set eth0 up",
            *(
                f"neigh replace {self.addresses[p]} lladdr {_mac(p)} dev eth0 nud permanent"
                for p in others
            ),
        ]
        _batch(name, lines)
        sysctl = "net.ipv4.tcp_congestion_control=cubic"
        subprocess.run(["ip", "netns", "exec", name, "sysctl", "-qw", sysctl], capture_output=True)
        _shape(name, "eth0", self.rate)
        _shape(self._core, f"p{rank}", self.rate)

    def _connect_nodes(self) -> None:
        if self.delay_us:
            pairs = [end for node in range(self.nodes) for end in (f"up{node}", f"dn{node}")]
            command = ["ip", "netns", "exec", self._core, str(_relay_program())]
            self._relay = subprocess.Popen(
                [*command, str(self.delay_us), *pairs], stdout=subprocess.PIPE
            )
            assert self._relay.stdout is not None
            self._relay.stdout.readline()
        lines = []
        for node in range(self.nodes):
            lines += [f"link set up{node} master br{node} up", f"link set dn{node} master core up"]
        _batch(self._core, lines)
        for node in range(self.nodes):
            _shape(self._core, f"up{node}", self.uplink)
            _shape(self._core, f"dn{node}", self.uplink)


def enter(namespace: str) -> None:
    """Moves this process into a namespace."""
    libc = ctypes.CDLL("libc.so.6", use_errno=True)
    handle = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(handle, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    finally:
        os.close(handle)


def remove_left_behind() -> None:
    """Removes networks of processes that were killed."""
    found = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for line in found.splitlines():
        name = line.split()[0]
        owner = name.removeprefix(PREFIX).split("_")[0]
        if name.startswith(PREFIX) and owner.isdigit() and not Path(f"/proc/{owner}").exists():
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def bits_per_second(rate: str) -> float:
    """A rate as ``tc`` writes it."""
    for suffix, factor in (("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3)):
        number = rate.removesuffix(suffix)
        if number != rate and number.replace(".", "", 1).isdigit():
            return float(number) * factor
    raise NetlabError(f"unknown rate {rate!r}: write it like 100mbit or 1gbit")


class LoadMeter:
    """Tells how busy other processes keep the machine, from here on.

    Children of this process count as its own from when they have ended. Interrupts are counted for
    nobody: most of them are the network's.
    """

    def __init__(self) -> None:
        self._started, self._before = time.monotonic(), self._foreign()

    def cores(self) -> float:
        """Cores that others have used on average since the beginning."""
        return max(0.0, (self._foreign() - self._before) / (time.monotonic() - self._started))

    @staticmethod
    def _foreign() -> float:
        fields = Path("/proc/stat").read_text().split("\n")[0].split()[1:4]
        return sum(map(int, fields)) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


def foreign_load(seconds: float = 0.5) -> float:
    """Cores that processes other than this one and its children are using."""
    meter = LoadMeter()
    time.sleep(seconds)
    return meter.cores()


def check_tools() -> None:
    """Refuses to begin what would fail at the first shaped link."""
    if os.geteuid():
        raise NetlabError("shaped networks need root: run as root, or measure on loopback")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise NetlabError(f"shaped networks need {tool!r}: install iproute2")


def _relay_program() -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise NetlabError("latency between nodes needs a C compiler, and there is none")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    version = hashlib.sha256(RELAY_SOURCE.read_bytes()).hexdigest()[:12]
    program = cache / "gulliver" / f"relay-{version}"
    if not program.exists():
        program.parent.mkdir(parents=True, exist_ok=True)
        fresh = program.with_name(f"{program.name}.{os.getpid()}")
        _run(compiler, "-O2", "-o", str(fresh), str(RELAY_SOURCE))
        fresh.rename(program)
    return program


def _shape(namespace: str, device: str, rate: str | None) -> None:
    if rate is None:
        return
    burst = max(_BURST, int(bits_per_second(rate) / 8 * 0.002))
    shaping = f"tbf rate {rate} burst {burst} latency 50ms".split()
    _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *shaping)


def _mac(rank: int) -> str:
    return f"02:00:00:00:{rank >> 8:02x}:{rank & 255:02x}"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NetlabError(f"{' '.join(command[:4])} failed: {done.stderr.strip()}")


def _batch(namespace: str, lines: list[str]) -> None:
    done = subprocess.run(
        ["ip", "-n", namespace, "-batch", "-"],
        input="\n".join(lines) + "\n",
        text=True,
        capture_output=True,
    )
    if done.returncode:
        raise NetlabError(f"ip in {namespace} failed: {done.stderr.strip()}")
