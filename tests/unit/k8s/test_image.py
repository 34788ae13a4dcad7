"""The Dockerfile, as far as one can check it without an engine that builds it."""

import re
from importlib.metadata import version

import yaml

from tests.arch.test_folders import PARTS
from tests.unit.k8s.test_manifests import FOLDERS, K8S, ROOT, pod_templates, rendered
from triptych.cli.serving.serve import RAY_ENVIRONMENT

LINES = (K8S / "Dockerfile").read_text(encoding="utf-8").splitlines()


def test_all_that_is_copied_is_there_and_not_ignored() -> None:
    copied = [
        word
        for line in LINES
        if line.startswith("COPY ") and "--from" not in line
        for word in line.split()[1:-1]
    ]
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert set(PARTS) <= set(copied)
    assert all((ROOT / name).exists() for name in copied)
    assert {f"!{name}" for name in copied} <= set(ignored)


def test_it_runs_as_the_user_of_the_pods() -> None:
    (user,) = [line.split()[1] for line in LINES if line.startswith("USER ")]
    for folder in FOLDERS:
        for _, template in pod_templates(rendered(folder)):
            security = template["spec"]["securityContext"]
            assert user == f"{security['runAsUser']}:{security['runAsGroup']}"


def test_it_sets_what_triptych_serve_sets_for_ray() -> None:
    text = "\n".join(LINES)
    for name, value in RAY_ENVIRONMENT.items():
        assert f"{name}={value} " in text


def test_its_base_has_a_version_that_the_project_supports() -> None:
    (base,) = [line.partition("=")[2] for line in LINES if line.startswith("ARG PYTHON=")]
    python = re.match(r"3\.(\d+)-slim", base)
    assert python is not None
    assert 11 <= int(python[1]) <= 12


def test_pods_run_the_image_of_this_version_with_the_ray_that_it_has() -> None:
    for folder in FOLDERS:
        bodies = rendered(folder)
        for _, template in pod_templates(bodies):
            pod = template["spec"]
            images = {c["image"] for c in [*pod.get("initContainers", []), *pod["containers"]]}
            assert images == {f"triptych:{version('triptych')}"}
        for body in bodies:
            if body["kind"] == "RayService":
                assert body["spec"]["rayClusterConfig"]["rayVersion"] == version("ray")


def test_every_yaml_file_of_the_folder_is_used_by_a_kustomization() -> None:
    """What is not rendered is not checked."""
    for path in K8S.rglob("kustomization.yaml"):
        spec = yaml.safe_load(path.read_text(encoding="utf-8"))
        named = [*spec.get("resources", []), *spec.get("components", [])]
        named += [patch["path"] for patch in spec.get("patches", []) if "path" in patch]
        present = {item.name for item in path.parent.glob("*.yaml")} - {"kustomization.yaml"}
        assert present <= set(named), f"{path.parent}: {present - set(named)}"
