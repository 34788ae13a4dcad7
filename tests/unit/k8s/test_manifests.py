"""The manifests of ``k8s/``: valid to Kubernetes, KubeRay, Ray Serve and our own builder."""

import copy
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from tests.unit.k8s.kustomize import Body, render
from tests.unit.k8s.schemas import CUSTOM
from triptych.cli.checks.manifests import find_problems
from triptych.cli.serving.serve_file import parse_serve_config
from triptych.core.config import AppConfig
from triptych.core.layout import Geometry
from triptych.core.pages import PagePlan
from triptych.deployments.app import bind_deployments, check_gpus
from triptych.deployments.app_plan import AppPlan
from triptych.deployments.placement.nodes import node_affinity

ROOT = Path(__file__).parents[3]
K8S = ROOT / "k8s"
FOLDERS = ["base", *sorted(f"overlays/{path.name}" for path in (K8S / "overlays").iterdir())]
KUBERNETES = "1.34"
SMOLLM2 = Geometry(layers=30, kv_heads=3, head_dim=64)


@cache
def _rendered(folder: str) -> list[Body]:
    return render(K8S / folder)


def rendered(folder: str) -> list[Body]:
    return copy.deepcopy(_rendered(folder))


def of_kind(bodies: list[Body], *kinds: str) -> list[Body]:
    return [body for body in bodies if body["kind"] in kinds]


def pod_templates(bodies: list[Body]) -> Iterator[tuple[str, Body]]:
    for body in bodies:
        name, spec = body["metadata"]["name"], body.get("spec", {})
        if body["kind"] == "RayService":
            cluster = spec["rayClusterConfig"]
            for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
                yield f"{name} {group.get('groupName', 'head')}", group["template"]
        elif "template" in spec:
            yield name, spec["template"]


def serve_configs(bodies: list[Body]) -> Iterator[tuple[Body, str]]:
    for body in bodies:
        if body["kind"] == "RayService":
            yield body, body["spec"]["serveConfigV2"]
        elif body["kind"] == "ConfigMap" and "config.yaml" in body["data"]:
            yield body, body["data"]["config.yaml"]


def validate(body: Body) -> None:
    """Raise ValidationError for an object that an API server would refuse or trim."""
    if body["kind"] in CUSTOM:
        jsonschema.validate(body, CUSTOM[body["kind"]])
    else:
        kubernetes_validate.validate(body, KUBERNETES, strict=True)


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_object_is_valid(folder: str) -> None:
    bodies = rendered(folder)
    for body in bodies:
        validate(body)
    for name, template in pod_templates(bodies):
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}}
        kubernetes_validate.validate({**pod, "template": template}, KUBERNETES, strict=True)
        assert name


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("NetworkPolicy", "spec.podSelectors", {}),
        ("Job", "spec.backoffLimit", "six"),
        ("RayService", "spec.rayClusterConfig.headGroupSpec.replicas", 1),
        ("RayService", "spec.serveConfig", ""),
        ("RayService", "spec.upgradeStrategy.type", "Rolling"),
    ],
)
def test_a_planted_mistake_is_found(kind: str, path: str, value: object) -> None:
    """The check above can fail, for core kinds and for those of KubeRay."""
    (body, *_) = of_kind(rendered("base"), kind)
    *parents, last = path.split(".")
    at: Any = body
    for part in parents:
        at = at[part]
    at[last] = value
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        validate(body)


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_rule_of_ours_is_broken(folder: str) -> None:
    assert not [str(problem) for problem in find_problems(rendered(folder))]


@pytest.mark.parametrize("folder", FOLDERS)
def test_ray_serve_and_our_builder_take_the_configuration(folder: str) -> None:
    found = list(serve_configs(rendered(folder)))
    assert found
    for body, text in found:
        schema = ServeDeploySchema.model_validate(yaml.safe_load(text))
        (app,) = parse_serve_config(text, folder)
        assert schema.applications[0].name == app.name == "triptych"
        plan = plan_of(app.config)
        plan.check()
        check_gpus(app.config, gpus_of(body))


@pytest.mark.parametrize("folder", ["base", "overlays/gpu-node"])
def test_every_actor_goes_to_the_pod_that_has_the_resource(folder: str) -> None:
    """Bound as Serve would: replicas, and the actor of the pool."""
    ((body, text),) = serve_configs(rendered(folder))
    (app,) = parse_serve_config(text, folder)
    wanted = node_affinity(app.config.node_resource)
    assert wanted
    assert set(wanted) <= set(group_resources(body))
    options = list(actor_options(bind_deployments([plan_of(app.config)])))
    assert len(options) == 6  # ingress, router, pool, three stages
    assert all(option["resources"] == wanted for option in options)


def actor_options(app: Any) -> Iterator[Body]:
    """What Serve passes to Ray for each deployment of a bound graph."""
    deployment = app._bound_deployment
    yield deployment.ray_actor_options
    for given in deployment.init_args:
        for below in given if isinstance(given, list) else [given]:
            if hasattr(below, "_bound_deployment"):
                yield from actor_options(below)


def plan_of(config: AppConfig) -> AppPlan:
    return AppPlan(
        config=config,
        model_path=Path(),
        pages=PagePlan.of(config, SMOLLM2),
        context_tokens=8192,
        revision="",
        run_dir=Path(),
    )


def group_resources(body: Body) -> dict[str, float]:
    (group,) = body["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    return yaml.safe_load(group["rayStartParams"]["resources"].strip("'"))


def gpus_of(body: Body) -> float:
    if body["kind"] != "RayService":
        return 0.0
    (group,) = body["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    return float(limits.get("nvidia.com/gpu", 0))


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_weights_that_are_served_are_those_that_are_fetched_and_waited_for(folder: str) -> None:
    bodies = rendered(folder)
    served = {
        app.config.model.name
        for _, text in serve_configs(bodies)
        for app in parse_serve_config(text, folder)
    }
    (job,) = of_kind(bodies, "Job")
    fetched = job["spec"]["template"]["spec"]["containers"][0]["command"][-1]
    waited = {
        container["command"][-1]
        for _, template in pod_templates(bodies)
        for container in template["spec"].get("initContainers", [])
    }
    assert served == {fetched} == waited


@pytest.mark.parametrize("folder", FOLDERS)
def test_names_that_objects_call_each_other_by_exist(folder: str) -> None:
    bodies = rendered(folder)
    names = {kind: {b["metadata"]["name"] for b in of_kind(bodies, kind)} for kind in
             ("PersistentVolumeClaim", "ServiceAccount", "ConfigMap", "RayService")}  # fmt: skip
    for _, template in pod_templates(bodies):
        pod = template["spec"]
        assert pod["serviceAccountName"] in names["ServiceAccount"]
        for volume in pod["volumes"]:
            lease_ref = volume.get("persistentVolumeClaim", {}).get("claimName")
            assert lease_ref is None or lease_ref in names["PersistentVolumeClaim"]
            config = volume.get("configMap", {}).get("name")
            assert config is None or config in names["ConfigMap"]
    for route in of_kind(bodies, "HTTPRoute"):
        behind = {ref["name"] for rule in route["spec"]["rules"] for ref in rule["backendRefs"]}
        assert behind == {f"{name}-serve-svc" for name in names["RayService"]}


@pytest.mark.parametrize("folder", FOLDERS)
def test_policies_and_budgets_select_pods_that_exist(folder: str) -> None:
    bodies = rendered(folder)
    labels = [template["metadata"]["labels"] for _, template in pod_templates(bodies)]
    for body in of_kind(bodies, "NetworkPolicy", "PodDisruptionBudget"):
        spec = body["spec"]
        selector = spec.get("selector", spec.get("podSelector"))["matchLabels"]
        assert any(selector.items() <= pod.items() for pod in labels), body["metadata"]["name"]
    policies = [
        body["spec"]["podSelector"]["matchLabels"] for body in of_kind(bodies, "NetworkPolicy")
    ]
    for pod in labels:
        assert any(selector.items() <= pod.items() for selector in policies), f"{pod} is open"


@pytest.mark.parametrize("folder", FOLDERS)
def test_clients_and_operator_reach_the_ports_that_listen(folder: str) -> None:
    bodies = rendered(folder)
    for _, text in serve_configs(bodies):
        serve = yaml.safe_load(text)
        port = serve["http_options"]["port"]
        (app,) = parse_serve_config(text, folder)
        rpc = app.config.ingress.grpc_port
        (policy,) = [
            b for b in of_kind(bodies, "NetworkPolicy") if b["metadata"]["name"] == "triptych-pods"
        ]
        rules = policy["spec"]["ingress"]
        open_to_all = [rule for rule in rules if "from" not in rule]
        assert not open_to_all
        opened = {item["port"] for rule in rules for item in rule.get("ports", [])}
        assert opened == {port, rpc, 8265, 8080}
        (clients,) = [rule for rule in rules if "clients" in str(rule)]
        assert {item["port"] for item in clients["ports"]} == {port, rpc}


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_label_of_a_pod_opens_no_port_from_any_namespace(folder: str) -> None:
    for body in of_kind(rendered(folder), "NetworkPolicy"):
        for rule in body["spec"].get("ingress", ()):
            for peer in rule["from"]:
                assert "namespaceSelector" not in peer or peer["namespaceSelector"], peer


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_volume_has_a_limit(folder: str) -> None:
    for name, template in pod_templates(rendered(folder)):
        for volume in template["spec"].get("volumes", ()):
            assert "sizeLimit" in volume.get("emptyDir", {"sizeLimit": ""}), (name, volume)


@pytest.mark.parametrize("folder", FOLDERS)
def test_services_lead_to_ports_of_pods_that_serve(folder: str) -> None:
    bodies = rendered(folder)
    pods = [template for _, template in pod_templates(bodies)]
    services = of_kind(bodies, "Service")
    assert "triptych-grpc" in {body["metadata"]["name"] for body in services}
    for body in services:
        wanted = body["spec"]["selector"].items()
        behind = [pod for pod in pods if wanted <= pod["metadata"]["labels"].items()]
        assert behind
        for pod in behind:
            ports = {p["name"]: p["containerPort"] for p in pod["spec"]["containers"][0]["ports"]}
            for port in body["spec"]["ports"]:
                assert ports[port["targetPort"]] == port["port"]


def test_the_real_kustomize_makes_the_same_of_it() -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl here")
    for folder in FOLDERS:
        command = [kubectl, "kustomize", str(K8S / folder)]
        done = subprocess.run(command, capture_output=True, check=True, text=True)
        theirs = [body for body in yaml.safe_load_all(done.stdout) if body]
        assert sorted(theirs, key=_key) == sorted(rendered(folder), key=_key), folder


def _key(body: Body) -> tuple[str, str]:
    return body["kind"], body["metadata"]["name"]
