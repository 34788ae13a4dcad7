"""Checks of ``triptych doctor``: what prevents a machine from serving a configuration.

The checks are pure functions of ``Facts``, which ``doctor.py`` collects.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from packaging.requirements import Requirement
from packaging.version import Version

from triptych.core.config import GIB, MIB, AppConfig
from triptych.kvpool import bracketed

Status = Literal["ok", "warning", "fault"]

LEAST_OPEN_FILES = 4096
"""Workers, connections and Ray's logs need open files."""
WORKER_NICENESS = "RAY_worker_niceness"
"""Ray adds this to the niceness of workers; 15 unless it is set. ``triptych serve`` sets 0."""
RAY_BYTES = 3 * GIB // 2
"""Memory of Ray's own processes."""
STAGE_BYTES = GIB
"""Memory of an actor with torch and a small model."""
LEAST_DISK_BYTES = 2 * GIB
RAY_DISK_SHARE = 0.05
"""Ray stops if less than this share of a disk is free."""
LONGEST_SOCKET_PATH = 107
LONGEST_SOCKET_NAME = len("/app-00000000/prefill-compress-decode-00000000.sock")


@dataclass(frozen=True, slots=True)
class Disk:
    """The disk of a folder."""

    path: str
    free_bytes: int
    total_bytes: int
    writable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A machine, as one process sees it."""

    python: str
    packages: Mapping[str, str]
    """Installed versions, by name."""
    needed: Sequence[str]
    """Requirements of Triptych, such as ``ray[serve]>=2.60``."""
    host: str
    port: int
    port_holder: str
    """Process that listens there already; empty: none."""
    grpc_port_fault: str
    """Why ``ingress.grpc_port`` cannot be used; empty: it can, or it is off."""
    shared_memory: Disk
    cache: Disk
    temporary: Disk
    base_dir: str
    """Directory of the applications' sockets."""
    base_dir_fault: str
    """Why that directory cannot be used; empty: it can."""
    memory_bytes: int
    """Available to this process, in its container."""
    cores: int
    """Usable by this process."""
    machine_cores: int
    load: float
    """Load average of one minute."""
    niceness: int
    """Of this process, and so of what it starts: 0 is normal, 19 yields to all others."""
    open_files: int
    gpus: Sequence[str]
    """Names of the GPUs that the driver shows."""
    torch_sees_gpus: int
    environment: Mapping[str, str]
    ray_processes: Sequence[str]
    """Command lines of Ray's own processes of this user."""
    ray_address_file: str
    """File with the address of the cluster that Ray would join; empty: there is none."""
    orphans: Sequence[str]
    """Files of applications that died."""
    orphan_bytes: int
    model_path: str
    """Directory of the configured model; empty: not on this machine."""
    model_fault: str = ""
    """Why the model cannot be loaded; empty: it can, or it is to be downloaded."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    check: str
    status: Status
    what: str
    remedy: str = ""


def diagnose(facts: Facts, config: AppConfig) -> list[Finding]:
    """Run all checks, in the order in which faults should be fixed."""
    return [finding for check in CHECKS for finding in check(facts, config)]


def _versions(facts: Facts, config: AppConfig) -> Iterator[Finding]:
    wrong = list[str]()
    for text in facts.needed:
        need = Requirement(text)
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        here = facts.packages.get(need.name)
        if here is None:
            wrong.append(f"{need.name} is missing, {need.specifier} is needed")
        elif not need.specifier.contains(Version(here).public, prereleases=True):
            wrong.append(f"{need.name} is {here}, {need.specifier} is needed")
    remedy = "run 'make setup', or 'pip install --upgrade triptych'"
    if wrong:
        yield Finding("versions", "fault", "; ".join(wrong), remedy)
    elif Version(facts.python) < Version("3.11"):
        yield Finding("versions", "fault", f"Python is {facts.python}", "use Python 3.11 or newer")
    else:
        yield Finding("versions", "ok", f"Python {facts.python}, {len(facts.needed)} packages")


def _port(facts: Facts, config: AppConfig) -> Iterator[Finding]:
    at = f"{bracketed(facts.host)}:{facts.port}"
    if not facts.port_holder:
        yield Finding("port", "ok", f"{at} is free")
    elif "triptych" in facts.port_holder:
        yield Finding("port", "ok", f"{facts.port_holder} answers at {at}")
    else:
        yield Finding(
            "port",
            "fault",
            f"{facts.port_holder} listens at {at}",
            "stop it, or set http_options.port to another one",
        )


def _grpc_port(facts: Facts, config: AppConfig) -> Iterator[Finding]:
    at = f"{bracketed(config.ingress.grpc_host)}:{config.ingress.grpc_port}"
    if facts.grpc_port_fault and "triptych" not in facts.port_holder:
        yield Finding(
            "gRPC port",
            "fault",
            f"nobody can listen at {at}: {facts.grpc_port_fault}",
            "stop who does, or set ingress.grpc_port or ingress.grpc_host to another one",
        )


def _shared_memory(facts: Facts, config: AppConfig) -> Iterator[Finding]:
    disk, wanted = facts.shared_memory, config.pool.shared_bytes
    if not disk.writable:
        yield Finding(
            "shared memory",
            "fault",
            "/dev/shm cannot be written",
            "mount a tmpfs there; in a container, run it with --shm-size or an emptyDir of medium "
            "Memory",
        )
    elif disk.free_bytes < wanted:
        yield Finding(
            "shared memory",
            "fault",
            f"{disk.path} has {_size(disk.free_bytes)} free of {_size(disk.total_bytes)}, and "
            f"pool.kv_cache_memory_bytes is {_size(wanted)}",
            "lower pool.kv_cache_memory_bytes, or give it more: docker run --shm-size, sizeLimit "
            "in "
            "Kubernetes, mount -o remount,size=",
        )
    else:
        yield Finding("shared memory", "ok", f"{_size(disk.free_bytes)} free")


def _memory(facts: Facts, config: AppConfig) -> Iterator[Finding]:
    wanted = config.pool.shared_bytes + processes_bytes(config)
    if facts.memory_bytes < wanted:
        yield Finding(
            "memory",
            "fault" if facts.memory_bytes < config.pool.shared_bytes + RAY_BYTES else "warning",
            f"{_size(facts.memory_bytes)} are available; pages, Ray and {workers_at_most(config)} "
            f"take {_size(wanted)} and more",
            "lower pool.kv_cache_memory_bytes or the copies, set topology: colocated, or stop "
            "something "
            "else",
        )
    else:
        yield Finding("memory", "ok", f"{_size(facts.memory_bytes)} available")


def _disks(facts: Facts, config: AppConfig) -> Iterator[Finding]:
    cache, scratch = facts.cache, facts.temporary
    if not cache.writable and not facts.model_path:
        yield Finding(
            "disk",
            "fault",
            f"{cache.path} cannot be written, and the model is not there",
            "set TRIPTYCH_CACHE_DIR to a folder of yours",
        )
    elif cache.free_bytes < LEAST_DISK_BYTES and not facts.model_path:
        yield Finding(
            "disk",
            "fault",
            f"{cache.path} has {_size(cache.free_bytes)} free, too little for a model",
            "make room, or set TRIPTYCH_CACHE_DIR to a folder on another disk",
        )
    if scratch.free_bytes < RAY_DISK_SHARE * scratch.total_bytes:
        yield Finding(
            "disk",
            "fault",
            f"{scratch.path} has {_size(scratch.free_bytes)} free, less than 5 %, and Ray refuses "
            "to work so",
            "make room, or set TMPDIR to a folder on another disk",
        )
    else:
        yield Finding("disk", "ok", f"{_size(cache.free_bytes)} free at {cache.path}")


def _sockets(facts: Facts, config: AppConfig) -> Iterator[Finding]:
    length = len(facts.base_dir) + LONGEST_SOCKET_NAME
    if facts.base_dir_fault:
        yield Finding("sockets", "fault", facts.base_dir_fault, "then start again")
    elif length > LONGEST_SOCKET_PATH:
        yield Finding(
            "sockets",
            "fault",
            f"paths of sockets below {facts.base_dir} have {length} bytes, and the kernel takes "
            f"{LONGEST_SOCKET_PATH}",
            "set TMPDIR to a shorter path, such as /tmp",
        )
    else:
        yield Finding("sockets", "ok", facts.base_dir)


def _limits(facts: Facts, config: AppConfig) -> Iterator[Finding]:
    if facts.open_files < LEAST_OPEN_FILES:
        yield Finding(
            "limits",
            "fault",
            f"{facts.open_files} open files are allowed",
            f"run 'ulimit -n 65536' before, or raise nofile; {LEAST_OPEN_FILES} is the least",
        )
    else:
        yield Finding("limits", "ok", f"{facts.open_files} open files")


def _threads(facts: Facts, config: AppConfig) -> Iterator[Finding]:
    threads = {
        name: group.actor.threads * group.most
        for name, group in config.worker_groups().items()
        if group.actor.threads != "auto"
    }
    if sum(threads.values()) > facts.cores:
        by_stage = ", ".join(f"{name} {count}" for name, count in threads.items())
        yield Finding(
            "threads",
            "warning",
            f"the stages have {sum(threads.values())} threads ({by_stage}) for {facts.cores} cores",
            "lower actor.threads, or set it to auto: then stages take turns",
        )
    elif facts.load > 2 * facts.machine_cores:
        yield Finding(
            "threads",
            "warning",
            f"{facts.load:.0f} processes want to run on {facts.machine_cores} cores",
            "stop what else computes here; figures measured now say little",
        )
    else:
        yield Finding("threads", "ok", f"{facts.cores} cores")


def _niceness(facts: Facts, config: AppConfig) -> Iterator[Finding]:
    """A worker of Ray has the niceness of its starter, and ``RAY_worker_niceness`` more."""
    more = facts.environment.get(WORKER_NICENESS, "0")
    niceness = facts.niceness + (int(more) if more.isdecimal() else 0)
    if niceness > 0:
        yield Finding(
            "niceness",
            "warning",
            f"workers would run at niceness {niceness}: other processes on these cores go "
            "first, and tokens are late",
            f"unset {WORKER_NICENESS} or set it to 0, and start the server without nice",
        )


def _cpus(facts: Facts, config: AppConfig) -> Iterator[Finding]:
    """CPUs that Ray reserves for the stages; 0 by default."""
    groups = config.worker_groups().values()
    first = sum(group.actor.num_cpus * group.actor.num_replicas for group in groups)
    most = sum(group.most_cpus for group in groups)
    if most > facts.cores:
        yield Finding(
            "CPUs",
            "fault" if first > facts.cores else "warning",
            f"the stages ask for {first:g} CPUs, {most:g} with all copies that they may have, and "
            f"this machine has {facts.cores}: copies for which none is left are never started",
            "lower num_cpus (0 shares the cores), num_replicas or autoscaling.max_replicas",
        )


def _gpus(facts: Facts, config: AppConfig) -> Iterator[Finding]:
    groups = config.worker_groups().values()
    wanted = sum(group.actor.num_gpus * group.actor.num_replicas for group in groups)
    most = sum(group.most_gpus for group in groups)
    if wanted > len(facts.gpus):
        yield Finding(
            "GPU",
            "fault",
            f"the stages ask for {wanted:g} GPUs and this machine shows {len(facts.gpus)}",
            "set num_gpus to 0 (the stages compute on the CPU), or run where GPUs are; in a "
            "container pass --gpus all",
        )
    elif most > len(facts.gpus):
        yield Finding(
            "GPU",
            "warning",
            f"the stages may grow to {most:g} GPUs and this machine shows {len(facts.gpus)}: "
            "copies for which none is left are never started",
            "lower autoscaling.max_replicas or num_gpus",
        )
    elif wanted and not facts.torch_sees_gpus:
        yield Finding(
            "GPU",
            "fault",
            f"torch {facts.packages.get('torch', '')} sees none of {len(facts.gpus)} GPUs",
            "install the CUDA build of torch",
        )
    else:
        yield Finding("GPU", "ok", ", ".join(facts.gpus) or "none, and none is asked for")


def _environment(facts: Facts, config: AppConfig) -> Iterator[Finding]:
    env = facts.environment
    address = env.get("RAY_ADDRESS", "")
    if address not in {"", "local"}:  # with local, Ray starts a cluster of its own
        yield Finding(
            "environment",
            "warning",
            f"RAY_ADDRESS is {address}: the server joins that cluster and starts none",
            "unset RAY_ADDRESS to serve on this machine",
        )
    proxies = [name for name in ("http_proxy", "HTTP_PROXY", "all_proxy") if env.get(name)]
    spared = env.get("no_proxy", "") + env.get("NO_PROXY", "")
    if proxies and "127.0.0.1" not in spared:
        yield Finding(
            "environment",
            "warning",
            f"{proxies[0]} is set, and clients would ask the proxy for 127.0.0.1",
            "set no_proxy=127.0.0.1,localhost",
        )
    if env.get("RAY_AUTH_MODE", "").lower() == "disabled":
        yield Finding(
            "environment",
            "warning",
            "RAY_AUTH_MODE is disabled: Ray's ports listen on all addresses, whatever "
            "http_options.host is, and whoever reaches them can run code",
            "unset RAY_AUTH_MODE, or set it to token",
        )


def _ray(facts: Facts, config: AppConfig) -> Iterator[Finding]:
    busy = "triptych" in facts.port_holder
    if facts.ray_processes and not busy:
        yield Finding(
            "Ray",
            "warning",
            f"{len(facts.ray_processes)} processes of Ray are running, and no server answers",
            "if no other program uses them, run 'ray stop'",
        )
    elif facts.ray_address_file and not facts.ray_processes:
        yield Finding(
            "Ray",
            "fault",
            f"{facts.ray_address_file} names a cluster that is not running, and a start would "
            "look for it",
            f"remove it: rm {facts.ray_address_file}",
        )
    else:
        yield Finding("Ray", "ok", "in use" if facts.ray_processes else "nothing is left over")


def _leftovers(facts: Facts, config: AppConfig) -> Iterator[Finding]:
    if facts.orphans:
        yield Finding(
            "leftovers",
            "warning",
            f"{_size(facts.orphan_bytes)} of applications that died: {', '.join(facts.orphans)}",
            "the next start removes them",
        )


def _model(facts: Facts, config: AppConfig) -> Iterator[Finding]:
    name = config.model.name
    if facts.model_fault:
        yield Finding("model", "fault", facts.model_fault, "or set model.name to another model")
    elif facts.model_path:
        yield Finding("model", "ok", f"{name} is at {facts.model_path}")
    else:
        yield Finding(
            "model",
            "warning",
            f"{name} is not on this machine",
            f"run 'triptych model fetch {name}'; without it 'triptych serve' fetches it",
        )


CHECKS: tuple[Callable[[Facts, AppConfig], Iterator[Finding]], ...] = (
    _versions,
    _port,
    _grpc_port,
    _shared_memory,
    _memory,
    _disks,
    _sockets,
    _limits,
    _threads,
    _niceness,
    _cpus,
    _gpus,
    _environment,
    _ray,
    _leftovers,
    _model,
)


def processes_bytes(config: AppConfig, shards: int = 1) -> int:
    """Lower bound of the memory of Ray and the maximum number of workers, without shared memory.

    ``config`` is that of one of ``shards`` shards.
    """
    workers = shards * sum(group.most for group in config.worker_groups().values())
    return RAY_BYTES + workers * STAGE_BYTES


def workers_at_most(config: AppConfig) -> str:
    """The maximum number of workers, as text."""
    groups = config.worker_groups().values()
    most = sum(group.most for group in groups)
    may_grow = most > sum(group.actor.num_replicas for group in groups)
    return f"up to {most} workers" if may_grow else f"{most} workers"


def _size(count: float) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"
