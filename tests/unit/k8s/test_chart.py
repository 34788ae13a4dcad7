"""The Helm chart, rendered by Helm's own library, makes what the kustomizations make."""

import copy
from typing import Any

import helm_python
import pytest
import yaml

from tests.unit.k8s.kustomize import Body
from tests.unit.k8s.test_manifests import K8S, ROOT, of_kind, pod_templates, rendered, validate
from triptych.cli.checks.manifests import find_problems
from triptych.core.config import AppConfig

CHART = K8S / "chart"
CASES = {
    "base": {},
    "overlays/laptop": yaml.safe_load((CHART / "values-laptop.yaml").read_text()),
    "overlays/disk": yaml.safe_load((CHART / "values-disk.yaml").read_text()),
    "overlays/gpu-node": yaml.safe_load((CHART / "values-gpu-node.yaml").read_text()),
}


def install(values: dict[str, Any], namespace: str = "triptych") -> list[Body]:
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        files = chart.render(values, name="release", namespace=namespace)
    texts = [text for name, text in files.items() if name.endswith(".yaml")]
    return [body for text in texts for body in yaml.safe_load_all(text) if body]


def comparable(bodies: list[Body]) -> dict[tuple[str, str], Body]:
    """Settings as our builder reads them; Helm makes the namespace itself."""
    found = dict[tuple[str, str], Body]()
    for body in copy.deepcopy(bodies):
        if body["kind"] == "RayService":
            serve = yaml.safe_load(body["spec"]["serveConfigV2"])
            serve["applications"][0]["args"] = AppConfig.from_mapping(
                serve["applications"][0]["args"]
            )
            body["spec"]["serveConfigV2"] = serve
        found[body["kind"], body["metadata"]["name"]] = body
    found.pop(("Namespace", "triptych"), None)
    return found


@pytest.mark.parametrize("folder", CASES)
def test_it_makes_what_the_kustomization_makes(folder: str) -> None:
    assert comparable(install(CASES[folder])) == comparable(rendered(folder))


def test_values_reach_every_object_that_they_concern() -> None:
    bodies = install(
        {
            "image": {
                "repository": "registry/triptych",
                "tag": "9.9.9",
                "pullPolicy": "Always",
                "pullSecrets": ["first", "second"],
            },
            "model": "my/model",
            "args": {"pool": {"kv_cache_memory_bytes": 2 << 30}, "ingress": {"max_choices": 2}},
            "models": {"storageClass": "fast", "storage": "100Gi"},
            "stages": {"nodeSelector": {"kind": "gpu"}, "sharedMemory": "3Gi"},
            "monitoring": {"enabled": True, "labels": {"release": "prometheus"}},
        },
        namespace="elsewhere",
    )
    for body in bodies:
        validate(body)
    assert find_problems(bodies) == []
    assert {body["metadata"]["namespace"] for body in bodies} == {"elsewhere"}
    text = yaml.safe_dump(bodies)
    assert text.count("registry/triptych:9.9.9") == text.count("image:") == 4
    for _, template in pod_templates(bodies):
        secrets = template["spec"]["imagePullSecrets"]
        assert secrets == [{"name": "first"}, {"name": "second"}]
    assert "smollm2" not in text
    (service,) = of_kind(bodies, "RayService")
    (app,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    assert app["args"]["pool"]["kv_cache_memory_bytes"] == 2 << 30
    assert app["args"]["decode"]["actor"]["num_replicas"] == 2
    (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert group["template"]["spec"]["nodeSelector"] == {"kind": "gpu"}
    (lease_ref,) = of_kind(bodies, "PersistentVolumeClaim")
    assert lease_ref["spec"]["storageClassName"] == "fast"
    for monitor in of_kind(bodies, "PodMonitor", "PrometheusRule"):
        assert monitor["metadata"]["labels"]["release"] == "prometheus"


def test_values_of_the_release_before_still_set_the_memory_of_the_pool() -> None:
    (service,) = of_kind(install({"args": {"pool": {"capacity_bytes": 2 << 30}}}), "RayService")
    (app,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    assert AppConfig.from_mapping(app["args"]).pool.kv_cache_memory_bytes == 2 << 30


def test_an_own_claim_replaces_the_volume_and_the_job() -> None:
    bodies = install({"models": {"existingClaim": "mine"}, "networkPolicy": {"enabled": False}})
    assert not of_kind(bodies, "Job", "PersistentVolumeClaim", "NetworkPolicy")
    assert yaml.safe_dump(bodies).count("claimName: mine") == 2


def test_prefixes_go_to_a_claim_that_outlives_the_pod() -> None:
    bodies = install({"disk": {"existingClaim": "nvme"}, "args": {"pool": {"disk_bytes": 1 << 40}}})
    assert find_problems(bodies) == []
    (service,) = of_kind(bodies, "RayService")
    (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    lease_ref = {"claimName": "nvme"}
    assert {"name": "prefixes", "persistentVolumeClaim": lease_ref} in group["template"]["spec"][
        "volumes"
    ]
    (app,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    pool = AppConfig.from_mapping(app["args"]).pool
    assert (pool.disk_path, pool.disk_bytes) == ("/var/lib/triptych/prefixes", 1 << 40)


@pytest.mark.parametrize(
    "values",
    [
        {"imag": {}},
        {"image": {"tag": "latest"}},
        {"args": {"topology": "three-way"}},
        {"args": {"pool": {"kv_cache_memory_bytes": "4GiB"}}},
        {"args": {"model": {"name": "elsewhere"}}},
        {"stages": {"sharedMemory": "much"}},
        {"disk": {"size": "much"}},
        {"disk": {"size": "1Gi", "existingClaim": "mine"}},
        {"args": {"pool": {"disk_bytes": "16Gi"}}},
        {"stages": {"resources": {"limit": {}}}},
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(helm_python.HelmError):
        install(values)


def test_without_grpc_there_is_no_service_for_it() -> None:
    bodies = install({"args": {"ingress": {"grpc_port": 0}}})
    assert find_problems(bodies) == []
    assert not of_kind(bodies, "Service")


def test_helm_lints_it() -> None:
    found = helm_python.lint(CHART)
    assert found["errors"] == []
    assert {message["error"] for message in found["messages"]} <= {"icon is recommended"}


def test_its_version_is_that_of_the_project() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{chart["appVersion"]}"' in project
    assert chart["version"] == chart["appVersion"]


def test_a_package_holds_the_files_that_the_links_lead_to(tmp_path: Any) -> None:
    """What ``helm package`` makes works where there is no k8s/base."""
    archive = helm_python.package(CHART, destination=tmp_path)
    with helm_python.Chart.load(archive) as chart:
        files = chart.render({}, name="release", namespace="triptych")
    assert "kind: RayService" in files["triptych/templates/instance.yaml"]
