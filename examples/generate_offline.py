"""Generate text with the three stages in one process, without Ray and HTTP."""

from triptych.core.config import AppConfig
from triptych.core.messages import Sampling
from triptych.workers.local import LocalServer
from triptych.workers.models.pretrained import read_tokenizer
from triptych.workers.models.store.model_store import resolve


def main(model: str = "smollm2-135m-instruct", profile: str = "auto") -> str:
    """``profile``: a calibrated profile, as in ``compressor.profile``."""
    pages = {"kv_cache_memory_bytes": 64 << 20}
    config = AppConfig.from_mapping(
        {"model": {"name": model}, "pool": pages, "compressor": {"profile": profile}}
    )
    prompt = read_tokenizer(resolve(model)).encode("The capital of Japan is")
    with LocalServer(config) as server:
        sampling = Sampling(temperature=0.0, max_tokens=24)
        (answer,) = server.complete([server.request(prompt, sampling)])
    print(answer.text, answer.report)
    return answer.text


if __name__ == "__main__":
    main()
