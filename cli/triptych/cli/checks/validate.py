"""``triptych validate``: check a config file or Kubernetes manifests."""

import json
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from triptych.cli.checks.manifests import find_problems, read_manifests
from triptych.cli.output import JsonFlag, console, make_table, show
from triptych.cli.serving.serve_file import (
    ServedApp,
    check_schema,
    parse_http,
    parse_serve_config,
    read_text,
)
from triptych.core.config import ActorConfig, AppConfig, WorkerGroup
from triptych.core.errors import ConfigError, ModelNotFetched
from triptych.core.shards import shard_of
from triptych.router import check_policies

if TYPE_CHECKING:
    from triptych.core.pages import PagePlan
    from triptych.deployments.app_plan import AppPlan
    from triptych.workers.models.facts import ModelFacts

ConfigPath = Annotated[
    Path,
    typer.Argument(
        help="Ray Serve config file, Kubernetes manifests, a folder of either, or - for stdin."
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Actors, pages and disks of one application of a config file."""

    name: str
    route_prefix: str
    model: str
    topology: str
    actors: dict[str, dict[str, object]]
    pages: dict[str, object] | None
    """Pages and the resolved policy; None if the model is not on this machine."""
    disk: dict[str, object] | None
    """Directory and size of the disk tier; None without one."""
    arena: dict[str, object] | None
    """Directory and size of a page arena on disk; None: in memory."""
    plugins: tuple[str, ...]
    """Plug-ins of the decode step, in their order."""
    network: str
    """Authentication between processes of different nodes."""
    warnings: tuple[str, ...]
    """What works, but not as the settings ask for."""


def validate(config: ConfigPath = Path("config.yaml"), as_json: JsonFlag = False) -> None:
    """Check a config file or manifests, and print what they start. Exit code 2 for an error."""
    text = _read(config)
    if _has_manifests(text):
        _validate_manifests(text, str(config), as_json=as_json)
        return
    apps = parse_serve_config(text, str(config))
    parse_http(text, str(config))
    check_schema(text, str(config))
    facts = [_facts(app) for app in apps]
    if as_json:
        typer.echo(json.dumps([asdict(fact) for fact in facts], indent=2))
        return
    columns = ("actor", "copies", "at most", "CPUs each", "GPUs each", "threads")
    keys = ("num_replicas", "max_replicas", "num_cpus", "num_gpus", "threads")
    for fact in facts:
        rows = [(actor, *(each[key] for key in keys)) for actor, each in fact.actors.items()]
        title = f"{fact.name} at {fact.route_prefix}: {fact.model}, {fact.topology}"
        console.print(make_table(columns, rows, title))
        console.print(_describe_pages(fact.pages), markup=False)
        if fact.plugins:
            console.print(f"in a decode step: {', '.join(fact.plugins)}", markup=False)
        console.print(f"between nodes: {fact.network}", markup=False)
        for warning in fact.warnings:
            console.print(f"warning: {warning}", markup=False, soft_wrap=True)
        if fact.disk:
            text = (
                "disk: up to {bytes:,} bytes of prefixes in {path}, where {free_bytes:,} are free"
            )
            console.print(text.format_map(fact.disk), markup=False)
        if fact.arena:
            text = "pages: {bytes:,} bytes in {path}, where {free_bytes:,} are free"
            console.print(text.format_map(fact.arena), markup=False)
            if fact.arena["is_read_whole"]:
                warning = "every step reads them all: set decode.selection.method to read a part"
                console.print(f"warning: {warning}", markup=False)


def _read(path: Path) -> str:
    """The YAML of a file, of standard input, of a kustomization, or of a folder's files.

    Raises: ConfigError if there is none, or nothing here can render it
    """
    if str(path) == "-":
        return sys.stdin.read()
    if not path.is_dir():
        return read_text(path)
    if (path / "kustomization.yaml").exists():
        return _render(path)
    if (path / "Chart.yaml").exists():
        raise ConfigError(
            f"{path}: a Helm chart: run 'helm template triptych {path} | triptych validate -'"
        )
    files = sorted(path.glob("*.y*ml"))
    if not files:
        raise ConfigError(f"{path}: no YAML file in this folder")
    return "\n---\n".join(read_text(file) for file in files)


def _render(folder: Path) -> str:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise ConfigError(
            f"{folder}: rendering a kustomization needs kubectl, which is not here: run 'kubectl "
            f"kustomize {folder} | triptych validate -' where it is"
        )
    done = subprocess.run(
        [kubectl, "kustomize", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise ConfigError(f"{folder}: {done.stderr.strip()}")
    return done.stdout


def _has_manifests(text: str) -> bool:
    """Whether a text is Kubernetes manifests: a Serve file has no top-level ``kind``."""
    return any(line.startswith("kind:") for line in text.splitlines())


def _validate_manifests(text: str, source: str, *, as_json: bool) -> None:
    bodies = read_manifests(text, source)
    problems = find_problems(bodies)
    rows = [(problem.where, problem.what, problem.remedy) for problem in problems]
    table = make_table(("where", "what is wrong", "remedy"), rows)
    if not problems:
        kinds = sorted({str(body["kind"]) for body in bodies})
        table = make_table((f"{len(bodies)} objects are right: {', '.join(kinds)}",), [])
    show([asdict(problem) for problem in problems], table, as_json=as_json)
    if problems:
        raise typer.Exit(2)


def actors_of(config: AppConfig) -> dict[str, dict[str, object]]:
    """The actors of a configuration, with the resources of each replica."""
    groups, shards = config.worker_groups(), config.router.shards
    if config.topology == "colocated":
        groups = {"worker (all stages)": groups["decode"]}
    copies = config.ingress.num_replicas
    front = WorkerGroup(ActorConfig(num_replicas=copies), copies)
    each = WorkerGroup(ActorConfig(num_replicas=shards), shards)
    actors = {"ingress": front, "router": each, "pool": each, **groups}
    return {
        name: {**asdict(group.actor), "max_replicas": group.most} for name, group in actors.items()
    }


def check_keys(config: AppConfig) -> None:
    """Raise ConfigError if the file of API keys cannot be used."""
    if config.ingress.api_keys:
        from triptych.deployments.http.keys import read_keys

        read_keys(Path(config.ingress.api_keys))


def known_of(config: AppConfig) -> "tuple[ModelFacts, AppPlan] | tuple[None, None]":
    """Facts of the model and the plan that ``serve`` makes for it; none if it is to be downloaded.

    Raises: ModelError if the model cannot be loaded; ConfigError if a page is too small for a
        format, or the pool for its workers or a request
    """
    from triptych.cli.checks.sizing import app_plan
    from triptych.cli.serving.panel import describe_pages
    from triptych.workers.compress.learned.known_networks import find_networks
    from triptych.workers.decode.codebook_file import check_codebooks
    from triptych.workers.models.compression_profile import find_profile
    from triptych.workers.models.facts import describe
    from triptych.workers.models.store.model_store import resolve
    from triptych.workers.models.tokenizer import open_tokenizer
    from triptych.workers.prefill.prompt_statistics import known_frequencies

    try:
        path = resolve(config.model.name, allow_download=False)
    except ModelNotFetched:
        return None, None
    facts = describe(path)
    facts.check_heads(config)
    open_tokenizer(path)
    context = config.context_tokens(facts.context_tokens)
    profile = find_profile(config, facts)
    check_codebooks(config, facts)
    learned = find_networks(config, facts)
    plan = app_plan(
        config, facts.geometry, context, profile, is_plain=facts.is_plain, learned=learned
    )
    known_frequencies(plan.pages, facts)  # raises if a method needs others than it has
    describe_pages(plan)  # raises if nothing is left for requests
    return facts, plan


def check_pages(config: AppConfig, plan: "PagePlan | None") -> dict[str, object] | None:
    """Sizes of the pages and the policy; None without a page plan."""
    if plan is None:
        return None
    shard = shard_of(config, 0)
    return {
        "page_bytes": plan.page_bytes,
        "pages": config.router.shards * (shard.pool.kv_cache_memory_bytes // plan.page_bytes),
        "raw_tokens_per_page": plan.raw.tokens,
        "stored_tokens_per_page": plan.high.tokens,
        "policy": plan.policy.name,
        "methods": list(plan.by_method),
        "high_format": plan.policy.high_format,
        "low_format": plan.policy.low_format,
        "alpha_high": plan.policy.alpha_high,
        "alpha_low": plan.policy.alpha_low,
        "keep_share": plan.policy.retention.keep_share if plan.policy.retention else None,
        "images": plan.policy.images.name if plan.policy.images else None,
        "window_tokens": plan.policy.window_tokens,
        "recent_format": plan.recent.format.name.upper(),
        "rotated": plan.policy.kv_rotation.rotated,
        "centred": bool(plan.policy.kv_rotation.key_centre),
    }


def check_disk(config: AppConfig) -> dict[str, object] | None:
    """Directory and size of the disk tier; None without one.

    Raises: ConfigError if the directory cannot be used, or the disk is too small
    """
    from triptych.kvpool.disk.store import usable_bytes
    from triptych.kvpool.disk.tier import DiskSettings

    settings = DiskSettings.of(config.pool)
    if settings is None:
        return None
    free = usable_bytes(settings.path, settings.capacity_bytes)
    return {"path": str(settings.path), "bytes": settings.capacity_bytes, "free_bytes": free}


def check_arena(config: AppConfig) -> dict[str, object] | None:
    """Directory and size of a page arena on disk; None: in memory.

    Raises: ConfigError if the directory cannot be used, or the disk is too small
    """
    from triptych.kvpool.pool.arena import free_bytes, require_room

    directory, wanted = config.pool.arena_directory, config.pool.kv_cache_memory_bytes
    if directory is None:
        return None
    free = free_bytes("pool.arena_path", directory)
    require_room(free, "pool.arena_path", directory, "pool.kv_cache_memory_bytes", wanted)
    is_read_whole = config.decode.selection.method == "none"
    return {
        "path": str(directory), "bytes": wanted, "free_bytes": free, "is_read_whole": is_read_whole
    }  # fmt: skip


def check_steps(
    config: AppConfig, facts: "ModelFacts | None", plan: "PagePlan | None"
) -> tuple[str, ...]:
    """Plug-ins of the decode step, in their order.

    Raises: ConfigError if one cannot be loaded, or they do not fit together
    """
    if not config.decode.plugins and not config.decode.selection.request_bounds:
        return ()  # avoids the import of torch
    from triptych.workers.decode.plugins import offers_of

    policy, can_exit = plan.policy if plan else None, facts is None or facts.is_plain
    return tuple(offer.plugin for offer in offers_of(config.decode, policy, can_exit=can_exit))


def _describe_pages(pages: dict[str, object] | None) -> str:
    if pages is None:
        return "pages: not checked, the model is not on this machine yet"
    text = (
        "pages: {pages} of {page_bytes} bytes; one holds {raw_tokens_per_page} raw or "
        "{stored_tokens_per_page} stored tokens of a KV head\n"
        "compression: {policy}, the newest {window_tokens} tokens in {recent_format}"
    )
    if pages["keep_share"] is not None:
        text += ", {keep_share:.0%} of a prompt's tokens kept, in {high_format}"
    elif pages["low_format"] is not None and pages["images"] is None:
        text += ", others in {high_format} or {low_format} (alpha {alpha_high:g} and {alpha_low:g})"
    return text.format_map(pages)


def check_network(config: AppConfig) -> str:
    """Authentication between processes of different nodes, as text.

    Raises: ConfigError naming a file that is missing, cannot be read, or is not what it should be
    """
    from triptych.kvpool import Access

    access = Access.of(config.network, token="one is made for each start")
    token = "token from a file" if config.network.token_file else "a new token for each start"
    return f"{token}, {'TLS' if access.tls else 'no TLS'}"


def check_chat_template(config: AppConfig) -> None:
    """Raise ConfigError if the operator's chat template cannot be used."""
    from triptych.workers.models.tokenizer import read_chat_template

    read_chat_template(config.model.chat_template)


def _facts(app: ServedApp) -> Facts:
    facts, plan = known_of(app.config)
    pages = plan.pages if plan else None
    check_keys(app.config)
    check_chat_template(app.config)
    check_policies(app.config.router, app.config.decode.max_num_seqs)
    return Facts(
        name=app.name,
        route_prefix=app.route_prefix,
        model=app.config.model.public_name,
        topology=app.config.topology,
        actors=actors_of(app.config),
        pages=check_pages(app.config, pages),
        disk=check_disk(app.config),
        arena=check_arena(app.config),
        plugins=check_steps(app.config, facts, pages),
        network=check_network(app.config),
        warnings=(plan.context_warning,) if plan and plan.context_warning else (),
    )
