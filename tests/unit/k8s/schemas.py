"""The custom resources that ``k8s/`` uses, as JSON Schemas that refuse unknown fields.

They name the fields that KubeRay 1.7 (RayService v1), the Gateway API 1.2 (HTTPRoute v1) and the
Prometheus Operator 0.80 (monitoring v1) have at these levels; the pod templates inside are checked
as Kubernetes' own.
"""

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
ANY: Schema = {"type": "object"}


def a_list(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def fields(required: str = "", **properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def resource(api: str, kind: str, spec: Schema) -> Schema:
    metadata = fields("name", name=TEXT, namespace=TEXT, labels=TEXTS, annotations=TEXTS)
    return fields(
        "apiVersion kind metadata spec",
        apiVersion={"const": api},
        kind={"const": kind},
        metadata=metadata,
        spec=spec,
    )


GROUP: dict[str, Schema] = {
    "rayStartParams": TEXTS,
    "resources": TEXTS,
    "labels": TEXTS,
    "template": fields("metadata spec", metadata=ANY, spec=ANY),
}
WORKERS = fields(
    "groupName replicas minReplicas maxReplicas rayStartParams template",
    groupName=TEXT,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    numOfHosts=COUNT,
    idleTimeoutSeconds=COUNT,
    scaleStrategy=ANY,
    suspend=FLAG,
    **GROUP,
)
CLUSTER = fields(
    "rayVersion headGroupSpec workerGroupSpecs",
    rayVersion=TEXT,
    authOptions=fields("mode", mode=one_of("disabled", "token"), secretName=TEXT),
    headGroupSpec=fields(
        "rayStartParams template",
        serviceType=TEXT,
        headService=ANY,
        enableIngress=FLAG,
        **GROUP,
    ),
    workerGroupSpecs=a_list(WORKERS),
    enableInTreeAutoscaling=FLAG,
    autoscalerOptions=ANY,
    gcsFaultToleranceOptions=ANY,
    headServiceAnnotations=TEXTS,
    networkPolicy=ANY,
    tlsOptions=ANY,
    suspend=FLAG,
)
RAY_SERVICE = fields(
    "serveConfigV2 rayClusterConfig",
    serveConfigV2=TEXT,
    rayClusterConfig=CLUSTER,
    upgradeStrategy=fields(
        "type",
        type=one_of("NewCluster", "NewClusterWithIncrementalUpgrade", "None"),
        clusterUpgradeOptions=ANY,
    ),
    serveService=ANY,
    excludeHeadPodFromServeSvc=FLAG,
    rayClusterDeletionDelaySeconds=COUNT,
    serviceUnhealthySecondThreshold=COUNT,
    deploymentUnhealthySecondThreshold=COUNT,
    suspend=FLAG,
    managedBy=TEXT,
)

BACKEND = fields("name port", name=TEXT, port=COUNT, weight=COUNT, namespace=TEXT)
MATCH = fields(
    path=fields("type value", type=one_of("Exact", "PathPrefix", "RegularExpression"), value=TEXT),
    method=TEXT,
)
HTTP_ROUTE = fields(
    "parentRefs rules",
    parentRefs=a_list(fields("name", name=TEXT, namespace=TEXT, sectionName=TEXT)),
    hostnames=a_list(TEXT),
    rules=a_list(
        fields(
            "backendRefs",
            matches=a_list(MATCH),
            backendRefs=a_list(BACKEND),
            timeouts=fields(request=TEXT, backendRequest=TEXT),
        )
    ),
)

ENDPOINT = fields(
    "port", port=TEXT, path=TEXT, interval=TEXT, scrapeTimeout=TEXT, relabelings=a_list(ANY)
)
POD_MONITOR = fields(
    "selector podMetricsEndpoints",
    selector=fields(matchLabels=TEXTS),
    namespaceSelector=fields(matchNames=a_list(TEXT)),
    podMetricsEndpoints=a_list(ENDPOINT),
)
RULE: Schema = {
    "oneOf": [
        fields("record expr", record=TEXT, expr=TEXT, labels=TEXTS),
        fields(
            "alert expr labels annotations",
            alert=TEXT,
            expr=TEXT,
            labels=TEXTS,
            annotations=TEXTS,
            **{"for": TEXT},
        ),
    ]
}
PROMETHEUS_RULE = fields(
    "groups", groups=a_list(fields("name rules", name=TEXT, interval=TEXT, rules=a_list(RULE)))
)

CUSTOM: dict[str, Schema] = {
    "RayService": resource("ray.io/v1", "RayService", RAY_SERVICE),
    "HTTPRoute": resource("gateway.networking.k8s.io/v1", "HTTPRoute", HTTP_ROUTE),
    "PodMonitor": resource("monitoring.coreos.com/v1", "PodMonitor", POD_MONITOR),
    "PrometheusRule": resource("monitoring.coreos.com/v1", "PrometheusRule", PROMETHEUS_RULE),
}
