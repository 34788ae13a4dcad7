"""A compression policy of one's own, in one file: many bits for what much attention rests on.

``compressor.policy: rare_is_precious:policy`` in config.yaml, with this file on PYTHONPATH.
"""

from triptych.core.config import AppConfig, CompressorConfig
from triptych.core.messages import CompressionReport, Sampling
from triptych.core.policy import Policy, kv_rotation_of
from triptych.core.profile import Profile
from triptych.workers.local import LocalServer


def policy(config: CompressorConfig, profile: Profile | None) -> Policy:
    """Few tokens in K8V8, the rest in K4V2, and those that hardly any other looks at nowhere."""
    return Policy(
        name=config.policy,
        high_format="k8v8",
        low_format="k4v2",
        alpha_high=3.0,
        alpha_low=0.1,
        window_tokens=16,
        high_window_tokens=16,
        score_every=config.score_every_tokens,
        kv_rotation=kv_rotation_of(config, "k8v8", profile),
    )


def main(model: str = "smollm2-135m-instruct") -> dict[str, CompressionReport | None]:
    """Compress one prompt with this policy, and with one that keeps all tokens in K8V8."""
    reports = dict[str, CompressionReport | None]()
    for name in ("uniform:k8v8", "rare_is_precious:policy"):
        pages, compressor = {"kv_cache_memory_bytes": 64 << 20}, {"policy": name, "profile": "none"}
        parts = {"model": {"name": model}, "pool": pages, "compressor": compressor}
        with LocalServer(AppConfig.from_mapping(parts)) as server:
            prompt = [5 + 7 * i % 200 for i in range(400)]
            (answer,) = server.complete([server.request(prompt, Sampling(max_tokens=8))])
        reports[name] = answer.report
        print(name, answer.report)
    return reports


if __name__ == "__main__":
    main()
