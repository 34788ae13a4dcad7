"""Start panel of ``triptych serve``: address, model, page budget, precision, example request."""

import json
from collections.abc import Iterator

from triptych.cli.serving.serve_file import HttpOptions, ServedApp
from triptych.core.errors import ConfigError
from triptych.deployments.app_plan import AppPlan
from triptych.kvpool import bracketed


def start_panel(app: ServedApp, http: HttpOptions) -> list[tuple[str, str]]:
    """Lines of the panel: pairs of title and text.

    Raises: ConfigError if a page is too small for a format, or the pool for a request
    """
    from triptych.cli.checks.sizing import app_plan
    from triptych.workers.compress.learned.known_networks import find_networks
    from triptych.workers.models.compression_profile import find_profile
    from triptych.workers.models.facts import describe
    from triptych.workers.models.store.model_store import resolve
    from triptych.workers.models.tokenizer import read_chat_template

    config = app.config
    read_chat_template(config.model.chat_template)
    facts = describe(resolve(config.model.name, allow_download=False))
    context = config.context_tokens(facts.context_tokens)
    profile = find_profile(config, facts)
    learned = find_networks(config, facts)
    plan = app_plan(
        config, facts.geometry, context, profile, is_plain=facts.is_plain, learned=learned
    )
    served = str(context) if not plan.context_warning else f"{plan.max_model_len} of {context}"
    url = http.url + app.route_prefix.rstrip("/")
    body = {
        "model": config.model.public_name,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 64,
    }
    grpc = config.ingress.grpc_port
    return [
        ("address", f"{url}/v1"),
        *([("gRPC", f"{bracketed(config.ingress.grpc_host)}:{grpc}")] if grpc else []),
        (
            "model",
            f"{config.model.public_name}, {served} tokens of context, {config.topology}"
            f"{app.topology_note}",
        ),
        *([("warning", plan.context_warning)] if plan.context_warning else []),
        ("pages", describe_pages(plan)),
        ("precision", ", ".join(describe_precision(plan))),
        (
            "try",
            f"curl '{url}/v1/chat/completions' -H 'Content-Type: application/json' "
            f"-d '{json.dumps(body)}'",
        ),
        ("watch", f"triptych top --url '{url}'"),
    ]


def describe_pages(plan: AppPlan) -> str:
    """The page budget, and the number of tokens that always fit."""
    pages = plan.pages
    tokens = plan.cache_tokens
    if tokens < 1:
        raise ConfigError(
            f"pool.kv_cache_memory_bytes={plan.config.pool.kv_cache_memory_bytes}: "
            "not one page for each of "
            f"{pages.geometry.head_rows} layers x KV heads is left for requests: raise it"
        )
    text = f"{plan.pool_pages} of {pages.page_bytes} bytes, {tokens} tokens or more at once"
    if pages.has_windows:
        longest = plan.longest_request_tokens
        text += f" ({plan.cache_tokens_in(longest)} in requests of {longest})"
    if plan.shards > 1:
        text += f" in each of {plan.shards} shards"
    if pages.prefix_bytes:
        text += f", {pages.prefix_bytes / 2**20:.0f} MiB of them for prefixes"
    return text


def describe_precision(plan: AppPlan) -> Iterator[str]:
    """Precision of recent and of older tokens, and the methods that requests may name."""
    policy = plan.pages.policy
    if plan.pages.others:
        yield "methods of requests: " + ", ".join(plan.pages.by_method)
    if not policy.compresses:
        yield "all tokens in 16 bits"
        return
    recent = plan.pages.recent.format.name.upper()
    yield f"{policy.name}: the newest {policy.window_tokens} tokens in {recent}"
    others = policy.high_format.upper()
    if policy.retention is not None:
        others += f", {policy.retention.keep_share:.0%} of a prompt's tokens"
    elif policy.images is not None:
        others += f", of images by {policy.images.name}"
    elif policy.low_format is not None:
        others += f" or {policy.low_format.upper()}, by the attention that they receive"
    yield f"others in {others}"
