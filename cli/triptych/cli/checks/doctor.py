"""``triptych doctor``: check whether this machine can run a configuration."""

import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Annotated

import httpx
import psutil
import typer
from packaging.requirements import Requirement

from triptych.cli.checks.diagnosis import Disk, Facts, diagnose
from triptych.cli.output import JsonFlag, make_table, show
from triptych.cli.serving.serve_file import HttpOptions, read_http, read_serve_file
from triptych.core.config import AppConfig
from triptych.core.config.cache_dirs import writable_cache_dir
from triptych.core.errors import ConfigError, ModelError, ModelNotFetched
from triptych.deployments.transport import run_dir
from triptych.kvpool.pool.arena import find_orphans, shared_memory_dir

ConfigFile = Annotated[
    Path | None,
    typer.Argument(
        help="Ray Serve config file; default: config.yaml if it exists, else the default settings."
    ),
]
MARKS = {"ok": "ok", "warning": "! ", "fault": "X "}


def doctor(config: ConfigFile = None, as_json: JsonFlag = False) -> None:
    """Check whether this machine can serve a configuration. Exit code 1 if it cannot."""
    path = config or (Path("config.yaml") if Path("config.yaml").exists() else None)
    settings, http = AppConfig(), HttpOptions()
    if path is not None:
        settings, http = read_serve_file(path)[0].config, read_http(path)
    findings = diagnose(look_around(settings, http), settings)
    rows = [(MARKS[one.status], one.check, one.what, one.remedy) for one in findings]
    title = f"{path or 'the defaults'} on this machine"
    table = make_table(("", "what", "found", "remedy"), rows, title)
    show([asdict(one) for one in findings], table, as_json=as_json)
    if any(one.status == "fault" for one in findings):
        raise typer.Exit(1)


def look_around(config: AppConfig, http: HttpOptions) -> Facts:
    """Collect the facts about this machine. Creates at most an empty socket directory."""
    from triptych.core.config.machine import usable_cores

    needed = [text for text in requires("triptych") or [] if "extra ==" not in text]
    folders = {shared_memory_dir(), config.pool.arena_directory or shared_memory_dir()}
    orphans = [path for folder in folders for path in find_orphans(folder)]
    orphans += run_dir.find_orphans()
    ray_processes = [" ".join(p.info["cmdline"][:1]) for p in _ray_processes()]
    gpus, ingress = _gpus(), config.ingress
    model_path, model_fault = _model(config)
    return Facts(
        python=platform.python_version(),
        packages=dict(_installed(needed)),
        needed=needed,
        host=http.host,
        port=http.port,
        port_holder=_port_holder(http),
        grpc_port_fault=_bind_fault(ingress.grpc_host, ingress.grpc_port),
        shared_memory=_disk(Path("/dev/shm")),
        cache=_disk(writable_cache_dir()),
        temporary=_disk(Path(tempfile.gettempdir())),
        base_dir=str(run_dir.base_dir()),
        base_dir_fault=_base_dir_fault(),
        memory_bytes=min(psutil.virtual_memory().available, container_memory()),
        cores=usable_cores(),
        machine_cores=os.cpu_count() or 1,
        load=os.getloadavg()[0],
        niceness=os.nice(0),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        gpus=gpus,
        torch_sees_gpus=_torch_gpus() if gpus else 0,
        environment=psutil.Process().environ(),
        ray_processes=ray_processes,
        ray_address_file=_ray_address_file(),
        orphans=[str(path) for path in orphans],
        orphan_bytes=sum(path.stat().st_size for path in orphans if path.is_file()),
        model_path=model_path,
        model_fault=model_fault,
    )


def _installed(needed: list[str]) -> Iterator[tuple[str, str]]:
    for text in needed:
        name = Requirement(text).name
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


def _disk(path: Path) -> Disk:
    """The disk of a folder; the folder need not exist."""
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    usage = shutil.disk_usage(there)
    return Disk(str(path), usage.free, usage.total, os.access(there, os.W_OK))


def container_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory left below the cgroup v2 limit; without a limit, a very large number."""
    try:
        limit, used = ((cgroup / name).read_text() for name in ("memory.max", "memory.current"))
    except OSError:
        return sys.maxsize
    return int(limit) - int(used) if limit.strip().isdigit() else sys.maxsize


def _port_holder(http: HttpOptions) -> str:
    """Name of the process at the server's address; empty if the port is free."""
    fault = _bind_fault(http.host, http.port)
    return fault and (_who_answers(http) or f"another program ({fault})")


def _bind_fault(host: str, port: int) -> str:
    """Why the gRPC port cannot be used; empty if it can, or if it is 0."""
    if not port:
        return ""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:  # without IPv6 there is no socket either
        return error.strerror or str(error)
    return ""


def _who_answers(http: HttpOptions) -> str:
    try:
        answer = httpx.get(f"{http.url}/version", timeout=2.0)
        return f"triptych {answer.json()['version']}"
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError):
        return ""


def _base_dir_fault() -> str:
    try:
        run_dir.check_base_dir()
    except (ConfigError, OSError) as error:
        return str(error)
    return ""


def _gpus() -> list[str]:
    """Names of the GPUs that the driver lists; empty without a driver."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    asked = [command, "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=20)
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else []


def _torch_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _ray_processes() -> Iterator[psutil.Process]:
    for process in psutil.process_iter(["name", "cmdline", "uids"]):
        mine = process.info["uids"] is not None and process.info["uids"].real == os.getuid()
        if mine and process.info["name"] in {"raylet", "gcs_server"}:
            yield process


def _ray_address_file() -> str:
    path = Path(tempfile.gettempdir()) / "ray" / "ray_current_cluster"
    return str(path) if path.exists() else ""


def _model(config: AppConfig) -> tuple[str, str]:
    """Directory of the model, and why it cannot be loaded; both empty if it is to be downloaded."""
    from triptych.workers.models.facts import describe
    from triptych.workers.models.store.model_store import resolve

    try:
        path = resolve(config.model.name, allow_download=False)
        describe(path)
    except ModelNotFetched:
        return "", ""
    except ModelError as error:
        return "", str(error)
    return str(path), ""
