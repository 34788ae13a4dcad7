# Ray Serve's decorators and handles lack types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedClassDecorator=false, reportFunctionMemberAccess=false
"""``build_app``, which ``serve run config.yaml`` calls; it finds what is wrong before any actor."""

import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.deployment import Application

from triptych.core.config import ActorConfig, AppConfig
from triptych.core.errors import ConfigError
from triptych.core.messages import STAGES, Stage
from triptych.core.pages import PagePlan
from triptych.core.shards import shard_of
from triptych.deployments.app_plan import AppPlan
from triptych.deployments.http.keys import read_keys
from triptych.deployments.placement.node_autoscaler import alive_nodes, on_every_node
from triptych.deployments.placement.nodes import sliver, wait_for_homes
from triptych.deployments.replicas.ingress import IngressReplica
from triptych.deployments.replicas.pool import PoolReplica
from triptych.deployments.replicas.router import RouterReplica
from triptych.deployments.replicas.worker import WorkerReplica
from triptych.deployments.transport.run_dir import new_run_dir
from triptych.kvpool import Access
from triptych.router import check_policies
from triptych.workers.decode.plugins import offers_of
from triptych.workers.factory import actor_config
from triptych.workers.models.compression_profile import find_profile
from triptych.workers.models.facts import describe
from triptych.workers.models.store.model_store import resolve
from triptych.workers.models.tokenizer import open_tokenizer

UNLIMITED = 1_000_000
"""The router queues and refuses; Serve must not do it a second time, by count."""
COMMON: dict[str, Any] = {"max_ongoing_requests": UNLIMITED, "health_check_period_s": 1}
INNER: dict[str, Any] = {**COMMON, "graceful_shutdown_wait_loop_s": 0.1}
"""What stands behind the ingress need not wait, as that does, for proxies to look elsewhere."""


def build_app(args: dict[str, object]) -> Application:
    """Build the application from the ``args`` of the Serve config file.

    Raises: ConfigError or ModelError saying what to change
    """
    config = AppConfig.from_mapping(args)
    plan = make_plan(config)
    nodes = wait_for_homes(config.node_resource, alive_nodes, at_least=config.min_nodes)
    plan = replace(plan, nodes=len(nodes))
    Access.of(config.network, plan.token)
    check_gpus(config, sum(node.get("GPU", 0.0) for node in nodes))
    return wire([plan.of_cell(config, index) for index in range(plan.cells)])


def make_plan(config: AppConfig) -> AppPlan:
    """Resolve the model and check that pages, formats and budget fit it: the first cell's plan."""
    check_policies(config.router, config.decode.max_num_seqs)
    if config.ingress.api_keys:
        read_keys(Path(config.ingress.api_keys))
    path = resolve(config.model.name)
    facts = describe(path)
    open_tokenizer(path)  # kept from now on, so that an ingress need not make it
    profile, one = find_profile(config, facts), shard_of(config, 0)
    pages = PagePlan.of(one, facts.geometry, profile, is_plain=facts.is_plain)
    plan = AppPlan(
        config=one,
        model_path=path,
        pages=pages,
        fidelity=profile.fidelity_of(config) if profile else (),
        offers=offers_of(config.decode, pages.policy, can_exit=facts.is_plain),
        context_tokens=config.context_tokens(facts.context_tokens),
        weights=facts.weights,
        run_dir=new_run_dir(),
        token=secrets.token_urlsafe(32),
        cells=config.router.shards,
    )
    plan.check()
    return plan


def check_gpus(config: AppConfig, available: float) -> None:
    """Raise ConfigError if the stages together ask for more GPUs than their nodes have."""
    wanted = {stage: _gpus(actor_config(config, stage)) for stage in groups(config)}
    if sum(wanted.values()) > available:
        asked = ", ".join(f"{stage} {count:g}" for stage, count in wanted.items() if count)
        raise ConfigError(
            f"num_gpus: the stages ask for {sum(wanted.values()):g} GPUs ({asked}) and their "
            f"nodes have {available:g}: lower num_gpus or num_replicas, or give the nodes more"
        )


def groups(config: AppConfig) -> dict[Stage, tuple[Stage, ...]]:
    """Which stages share a deployment: each its own, or all in one named after decode."""
    if config.topology == "colocated":
        return {"decode": STAGES}
    return {stage: (stage,) for stage in STAGES}


def wire(plans: Sequence[AppPlan]) -> Application:
    """Bind the deployments of all cells, whose plans these are, behind one ingress.

    Workers know their router by its address, Serve by its graph. A cell's deployments have its
    number in their names, so what Serve starts in the place of a dead worker is of the same cell.
    """
    plan = plans[0]
    routers = [_router(one) for one in plans]
    workers = [stage for one in plans for stage in _stages(one)]
    pools = [_pools(one) for one in plans]
    return serve.deployment(
        IngressReplica,
        name="Ingress",
        num_replicas=plan.config.ingress.num_replicas,
        ray_actor_options={"num_cpus": 0, "resources": sliver(plan.config.node_resource)},
        **COMMON,
    ).bind(plan, routers, workers, *pools)


def _router(plan: AppPlan) -> Application:
    here = sliver(plan.config.node_resource)
    return serve.deployment(
        RouterReplica,
        name=plan.named("Router"),
        ray_actor_options={"num_cpus": 0, "resources": here},
        **INNER,
    ).bind(plan)


def _pools(plan: AppPlan) -> Application:
    """A pool on each node, and if they are several, also on those that join later."""
    where = plan.config.node_resource
    pools = serve.deployment(
        PoolReplica,
        name=plan.named("Pool"),
        max_replicas_per_node=1,
        ray_actor_options={"num_cpus": 0, "resources": sliver(where)},
        **INNER,
    )
    if plan.nodes > 1:
        pools = pools.options(autoscaling_config=on_every_node(where, plan.nodes))
    return pools.bind(plan)


def _stages(plan: AppPlan) -> list[Application]:
    return [_stage(plan, stage, members) for stage, members in groups(plan.config).items()]


def _stage(plan: AppPlan, stage: Stage, members: tuple[Stage, ...]) -> Application:
    actor = actor_config(plan.config, stage)
    names = {"prefill": "Prefill", "compress": "Compressor", "decode": "Decode"}
    return serve.deployment(
        WorkerReplica,
        name=plan.named(names[stage] if len(members) == 1 else "Worker"),
        **_replicas(plan.config, stage),
        **INNER,
        ray_actor_options={
            "num_cpus": actor.num_cpus,
            "num_gpus": actor.num_gpus,
            "resources": {**actor.resources, **sliver(plan.config.node_resource)},
            "runtime_env": {"env_vars": BRIEF_SPINNING},
        },
    ).bind(plan, members)


def _replicas(config: AppConfig, stage: Stage) -> dict[str, Any]:
    """How many copies a stage has: a number, or what Serve needs to change it."""
    actor, scaling = actor_config(config, stage), config.autoscaling(stage)
    if not scaling.is_on:
        return {"num_replicas": actor.num_replicas}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=scaling.min_replicas,
            initial_replicas=actor.num_replicas,
            max_replicas=scaling.max_replicas,
            upscale_delay_s=scaling.upscale_delay_s,
            downscale_delay_s=scaling.downscale_delay_s,
            look_back_period_s=LOOK_BACK_S,
            policy=AutoscalingPolicy(policy_function=POLICY),
        )
    }


LOOK_BACK_S = 15.0
"""Over how long what the copies were told is averaged; more than the 10 s between two reports."""
POLICY = "triptych.deployments.placement.autoscaling:policy"
BRIEF_SPINNING = {"GOMP_SPINCOUNT": "500000", "KMP_BLOCKTIME": "1"}
"""OpenMP threads spin for milliseconds before they sleep; how many, the processor's pause decides.

That is longer than the gaps between the kernels of a step, and too short to be seen when a
worker idles. A token of one stream takes 21 ms so, and 29 ms with a twentieth of it. Since
steps take turns, none of our workers spins against another; a program that does the same on
the same cores makes a step take thirty times as long (docs/log.md).
"""


def _gpus(actor: ActorConfig) -> float:
    """Of the copies that there are at first; more of them come only where GPUs are left."""
    return actor.num_gpus * actor.num_replicas
