"""Repeats metrics under vLLM's names, for dashboards, gateways and autoscalers made for vLLM."""

import re
from collections.abc import Iterator, Mapping

FAMILIES: Mapping[str, str] = {
    name: name
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prompt_tokens",
        "prompt_tokens_cached",
        "generation_tokens",
        "request_success",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "cache_config_info",
    )
} | {
    # Gauges here, since other processes report totals; counters in vLLM.
    "num_preemptions": "num_preemptions_total",
    "prefix_cache_queries": "prefix_cache_queries_total",
    "prefix_cache_hits": "prefix_cache_hits_total",
}
"""Metric names of Triptych, and the names of the same metrics in vLLM, without prefixes."""

_LINE = re.compile(
    r"(?P<mark># (?:HELP|TYPE) )?triptych_(?P<family>\w+?)(?P<suffix>_bucket|_sum|_count|_total)?"
    r"(?:\{(?P<labels>.*)\})? (?P<rest>.*)"
)


def aliases(exposition: str, model: str) -> Iterator[str]:
    """The lines of an exposition whose metrics vLLM has too, with vLLM's names and labels.

    Source: vLLM 0.33 (``vllm/v1/metrics/loggers.py``)
    """
    for line in exposition.splitlines():
        found = _LINE.fullmatch(line)
        if found is None or found["family"] not in FAMILIES:
            continue
        name = f"vllm:{FAMILIES[found['family']]}{found['suffix'] or ''}"
        if found["mark"]:
            rest = "counter" if name.endswith("_total") and "TYPE" in line else found["rest"]
            yield f"{found['mark']}{name} {rest}"
        else:
            labels = f'model_name="{_escaped(model)}",engine="0"'
            given = f",{found['labels']}" if found["labels"] else ""
            yield f"{name}{{{labels}{given}}} {found['rest']}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
