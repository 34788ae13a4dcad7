"""Requests of several compression methods in one server: each answers as its method alone."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.learned import networks_beside
from tests.tiny import DIFFKV
from tests.unit.conformance.rows import profile_beside
from tests.unit.workers.test_local_server import greedy, prompt
from triptych.core.config import AppConfig
from triptych.core.messages import Request
from triptych.workers.local import Completion, LocalServer

METHODS = ("uniform:k8v4", "uniform:k4v2", "uniform:fp16", "leankv")
"""Beside the default, which is diffkv."""
EVERY = ("", *METHODS)
MB = 1 << 20


def config(**parts: dict[str, object]) -> AppConfig:
    base: dict[str, object] = {
        "model": {"name": "tiny", "dtype": "float32"},
        "pool": {"kv_cache_memory_bytes": 64 * MB, "extent_pages": 64, "prefix_bytes": 0},
        "compressor": {**DIFFKV, "methods": METHODS, "mass_high": 0.3, "mass_low": 0.05},
        "prefill": {"max_num_batched_tokens": 48},
        "decode": {"max_num_seqs": 32},
    }
    return AppConfig.from_mapping(base | parts)


@contextmanager
def served(settings: AppConfig, model: Path) -> Iterator[LocalServer]:
    with LocalServer(settings, model) as server:
        yield server
        give_up_s = time.monotonic() + 10  # the last tokens come before the router's books
        while server.booked_bytes or server.pool.stat().request_pages:
            assert time.monotonic() < give_up_s, (server.booked_bytes, server.pool.stat())
            time.sleep(0.01)
        assert (server.pool.stat().faults, server.pool.check()) == ([], [])


def requests(server: LocalServer, count: int, tokens: int = 90) -> list[Request]:
    """Requests whose methods alternate; neighbours have equal prompts."""
    every = len(EVERY)
    return [
        replace(
            server.request(prompt(20 + 23 * (number // every), seed=1), greedy(tokens)),
            method=EVERY[number % every],
        )
        for number in range(count)
    ]


def tokens_of(answers: list[Completion]) -> list[list[int]]:
    assert [answer.error for answer in answers] == [None] * len(answers)
    return [answer.tokens for answer in answers]


def again(server: LocalServer, asked: Request) -> Request:
    return replace(asked, id=server.request(asked.prompt, asked.sampling).id)


def test_twenty_requests_of_five_methods_answer_as_each_does_alone(tiny_model: Path) -> None:
    with served(config(), tiny_model) as server:
        asked = requests(server, 20)
        together = server.complete(asked)
        alone = [server.complete([again(server, one)])[0] for one in asked]
    assert tokens_of(together) == tokens_of(alone)
    reports = [answer.report for answer in together]
    names = [report.policy for report in reports if report is not None]
    assert names == [one.method or "diffkv" for one in asked]
    sizes = {name: [r.stored_bytes for r in reports if r and r.policy == name] for name in names}
    assert sum(sizes["uniform:fp16"]) > sum(sizes["uniform:k8v4"]) > sum(sizes["uniform:k4v2"])


CODECS = (
    *("kvarn", "fp8", "saw_int4", "uniform:k4v8", "uniform:k8v2"),
    *("snapkv", "adakv"),
)
"""Beside the default: seven methods with a rotation, as it has one."""
OF_PROFILES = (
    *("h2o:generate", "compresskv", "tangram", "cake", "epicache"),
    *("leankv", "uniform:k2v2", "uniform:fp16"),
)
"""Beside the default: rules that drop tokens, of which some need a profile, and other methods."""
UNROTATED = ("kivi", "kivi:2", "spherical", "uniform:k8v4", "uniform:fp16", "fp8")
"""Methods without a rotation."""


@pytest.mark.conformance
@pytest.mark.parametrize(
    ("default", "others", "rotation"),
    [
        ("diffkv", CODECS, "auto"),
        ("diffkv", OF_PROFILES, "auto"),
        ("oscar", ("uniform:fp16",), "auto"),
        ("block_gtq", ("uniform:fp16",), "auto"),
        ("spherical", ("uniform:fp16",), "auto"),
        ("kivi", UNROTATED[1:], "none"),
    ],
    ids=["rotated", "profiles", "bases", "segments", "pairs", "unrotated"],
)
def test_sixteen_requests_of_many_methods_answer_as_each_does_alone(
    tiny_model: Path, default: str, others: tuple[str, ...], rotation: str
) -> None:
    """Prompts and answers are long enough that pages are encoded whole, and that tokens are
    dropped, while answers grow. ``oscar`` and ``block_gtq`` have coordinates of their own, which 16
    bits take on."""
    compressor = {
        **DIFFKV,
        "policy": default,
        "methods": others,
        "kv_rotation": rotation,
        "keep_share": 0.5,
        "profile": profile_beside(tiny_model),
    }
    every = ("", *others)
    with served(config(compressor=compressor), tiny_model) as server:
        asked = [
            replace(
                server.request(prompt(40 + 19 * n, seed=n % 3), greedy(110)),
                method=every[n % len(every)],
            )
            for n in range(16)
        ]
        together = server.complete(asked)
        alone = [server.complete([again(server, one)])[0] for one in asked]
    assert tokens_of(together) == tokens_of(alone)
    reports = [answer.report for answer in together]
    names = [report.policy for report in reports if report is not None]
    assert names == [one.method or default for one in asked]


def in_conformance(methods: tuple[str, ...]) -> Any:
    """A case of ``make conformance`` alone."""
    return pytest.param(methods, marks=pytest.mark.conformance)


CACHED = ("", "learned:score", "leankv", "uniform:k4v2")
"""Methods of the next test whose prompts read and fill the prefix cache."""


@pytest.mark.parametrize(
    "methods",
    [
        ("", "learned:merge", "learned:paper", "learned:score"),
        *map(
            in_conformance,
            [
                ("snapkv", "learned:merge", "adakv", "leankv"),
                ("h2o", "tova", "learned:score", "pyramidkv"),
                ("streaming_llm", "learned:paper", "knorm", "uniform:k4v2"),
                ("expected_attention", "cake", "keydiff", "kvcrush"),
                ("snapkv", "learned:merge", "leankv", "kvmerger"),
            ],
        ),
        ("h2o:generate", "snapkv", "leankv", "h2o"),
    ],
    ids=lambda methods: methods[-1],
)
def test_sixteen_requests_of_four_methods_answer_as_each_does_alone(
    tiny_model: Path, methods: tuple[str, ...]
) -> None:
    """With a prefix cache, which merged and pruned prompts neither read nor enter."""
    pool = {"kv_cache_memory_bytes": 64 * MB, "extent_pages": 64, "prefix_bytes": 16 * MB}
    offered = [name for name in methods if name]
    compressor = {**DIFFKV, "methods": offered, "learned": networks_beside(tiny_model)}
    with LocalServer(config(pool=pool, compressor=compressor), tiny_model) as server:
        asked = [
            replace(
                server.request(prompt(60 + 31 * (n // 4)), greedy(40)),
                method=methods[n % 4],
                session=f"s{n}",
            )
            for n in range(16)
        ]
        together = server.complete(asked)
        alone = [server.complete([again(server, one)])[0] for one in asked]
    assert tokens_of(together) == tokens_of(alone)
    sizes = dict.fromkeys(methods, 0)
    for one, first, second in zip(asked, together, alone, strict=True):
        assert first.report is not None
        assert first.report.policy == (one.method or "diffkv")
        sizes[one.method] += first.report.stored_bytes + first.report.shared_bytes
        is_cached = second.cached_tokens > 0
        has_block = len(one.prompt) > server.plan.of_method(one.method).block_tokens
        assert is_cached == (one.method in CACHED and has_block)
    if "" in methods:
        assert sizes["learned:merge"] == sizes["learned:paper"] < sizes[""]


@pytest.mark.parametrize("method", EVERY)
def test_a_method_among_others_answers_as_on_a_server_of_its_own(
    tiny_model: Path, method: str
) -> None:
    """In the coordinates that all methods have in common, set for both."""
    rotation = {"kv_rotation": "hadamard"}
    both = {**DIFFKV, "methods": METHODS, "mass_high": 0.3, "mass_low": 0.05, **rotation}
    own = {**both, "methods": (), "policy": method or "diffkv"}
    with served(config(compressor=own), tiny_model) as server:
        asked = [server.request(prompt(n, seed=1), greedy(90)) for n in (5, 66, 150)]
        alone = server.complete(asked)
    with served(config(compressor=both), tiny_model) as server:
        mixed = server.complete([replace(one, method=method) for one in asked])
    assert tokens_of(mixed) == tokens_of(alone)
    assert [one.report for one in mixed] == [one.report for one in alone]


def test_cached_prefixes_of_one_method_are_not_read_by_another(tiny_model: Path) -> None:
    pool = {"kv_cache_memory_bytes": 64 * MB, "extent_pages": 64, "prefix_bytes": 16 * MB}
    settings = config(pool=pool)
    with LocalServer(settings, tiny_model) as server:
        first = requests(server, 10)[5:]
        first = [replace(one, prompt=tuple(prompt(300))) for one in first]
        cold = server.complete(first)
        warm = server.complete([again(server, one) for one in first])
    # The pages of diffkv's blocks are those of leankv's: the same format, with significance.
    assert [answer.cached_tokens for answer in cold].count(0) >= 4
    assert all(answer.cached_tokens > 100 for answer in warm)
    assert tokens_of(cold) == tokens_of(warm)


def test_choices_of_equal_prompts_and_different_methods_share_nothing(tiny_model: Path) -> None:
    with served(config(), tiny_model) as server:
        asked = [
            replace(server.request(prompt(130), greedy(60)), method=method) for method in EVERY
        ]
        together = server.complete(asked)
        alone = [server.complete([again(server, one)])[0] for one in asked]
    assert tokens_of(together) == tokens_of(alone)


def test_a_method_that_nobody_offers_is_refused_and_leaves_nothing(tiny_model: Path) -> None:
    with served(config(), tiny_model) as server:
        bad = replace(server.request(prompt(50), greedy(10)), method="uniform:k4v4")
        good = server.request(prompt(50), greedy(10))
        refused, answered = server.complete([bad, good])
    assert refused.error is not None
    assert (refused.error.status, refused.error.code) == (400, "unknown_method")
    assert "'diffkv', 'uniform:k8v4', 'uniform:k4v2', 'uniform:fp16', 'leankv'" in (
        refused.error.message
    )
    assert len(answered.tokens) == 10


def test_short_memory_lowers_those_that_can_be_and_all_answer(tiny_model: Path) -> None:
    """Books, limits and lowerings follow each request's method."""
    pool = {"kv_cache_memory_bytes": 3 * MB // 2, "extent_pages": 16, "prefix_bytes": 0}
    settings = config(pool=pool, compressor={**DIFFKV, "alpha_low": 0, "methods": METHODS[:3]})
    with served(settings, tiny_model) as server:
        methods = ("", *METHODS[:3])
        asked = [
            replace(server.request(prompt(60, seed=n), greedy(200)), method=methods[n % 4])
            for n in range(24)
        ]
        answers = server.complete(asked)
        assert [len(answer.tokens) for answer in answers] == [200] * 24
    for one, answer in zip(asked, answers, strict=True):
        assert answer.report is not None
        assert answer.report.lowered_tokens == 0 or one.method == ""
