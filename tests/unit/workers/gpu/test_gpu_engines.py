"""The three engines on a GPU say what they say on the CPU."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tiny import DIFFKV
from triptych.core.config import AppConfig
from triptych.core.messages import Sampling
from triptych.kvpool import WorkerPool
from triptych.workers.decode.checkpoint import Checkpoint
from triptych.workers.decode.decode_engine import DecodeEngine
from triptych.workers.device import CPU, Device
from triptych.workers.local import Completion, LocalServer

PROMPTS = (3, 40, 90)
GREEDY = Sampling(temperature=0.0, max_tokens=18, ignore_eos=True, logprobs=2)
SELECTION = {"method": "moments", "keep_fraction": 0.5, "budget_tokens": 0, "dense_layers": 0}
PLUGINS = [
    {"name": "entropy_stop", "options": {"threshold": 3.0, "patience_tokens": 3}},
    {"name": "soft_prune", "options": {"threshold": 0.5}},
    {"name": "layer_exit", "options": {"threshold": 4.5, "depth": 0.5}},
]


def config(**parts: object) -> AppConfig:
    base: dict[str, object] = {
        "model": {"name": "tiny", "dtype": "float32"},
        "pool": {"kv_cache_memory_bytes": 4 << 20, "extent_pages": 64, "prefix_bytes": 0},
        "compressor": DIFFKV,
        "prefill": {"max_num_batched_tokens": 48},
    }
    return AppConfig.from_mapping(base | parts)


def answers(
    settings: AppConfig,
    model: Path,
    device: Device,
    sampling: Sampling = GREEDY,
    lengths: Sequence[int] = PROMPTS,
) -> list[Completion]:
    """Of some prompts at once, and of what follows the longest one and its answer."""
    generator = random.Random(5)
    prompts = [[generator.randrange(2, 258) for _ in range(count)] for count in lengths]
    with LocalServer(settings, model, device=device) as server:
        found = server.complete([server.request(prompt, sampling) for prompt in prompts])
        if settings.pool.prefix_bytes:
            again = [*prompts[-1], *found[-1].tokens, 7, 8, 9]
            found += server.complete([server.request(again, sampling)])
        if not settings.pool.prefix_bytes:  # else answers are being kept yet
            assert server.pool.stat().request_pages == 0
    return found


def check_alike(here: list[Completion], there: list[Completion], *, within: float = 1e-2) -> None:
    for one, other in zip(here, there, strict=True):
        assert one.error is None
        assert other.error is None
        assert one.tokens == other.tokens
        assert one.report == other.report
        assert one.finish == other.finish
        assert one.cached_tokens == other.cached_tokens
        pairs = zip(one.logprobs, other.logprobs, strict=True)
        assert max(abs(a.logprob - b.logprob) for a, b in pairs) < within


@pytest.mark.parametrize("policy", ["uniform:fp16", "uniform:k8v4", "diffkv", "leankv"])
def test_answers_are_those_of_the_cpu(tiny_model: Path, quick_device: Device, policy: str) -> None:
    settings = config(compressor=DIFFKV | {"policy": policy})
    check_alike(answers(settings, tiny_model, CPU), answers(settings, tiny_model, quick_device))


@pytest.mark.parametrize(
    "parts",
    [
        {"decode": {"selection": SELECTION}},
        {"decode": {"plugins": PLUGINS}},
        {
            "pool": {
                "kv_cache_memory_bytes": 8 << 20,
                "prefix_bytes": 2 << 20,
                "keep_answers": "always",
            }
        },
    ],
    ids=["selection", "plugins", "prefixes"],
)
def test_so_they_are_with_all_that_decoding_can_do(
    tiny_model: Path, quick_device: Device, parts: dict[str, object]
) -> None:
    settings = config(**parts)
    here = answers(settings, tiny_model, CPU)
    check_alike(here, answers(settings, tiny_model, quick_device))
    if "pool" in parts:
        assert here[-1].cached_tokens > 0


def test_drawn_tokens_are_those_of_the_cpu(tiny_model: Path, quick_device: Device) -> None:
    drawn = replace(
        GREEDY, temperature=0.8, seed=3, top_p=0.9, top_k=40, min_p=0.01,
        repetition_penalty=1.1, presence_penalty=0.2, logit_bias=((65, 2.0),), max_tokens=6,
        prompt_logprobs=2,
    )  # fmt: skip
    settings = config(compressor={"policy": "uniform:k8v4"})
    here = answers(settings, tiny_model, CPU, drawn)
    check_alike(here, answers(settings, tiny_model, quick_device, drawn))


def test_kernels_of_a_gpu_say_the_same(tiny_model: Path, device: Device) -> None:
    """All of them at once, with every class of tokens, and some pages left out."""
    settings, few = config(decode={"selection": SELECTION}), replace(GREEDY, max_tokens=16)
    here = answers(settings, tiny_model, CPU, few, (60,))
    check_alike(here, answers(settings, tiny_model, device, few, (60,)))


def test_prompts_are_read_in_16_bits_where_the_model_is(tiny_model: Path, device: Device) -> None:
    # Else a processor with VNNI and without AMX multiplies prompts in 8 bits.
    model = {"name": "tiny", "dtype": "bfloat16", "quantization": "none"}
    settings = config(model=model, compressor={"policy": "uniform:fp16"})
    few = replace(GREEDY, max_tokens=2)
    here = answers(settings, tiny_model, CPU, few)
    check_alike(here, answers(settings, tiny_model, device, few), within=0.1)


def test_the_arena_has_what_a_gpu_worker_wrote(
    tiny_model: Path, quick_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever takes over reads it there: keys, values, positions and scores of every token."""
    checked, step = list[int](), DecodeEngine.step

    def checking(engine: DecodeEngine) -> object:
        sends = list(step(engine))
        _names, slots = engine.slots()
        memory = engine._memory
        assert memory.is_copied
        for slot in slots.tolist():
            for table in engine.tables:
                tokens, pages = table.read(slot)
                counts = -(-tokens // table.layout.tokens)
                ends = np.cumsum(counts)
                # Token slots after the last token of a row have arbitrary content.
                full = [p for p in range(len(pages)) if p + 1 not in ends[counts > 0]]
                at = memory.device.put(pages[full].astype(np.int64))
                near, shared = (
                    arena.view(-1, table.layout.size_bytes)
                    for arena in (memory.near, memory.shared)
                )
                assert (near[at].cpu() == shared[at].cpu()).all()
                checked.append(len(full))
        return sends

    monkeypatch.setattr(DecodeEngine, "step", checking)
    answers(config(), tiny_model, quick_device)
    assert sum(checked) > 100


@pytest.mark.skipif(torch.cuda.is_available(), reason="only the fake device knows what is pending")
def test_nobody_is_told_before_the_device_is_done(
    tiny_model: Path, quick_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is handed pages, or gets them next, must not meet a kernel that is still at them."""
    early = dict[str, list[str]]()

    def watch(owner: type, name: str) -> None:
        method = getattr(owner, name)

        def watched(*args: object, **kwargs: object) -> object:
            if pending := quick_device.pending:
                early.setdefault(name, pending)
            return method(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    for name in ("handoff", "free", "release", "withdraw", "release_prefix", "publish_prefix"):
        watch(WorkerPool, name)
    for name in ("append_token", "mark_preempted", "mark_finished"):
        watch(Checkpoint, name)
    pool = {"kv_cache_memory_bytes": 8 << 20, "prefix_bytes": 2 << 20, "keep_answers": "always"}
    for parts in ({"pool": pool}, {"decode": {"selection": SELECTION, "plugins": PLUGINS}}):
        answers(config(**parts), tiny_model, quick_device)
    assert early == {}
