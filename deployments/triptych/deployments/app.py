# Ray Serve's decorators and handles lack types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedClassDecorator=false, reportFunctionMemberAccess=false
"""``build_app``, which ``serve run config.yaml`` calls. It checks all before actors start."""

import logging
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray import serve
from ray._raylet import (
    AuthenticationMode,  # pyright: ignore[reportAttributeAccessIssue]
    get_authentication_mode,  # pyright: ignore[reportAttributeAccessIssue]
)
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.deployment import Application

from triptych.core.config import ActorConfig, AppConfig
from triptych.core.config.cache_dirs import environment_variable
from triptych.core.config.machine import usable_cores
from triptych.core.errors import ConfigError
from triptych.core.messages import STAGES, Stage
from triptych.core.pages import PagePlan
from triptych.core.shards import shard_of
from triptych.deployments.app_plan import AppPlan
from triptych.deployments.http.keys import check_methods, read_keys
from triptych.deployments.placement.node_autoscaler import alive_nodes, on_every_node
from triptych.deployments.placement.nodes import check_ray_auth, node_affinity, wait_for_nodes
from triptych.deployments.replicas.ingress import IngressReplica
from triptych.deployments.replicas.pool import PoolReplica
from triptych.deployments.replicas.router import RouterReplica
from triptych.deployments.replicas.worker import WorkerReplica
from triptych.deployments.transport.run_dir import new_run_dir
from triptych.kvpool import Access
from triptych.router import check_policies
from triptych.workers.compress.learned.known_networks import find_networks
from triptych.workers.decode.codebook_file import check_codebooks
from triptych.workers.decode.plugins import offers_of
from triptych.workers.factory import actor_config
from triptych.workers.models.compression_profile import find_profile
from triptych.workers.models.facts import describe
from triptych.workers.models.store.model_store import resolve
from triptych.workers.models.tokenizer import open_tokenizer, read_chat_template
from triptych.workers.models.vision.vision_traits import describe_vision
from triptych.workers.prefill.prompt_statistics import known_frequencies

logger = logging.getLogger(__name__)

UNLIMITED = 1_000_000
"""Bound on requests in Serve's own queues: the router queues and rejects, so Serve must not."""
SHUTDOWN_MARGIN_S = 10.0
"""How much longer than the grace period Serve waits before it kills a replica."""
COMMON_OPTIONS: dict[str, Any] = {"max_ongoing_requests": UNLIMITED, "health_check_period_s": 1}


def build_app(args: dict[str, object]) -> Application:
    """Build the application from the ``args`` of the Serve config file.

    Raises: ConfigError or ModelError saying what to change
    """
    config = AppConfig.from_mapping(args).on_machine(usable_cores())
    plan = make_plan(config)
    nodes = wait_for_nodes(config.node_resource, alive_nodes, at_least=config.min_nodes)
    mode: object = get_authentication_mode()  # known once Ray runs
    check_ray_auth(
        is_on=mode is not AuthenticationMode.DISABLED, chosen=environment_variable("RAY_AUTH_MODE")
    )
    plan = replace(plan, nodes=len(nodes))
    Access.of(config.network, plan.token)
    check_gpus(config, sum(node.get("GPU", 0.0) for node in nodes), plan.stages)
    return bind_deployments([plan.of_shard(config, index) for index in range(plan.shards)])


def make_plan(config: AppConfig) -> AppPlan:
    """The first shard's plan: resolve the model, check pages, formats and memory against it."""
    check_policies(config.router, config.decode.max_num_seqs)
    keys = read_keys(Path(config.ingress.api_keys)) if config.ingress.api_keys else {}
    template = read_chat_template(config.model.chat_template)
    path = resolve(config.model.name)
    facts, vision = describe(path), describe_vision(path)
    facts.check_heads(config)
    open_tokenizer(path)  # writes the cached tokenizer that the ingress loads
    profile, one = find_profile(config, facts), shard_of(config, 0)
    check_codebooks(config, facts)
    learned = find_networks(config, facts)
    pages = PagePlan.of(one, facts.geometry, profile, is_plain=facts.is_plain, learned=learned)
    known_frequencies(pages, facts)  # raises if a method needs others than it has
    plan = AppPlan(
        config=one,
        model_path=path,
        pages=pages,
        measured_on=profile.measured_on if profile else "",
        offers=offers_of(config.decode, pages.policy, can_exit=facts.is_plain),
        context_tokens=config.context_tokens(facts.context_tokens),
        vision=vision,
        vocab_tokens=facts.vocab_size,
        revision=facts.revision,
        run_dir=new_run_dir(),
        chat_template=template,
        token=secrets.token_urlsafe(32),
        shards=config.router.shards,
    )
    plan.check()
    check_methods(keys, pages)
    if plan.context_warning:
        logger.warning("%s", plan.context_warning)
    return plan


def check_gpus(config: AppConfig, available: float, stages: Sequence[Stage] = STAGES) -> None:
    """Raise ConfigError if the stages together need more GPUs than their nodes have."""
    wanted = {stage: _gpus(actor_config(config, stage)) for stage in stage_groups(config, stages)}
    if sum(wanted.values()) > available:
        asked = ", ".join(f"{stage} {count:g}" for stage, count in wanted.items() if count)
        raise ConfigError(
            f"num_gpus: the stages ask for {sum(wanted.values()):g} GPUs ({asked}) and their "
            f"nodes have {available:g}: lower num_gpus or num_replicas, or give the nodes more"
        )


def stage_groups(config: AppConfig, stages: Sequence[Stage]) -> dict[Stage, tuple[Stage, ...]]:
    """Stages of each deployment: one each, or all in the deployment of decode if colocated.

    Prefill workers have the encode stage too if ``encode.worker`` says so.
    """
    if config.topology == "colocated":
        return {"decode": tuple(stages)}
    groups: dict[Stage, tuple[Stage, ...]] = {stage: (stage,) for stage in stages}
    if config.encode.worker == "prefill" and "encode" in groups:
        del groups["encode"]
        groups["prefill"] = ("encode", "prefill")
    return groups


def bind_deployments(plans: Sequence[AppPlan]) -> Application:
    """Bind the deployments of all shards behind one ingress; ``plans`` has one plan per shard.

    Workers find their router by its address, not through Serve. The names of a shard's deployments
    contain its number, so a replacement that Serve starts belongs to the same shard.
    """
    plan = plans[0]
    routers = [_router(one) for one in plans]
    workers = [stage for one in plans for stage in _stages(one)]
    pools = [_pools(one) for one in plans]
    return serve.deployment(
        IngressReplica,
        name="Ingress",
        num_replicas=plan.config.ingress.num_replicas,
        ray_actor_options={"num_cpus": 0, "resources": node_affinity(plan.config.node_resource)},
        **_ingress_options(plan.config),
    ).bind(plan, routers, workers, *pools)


def _ingress_options(config: AppConfig) -> dict[str, Any]:
    timeout_s = config.ingress.graceful_shutdown_timeout_s + SHUTDOWN_MARGIN_S
    return {**COMMON_OPTIONS, "graceful_shutdown_timeout_s": timeout_s}


def _internal_options(config: AppConfig) -> dict[str, Any]:
    """Only the ingress must wait at shutdown until Serve's proxies have stopped sending to it."""
    return {**_ingress_options(config), "graceful_shutdown_wait_loop_s": 0.1}


def _router(plan: AppPlan) -> Application:
    here = node_affinity(plan.config.node_resource)
    return serve.deployment(
        RouterReplica,
        name=plan.named("Router"),
        ray_actor_options={"num_cpus": 0, "resources": here},
        **_internal_options(plan.config),
    ).bind(plan)


def _pools(plan: AppPlan) -> Application:
    """One pool replica per node. With several nodes, nodes that join later get one too."""
    where = plan.config.node_resource
    pools = serve.deployment(
        PoolReplica,
        name=plan.named("Pool"),
        max_replicas_per_node=1,
        ray_actor_options={"num_cpus": 0, "resources": node_affinity(where)},
        **_internal_options(plan.config),
    )
    if plan.nodes > 1:
        pools = pools.options(autoscaling_config=on_every_node(where, plan.nodes))
    return pools.bind(plan)


def _stages(plan: AppPlan) -> list[Application]:
    groups = stage_groups(plan.config, plan.stages)
    return [_stage(plan, stage, members) for stage, members in groups.items()]


def _stage(plan: AppPlan, stage: Stage, members: tuple[Stage, ...]) -> Application:
    actor = actor_config(plan.config, stage)
    names = {"encode": "Encode", "prefill": "Prefill", "compress": "Compressor", "decode": "Decode"}
    return serve.deployment(
        WorkerReplica,
        name=plan.named("Worker" if plan.config.topology == "colocated" else names[stage]),
        **_replicas(plan.config, stage),
        **_internal_options(plan.config),
        ray_actor_options={
            "num_cpus": actor.num_cpus,
            "num_gpus": actor.num_gpus,
            "resources": {**actor.resources, **node_affinity(plan.config.node_resource)},
            "runtime_env": {"env_vars": BRIEF_SPINNING},
        },
    ).bind(plan, members)


def _replicas(config: AppConfig, stage: Stage) -> dict[str, Any]:
    """The number of replicas of a stage, or Serve's autoscaling configuration for it."""
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
"""Window over which Serve averages the replicas' metrics; longer than the 10 s between reports."""
POLICY = "triptych.deployments.placement.autoscaling:policy"
BRIEF_SPINNING = {"GOMP_SPINCOUNT": "500000", "KMP_BLOCKTIME": "1"}
"""OpenMP threads spin for some milliseconds before they sleep; the exact time depends on the CPU.

That is longer than the gaps between the kernels of a step, and short enough not to matter when a
worker idles. With it a token of one stream takes 21 ms, with a twentieth of it 29 ms. Steps of
different workers run in turns, so workers do not spin against each other. Another program that
spins on the same cores makes a step take 30 times as long (docs/log.md).
"""


def _gpus(actor: ActorConfig) -> float:
    """GPUs of the initial replicas; autoscaling adds replicas only where GPUs are free."""
    return actor.num_gpus * actor.num_replicas
