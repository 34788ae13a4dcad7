"""Mistakes as people make them: each is found before anything starts, and named with its remedy."""

import copy
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml

from tests.tiny import save_tiny_model
from tests.unit.k8s.kustomize import Body, render
from triptych.cli.checks.diagnosis import Disk, Facts, diagnose
from triptych.cli.checks.doctor import container_memory, look_around
from triptych.cli.checks.manifests import find_problems, read_manifests
from triptych.cli.serving.serve_file import DEFAULT, HttpOptions, parse_serve_config, read_http
from triptych.core.config import AppConfig
from triptych.core.errors import ConfigError

GIB = 1 << 30
K8S = Path(__file__).parents[3] / "k8s"

HEALTHY = Facts(
    python="3.11.7",
    packages={"ray": "2.60.0", "torch": "2.13.0+cpu"},
    needed=["ray[serve]>=2.60", "torch>=2.11", "windows-only>=1; sys_platform == 'win32'"],
    host="127.0.0.1",
    port=8000,
    port_holder="",
    grpc_port_fault="",
    shared_memory=Disk("/dev/shm", 8 * GIB, 16 * GIB),
    cache=Disk("/home/a/.cache/triptych", 50 * GIB, 100 * GIB),
    temporary=Disk("/tmp", 50 * GIB, 100 * GIB),
    base_dir="/tmp/triptych-1000",
    base_dir_fault="",
    memory_bytes=16 * GIB,
    cores=8,
    machine_cores=8,
    load=1.0,
    niceness=0,
    open_files=65536,
    gpus=[],
    torch_sees_gpus=0,
    environment={},
    ray_processes=[],
    ray_address_file="",
    orphans=[],
    orphan_bytes=0,
    model_path="/home/a/.cache/triptych/models/m",
)
GPU = {"decode": {"actor": {"num_gpus": 1.0}}}
MACHINES: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "a package too old": (
        {"packages": {"ray": "2.52.0", "torch": "2.13.0"}},
        {},
        "ray is 2.52.0, >=2.60 is needed",
        "make setup",
    ),
    "a package missing": ({"packages": {"ray": "2.60.0"}}, {}, "torch is missing", "make setup"),
    "a Python too old": ({"python": "3.10.12"}, {}, "Python is 3.10.12", "use Python 3.11"),
    "workers that yield to everything": (
        {"niceness": 5, "environment": {"RAY_worker_niceness": "10"}},
        {},
        "workers would run at niceness 15",
        "unset RAY_worker_niceness",
    ),
    "a port in use": (
        {"port_holder": "another program (Address already in use)"},
        {},
        "listens at 127.0.0.1:8000",
        "set http_options.port",
    ),
    "a gRPC port in use": (
        {"grpc_port_fault": "Address already in use"},
        {"ingress": {"grpc_port": 9000}},
        "nobody can listen at 127.0.0.1:9000",
        "set ingress.grpc_port",
    ),
    "Docker's small shared memory": (
        {"shared_memory": Disk("/dev/shm", 64 << 20, 64 << 20)},
        {},
        "64 MiB free of 64 MiB, and pool.kv_cache_memory_bytes is 1.0 GiB",
        "--shm-size",
    ),
    "no shared memory": (
        {"shared_memory": Disk("/dev/shm", GIB, GIB, writable=False)},
        {},
        "cannot be written",
        "mount a tmpfs",
    ),
    "a pool larger than memory": (
        {"memory_bytes": 4 * GIB},
        {"pool": {"kv_cache_memory_bytes": 6 * GIB}},
        "4.0 GiB are available",
        "lower pool.kv_cache_memory_bytes",
    ),
    "a stage that may outgrow memory": (
        {"memory_bytes": 8 * GIB},
        {"decode": {"autoscaling": {"max_replicas": 8}}},
        "up to 10 workers take 12.5 GiB",
        "the copies",
    ),
    "a full disk": (
        {"temporary": Disk("/tmp", GIB, 100 * GIB)},
        {},
        "less than 5 %",
        "set TMPDIR",
    ),
    "no room for the model": (
        {"cache": Disk("/c", 1 << 20, GIB), "model_path": ""},
        {},
        "too little for a model",
        "TRIPTYCH_CACHE_DIR",
    ),
    "a cache that is read-only": (
        {"cache": Disk("/c", 9 * GIB, 9 * GIB, writable=False), "model_path": ""},
        {},
        "/c cannot be written",
        "TRIPTYCH_CACHE_DIR",
    ),
    "a temporary folder too deep for sockets": (
        {"base_dir": "/var/folders/" + "x" * 60},
        {},
        "the kernel takes 107",
        "set TMPDIR",
    ),
    "a run directory of somebody else": (
        {"base_dir_fault": "/tmp/triptych-0: expected a directory of yours: remove it"},
        {},
        "expected a directory of yours",
        "start again",
    ),
    "too few open files": ({"open_files": 256}, {}, "256 open files", "ulimit -n 65536"),
    "more threads than cores": (
        {},
        {"prefill": {"actor": {"threads": 8}}, "decode": {"actor": {"threads": 4}}},
        "12 threads (prefill 8, decode 4) for 8 cores",
        "set it to auto",
    ),
    "a machine that is busy": ({"load": 40.0}, {}, "40 processes want to run", "stop what else"),
    "a stage that may outgrow its threads": (
        {},
        {"decode": {"actor": {"threads": 4}, "autoscaling": {"max_replicas": 3}}},
        "12 threads (decode 12) for 8 cores",
        "set it to auto",
    ),
    "CPUs that are not there": (
        {},
        {"prefill": {"actor": {"num_cpus": 6}}, "decode": {"actor": {"num_cpus": 4}}},
        "ask for 10 CPUs, 10 with all copies",
        "lower num_cpus",
    ),
    "GPUs that a stage may grow to": (
        {"gpus": ["H100"], "torch_sees_gpus": 1},
        {"decode": {"actor": {"num_gpus": 1.0}, "autoscaling": {"max_replicas": 4}}},
        "may grow to 4 GPUs and this machine shows 1",
        "lower autoscaling.max_replicas",
    ),
    "GPUs that are not there": (
        {},
        GPU,
        "ask for 1 GPUs and this machine shows 0",
        "num_gpus to 0",
    ),
    "torch without CUDA": ({"gpus": ["H100"]}, GPU, "torch 2.13.0+cpu sees none", "CUDA build"),
    "a cluster in RAY_ADDRESS": (
        {"environment": {"RAY_ADDRESS": "10.0.0.1:6379"}},
        {},
        "joins that cluster",
        "unset",
    ),
    "a proxy for loopback": (
        {"environment": {"http_proxy": "http://proxy:3128"}},
        {},
        "http_proxy is set",
        "no_proxy=",
    ),
    "an open Ray": (
        {"environment": {"RAY_AUTH_MODE": "disabled"}, "host": "127.0.0.1"},
        {},
        "can run code",
        "unset RAY_AUTH_MODE",
    ),
    "Ray left running": ({"ray_processes": ["raylet"]}, {}, "1 processes of Ray", "ray stop"),
    "an address of a dead cluster": (
        {"ray_address_file": "/tmp/ray/ray_current_cluster"},
        {},
        "is not running",
        "rm /tmp/ray/ray_current_cluster",
    ),
    "what died left behind": (
        {"orphans": ["/dev/shm/triptych-0-ab"], "orphan_bytes": 3 * GIB},
        {},
        "3.0 GiB of applications that died",
        "next start removes",
    ),
    "a model that is cut short": (
        {"model_path": "", "model_fault": "/m: model.safetensors: has 5 bytes"},
        {},
        "has 5 bytes",
        "model.name",
    ),
    "a port at an IPv6 address": (
        {"host": "::1", "port_holder": "another program"},
        {},
        "listens at [::1]:8000",
        "http_options.port",
    ),
    "a gRPC port at an IPv6 address": (
        {"grpc_port_fault": "Address already in use"},
        {"ingress": {"grpc_port": 9000, "grpc_host": "::1"}},
        "nobody can listen at [::1]:9000",
        "ingress.grpc_port",
    ),
    "a model that is not here": (
        {"model_path": ""},
        {},
        "not on this machine",
        "triptych model fetch",
    ),
}


@pytest.mark.parametrize("name", MACHINES)
def test_doctor_names_what_is_wrong_with_a_machine_and_what_helps(name: str) -> None:
    facts, settings, says, remedy = MACHINES[name]
    found = diagnose(replace(HEALTHY, **facts), AppConfig.from_mapping(settings))
    wrong = [finding for finding in found if finding.status != "ok"]
    assert any(says in finding.what and remedy in finding.remedy for finding in wrong), wrong


def test_doctor_has_nothing_to_say_of_a_healthy_machine() -> None:
    found = diagnose(HEALTHY, AppConfig())
    assert {finding.status for finding in found} == {"ok"}


@pytest.mark.parametrize(
    "facts",
    [
        {"environment": {"RAY_ADDRESS": "local"}},
        {"environment": {"RAY_worker_niceness": "0"}},
        {"environment": {"RAY_AUTH_MODE": "token"}, "host": "0.0.0.0"},
    ],
    ids=[
        "RAY_ADDRESS=local starts a cluster",
        "workers as urgent as others",
        "Ray wants its token",
    ],
)
def test_doctor_does_not_warn_of_what_is_harmless(facts: dict[str, Any]) -> None:
    found = diagnose(replace(HEALTHY, **facts), AppConfig())
    assert {finding.status for finding in found} == {"ok"}


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("::1", "http://[::1]:8020"),
        ("::", "http://[::1]:8020"),
        ("fe80::1%eth0", "http://[fe80::1%eth0]:8020"),
        ("0.0.0.0", "http://127.0.0.1:8020"),
        ("localhost", "http://localhost:8020"),
    ],
)
def test_the_url_of_every_host_can_be_used(host: str, url: str) -> None:
    assert HttpOptions(host, 8020).url == url


def test_doctor_works_at_an_ipv6_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRIPTYCH_CACHE_DIR", str(tmp_path / "none"))
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        port = taken.getsockname()[1]
        facts = look_around(AppConfig(), HttpOptions("::1", port))
    assert facts.port_holder.startswith("another program")


def test_doctor_works_where_there_is_no_ipv6(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRIPTYCH_CACHE_DIR", str(tmp_path / "none"))

    def no_socket(*_: object) -> NoReturn:
        raise OSError(97, "Address family not supported by protocol")

    monkeypatch.setattr("triptych.cli.checks.doctor.socket.socket", no_socket)
    monkeypatch.setattr("triptych.cli.checks.doctor._who_answers", lambda _: "")
    assert "not supported" in look_around(AppConfig(), HttpOptions("::1", 8020)).port_holder


def test_doctor_knows_its_own_niceness(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRIPTYCH_CACHE_DIR", str(tmp_path / "none"))
    assert look_around(AppConfig(), HttpOptions()).niceness == os.nice(0)


def test_doctor_says_why_a_model_cannot_be_loaded(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    config = AppConfig.from_mapping({"model": {"name": str(tmp_path / "model")}})
    assert "download it again" in look_around(config, HttpOptions()).model_fault


def test_doctor_finds_what_a_killed_pool_left_on_a_disk(tmp_path: Path) -> None:
    left = tmp_path / f"triptych-{os.getuid()}-0123456789abcdef"
    left.write_bytes(b"pages")
    config = AppConfig.from_mapping({"pool": {"arena_path": str(tmp_path)}})
    facts = look_around(config, HttpOptions())
    assert str(left) in facts.orphans
    assert facts.orphan_bytes >= 5


def test_doctor_looks_at_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The facts are real ones: a port that is taken, a cache that is empty."""
    monkeypatch.setenv("TRIPTYCH_CACHE_DIR", str(tmp_path / "none"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        facts = look_around(AppConfig(), HttpOptions(port=taken.getsockname()[1]))
    assert facts.port_holder.startswith("another program")
    assert facts.model_path == ""
    assert facts.shared_memory.total_bytes > 0
    assert facts.cores <= facts.machine_cores
    assert {"ray", "torch"} <= facts.packages.keys()


@pytest.mark.parametrize(
    ("limit", "left"), [("1000000\n", 400000), ("max\n", sys.maxsize), (None, sys.maxsize)]
)
def test_a_container_has_the_memory_of_its_limit(
    tmp_path: Path, limit: str | None, left: int
) -> None:
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
        (tmp_path / "memory.current").write_text("600000\n")
    assert container_memory(tmp_path) == left


CONFIGS: dict[str, tuple[object, str]] = {
    "a misspelt section": ({"modle": {}}, "did you mean 'model'"),
    "a misspelt key": (
        {"pool": {"kv_cache_memory_byte": 1}},
        "did you mean 'pool.kv_cache_memory_bytes'",
    ),
    "a size in words": ({"pool": {"kv_cache_memory_bytes": "four"}}, "a size such as 4GiB"),
    "a format that does not exist": (
        {"compressor": {"policy": "uniform:k9v9"}},
        "have ['block_gtq'",
    ),
    "a topology that does not exist": (
        {"topology": "disagregated"},
        "did you mean 'disaggregated'",
    ),
    "no copies": ({"decode": {"actor": {"num_replicas": 0}}}, "num_replicas=0: expected >= 1"),
    "an odd page": ({"pool": {"page_bytes": 1000}}, "multiple of 256"),
    "more prefixes than pool": ({"pool": {"prefix_bytes": 2 * GIB}}, "0 to kv_cache_memory_bytes"),
    "a list": (["no", "mapping"], "expected a mapping"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_wrong_setting_is_named_with_what_was_expected(name: str) -> None:
    args, says = CONFIGS[name]
    (app,) = DEFAULT["applications"]  # type: ignore[misc]
    text = yaml.safe_dump({**DEFAULT, "applications": [{**app, "args": args}]})
    with pytest.raises(ConfigError) as found:
        parse_serve_config(text, "config.yaml")
    assert says in str(found.value)


@pytest.mark.parametrize(
    "options",
    [
        {"port": "8000"},
        {"port": 0},
        {"host": 8000},
        {"host": "[::1]"},
        {"host": "127.0.0.1:8000"},
        {"host": "http://localhost"},
        {"host": "a b"},
        {"host": ""},
        ["8000"],
    ],
)
def test_a_wrong_address_is_refused(tmp_path: Path, options: object) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**DEFAULT, "http_options": options}))
    with pytest.raises(ConfigError, match=r"config.yaml: http_options.*expected"):
        read_http(path)


@pytest.mark.parametrize(
    "options", [{}, None, {"port": 9000}, {"host": "0.0.0.0"}, {"host": "::"}, {"host": "node-1.a"}]
)
def test_an_address_that_is_not_given_is_the_usual_one(tmp_path: Path, options: object) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**DEFAULT, "http_options": options}))
    given = options if isinstance(options, dict) else {}
    assert read_http(path) == HttpOptions(**given)


Plant = Callable[[Body, Body], None]


def args(change: Callable[[dict[str, Any]], object]) -> Plant:
    """A change to the Serve configuration."""

    def plant(service: Body, _: Body) -> None:
        serve = yaml.safe_load(service["spec"]["serveConfigV2"])
        change(serve)
        service["spec"]["serveConfigV2"] = yaml.safe_dump(serve)

    return plant


def pod(change: Callable[[Body, Body], object]) -> Plant:
    """A change to the worker group's pod and its container."""

    def plant(_: Body, group: Body) -> None:
        change(group["template"]["spec"], group["template"]["spec"]["containers"][0])

    return plant


def group(change: Callable[[Body], object]) -> Plant:
    return lambda _, group: (change(group), None)[1]


def cluster(change: Callable[[Body], object]) -> Plant:
    return lambda service, _: (change(service["spec"]["rayClusterConfig"]), None)[1]


def app_args(serve: dict[str, Any]) -> dict[str, Any]:
    return serve["applications"][0]["args"]


MANIFESTS: dict[str, tuple[Plant, str]] = {
    "Ray without a token": (cluster(lambda c: c.pop("authOptions")), "authOptions.mode: token"),
    "another Ray": (
        cluster(lambda c: c.update(rayVersion="2.9.0")),
        "rayVersion is 2.9.0: set it to",
    ),
    "a misspelt setting": (args(lambda s: app_args(s).update(modle={})), "did you mean 'model'"),
    "no resource": (
        args(lambda s: app_args(s).pop("node_resource")),
        "head and worker are two nodes",
    ),
    "a resource nobody has": (
        args(lambda s: app_args(s).update(node_resource="gpu-node")),
        "no worker group has",
    ),
    "two pods in the group": (group(lambda g: g.update(maxReplicas=2)), "add RayServices"),
    "loopback": (args(lambda s: s["http_options"].pop("host")), "set it to 0.0.0.0"),
    "another port": (args(lambda s: s["http_options"].update(port=9000)), "let them be the same"),
    "keys that are not mounted": (
        args(lambda s: app_args(s)["ingress"].update(api_keys="/keys.yaml")),
        "mount the secret",
    ),
    "gRPC on loopback": (
        args(lambda s: app_args(s)["ingress"].pop("grpc_host")),
        "grpc_host is 127.0.0.1",
    ),
    "a gRPC port that is closed": (
        args(lambda s: app_args(s)["ingress"].update(grpc_port=9100)),
        "{name: grpc, containerPort: 9100}",
    ),
    "a disk that is not there": (
        args(lambda s: app_args(s)["pool"].update(disk_path="/var/lib/t", disk_bytes=GIB)),
        "add k8s/components/disk",
    ),
    "pages on a disk that is not there": (
        args(lambda s: app_args(s)["pool"].update(arena_path="/var/lib/t")),
        "pool.arena_path is /var/lib/t, and no volume",
    ),
    "a disk that is read-only": (
        args(lambda s: app_args(s)["pool"].update(disk_path="/var/cache/triptych", disk_bytes=1)),
        "no volume that can be written",
    ),
    "proxies on the head": (args(lambda s: s.update(proxy_location="HeadOnly")), "EveryNode"),
    "a container's own /dev/shm": (
        pod(lambda p, c: c["volumeMounts"].pop(2)),
        "mount an emptyDir of medium Memory",
    ),
    "a /dev/shm on disk": (
        pod(lambda p, c: p["volumes"][2].update(emptyDir={})),
        "mount an emptyDir of medium Memory",
    ),
    "a pool larger than /dev/shm": (
        args(lambda s: app_args(s)["pool"].update(kv_cache_memory_bytes=8 * GIB)),
        "raise sizeLimit",
    ),
    "/dev/shm larger than memory": (
        pod(lambda p, c: c["resources"]["limits"].update(memory="6Gi")),
        "raise the limit",
    ),
    "GPUs that the pod has not": (
        args(lambda s: app_args(s)["decode"]["actor"].update(num_gpus=0.5)),
        "nvidia.com/gpu",
    ),
    "GPUs for the first copies alone": (
        args(
            lambda s: app_args(s).update(
                prefill={"actor": {"num_gpus": 1.0}, "autoscaling": {"max_replicas": 3}}
            )
        ),
        "ask for 3 GPUs and the container has 0",
    ),
    "CPUs that the pod has not": (
        args(lambda s: app_args(s)["decode"]["actor"].update(num_cpus=4)),
        "ask for 8 CPUs and the container has 4",
    ),
    "more copies than memory": (
        args(lambda s: app_args(s)["decode"].update(autoscaling={"max_replicas": 12})),
        "20.5Gi with Ray and up to 14 workers",
    ),
    "no drain": (pod(lambda p, c: c.pop("lifecycle")), "preStop.exec.command"),
    "a grace of 30 s": (
        pod(lambda p, c: p.pop("terminationGracePeriodSeconds")),
        "killed after 30 s",
    ),
    "requests longer than the drain": (
        args(lambda s: app_args(s)["ingress"].update(request_timeout_s=3600)),
        "lower ingress.request",
    ),
    "root": (pod(lambda p, c: p["securityContext"].pop("runAsNonRoot")), "runAsNonRoot: true"),
    "privileges": (
        pod(lambda p, c: c["securityContext"].update(privileged=True)),
        "gain privileges",
    ),
    "capabilities": (pod(lambda p, c: c["securityContext"].pop("capabilities")), "drop: [ALL]"),
    "the machine's network": (pod(lambda p, c: p.update(hostNetwork=True)), "hostNetwork: leave"),
    "a folder of the machine": (
        pod(lambda p, c: p["volumes"].append({"name": "d", "hostPath": {"path": "/"}})),
        "volume d",
    ),
    "a moving image": (pod(lambda p, c: c.update(image="triptych:latest")), "name a version"),
    "no limits": (pod(lambda p, c: c["resources"].pop("limits")), "resources.limits.cpu"),
    "a name without room for KubeRay's": (
        lambda s, g: s["metadata"].update(name="a" * 48),
        "has 48 characters, and the limit is 47",
    ),
    "a name that begins with a digit": (
        lambda s, g: s["metadata"].update(name="9llm"),
        "'9llm' is no DNS name",
    ),
    "a name with other characters": (
        lambda s, g: s["metadata"].update(name="Bad_Name"),
        "'Bad_Name' is no DNS name",
    ),
    "a group's name": (group(lambda g: g.update(groupName="A_b")), "groupName 'A_b' is no DNS"),
    "a container's name": (pod(lambda p, c: c.update(name="a.b")), "container 'a.b' is no DNS"),
    "a volume's name": (
        pod(lambda p, c: p["volumes"].append({"name": "v" * 64, "emptyDir": {}})),
        "has 64 characters, and the limit is 63",
    ),
    "a group without a pod": (
        group(lambda g: g.pop("template")),
        "compare it with the one in k8s/",
    ),
}


@pytest.fixture(scope="module")
def base() -> list[Body]:
    return render(K8S / "base")


@pytest.mark.parametrize("name", MANIFESTS)
def test_validate_names_what_is_wrong_with_a_manifest_and_what_helps(
    base: list[Body], name: str
) -> None:
    plant, says = MANIFESTS[name]
    bodies = copy.deepcopy(base)
    (service,) = [body for body in bodies if body["kind"] == "RayService"]
    plant(service, service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0])
    problems = [str(problem) for problem in find_problems(bodies)]
    assert any(says in problem for problem in problems), problems


def test_a_disk_that_is_too_small_is_named() -> None:
    bodies = render(K8S / "overlays" / "disk")
    (service,) = [body for body in bodies if body["kind"] == "RayService"]
    (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    group["template"]["spec"]["volumes"][-1]["emptyDir"]["sizeLimit"] = "1Gi"
    (problem,) = find_problems(bodies)
    assert "lower pool.disk_bytes" in str(problem)


def test_a_deployment_that_serves_another_file_is_found() -> None:
    bodies = render(K8S / "overlays" / "autoscaled")
    (config,) = [body for body in bodies if body["kind"] == "ConfigMap"]
    config["data"]["other.yaml"] = config["data"].pop("config.yaml")
    assert "it serves config.yaml" in str(find_problems(bodies)[0])


def test_a_port_that_the_network_policy_closes_is_named(base: list[Body]) -> None:
    bodies = copy.deepcopy(base)
    policies = [body for body in bodies if body["kind"] == "NetworkPolicy"]
    for rule in policies[0]["spec"]["ingress"]:
        rule["ports"] = [item for item in rule.get("ports", []) if item["port"] != 9000]
        if not rule["ports"]:
            del rule["ports"]
    (problem,) = find_problems(bodies)
    assert "no network policy lets anybody reach port 9000" in str(problem)
    assert find_problems([body for body in bodies if body not in policies]) == []
    policies[0]["spec"]["ingress"].append({"from": [{"namespaceSelector": {}}]})
    assert find_problems(bodies) == []


@pytest.mark.parametrize("text", ["a: b", "- 1", "a: [", "kind: Pod"])
def test_what_is_no_manifest_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"some.yaml: "):
        read_manifests(text, "some.yaml")


def test_the_base_is_as_large_as_a_plan_says(base: list[Body]) -> None:
    """The catalogue above starts from something that is right."""
    assert find_problems(base) == []
    assert len(MACHINES) + len(CONFIGS) + len(MANIFESTS) > 20
