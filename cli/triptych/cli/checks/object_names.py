"""Names that Kubernetes and KubeRay accept, by kind of object."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

Body = Mapping[str, Any]

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
"""A DNS label of RFC 1123."""
SERVICE_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
"""A DNS label of RFC 1035: it begins with a letter."""
SUBDOMAIN = re.compile(rf"{LABEL.pattern}(\.{LABEL.pattern})*")

MOST_CHARACTERS = 253
MOST_OF_A_LABEL = 63
LIMITS: Mapping[str, tuple[re.Pattern[str], int]] = {
    # KubeRay adds "-" and 5 characters for the cluster, and "-serve-svc" for its longest service.
    "RayService": (SERVICE_LABEL, MOST_OF_A_LABEL - len("-serve-svc") - 6),
    "RayCluster": (SERVICE_LABEL, MOST_OF_A_LABEL - len("-serve-svc")),
    "Service": (SERVICE_LABEL, MOST_OF_A_LABEL),
    "Namespace": (LABEL, MOST_OF_A_LABEL),
    "CronJob": (SUBDOMAIN, 52),  # 11 more for the time of a job
    "Job": (SUBDOMAIN, MOST_OF_A_LABEL),
    "StatefulSet": (SUBDOMAIN, MOST_OF_A_LABEL - len("-0123456789")),
}
FREE = frozenset({"Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"})
"""Kinds whose names are path segments."""


def name_errors(body: Body) -> Iterator[str]:
    """Errors in the names of an object and of its worker groups."""
    kind, metadata = str(body["kind"]), cast("Body", body.get("metadata") or {})
    if "name" in metadata and kind not in FREE:
        pattern, most = LIMITS.get(kind, (SUBDOMAIN, MOST_CHARACTERS))
        yield from _errors("metadata.name", metadata["name"], pattern, most)
    spec = cast("Body", body.get("spec") or {})
    cluster: Body = spec.get("rayClusterConfig", {})
    for group in cluster.get("workerGroupSpecs", ()):
        yield from _errors("groupName", group["groupName"], LABEL, MOST_OF_A_LABEL)


def name_errors_in_pod(pod: Body) -> Iterator[str]:
    """Errors in the names of a pod's containers and volumes."""
    for container in (*pod.get("initContainers", ()), *pod["containers"]):
        yield from _errors("container", container["name"], LABEL, MOST_OF_A_LABEL)
    for volume in pod.get("volumes", ()):
        yield from _errors("volume", volume["name"], LABEL, MOST_OF_A_LABEL)


def _errors(field: str, name: object, pattern: re.Pattern[str], most: int) -> Iterator[str]:
    text = str(name)
    if len(text) > most:
        yield f"{field} {text!r} has {len(text)} characters, and the limit is {most}"
    if not pattern.fullmatch(text):
        first = " after a first letter" if pattern is SERVICE_LABEL else ""
        dots = ", '.'" if pattern is SUBDOMAIN else ""
        yield f"{field} {text!r} is no DNS name: lower-case letters, digits, '-'{dots}{first}"
