"""As much of kustomize as ``k8s/`` uses, so that its manifests are checked without a binary.

A test compares it with the real one where there is one.
"""

import copy
import json
from pathlib import Path
from typing import Any

import yaml

Body = dict[str, Any]

KNOWN_KEYS = {
    "apiVersion", "components", "configMapGenerator", "kind", "nameSuffix", "patches", "resources",
}  # fmt: skip


def render(folder: Path, given: list[Body] | None = None) -> list[Body]:
    """The objects of a kustomization; a component gets those that it changes."""
    spec = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    assert spec.keys() <= KNOWN_KEYS, f"{folder}: {spec.keys() - KNOWN_KEYS} is not known here"
    bodies = given or []
    for name in spec.get("resources", []):
        bodies = [*bodies, *load(folder / name)]
    for generator in spec.get("configMapGenerator", []):
        bodies = [*bodies, _config_map(folder, generator)]
    for name in spec.get("components", []):
        bodies = render(folder / name, bodies)
    for patch in spec.get("patches", []):
        bodies = _patched(folder, patch, bodies)
    for body in bodies:
        body["metadata"]["name"] += spec.get("nameSuffix", "")
    return bodies


def load(path: Path) -> list[Body]:
    if path.is_dir():
        return render(path)
    bodies = [body for body in yaml.safe_load_all(path.read_text(encoding="utf-8")) if body]
    return json.loads(json.dumps(bodies))  # aliases of YAML are one object, and shall not be


def _config_map(folder: Path, generator: Body) -> Body:
    assert generator["options"]["disableNameSuffixHash"] is True
    files = {name: (folder / name).read_text(encoding="utf-8") for name in generator["files"]}
    metadata = {
        "name": generator["name"],
        "namespace": generator["namespace"],
        "labels": generator["options"]["labels"],
    }
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": files}


def _patched(folder: Path, patch: Body, bodies: list[Body]) -> list[Body]:
    text = patch["patch"] if "patch" in patch else (folder / patch["path"]).read_text("utf-8")
    steps, target = yaml.safe_load(text), patch["target"]
    hit = [body for body in bodies if _is_target(body, target)]
    assert hit, f"{folder}: nothing is {target}"
    if isinstance(steps, dict):
        assert steps["$patch"] == "delete"
        return [body for body in bodies if body not in hit]
    for body in hit:
        for step in copy.deepcopy(steps):
            _apply(body, step)
    return bodies


def _is_target(body: Body, target: Body) -> bool:
    names = (body["kind"], body["metadata"]["name"])
    return names[0] == target["kind"] and names[1] == target.get("name", names[1])


def _apply(body: Body, step: Body) -> None:
    """One step of RFC 6902; ``replace`` and ``test`` need what is there, as they should."""
    *parents, last = [
        part.replace("~1", "/").replace("~0", "~") for part in step["path"][1:].split("/")
    ]
    at: Any = body
    for part in parents:
        at = at[int(part)] if isinstance(at, list) else at[part]
    if last == "-":
        assert step["op"] == "add"
        at.append(step["value"])
        return
    key: Any = int(last) if isinstance(at, list) else last
    if step["op"] == "test":
        assert at[key] == step["value"], f"{step['path']} is {at[key]!r}"
    elif step["op"] == "replace":
        assert at[key] is not None
        at[key] = step["value"]
    else:
        assert step["op"] == "add"
        assert isinstance(at, dict)
        at[key] = step["value"]
