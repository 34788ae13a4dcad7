"""Checks of Kubernetes manifests of Triptych beyond their schema.

A manifest can be valid and serve nobody: pages that do not fit into /dev/shm, a resource that no
pod has, a grace period that cuts streams. Each rule here is one such mistake and its remedy.
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, cast

import yaml

from triptych.cli.checks.diagnosis import processes_bytes, workers_at_most
from triptych.cli.checks.object_names import name_errors, name_errors_in_pod
from triptych.cli.serving.serve_file import ServedApp, parse_serve_config
from triptych.core.config import GIB, MIB, AppConfig
from triptych.core.errors import ConfigError

Body = dict[str, Any]

OBJECT_STORE_BYTES = 256 * MIB
"""Size of Ray's object store in /dev/shm if a manifest does not limit it."""
DEFAULT_GRACE_S = 30
DRAIN_MARGIN_S = 30
"""Time in which Ray and the stages stop once no request runs."""

_DECIMAL = {"m": 1e-3, "": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SUFFIXES = {**_DECIMAL, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


@dataclass(frozen=True, slots=True)
class Problem:
    """One error."""

    where: str
    """Kind and name of the object, and the field."""
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}: {self.remedy}"


def read_manifests(text: str, source: str) -> list[Body]:
    """The objects of a YAML stream.

    Raises: ConfigError naming the source
    """
    try:
        bodies = [body for body in yaml.safe_load_all(text) if body is not None]
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: {error}") from error
    for body in bodies:
        if not isinstance(body, dict) or "kind" not in body or "apiVersion" not in body:
            raise ConfigError(f"{source}: a document without apiVersion and kind: no manifest")
    return cast("list[Body]", bodies)


def find_problems(bodies: Sequence[Body]) -> list[Problem]:
    """All errors of these manifests, in their order."""
    around = Surroundings(
        {_name(body): body for body in bodies if body["kind"] == "ConfigMap"},
        [body for body in bodies if body["kind"] == "NetworkPolicy"],
    )
    found = list[Problem]()
    for body in bodies:
        try:
            found += [*_in_names(body), *_in_pods(body), *_in_object(body, around)]
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            found.append(
                Problem(
                    _title(body),
                    f"it is not built as a {body['kind']} is ({error!r})",
                    "compare it with the one in k8s/",
                )
            )
    return found


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Other objects that the serving pods depend on."""

    config_maps: Mapping[str, Body]
    policies: Sequence[Body]

    def closed_ports(self, template: Body, ports: Sequence[int]) -> list[int]:
        """The ports of a pod that network policies open only to pods with its own labels."""
        labels: Body = template.get("metadata", {}).get("labels", {})
        mine: list[Body] = [
            policy["spec"]
            for policy in self.policies
            if "Ingress" in policy["spec"].get("policyTypes", ["Ingress"])
            and policy["spec"]["podSelector"].get("matchLabels", {}).items() <= labels.items()
        ]
        rules = list[Body]()
        for spec in mine:
            rules += spec.get("ingress") or []
        opened = set[int]()
        for rule in rules:
            if not rule.get("ports") and not _is_among(rule.get("from") or [], labels):
                return []  # every port is open to others
            opened |= {item.get("port") for item in rule.get("ports", [])}
        if not mine:
            return []
        return [port for port in ports if port not in opened]


def _is_among(peers: Sequence[Body], labels: Body) -> bool:
    """Whether a rule applies only to pods with these labels; without peers it applies to all."""
    return bool(peers) and all(
        not peer.keys() - {"podSelector"}
        and peer["podSelector"].get("matchLabels", {}).items() <= labels.items()
        for peer in peers
    )


def _in_names(body: Body) -> Iterator[Problem]:
    for error in name_errors(body):
        yield Problem(_title(body), error, "choose another name")
    for at, pod in _pods(body):
        for error in name_errors_in_pod(pod):
            yield Problem(at, error, "choose another name")


def _in_object(body: Body, around: Surroundings) -> Iterator[Problem]:
    if body["kind"] == "RayService":
        yield from _in_ray_service(body, around)
    elif body["kind"] in {"Deployment", "StatefulSet"}:
        yield from _in_workload(body, around)


def quantity(text: object) -> float:
    """A Kubernetes quantity in its unit: bytes, cores.

    Raises: ConfigError if it is none

    >>> quantity("5Gi") == 5 * 2**30, quantity("500m"), quantity(4)
    (True, 0.5, 4.0)
    """
    match = re.fullmatch(r"([0-9.]+)(|m|k|M|G|T|Ki|Mi|Gi|Ti)", str(text))
    if match is None:
        raise ConfigError(f"{text!r}: expected a quantity such as 5Gi or 500m")
    return float(match[1]) * _SUFFIXES[match[2]]


# ------------------------------------------------------------------ Ray services


def _in_ray_service(body: Body, around: Surroundings) -> Iterator[Problem]:
    where, spec = _title(body), body["spec"]
    cluster: Body = spec.get("rayClusterConfig", {})
    if cluster.get("authOptions", {}).get("mode") != "token":
        yield Problem(
            where,
            "Ray takes code from everybody who reaches its ports",
            "set rayClusterConfig.authOptions.mode: token",
        )
    if (here := cluster.get("rayVersion")) != (installed := version("ray")):
        yield Problem(where, f"rayVersion is {here}", f"set it to {installed}, which the image has")
    serve = _serve_config(spec.get("serveConfigV2", ""), f"{where}: serveConfigV2")
    if isinstance(serve, Problem):
        yield serve
        return
    if serve.body.get("proxy_location") == "HeadOnly" and spec.get("excludeHeadPodFromServeSvc"):
        yield Problem(
            where, "proxies run on the head alone, and the head is not served", "EveryNode"
        )
    groups: list[Body] = cluster.get("workerGroupSpecs", [])
    for app in serve.apps:
        yield from _in_groups(where, app.config, groups, serve, around)


def _in_groups(
    where: str,
    config: AppConfig,
    groups: Sequence[Body],
    serve: "ServeConfig",
    around: Surroundings,
) -> Iterator[Problem]:
    resource = config.node_resource
    if not resource:
        yield Problem(
            where,
            "args.node_resource is not set, and head and worker are two nodes",
            "name a resource that one worker group has in its rayStartParams.resources",
        )
        return
    homes = [group for group in groups if resource in _ray_resources(group)]
    if not homes:
        yield Problem(
            where,
            f"no worker group has the resource {resource!r} that args.node_resource names",
            f"""add resources: '''{{"{resource}": 1}}''' to its rayStartParams""",
        )
    pods = sum(_most_replicas(group) for group in homes)
    if pods > 1:
        names = ", ".join(group["groupName"] for group in homes)
        yield Problem(
            where,
            f"{pods} pods may have the resource {resource!r} (group {names}), and the stages "
            "share the memory of one",
            "set replicas and maxReplicas to 1, and add RayServices instead of pods",
        )
    for group in homes:
        at = f"{where}: group {group['groupName']}"
        store = group.get("rayStartParams", {}).get("object-store-memory", OBJECT_STORE_BYTES)
        yield from _in_serving_pod(
            at, group["template"], config, serve, around, store_bytes=int(store)
        )


def _ray_resources(group: Body) -> Mapping[str, float]:
    """Custom resources of a group: its own field, or the parameter of ``ray start``."""
    given = dict(group.get("resources", {}))
    text = str(group.get("rayStartParams", {}).get("resources", ""))
    try:  # one level of quotes is for the shell of the pod
        told: object = yaml.safe_load(shlex.split(text)[0]) if text else {}
    except (yaml.YAMLError, ValueError, IndexError):
        return given
    return {**given, **cast("Body", told)} if isinstance(told, dict) else given


def _most_replicas(group: Body) -> int:
    return max(int(group.get(key, 1)) for key in ("replicas", "maxReplicas"))


# ------------------------------------------------------------------ plain workloads


def _in_workload(body: Body, around: Surroundings) -> Iterator[Problem]:
    """A pod that runs ``triptych serve`` on a file of a ConfigMap."""
    config_maps = around.config_maps
    where, pod = _title(body), body["spec"]["template"]["spec"]
    names = [
        volume["configMap"]["name"] for volume in pod.get("volumes", []) if "configMap" in volume
    ]
    command = " ".join(pod["containers"][0].get("args", pod["containers"][0].get("command", [])))
    if "triptych serve" not in command:
        return
    file_name = command.split()[-1].rpartition("/")[2]
    texts = [config_maps[name]["data"].get(file_name) for name in names if name in config_maps]
    if not any(texts):
        yield Problem(
            where,
            f"it serves {file_name}, which no mounted ConfigMap has",
            "mount the one that has",
        )
        return
    serve = _serve_config(next(text for text in texts if text), f"{where}: {file_name}")
    if isinstance(serve, Problem):
        yield serve
        return
    for app in serve.apps:
        store_bytes = _object_store_bytes(pod["containers"][0])
        template: Body = body["spec"]["template"]
        yield from _in_serving_pod(
            where, template, app.config, serve, around, store_bytes=store_bytes
        )


def _object_store_bytes(container: Body) -> int:
    env = {item["name"]: item.get("value") for item in container.get("env", [])}
    return int(env.get("RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES") or OBJECT_STORE_BYTES)


# ------------------------------------------------------------------ the pod that serves


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """A Ray Serve configuration and its Triptych applications."""

    body: Body
    apps: list[ServedApp]

    @property
    def http(self) -> Body:
        return self.body.get("http_options") or {}


def _serve_config(text: str, source: str) -> ServeConfig | Problem:
    try:
        apps = parse_serve_config(text, source)
    except ConfigError as error:
        return Problem(
            source,
            str(error).removeprefix(f"{source}: "),
            "'triptych config explain' lists what can be set",
        )
    return ServeConfig(cast("Body", yaml.safe_load(text)), apps)


def _in_serving_pod(
    where: str,
    template: Body,
    config: AppConfig,
    serve: ServeConfig,
    around: Surroundings,
    *,
    store_bytes: int,
) -> Iterator[Problem]:
    pod: Body = template["spec"]
    container: Body = pod["containers"][0]
    yield from _in_network(where, container, serve)
    yield from _in_policies(where, template, config, serve, around)
    yield from _in_keys(where, pod, container, config.ingress.api_keys)
    yield from _in_grpc(where, container, config)
    yield from _in_disk(where, pod, container, config)
    yield from _in_memory(where, pod, container, config, store_bytes)
    yield from _in_processors(where, container, config)
    yield from _in_shutdown(where, pod, container, config.ingress.request_timeout_s)


def _in_network(where: str, container: Body, serve: ServeConfig) -> Iterator[Problem]:
    host = serve.http.get("host", "127.0.0.1")
    if host in {"127.0.0.1", "localhost", "::1"}:
        yield Problem(
            where, f"http_options.host is {host}: no other pod reaches it", "set it to 0.0.0.0"
        )
    port = serve.http.get("port", 8000)
    ports = {item.get("name"): item["containerPort"] for item in container.get("ports", [])}
    if ports.get("serve") != port:
        yield Problem(
            where,
            f"http_options.port is {port} and the container's port 'serve' {ports.get('serve')}",
            "let them be the same",
        )


def _in_grpc(where: str, container: Body, config: AppConfig) -> Iterator[Problem]:
    host, port = config.ingress.grpc_host, config.ingress.grpc_port
    if port and host in {"127.0.0.1", "localhost", "::1"}:
        yield Problem(
            where, f"ingress.grpc_host is {host}: no other pod reaches it", "set it to 0.0.0.0"
        )
    if port and port not in {item["containerPort"] for item in container.get("ports", [])}:
        yield Problem(
            where,
            f"ingress.grpc_port is {port}, and no port of the container",
            f"add {{name: grpc, containerPort: {port}}} to its ports",
        )


def _in_policies(
    where: str, template: Body, config: AppConfig, serve: ServeConfig, around: Surroundings
) -> Iterator[Problem]:
    ports = [int(serve.http.get("port", 8000)), config.ingress.grpc_port]
    for port in around.closed_ports(template, [port for port in ports if port]):
        yield Problem(
            where,
            f"no network policy lets anybody reach port {port}",
            f"add {{protocol: TCP, port: {port}}} to the clients' rule of the policy",
        )


def _in_disk(where: str, pod: Body, container: Body, config: AppConfig) -> Iterator[Problem]:
    """Check directories: the root is read-only, and scratch space is shared."""
    pool = config.pool
    for path, name, size, wanted in (
        (pool.disk_path, "disk_path", "disk_bytes", pool.disk_bytes),
        (pool.arena_path, "arena_path", "capacity_bytes", pool.kv_cache_memory_bytes),
    ):
        if path:
            yield from _on_volume(where, pod, container, path, name, size, wanted)


def _on_volume(
    where: str, pod: Body, container: Body, path: str, setting: str, size: str, wanted: int
) -> Iterator[Problem]:
    """Check that a directory is on a writable volume with enough space."""
    mounts: list[Body] = [
        mount
        for mount in container.get("volumeMounts", [])
        if f"{path}/".startswith(mount["mountPath"].rstrip("/") + "/")
    ]
    mount = max(mounts, key=lambda one: len(one["mountPath"]), default=None)
    if mount is None or mount.get("readOnly"):
        yield Problem(
            where,
            f"pool.{setting} is {path}, and no volume that can be written is mounted there",
            "add k8s/components/disk, or in the chart disk.size",
        )
        return
    volumes: dict[str, Body] = {item["name"]: item for item in pod.get("volumes", [])}
    folder: Body = volumes[mount["name"]].get("emptyDir") or {}
    if "sizeLimit" in folder and quantity(folder["sizeLimit"]) < wanted:
        yield Problem(
            where,
            f"pool.{size} is {_gib(wanted)}, and the volume has {folder['sizeLimit']}: "
            "Kubernetes ends a pod that fills it",
            f"raise sizeLimit, or lower pool.{size}",
        )


def _in_keys(where: str, pod: Body, container: Body, path: str) -> Iterator[Problem]:
    secrets = {volume["name"] for volume in pod.get("volumes", []) if "secret" in volume}
    folders = [
        mount["mountPath"].rstrip("/") + "/"
        for mount in container.get("volumeMounts", [])
        if mount["name"] in secrets
    ]
    if path and not any(path.startswith(folder) for folder in folders):
        yield Problem(
            where,
            f"ingress.api_keys is {path}, and no secret is mounted there",
            "mount the secret that has the file, in the head too",
        )


def _in_memory(
    where: str, pod: Body, container: Body, config: AppConfig, store_bytes: int
) -> Iterator[Problem]:
    """Check the memory limit against /dev/shm (pages, Ray's store) and the processes."""
    shared_bytes = config.pool.shared_bytes + store_bytes
    mounts = {item["mountPath"]: item["name"] for item in container.get("volumeMounts", [])}
    volumes: dict[str, Body] = {item["name"]: item for item in pod.get("volumes", [])}
    folder: Body = volumes.get(mounts.get("/dev/shm", ""), {}).get("emptyDir") or {}
    if folder.get("medium") != "Memory":
        yield Problem(
            where,
            "nothing of medium Memory is mounted at /dev/shm, and a container's own has 64 MiB",
            f"mount an emptyDir of medium Memory with sizeLimit {_gib(shared_bytes)}",
        )
        return
    size = quantity(folder["sizeLimit"]) if "sizeLimit" in folder else None
    if size is not None and size < shared_bytes:
        yield Problem(
            where,
            f"/dev/shm has {_gib(size)}, and the pool's pages with Ray's store take "
            f"{_gib(shared_bytes)}",
            "raise sizeLimit, or lower pool.kv_cache_memory_bytes",
        )
    limit = container.get("resources", {}).get("limits", {}).get("memory")
    taken = max(shared_bytes, size or 0) + processes_bytes(config)
    if limit is not None and quantity(limit) < taken:
        yield Problem(
            where,
            f"the memory limit is {limit}, and what lies in /dev/shm counts: {_gib(taken)} with "
            f"Ray and {workers_at_most(config)}",
            "raise the limit, or lower pool.kv_cache_memory_bytes and sizeLimit, or the copies",
        )


def _in_processors(where: str, container: Body, config: AppConfig) -> Iterator[Problem]:
    """Check that CPUs and GPUs suffice for all replicas, those of autoscaling included."""
    groups = config.worker_groups().values()
    limits: Body = container.get("resources", {}).get("limits", {})
    gpus = sum(quantity(count) for name, count in limits.items() if name.endswith("/gpu"))
    if (wanted := sum(group.most_gpus for group in groups)) > gpus:
        yield Problem(
            where,
            f"the stages ask for {wanted:g} GPUs and the container has {gpus:g}",
            "raise the limit of nvidia.com/gpu, or lower num_gpus or max_replicas",
        )
    wanted = sum(group.most_cpus for group in groups)
    if "cpu" in limits and wanted > (given := quantity(limits["cpu"])):
        yield Problem(
            where,
            f"the stages ask for {wanted:g} CPUs and the container has {given:g}",
            "raise the limit of cpu, or lower num_cpus or max_replicas",
        )


def _in_shutdown(where: str, pod: Body, container: Body, request_s: float) -> Iterator[Problem]:
    hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
    if list(hook[:2]) != ["triptych", "drain"]:
        yield Problem(
            where,
            "no preStop hook waits for running answers",
            "add lifecycle.preStop.exec.command: [triptych, drain, --timeout, SECONDS]",
        )
        return
    grace_s = float(pod.get("terminationGracePeriodSeconds", DEFAULT_GRACE_S))
    drain_s = float(hook[hook.index("--timeout") + 1]) if "--timeout" in hook else request_s
    if min(drain_s, grace_s - DRAIN_MARGIN_S) < request_s:
        yield Problem(
            where,
            f"a request may last {request_s:g} s, the drain hook waits {drain_s:g} s and the pod "
            f"is killed after {grace_s:g} s",
            f"let the hook wait {request_s:g} s, terminationGracePeriodSeconds "
            f"{DRAIN_MARGIN_S} s longer, or lower ingress.request_timeout_s",
        )


# ------------------------------------------------------------------ any pod


def _in_pods(body: Body) -> Iterator[Problem]:
    for at, pod in _pods(body):
        yield from _in_posture(at, pod)


def _in_posture(where: str, pod: Body) -> Iterator[Problem]:
    """Check the restricted pod security standard, and that limits are set."""
    if not pod.get("securityContext", {}).get("runAsNonRoot"):
        yield Problem(where, "it may run as root", "set securityContext.runAsNonRoot: true")
    shared = [key for key in ("hostNetwork", "hostPID", "hostIPC") if pod.get(key)]
    shared += [f"volume {item['name']}" for item in pod.get("volumes", []) if "hostPath" in item]
    if shared:
        yield Problem(where, f"it shares its machine's {', '.join(shared)}", "leave them out")
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        yield from _in_container(f"{where}: {container['name']}", container)


def _in_container(where: str, container: Body) -> Iterator[Problem]:
    security: Body = container.get("securityContext", {})
    if security.get("privileged") or security.get("allowPrivilegeEscalation", True):
        yield Problem(
            where, "it may gain privileges", "set securityContext.allowPrivilegeEscalation: false"
        )
    if "ALL" not in security.get("capabilities", {}).get("drop", []):
        yield Problem(
            where, "it keeps capabilities of root", "set securityContext.capabilities.drop: [ALL]"
        )
    image = str(container.get("image", ""))
    if image.endswith(":latest") or ":" not in image.rpartition("/")[2]:
        yield Problem(
            where, f"image {image!r} changes under its name", "name a version or a digest"
        )
    if not {"cpu", "memory"} <= container.get("resources", {}).get("limits", {}).keys():
        yield Problem(
            where,
            "it has no limits, so it takes what its neighbours need",
            "set resources.limits.cpu and .memory",
        )


def _pods(body: Body) -> Iterable[tuple[str, Body]]:
    """Every pod spec of an object, with its path."""
    where, spec = _title(body), cast("Body", body.get("spec") or {})
    if body["kind"] == "RayService":
        cluster: Body = spec.get("rayClusterConfig", {})
        yield f"{where}: head", cluster["headGroupSpec"]["template"]["spec"]
        for group in cluster.get("workerGroupSpecs", []):
            yield f"{where}: group {group['groupName']}", group["template"]["spec"]
    elif body["kind"] in {"Deployment", "StatefulSet", "Job", "DaemonSet"}:
        yield where, spec["template"]["spec"]


def _title(body: Body) -> str:
    return f"{body['kind']} {_name(body)}"


def _name(body: Body) -> str:
    return str(body.get("metadata", {}).get("name", "without a name"))


def _gib(count: float) -> str:
    return f"{count / GIB:.3g}Gi"
