"""Pages of sliding layers hold their window; the others go, whatever dies or moves meanwhile."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.effort import in_parts
from tests.sliding import WINDOW, save_sliding
from tests.tiny import DIFFKV
from tests.unit.workers.decode import test_resume
from tests.unit.workers.decode.test_lowering import positions
from tests.unit.workers.decode.test_resume import (
    CONTEXT,
    Client,
    Stages,
    die_and_go_on,
    lines_of_a_run,
    run,
    test_a_request_moves_between_living_workers_and_no_token_changes,
    uninterrupted,
)
from triptych.core.messages import Evict, Evicted, Request, Sampling
from triptych.core.pages import PagePlan
from triptych.router import ByteModel
from triptych.workers.decode import checkpoint, page_expiry, page_growth, window
from triptych.workers.decode.page_expiry import expired_pages

__all__ = ["test_a_request_moves_between_living_workers_and_no_token_changes"]

METHODS = {
    "fp16": {"policy": "uniform:fp16", "recent_window_tokens": 4},
    "uniform": {"policy": "uniform:k8v4", "recent_window_tokens": 4},
    "diffkv": DIFFKV,
    "mixed": {**DIFFKV, "methods": ["uniform:fp16"]},
}
OTHERS = ("leankv", "saw_int4", "fp8", "kivi", "kvarn", "snapkv", "adakv", "streaming_llm", "knorm")
EXPIRY = frozenset(
    str(Path(module.__file__ or "")) for module in (page_expiry, page_growth, checkpoint, window)
)


@pytest.fixture(scope="module")
def sliding_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sliding")
    save_sliding("Gemma 3", path)
    return path


@pytest.fixture(scope="module", params=list(METHODS))
def stages(request: pytest.FixtureRequest, sliding_model: Path) -> Stages:
    return Stages.of(sliding_model, METHODS[request.param])


@pytest.fixture(scope="module")
def whole(stages: Stages) -> dict[str, list[int]]:
    return uninterrupted(stages)


@in_parts(3)
def test_a_worker_may_die_at_any_line_of_an_expiry(
    stages: Stages, whole: dict[str, list[int]], part: slice
) -> None:
    total = lines_of_a_run(stages, EXPIRY)
    for lines in range(total // 2, total, max(1, total // 20))[part]:
        die_and_go_on(stages, whole, lines, EXPIRY)


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 60), st.integers(0, 30))
def test_what_a_later_token_reads_stays_and_a_page_of_others_goes(
    tokens: int, room: int, sliding: int, first: int
) -> None:
    pages = -(-tokens // room)
    stored = np.arange(first, first + pages * room, dtype=np.int32)
    now = first + tokens
    gone = expired_pages(
        stored.reshape(1, pages, room), np.array([tokens]), np.array([now - sliding + 1])
    )[0]
    for page, positions_of in enumerate(np.split(stored[:tokens], range(room, tokens, room))):
        is_read = any(now - position < sliding for position in positions_of.tolist())
        assert gone[page] == (not is_read)


def one_request(method: str) -> Request:
    sampling = Sampling(max_tokens=100, temperature=9.0, seed=3, ignore_eos=True)
    prompt = tuple(np.random.default_rng(3).integers(2, 250, CONTEXT - 110).tolist())
    return Request(id="r0", prompt=prompt, sampling=sampling, reply_to="client", method=method)


@pytest.mark.parametrize("method", ["uniform:fp16", "uniform:k8v4", "diffkv", *OTHERS])
def test_no_request_holds_more_than_the_router_books(sliding_model: Path, method: str) -> None:
    """At each step; rows of sliding layers hold all that the next token reads, and no low token."""
    stages = Stages.of(sliding_model, {**DIFFKV, "policy": method})
    plan, request = stages.plan, one_request("")
    sliding = [layer for layer, each in enumerate(plan.windows) if each]
    assert sliding
    join = stages.join(request)
    bound = ByteModel(plan).estimate(len(request.prompt), 100)
    held = stages.pool.stat().held_pages * plan.page_bytes
    assert held <= bound.compressed
    sizes = bound.corrected(held)
    _, engine = stages.decoder()
    client = Client()
    client.hear(engine.accept(join) or ())
    (one,) = engine._running.values()
    assert one.num_pages * plan.page_bytes == held
    while engine.has_work():
        client.hear(engine.step())
        if not engine.has_work():
            break
        assert one.num_pages * plan.page_bytes <= sizes.grown
        assert_window_is_there(engine, plan, sliding, one.position, method)
    assert stages.pool.check() == []
    assert stages.pool.stat().held_pages == 0


@pytest.mark.parametrize("method", ["uniform:fp16", "uniform:k8v8"])
def test_a_request_is_evicted_and_computed_again(sliding_model: Path, method: str) -> None:
    """Its tokens are those of an undisturbed run: formats with many bits turn none of these."""
    stages, request = Stages.of(sliding_model, {**DIFFKV, "policy": method}), one_request("")
    request = replace(request, sampling=replace(request.sampling, temperature=0.0))
    client, written = Client(), tuple[int, ...]()
    _, engine = stages.decoder()
    client.hear(engine.accept(stages.join(request)) or ())
    run(engine, client)
    whole = client.answer("r0")
    for _ in range(3):
        engine.accept(stages.join(replace(request, output_tokens=written)))
        for _ in range(30):
            engine.step()
        (send,) = engine.accept(Evict(request="r0", number=1)) or ()
        assert isinstance(send.message, Evicted)
        assert stages.pool.stat().by_request == {}
        written += send.message.output_tokens
        assert list(written) == whole[: len(written)]
    assert len(written) > 90
    assert stages.pool.check() == []
    assert stages.pool.stat().held_pages == 0


def assert_window_is_there(
    engine: object, plan: PagePlan, sliding: list[int], seen: int, method: str
) -> None:
    recent, high, *low = positions_of(engine)
    for layer in sliding:
        for row in range(layer * plan.geometry.kv_heads, (layer + 1) * plan.geometry.kv_heads):
            assert not any(part[row] for part in low)
            assert high[row] == sorted(high[row])
            visible = plan.visible_tokens(seen, WINDOW)
            most = max(WINDOW, visible) + plan.high.tokens + plan.retire_tokens
            assert len(high[row]) <= most
            read = set(range(seen - WINDOW + 1, seen)) - {*recent[row]}
            if method not in ("snapkv", "adakv", "streaming_llm", "knorm", "diffkv", "leankv"):
                assert read <= {*high[row]}


def positions_of(engine: object) -> list[list[list[int]]]:
    return positions(engine)  # pyright: ignore[reportArgumentType]


def test_an_answer_is_that_of_pages_with_all_tokens(
    sliding_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"policy": "uniform:k8v4", "recent_window_tokens": 4}
    answers = list[list[int]]()
    for windows in (None, ()):
        if windows is not None:
            described = test_resume.describe(sliding_model)
            plain = replace(described, geometry=replace(described.geometry, windows=windows))
            monkeypatch.setattr(test_resume, "describe", lambda _, plain=plain: plain)
        stages = Stages.of(sliding_model, settings)
        assert stages.plan.has_windows == (windows is None)
        client = Client()
        _, engine = stages.decoder()
        client.hear(engine.accept(stages.join(one_request(""))) or ())
        run(engine, client)
        answers.append(client.answer("r0"))
    assert answers[0] == answers[1]
