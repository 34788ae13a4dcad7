"""Names of Kubernetes objects, by kind."""

import pytest

from triptych.cli.checks.object_names import name_errors


@pytest.mark.parametrize(
    ("kind", "name", "is_right"),
    [
        ("RayService", "a" * 47, True),
        ("RayService", "a" * 48, False),
        ("RayService", "9llm", False),
        ("RayService", "llm-", False),
        ("RayService", "", False),
        ("RayCluster", "a" * 53, True),
        ("Service", "a" * 63, True),
        ("Service", "a.b", False),
        ("Service", "1a", False),
        ("Namespace", "1a", True),
        ("Namespace", "a.b", False),
        ("ConfigMap", "1a.b-c", True),
        ("ConfigMap", "a..b", False),
        ("ConfigMap", "Bad_Name", False),
        ("ConfigMap", "a" * 254, False),
        ("CronJob", "a" * 53, False),
        ("ClusterRole", "system:triptych", True),
    ],
)
def test_names_follow_the_rules_of_their_kind(kind: str, name: str, is_right: bool) -> None:
    errors = [*name_errors({"kind": kind, "metadata": {"name": name}})]
    assert (not errors) is is_right
    assert all(repr(name) in error for error in errors)


def test_an_object_whose_name_kubernetes_makes_is_right() -> None:
    assert not [*name_errors({"kind": "Job", "metadata": {"generateName": "fetch-"}})]
    assert not [*name_errors({"kind": "List"})]
