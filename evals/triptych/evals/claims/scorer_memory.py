"""Memory that scoring the tokens of a prompt takes beyond prefill without scores.

Each method prefills a prompt in a process of its own, since freed memory stays with a process.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from triptych.core.config import AppConfig, CompressorConfig, ModelConfig, PoolConfig
from triptych.core.errors import ModelError
from triptych.core.messages import Sampling
from triptych.evals.claims.draw import Draw
from triptych.evals.data.texts import Split, documents
from triptych.evals.data.vocabulary import Vocabulary
from triptych.workers.local import LocalServer

PLAIN = "uniform:k8v4"
METHODS = ("diffkv", "snapkv", "h2o", "expected_attention", "cake")
RESET_PEAK = "5"
"""Written to ``clear_refs``, it sets the peak of a process to its present size."""
POOL_BYTES = 256 << 20


def scorer_peaks(draw: Draw, tokens: int, methods: Sequence[str] = METHODS) -> Mapping[str, float]:
    """MiB that each method takes at most while a prompt is prefilled and compressed, over none.

    Compared with ``uniform:k8v4``, which scores no token. A share of the square of the prompt is
    what full matrices of attention of one layer would take.

    Source: LeanKV, section 7.4 (H2O needs memory for the attention of prompts)
    """
    peaks = {name: _peak_mib(draw, name, tokens) for name in (PLAIN, *methods)}
    found = {f"{name}: MiB over none": peaks[name] - peaks[PLAIN] for name in methods}
    heads = draw.captures[0].queries.shape[1]
    return found | {"matrices of a layer, MiB": 4 * heads * tokens**2 / 2**20}


def _peak_mib(draw: Draw, method: str, tokens: int) -> float:
    command = [sys.executable, "-m", __name__, str(draw.model.path), method]
    command += [str(tokens), draw.split, str(draw.seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ModelError(f"{method}: {done.stderr.strip().splitlines()[-1]}")
    return float(json.loads(done.stdout.splitlines()[-1])["peak_bytes"]) / 2**20


def peak_bytes(model: Path, method: str, tokens: int, split: Split, seed: int) -> int:
    """Peak of this process above its size before, while one prompt is prefilled and compressed."""
    (text,) = documents(
        Vocabulary(model).encode,
        split,
        context=tokens,
        continuation=1,
        count=1,
        seed=seed,
    )
    config = AppConfig(
        model=ModelConfig(name=str(model), dtype="float32"),
        compressor=CompressorConfig(policy=method),
        pool=PoolConfig(kv_cache_memory_bytes=POOL_BYTES, prefix_bytes=0),
    )
    sampling = Sampling(temperature=0.0, max_tokens=2, ignore_eos=True)
    with LocalServer(config, model) as server:
        server.complete([server.request(text.context[:64], sampling)])
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text(RESET_PEAK, encoding="ascii")
        server.complete([server.request(text.context, sampling)])
        return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    model, method, tokens, split, seed = sys.argv[1:]
    found = peak_bytes(Path(model), method, int(tokens), cast("Split", split), int(seed))
    sys.stdout.write(json.dumps({"peak_bytes": found}) + "\n")
