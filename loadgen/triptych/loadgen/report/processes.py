"""Memory and CPU time of a server's processes during a run, and the load of other processes."""

import asyncio
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import PurePath
from time import perf_counter

import psutil

from triptych.loadgen.report.stats import Figures

RSS_EVERY_S = 0.5
PSS_EVERY_SAMPLES = 8
IDLE = "IDLE"

FindProcesses = Callable[[], list[psutil.Process]]


def tree_of(pid: int) -> FindProcesses:
    """The process and all its descendants, looked up at each call."""

    def find() -> list[psutil.Process]:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]

    return find


def named(part: str) -> FindProcesses:
    """All processes whose command line contains ``part``, but not this one or its parents."""
    own = {psutil.Process().pid, *(parent.pid for parent in psutil.Process().parents())}

    def find() -> list[psutil.Process]:
        return [
            process
            for process in psutil.process_iter()
            if process.pid not in own and part in _command(process)
        ]

    return find


@dataclass
class Usage:
    """Peaks and sums over a server's processes during one run."""

    peak_rss_bytes: int = 0
    """Sum of RSS: shared memory counts once per process."""

    peak_pss_bytes: int = 0
    """Sum of PSS: shared memory counts once. Sampled less often."""

    cpu_s: float = 0.0
    """CPU time of all processes, including those that ended during the run."""

    other_cores: float = 0.0
    """Cores used by processes that are neither server nor client."""

    kinds: dict[tuple[int, float], str] = field(default_factory=dict[tuple[int, float], str])
    """Kind of each process: class of a Ray actor, deployment of a Serve replica."""

    _first: dict[tuple[int, float], float] = field(default_factory=dict[tuple[int, float], float])
    _last: dict[tuple[int, float], float] = field(default_factory=dict[tuple[int, float], float])

    def figures(self) -> Figures:
        return {
            "peak_rss_bytes": self.peak_rss_bytes,
            "peak_pss_bytes": self.peak_pss_bytes,
            "server_cpu_s": self.cpu_s,
            "other_cores": self.other_cores,
        }

    def cpu_s_by_kind(self) -> dict[str, float]:
        """CPU time by kind of process, without kinds that used almost none."""
        spent = dict[str, float]()
        for key, last in self._last.items():
            kind = self.kinds[key]
            spent[kind] = spent.get(kind, 0.0) + last - self._first[key]
        return {kind: round(s, 2) for kind, s in sorted(spent.items()) if s >= 0.01}

    def saw(self, process: psutil.Process) -> bool:
        return (process.pid, process.create_time()) in self._last

    def look(self, find: FindProcesses, *, with_pss: bool) -> None:
        """Take one sample."""
        rss = pss = 0
        try:
            processes = find()
        except psutil.NoSuchProcess:
            processes = list[psutil.Process]()  # the server is gone; the run will say so
        for process in processes:
            try:
                key = (process.pid, process.create_time())
                if self.kinds.get(key, IDLE) == IDLE:  # a Ray worker that has no actor yet
                    self.kinds[key] = kind_of(_command(process) or process.name())
                self._last[key] = _cpu_seconds(process)
                rss += process.memory_info().rss
                pss += process.memory_full_info().pss if with_pss else 0
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            self._first.setdefault(key, self._last[key])
        self.peak_rss_bytes = max(self.peak_rss_bytes, rss)
        self.peak_pss_bytes = max(self.peak_pss_bytes, pss)
        self.cpu_s = sum(last - self._first[key] for key, last in self._last.items())


@asynccontextmanager
async def watch(find: FindProcesses) -> AsyncGenerator[Usage]:
    """Sample the processes while the block runs; complete at its end."""
    usage = Usage()
    client = psutil.Process()
    start, busy, own = perf_counter(), _machine_busy_s(), _cpu_seconds(client)
    usage.look(find, with_pss=True)
    task = asyncio.create_task(_keep_looking(usage, find))
    try:
        yield usage
    finally:
        task.cancel()
        usage.look(find, with_pss=False)
        ours = usage.cpu_s
        if not usage.saw(client):
            ours += _cpu_seconds(client) - own
        spent = _machine_busy_s() - busy - ours
        usage.other_cores = max(0.0, spent / (perf_counter() - start))


async def _keep_looking(usage: Usage, find: FindProcesses) -> None:
    count = 0
    while True:
        await asyncio.sleep(RSS_EVERY_S)
        count += 1
        usage.look(find, with_pss=count % PSS_EVERY_SAMPLES == 0)


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _machine_busy_s() -> float:
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)


def kind_of(command: str) -> str:
    """Kind of a process, from its title.

    >>> kind_of("ray::ServeReplica:triptych:Router.handle"), kind_of("ray::ProxyActor")
    ('Router', 'ProxyActor')
    >>> kind_of("/usr/bin/python -m something")
    'python'
    """
    actor = re.match(r"ray::(?:ServeReplica:[^:]+:)?(\w+)", command)
    return actor[1] if actor else PurePath(command.split(" ")[0]).name


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""
