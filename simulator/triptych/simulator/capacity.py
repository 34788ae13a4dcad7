"""Capacity of a cluster in requests per second, by arithmetic: the start of a sweep."""

from triptych.simulator.costs import Costs
from triptych.simulator.image_stage import SIDE
from triptych.simulator.setup import Cluster


def saturation_rate(
    cluster: Cluster,
    costs: Costs,
    prompt_tokens: float,
    output_tokens: float,
    images: float = 0.0,
) -> float:
    """Requests per second of mean length at which the first stage is saturated.

    ``prompt_tokens`` are those of text and images together.

    Steps are taken to be full: whole chunks of prompts, and decode batches as large as slots and
    bytes allow. So this is an upper bound; queues grow long some way below it.
    """
    encode_s = _encode_s(cluster, costs, images)
    prefill_s = _read_s(cluster, costs, prompt_tokens) + (0.0 if cluster.encode else encode_s)
    compress_s = costs.compress_step_s + prompt_tokens * costs.compress_token_s
    batch = _batch(cluster, prompt_tokens, output_tokens)
    stored = prompt_tokens + output_tokens / 2
    step_s = costs.decode_step_s + batch * (costs.decode_request_s + stored * costs.decode_token_s)
    decode_s = max(0.0, output_tokens - 1) * step_s / batch
    if cluster.colocated or cluster.shared_cores:
        apart_s = encode_s if cluster.encode else 0.0
        return _machines(cluster) / (apart_s + prefill_s + compress_s + decode_s)
    stages = (
        (cluster.encode, encode_s if cluster.encode else 0.0),
        (cluster.prefill, prefill_s),
        (cluster.compress, compress_s),
        (cluster.decode, decode_s),
    )
    return min(workers / seconds for workers, seconds in stages if seconds > 0)


def _read_s(cluster: Cluster, costs: Costs, tokens: float) -> float:
    share = tokens / cluster.chunk_tokens
    each = tokens * costs.prefill_token_s + tokens * tokens / 2 * costs.prefill_pair_s
    return share * costs.prefill_step_s + each


def _encode_s(cluster: Cluster, costs: Costs, images: float) -> float:
    batch = max(1, cluster.encoding.max_batch_pixels // SIDE**2)
    return images * (costs.encode_step_s / batch + cluster.image_tokens * costs.encode_token_s)


def _batch(cluster: Cluster, prompt_tokens: float, output_tokens: float) -> float:
    """Requests that one decode worker runs at a time, as memory allows."""
    plan = cluster.plan
    pages = cluster.stored_pages(int(prompt_tokens + output_tokens))
    decoders = cluster.colocated or cluster.decode
    room = cluster.capacity_bytes * len({arena for _, arena, _ in cluster.workers})
    fitting = room / (pages * plan.page_bytes) / decoders
    return max(1.0, min(float(cluster.max_batch_requests), fitting))


def _machines(cluster: Cluster) -> int:
    """Sets of cores: a machine's, or a worker's of its own."""
    if cluster.shared_cores:
        return len({arena for _, arena, _ in cluster.workers})
    return cluster.colocated
