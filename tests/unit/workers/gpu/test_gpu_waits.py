"""The host waits for the device at most twice in a decode step: for plans, and for the tokens."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.sliding import save_sliding
from tests.tiny import DIFFKV
from triptych.core.config import AppConfig
from triptych.core.messages import Lower, Lowered, PageLimit, Sampling, Send
from triptych.workers.decode.decode_engine import DecodeEngine
from triptych.workers.decode.lowering import Lowering, LoweringPlan
from triptych.workers.decode.page_expiry import PageExpiry
from triptych.workers.decode.window import RetirementPlan, Window
from triptych.workers.device import CPU, Device
from triptych.workers.kv.device_pages import NO_PAGES
from triptych.workers.local import LocalServer

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="only the fake device counts")

GREEDY = Sampling(temperature=0.0, max_tokens=50, ignore_eos=True)
PROMPT = tuple(range(20, 110))
SELECTION = {"method": "box", "budget_tokens": 16, "sink_tokens": 1, "window_tokens": 4}
OTHERS = ["uniform:k8v4", "uniform:fp16", "h2o:generate"]
SETTINGS: Mapping[str, Mapping[str, object]] = {
    "selection": {"compressor": DIFFKV, "decode": {"selection": SELECTION}},
    "kvarn": {"compressor": {"policy": "kvarn"}},
    "leankv": {"compressor": DIFFKV | {"policy": "leankv"}},
    "several": {"compressor": DIFFKV | {"methods": OTHERS}},
}


@dataclass
class Step:
    """What a decode step asked of the device, and what happened in it."""

    asked: list[str]
    retired: int = 0
    """Calls of ``Window.apply``."""
    expired: int = 0
    """Requests whose pages expired."""
    lowered: int = 0
    """Requests whose pages were ranked, and lowered if some were cold."""

    @property
    def waits(self) -> int:
        from tests.far import WAIT  # noqa: PLC0415 - there is none beside a GPU

        return self.asked.count(WAIT)


@contextmanager
def watched(device: Device) -> Generator[list[Step]]:
    """All decode steps of this process."""
    seen, current = list[Step](), Step([])
    asked: list[str] = device.asked  # type: ignore[attr-defined]
    step, apply, remove = DecodeEngine.step, Window.apply, PageExpiry.remove
    lower = Lowering.apply

    def stepping(engine: DecodeEngine) -> object:
        nonlocal current
        start, current = len(asked), Step([])
        seen.append(current)
        sends = list(step(engine))
        current.asked = asked[start:]
        return sends

    def applying(window: Window, plan: RetirementPlan) -> object:
        current.retired += 1
        return apply(window, plan)

    def removing(expiry: PageExpiry, slot: int, now: int, positions: np.ndarray) -> object:
        gone = remove(expiry, slot, now, positions)
        current.expired += gone is not NO_PAGES
        return gone

    def lowering(one: Lowering, slot: int, plan: LoweringPlan, ids: np.ndarray) -> np.ndarray:
        current.lowered += 1
        return lower(one, slot, plan, ids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecodeEngine, "step", stepping)
        patch.setattr(Lowering, "apply", lowering)
        patch.setattr(Window, "apply", applying)
        patch.setattr(PageExpiry, "remove", removing)
        yield seen


def steps_of(
    settings: Mapping[str, object], model: Path, device: Device, methods: Sequence[str] = ("",)
) -> list[Step]:
    """The steps in which four requests are answered at once."""
    with watched(device) as seen:
        answers(settings, model, device, methods)
    return seen


def answers(
    settings: Mapping[str, object], model: Path, device: Device, methods: Sequence[str] = ("",)
) -> list[list[int]]:
    """Greedy answers to four requests, two of a length each."""
    config = AppConfig.from_mapping(
        {
            "model": {"name": "tiny", "dtype": "float32"},
            "pool": {"kv_cache_memory_bytes": 8 << 20, "extent_pages": 64, "prefix_bytes": 0},
            **settings,
        }
    )
    with LocalServer(config, model, device=device) as server:
        asked = [
            replace(server.request([n, *PROMPT[n // 2 :]], GREEDY), method=method)
            for n, method in zip(range(4), cycle(methods), strict=False)
        ]
        done = server.complete(asked)
    assert [one.error for one in done] == [None] * len(done)
    assert all(len(one.tokens) == GREEDY.max_tokens for one in done)
    return [list(one.tokens) for one in done]


def check(steps: Sequence[Step]) -> None:
    """Two waits where something must be planned, one in other steps."""
    for one in steps:
        is_planned = one.retired or one.expired or one.lowered
        assert one.waits <= (2 if is_planned else 1), one


@pytest.mark.parametrize("name", SETTINGS)
def test_a_step_waits_at_most_twice(name: str, tiny_model: Path, quick_device: Device) -> None:
    methods = ["", *OTHERS] if name == "several" else [""]
    steps = steps_of(SETTINGS[name], tiny_model, quick_device, methods)
    check(steps)
    assert any(one.retired for one in steps)


@pytest.fixture(scope="module")
def sliding_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sliding")
    save_sliding("Gemma 3", path)
    return path


def test_pages_of_sliding_windows_expire_without_a_wait_of_their_own(
    sliding_model: Path, quick_device: Device
) -> None:
    settings = {"compressor": DIFFKV | {"methods": ["uniform:k8v4", "h2o:generate"]}}
    methods = ["", "uniform:k8v4", "", "h2o:generate"]
    steps = steps_of(settings, sliding_model, quick_device, methods)
    check(steps)
    assert max(one.expired for one in steps) > 1


KEPT = {"compressor": DIFFKV | {"alpha_high": 0.1, "alpha_low": 0.0}}
"""Most tokens are high, and none is dropped."""


def near_limit(engine: DecodeEngine) -> None:
    """Give each request a limit so close that it must lower pages when it grows."""
    for one in engine._running.values():  # pyright: ignore[reportPrivateUsage]
        if one.limit is None:
            pages = one.num_pages + one.step_pages + 2
            one.limit = PageLimit(request=one.id, pages=pages, lowers=True)


def test_lowered_requests_are_ranked_together_and_moved_without_a_wait(
    tiny_model: Path, quick_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside requests that retire pages in the same step."""
    step = DecodeEngine.step

    def limiting(engine: DecodeEngine) -> object:
        near_limit(engine)
        return step(engine)

    monkeypatch.setattr(DecodeEngine, "step", limiting)
    with watched(quick_device) as steps:
        there = answers(KEPT, tiny_model, quick_device)
    assert there == answers(KEPT, tiny_model, CPU)
    check(steps)
    assert max(one.lowered for one in steps) > 1
    assert any(one.lowered and one.retired for one in steps)


def test_the_router_is_answered_at_the_end_of_the_next_step(
    tiny_model: Path, quick_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, counts, heard = DecodeEngine.step, [0], list[Lowered]()

    def asking(engine: DecodeEngine) -> list[Send]:
        counts[0] += 1
        if counts[0] == 20:
            for name in engine.requests():
                assert engine.accept(Lower(request=name, number=1, pages=1000)) == []
        sends = list(step(engine))
        mine = [send for send in sends if isinstance(send.message, Lowered)]
        heard.extend(send.message for send in mine if isinstance(send.message, Lowered))
        assert not mine or counts[0] == 20
        return [send for send in sends if send not in mine]  # the router did not ask

    monkeypatch.setattr(DecodeEngine, "step", asking)
    check(steps_of(KEPT, tiny_model, quick_device))
    assert heard
    assert all(one.number == 1 and one.freed > 0 for one in heard)
