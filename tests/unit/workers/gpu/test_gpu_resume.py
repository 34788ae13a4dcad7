"""A decode worker on a GPU dies at any line of its code; what the arena has is enough to go on."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.workers.decode.test_lowering import long_request, lower, started
from tests.unit.workers.decode.test_resume import (
    DECODE,
    RETIREMENT,
    Client,
    Crash,
    Stages,
    die_and_go_on,
    go_on,
    lines_of_a_run,
    requests,
    run,
    uninterrupted,
)
from triptych.kernels.pages import segments
from triptych.workers.decode.decode_engine import DecodeEngine
from triptych.workers.decode.window import RetirementPlan, Window
from triptych.workers.device import Device
from triptych.workers.kv.device_pages import Ids

Scores = dict[tuple[str, int, int, int], float]
"""Score of each token by request, layer, KV head and position."""


@pytest.fixture(scope="module", params=["diffkv", "selected", "over the bus"])
def stages(
    request: pytest.FixtureRequest, tiny_model: Path, quick_device: Device
) -> Iterator[Stages]:
    """In the last case copies of the pages have no room on the device."""
    is_far = request.param == "over the bus"
    with pytest.MonkeyPatch.context() as patch:
        if is_far:
            patch.setattr(type(quick_device), "free_bytes", 1000)
        policy = "diffkv" if is_far else request.param
        stages = Stages.of(tiny_model, policy, device=quick_device)
        assert stages.engines["decode"]._memory.is_copied != is_far
        yield stages


def test_the_next_worker_says_the_same_wherever_the_first_one_died(
    stages: Stages,
) -> None:
    whole, luck = uninterrupted(stages), random.Random(5)
    for files in (DECODE, RETIREMENT):
        total = lines_of_a_run(stages, files)
        die_and_go_on(stages, whole, luck.randrange(total), files)


@pytest.mark.parametrize("done", [0, 1, 2])
def test_a_device_that_dies_behind_the_host_leaves_a_retirement_to_repeat(
    stages: Stages, done: int
) -> None:
    """The tables are in place already; the device has done ``done`` of the two parts."""
    whole, client, left = uninterrupted(stages), Client(), [done]
    name, engine = stages.decoder()
    for request in requests():
        client.hear(engine.accept(stages.join(request)) or ())
    move, record, apply = Window._move, Window._queue_record, Window.apply

    def moving(window: Window, *args: Any) -> None:
        if left[0]:
            move(window, *args)

    def recording(window: Window, slots: Ids, phase: int) -> None:
        if left[0]:
            record(window, slots, phase)
            left[0] -= 1

    def applying(window: Window, plan: RetirementPlan) -> None:
        apply(window, plan)
        assert (window.moving.phase[plan.slots] == 1 + done).all()
        raise Crash

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Window, "_move", moving)
        patch.setattr(Window, "_queue_record", recording)
        patch.setattr(Window, "apply", applying)
        with pytest.raises(Crash):
            run(engine, client)
    go_on(stages, whole, client, name, f"died after {done} parts")


def test_lowered_pages_are_in_the_arena_too(tiny_model: Path, quick_device: Device) -> None:
    """The worker that lowered them dies; the next one reads them there."""
    stages = Stages.of(tiny_model, "kept", device=quick_device)
    whole, client = Client(), Client()
    _, engine = started(stages, whole)
    assert lower(engine).freed
    run(engine, whole)
    name, engine = started(stages, client)
    assert lower(engine).freed
    _, takeover = stages.decoder()
    client.hear(takeover.accept(stages.resume(long_request(), name)) or ())
    run(takeover, client)
    assert client.answer("r0") == whole.answer("r0")


def begun(stages: Stages, steps: int) -> tuple[str, DecodeEngine]:
    """A worker that has done some steps of all requests."""
    name, engine = stages.decoder()
    for request in requests():
        engine.accept(stages.join(request))
    for _ in range(steps):
        engine.step()
    return name, engine


def scores_of(engine: DecodeEngine) -> Scores:
    """What another worker would read in the arena."""
    found, shared = Scores(), engine._memory.shared.cpu()
    for name, slot in zip(*engine.slots(), strict=True):
        for table in engine.tables:
            parts = segments(shared, table.layout)
            for layer, head in np.ndindex(table.pages.shape[0], table.pages.shape[2]):
                for token in range(table.tokens[layer, slot, head]):
                    column, row = divmod(token, table.layout.tokens)
                    page = int(table.pages[layer, slot, head, column])
                    position = int(parts.positions[page, row])
                    found[name, layer, head, position] = float(parts.scores[page, row])
    return found


ATTENTION = "decode_attention", "attend_rotated"
"""Of coordinates of the model, and of others."""


def differing_layers(one: Scores, other: Scores) -> set[int]:
    assert one.keys() == other.keys()
    return {key[1] for key in one if one[key] != pytest.approx(other[key], rel=1e-3, abs=1e-5)}


@pytest.mark.skipif(torch.cuda.is_available(), reason="only the fake device dies inside a graph")
def test_a_death_inside_a_graph_counts_each_layer_of_scores_once(
    stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the layer whose scores are added and not recorded yet: that one counts twice."""
    name, engine = begun(stages, 0)
    if engine.selector is not None:
        return  # its steps are no graphs
    device, parts, steps = stages.device, list[str](), 0
    monkeypatch.setattr(device, "before_each", parts.append, raising=False)
    while "record_scores" not in parts:
        parts.clear()
        engine.step()
        steps += 1
    want = scores_of(engine)
    assert stages.pool.expel(name)
    layer, is_open = 0, False
    for at, part in enumerate(parts):
        layer += part in ATTENTION  # the layer of this part, from 1 on
        if part in ("append_tokens", *ATTENTION, "score_tokens", "record_scores"):
            left = [at]

            def die(_: str, left: list[int] = left) -> None:
                left[0] -= 1
                if left[0] < 0:
                    raise Crash

            monkeypatch.setattr(device, "before_each", lambda _: None)
            name, engine = begun(stages, steps - 1)
            monkeypatch.setattr(device, "before_each", die)
            with pytest.raises(Crash):
                engine.step()
            monkeypatch.setattr(device, "before_each", lambda _: None)
            takeover_name, takeover = stages.decoder()
            client = Client()
            for request in requests():
                client.hear(takeover.accept(stages.resume(request, name)) or ())
            client.hear(takeover.step())
            twice = {layer - 1} if is_open else set[int]()
            assert differing_layers(scores_of(takeover), want) == twice, f"before {at}: {part}"
            for one in (name, takeover_name):
                assert stages.pool.expel(one)
        is_open = part == "score_tokens" or (is_open and part != "record_scores")
    assert layer == 2
