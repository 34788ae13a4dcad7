"""The methods of the table, as the conformance suite runs them."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.learned import CHUNK_TOKENS, networks_beside
from tests.moves import ALONE
from tests.tiny import DIFFKV
from tests.unit.workers.decode.test_resume import Client, Stages
from triptych.core.head_budgets import encode_head_budgets
from triptych.core.images import Segment
from triptych.core.layout import FORMATS, Geometry
from triptych.core.messages import (
    Compress,
    Compressed,
    CompressItem,
    Encode,
    Planned,
    Prefill,
    Prefilled,
    Request,
    Send,
)
from triptych.core.methods.learned_files import LearnedFile, NetworkKind
from triptych.core.methods.table import METHODS
from triptych.core.profile import Profile, Settings
from triptych.kernels import OPS, load_tokens
from triptych.workers.kv.handle_codec import unpack_run
from triptych.workers.models.facts import describe
from triptych.workers.models.kv_rotation import pack_bases

PLAIN = tuple(name for name in ALONE if FORMATS[name].suits_any_method)
"""Formats that settings may name for any method."""
METHOD_NAMES = tuple(
    name
    for row in METHODS.builtin
    for name in ([f"uniform:{form}" for form in PLAIN] if row == "uniform" else [row])
)
"""Each row of the table, and ``uniform`` with each of these formats."""
ALIKE = (
    *("streaming_llm", "knorm", "keydiff", "h2o", "snapkv", "pyramidkv", "tova"),
    *("expected_attention", "kvcrush", "tangram", "compresskv"),
    *("learned:paper", "learned:score"),
    *("saw_int4", "fp8", "kivi", "kivi:2", "oscar", "block_gtq"),
    *(f"uniform:{form}" for form in ("k4v8", "k8v2", "k2v4", "k4v1", "k2v2", "k4v2c", "fp8")),
)
"""Methods that differ from another one in a part that has tests of its own."""
METHODS_TO_TEST = tuple(
    pytest.param(name, marks=[pytest.mark.conformance] if name in ALIKE else [])
    for name in METHOD_NAMES
)
"""``make check`` runs one method of each kind, ``make conformance`` all."""

Tokens = list[tuple[str, Tensor, Tensor, Tensor]]
"""Of each run: its format, and keys, values and positions of its tokens."""


FILES = tuple(
    LearnedFile(
        path="", kind=kind, tensors="", chunk_tokens=0 if kind == "scorer" else CHUNK_TOKENS
    )
    for kind in get_args(NetworkKind)
)
"""One of each kind, for plans that nothing runs by."""


def profile_for(geometry: Geometry, weights: str = "") -> Profile:
    """A profile of which some methods need the head budgets, where odd head rows keep twice as
    much, and others the retrieval heads, bases or orders of pairs."""
    shares = [
        min(1.0, step / 32 * (4 / 3 if row % 2 else 2 / 3)) if step < 32 else 1.0
        for row in range(geometry.head_rows)
        for step in range(33)
    ]
    made = Profile(model="made up", weights=weights, geometry=geometry, settings=Settings())
    made = made.with_head_budgets(encode_head_budgets(shares))
    heads = tuple((1 + layer % 2, 0, 3) for layer in range(geometry.layers))
    errors = tuple(1.0 + layer for layer in range(geometry.layers))
    shape = 2, geometry.layers, geometry.kv_heads, geometry.head_dim, geometry.head_dim
    draw = torch.Generator().manual_seed(geometry.head_dim)
    bases = pack_bases(torch.linalg.qr(torch.randn(shape, generator=draw))[0])
    pairs = geometry.head_dim // 2
    orders = [torch.randperm(pairs, generator=draw) for _ in range(geometry.head_rows)]
    order = torch.cat(orders).to(torch.uint8).numpy().tobytes()
    return replace(
        made,
        retrieval_heads=heads,
        layer_errors=errors,
        bases=Profile.pack(bases),
        pair_order=Profile.pack(order),
    )


def profile_beside(model: Path) -> str:
    """The path of such a profile for a model, which is written."""
    facts, path = describe(model), model / "profile.json"
    profile_for(facts.geometry, facts.weights).write(path)
    return str(path)


def settings_of(method: str, model: Path | None = None) -> Mapping[str, object]:
    """Settings by which every class of tokens occurs within a few tokens.

    ``model``: where learned networks are beside it.
    """
    learned = [] if model is None else networks_beside(model)
    masses = {"mass_high": 0.4, "mass_low": 0.1}
    calibrated = "tangram", "compresskv", "oscar", "block_gtq"
    is_calibrated = model is not None and method in calibrated
    profile = {"profile": profile_beside(model)} if is_calibrated and model else {}
    blocks = {"block_tokens": 16}
    return {**DIFFKV, "policy": method, **masses, "learned": learned, **profile, **blocks}


def compress(
    stages: Stages,
    requests: list[Request],
    how: AbstractContextManager[None] | None = None,
    segments: tuple[Segment, ...] = (),
) -> list[tuple[Planned, Compressed]]:
    """Read prompts one by one, and compress them in one step, in a context (``how``).

    ``segments``: tokens of each that count as those of images.
    """
    engine = stages.engines["compress"]
    read = [
        stages._until(stages.engines["prefill"], Prefill(requests=(one,)), Prefilled)
        for one in requests
    ]
    items = [
        CompressItem(
            request=one.id,
            handle=done.handle,
            method=one.method,
            floor=one.floor,
            segments=segments,
        )
        for one, done in zip(requests, read, strict=True)
    ]
    names = tuple(one.id for one in requests)
    with how or nullcontext():
        sends: list[Send] = list(engine.accept(Compress(items=tuple(items))))
        engine.accept(Encode(requests=names, arena=stages.pool.arena.id))
        sends += engine.step()
    planned = [send.message for send in sends if isinstance(send.message, Planned)]
    done = [send.message for send in sends if isinstance(send.message, Compressed)]
    assert len(planned) == len(done) == len(requests)
    return list(zip(planned, done, strict=True))


def stored(stages: Stages, done: Compressed) -> Tokens:
    """What a decode worker reads in the pages of a request."""
    plan, found = stages.plan, Tokens()
    rows, capacity = plan.geometry.head_rows, stages.pool.capacity_pages
    for layout, run in zip(layouts(stages), done.handle.runs, strict=True):
        counts, ids = unpack_run(run, layout, rows, capacity)
        width = int(layout.pages(int(counts.max(initial=0))))
        table = np.zeros((rows, max(1, width)), np.int32)
        used = np.arange(table.shape[1]) < -(-counts // layout.tokens)[:, None]
        table[used] = ids
        arena = torch.from_numpy(stages.pool.arena.data)
        loaded = load_tokens(arena, layout, torch.from_numpy(table), torch.from_numpy(counts))
        found.append((layout.format.name, *(part.clone() for part in loaded)))
    return found


def layouts(stages: Stages) -> list[object]:
    """Layouts of a request's runs."""
    plan = stages.plan
    return [plan.recent, *plan.classes]


def is_same(one: Tokens, other: Tokens) -> bool:
    return all(
        first[0] == second[0] and all(map(torch.equal, first[1:], second[1:]))
        for first, second in zip(one, other, strict=True)
    )


def answer(stages: Stages, requests: list[Request]) -> dict[str, list[int]]:
    """The answers of requests that decode together."""
    client, (name, engine) = Client(), stages.decoder()
    for request in requests:
        client.hear(engine.accept(stages.join(request)) or ())
    while engine.has_work():
        client.hear(engine.step())
    assert stages.pool.expel(name)
    return {name: client.answer(name) for name in client.tokens}


def named(requests: list[Request], prefix: str) -> list[Request]:
    """The same requests with other ids."""
    return [replace(one, id=f"{prefix}{one.id}") for one in requests]


@contextmanager
def by_reference() -> Iterator[None]:
    """Have all operations computed by their readable definitions in torch."""
    before = {name: dict(op.loaded) for name, op in OPS.items()}
    for op in OPS.values():
        op.loaded["cpu"] = op.spec
    try:
        yield
    finally:
        for name, op in OPS.items():
            op.loaded.clear()
            op.loaded.update(before[name])
