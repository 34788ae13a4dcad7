"""Compression methods: parts that cannot stand together, and methods that share a pool."""

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.config import AppConfig, CompressorConfig
from triptych.core.errors import ConfigError, UnknownMethod
from triptych.core.layout import Geometry
from triptych.core.methods.composition import (
    OF_PROFILES,
    PROVIDED,
    RULES,
    WITH_PROFILE,
    Method,
    Part,
    Trait,
)
from triptych.core.methods.learned_files import LearnedFile, NetworkKind
from triptych.core.methods.parts import ATTENTION, EVERY_TOKEN, HADAMARD, ONE_RANGE
from triptych.core.methods.table import METHODS, offered_methods, policies_of
from triptych.core.methods.uniform import uniform
from triptych.core.pages import PagePlan
from triptych.core.policy import KVRotation, Policy
from triptych.core.profile import Profile, Settings

GEOMETRY = Geometry(layers=2, kv_heads=2, head_dim=64)
TRAITS: tuple[Trait, ...] = tuple(dict.fromkeys(t for r in RULES for t in (r.first, r.second)))
PLAIN = Part(role="basis", name="plain", granularity="model")
BY_CHANNEL = Part(
    role="codec",
    name="channels_of_pages",
    granularity="page",
    traits=frozenset({"codes_by_channel", "codes_whole_pages"}),
)
PRUNING = Part(role="budget", name="top_k", granularity="token", traits=frozenset({"drops_tokens"}))
LEARNED = Part(
    role="merger",
    name="learned",
    granularity="token",
    needs=frozenset({"training"}),
    traits=frozenset({"merges_tokens", "places_merged_tokens"}),
)


def method(**parts: Part | None) -> Method:
    given: dict[str, Part | None] = {"budget": EVERY_TOKEN, "basis": PLAIN, "codec": ONE_RANGE}
    return Method(name="m", idea="", policy=uniform, **(given | parts))


def plan(**compressor: object) -> PagePlan:
    config = AppConfig.from_mapping({"compressor": {"profile": "none", **compressor}})
    return PagePlan.of(config, GEOMETRY)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"codec": BY_CHANNEL, "basis": HADAMARD}, "rotation mixes the channels"),
        ({"codec": BY_CHANNEL, "budget": PRUNING}, "cannot drop one token of a page"),
        (
            {
                "codec": BY_CHANNEL,
                "budget": replace(PRUNING, traits=frozenset({"requantizes_tokens"})),
            },
            "cannot store one token of a page with fewer bits",
        ),
        (
            {"merger": replace(LEARNED, traits=frozenset({"merges_tokens"}))},
            "'learned': keys are stored after RoPE, so a merged token needs a position",
        ),
        (
            {"codec": replace(ONE_RANGE, traits=frozenset({"bits_by_energy"}))},
            "bits by energy need a scale-normalized codec",
        ),
        (
            {
                "codec": replace(
                    ONE_RANGE, traits=frozenset({"bits_by_energy", "scale_normalized"})
                ),
                "basis": HADAMARD,
            },
            "spreads the energy over all channels",
        ),
        ({"codec": ATTENTION}, "'received_attention' is a scorer, not a codec"),
    ],
)
def test_parts_that_cannot_stand_together_are_refused_with_the_reason(
    parts: dict[str, Part], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        method(**parts)


@given(st.frozensets(st.sampled_from(TRAITS)))
def test_a_composition_stands_exactly_if_no_rule_is_violated(traits: frozenset[Trait]) -> None:
    codec = replace(ONE_RANGE, traits=traits)
    violated = [
        rule
        for rule in RULES
        if rule.first in traits
        and (rule.second not in traits if rule.is_needed else rule.second in traits)
    ]
    if violated:
        with pytest.raises(ConfigError, match=violated[0].reason.partition(",")[0]):
            method(codec=codec)
    else:
        assert method(codec=codec).traits == traits


def test_a_need_that_nobody_meets_is_told_before_anything_runs() -> None:
    learned = method(merger=LEARNED)
    assert learned.needs == {"training"}
    with pytest.raises(ConfigError, match="merger 'learned' needs training, which this server"):
        learned.check_needs(PROVIDED)
    learned.check_needs(PROVIDED | frozenset({"training"}))


@pytest.mark.parametrize("name", METHODS.builtin)
def test_every_row_of_the_table_is_a_method_of_its_name(name: str) -> None:
    found = METHODS.load(name)
    assert isinstance(found, Method)
    assert (found.name, found.version) == (name, 2 if name == "leankv" else 1)
    assert found.idea
    found.check_needs(WITH_PROFILE | OF_PROFILES, get_args(NetworkKind))


def test_compresskv_is_refused_without_the_heads_that_retrieve() -> None:
    config = AppConfig.from_mapping({"compressor": {"methods": ["compresskv"]}})
    made = Profile(model="any", weights="", geometry=GEOMETRY, settings=Settings())
    with pytest.raises(ConfigError, match=r"needs retrieval_heads.*run 'triptych retrieval' for"):
        PagePlan.of(config, GEOMETRY, made)
    assert "compresskv" not in offered_methods((), made)
    heads = ((3, 1, 0, 2, 4),) * GEOMETRY.layers
    found = replace(made, retrieval_heads=heads, layer_errors=(0.5,) * GEOMETRY.layers)
    assert "compresskv" in offered_methods((), found)
    rule = PagePlan.of(config, GEOMETRY, found).of_method("compresskv").policy.retention
    assert rule is not None
    assert rule.heads == ((3, 1, 0, 2),) * GEOMETRY.layers


def test_oscar_is_refused_without_bases_and_beside_other_coordinates() -> None:
    config = AppConfig.from_mapping({"compressor": {"policy": "oscar"}})
    made = Profile(model="any", weights="", geometry=GEOMETRY, settings=Settings())
    with pytest.raises(ConfigError, match=r"needs bases.*run 'triptych calibrate --bases' for"):
        PagePlan.of(config, GEOMETRY, made)
    assert "oscar" not in offered_methods((), made)
    size = 2 * GEOMETRY.head_rows * GEOMETRY.head_dim**2
    found = replace(made, bases=Profile.pack(bytes(size)))
    assert "oscar" in offered_methods((), found)
    made_plan = PagePlan.of(config, GEOMETRY, found)
    assert made_plan.policy.kv_rotation.bases == bytes(size)
    assert made_plan.policy.high_format == "k2v2"
    assert not made_plan.caches_prompts
    beside = AppConfig.from_mapping({"compressor": {"policy": "oscar", "methods": ["diffkv"]}})
    with pytest.raises(ConfigError, match="different coordinates"):
        PagePlan.of(beside, GEOMETRY, found)


def test_block_gtq_is_refused_without_an_order_of_pairs_and_beside_other_coordinates() -> None:
    config = AppConfig.from_mapping({"compressor": {"policy": "block_gtq"}})
    made = Profile(model="any", weights="", geometry=GEOMETRY, settings=Settings())
    wanted = r"needs pair_order.*run 'triptych calibrate --pair-order' for"
    with pytest.raises(ConfigError, match=wanted):
        PagePlan.of(config, GEOMETRY, made)
    assert "block_gtq" not in offered_methods((), made)
    order = bytes(range(GEOMETRY.head_dim // 2)) * GEOMETRY.head_rows
    found = replace(made, pair_order=Profile.pack(order))
    assert "block_gtq" in offered_methods((), found)
    plan = PagePlan.of(config, GEOMETRY, found)
    assert plan.policy.kv_rotation.pair_order == order
    assert plan.policy.high_format == "block_gtq"
    assert not plan.caches_prompts
    beside = AppConfig.from_mapping({"compressor": {"policy": "block_gtq", "methods": ["diffkv"]}})
    with pytest.raises(ConfigError, match="different coordinates"):
        PagePlan.of(beside, GEOMETRY, found)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"policy": "uniform:block_gtq"}, "by a method of its own: use 'block_gtq'"),
        ({"policy": "diffkv", "high_format": "block_gtq"}, r"high_format=.block_gtq.: expected a"),
        ({"policy": "diffkv", "low_format": "block_gtq"}, r"low_format=.block_gtq.: expected a"),
        ({"policy": "snapkv", "high_format": "block_gtq"}, r"high_format=.block_gtq.: expected a"),
        ({"policy": "block_gtq", "kv_rotation": "none"}, "rotates keys and values"),
    ],
)
def test_no_other_method_has_the_format_of_block_gtq(
    settings: dict[str, object], wanted: str
) -> None:
    order = bytes(range(GEOMETRY.head_dim // 2)) * GEOMETRY.head_rows
    made = Profile(model="any", weights="", geometry=GEOMETRY, settings=Settings())
    found = replace(made, pair_order=Profile.pack(order))
    with pytest.raises(ConfigError, match=wanted):
        PagePlan.of(AppConfig.from_mapping({"compressor": settings}), GEOMETRY, found)


def test_keys_of_block_gtq_need_sixteenths_of_the_channels() -> None:
    odd = replace(GEOMETRY, head_dim=24)
    order = Profile.pack(bytes(range(12)) * odd.head_rows)
    found = Profile(model="any", weights="", geometry=odd, settings=Settings(), pair_order=order)
    config = AppConfig.from_mapping({"compressor": {"policy": "block_gtq"}})
    with pytest.raises(ConfigError, match=r"head_dim 24.*expected a multiple of 16"):
        PagePlan.of(config, odd, found)


def test_a_network_serves_the_methods_of_its_kind_alone() -> None:
    scorer = LearnedFile(path="s", kind="scorer", tensors="")
    config = AppConfig.from_mapping({"compressor": {"methods": ["learned:score"]}})
    found = PagePlan.of(config, GEOMETRY, learned=[scorer]).of_method("learned:score")
    assert found.policy.scorer is scorer
    assert not found.policy.needs_attention_sums
    for name in ("learned:merge", "learned:paper"):
        config = AppConfig.from_mapping({"compressor": {"methods": [name]}})
        with pytest.raises(
            ConfigError, match=rf"'{name}': merger .* needs training .*text.*'triptych"
        ):
            PagePlan.of(config, GEOMETRY, learned=[scorer])


@pytest.mark.parametrize("prompt", [0, 1, 66, 92, 150, 229, 230, 1024])
@pytest.mark.parametrize("chunk", [2, 3, 5])
def test_tokens_are_merged_in_whole_chunks_and_the_rest_stays_recent(
    prompt: int, chunk: int
) -> None:
    file = LearnedFile(path="m", kind="merger", tensors="", chunk_tokens=chunk)
    config = AppConfig.from_mapping({"compressor": {"policy": "learned:merge"}})
    found = PagePlan.of(config, GEOMETRY, learned=[file])
    leaving = found.leaving_tokens(prompt)
    assert leaving % chunk == 0
    assert found.encoded_tokens(leaving) * chunk == leaving
    recent = prompt - leaving
    assert min(prompt, found.sink_tokens + 64) <= recent < found.full_recent_tokens
    assert found.high.has_bias
    assert not found.recent.has_bias
    assert not any((found.caches_prompts, found.shares, found.rounds_prompts))


@pytest.mark.parametrize(
    ("chunk", "settings", "says"),
    [
        (200, {}, "merges 200 tokens; at most 24"),
        (5, {"compressor": {"high_format": "fp16"}}, "a quantized format with learned:merge"),
        (5, {"decode": {"selection": {"method": "box"}}}, "selection ranks pages by their keys"),
    ],
)
def test_merging_that_cannot_be_served_is_refused_at_start(
    chunk: int, settings: dict[str, dict[str, object]], says: str
) -> None:
    file = LearnedFile(path="m", kind="merger", tensors="", chunk_tokens=chunk)
    compressor = {"policy": "learned:merge", **settings.get("compressor", {})}
    config = AppConfig.from_mapping({**settings, "compressor": compressor})
    with pytest.raises(ConfigError, match=says):
        PagePlan.of(config, GEOMETRY, learned=[file])


def test_a_plan_has_the_plans_of_all_methods_and_they_differ_in_the_policy_alone() -> None:
    offered = ("uniform:k4v2", "leankv", "diffkv", "uniform:fp16")
    found = plan(policy="diffkv", methods=offered)
    assert list(found.by_method) == ["diffkv", "uniform:k4v2", "leankv", "uniform:fp16"]
    for name, one in found.by_method.items():
        alone = plan(policy=name, kv_rotation="hadamard")
        assert replace(one, others=()) == replace(alone, prefix_bytes=found.prefix_bytes)
        assert found.of_method(name) is one
    assert found.of_method("") is found
    with pytest.raises(UnknownMethod, match=r"no compression method 'x': .*'diffkv', 'uniform:k4"):
        found.of_method("x")


def test_sixteen_bits_take_the_coordinates_of_the_others() -> None:
    found = plan(policy="uniform:fp16", methods=("uniform:k8v4",)).by_method.values()
    assert {one.policy.kv_rotation for one in found} == {KVRotation(rotated=True)}
    assert plan(policy="uniform:fp16").policy.kv_rotation == KVRotation()


@pytest.mark.parametrize("name", ["kivi", "kivi:2", "kvarn"])
@pytest.mark.parametrize("prompt", [0, 1, 66, 110, 142, 230, 1024])
def test_tokens_of_codecs_of_whole_pages_leave_a_page_at_a_time(name: str, prompt: int) -> None:
    found = plan(policy=name)
    room, leaving = found.high.tokens, found.leaving_tokens(prompt)
    assert found.retire_tokens == room == found.retire_pages * found.recent.tokens
    assert leaving % room == 0
    kept = found.sink_tokens + found.policy.window_tokens
    assert min(prompt, kept) <= prompt - leaving < kept + room
    assert not any((found.caches_prompts, found.shares, found.rounds_prompts))


@pytest.mark.parametrize(
    ("compressor", "says"),
    [
        ({"policy": "kivi", "kv_rotation": "hadamard"}, "'kivi' has scales of channels"),
        ({"policy": "kvarn", "kv_rotation": "none"}, "'kvarn' rotates keys and values"),
        ({"policy": "saw_int4", "kv_rotation": "none"}, "'saw_int4' rotates keys and values"),
        ({"policy": "kvarn", "methods": ["kivi"]}, "different coordinates"),
        ({"policy": "spherical", "kv_rotation": "hadamard"}, "kv_rotation='hadamard'"),
        ({"policy": "spherical", "methods": ["diffkv"]}, "different coordinates"),
        ({"policy": "uniform:r3a5v4"}, "pages of r3a5v4 need keys that are not rotated"),
        ({"policy": "diffkv", "high_format": "r3a5v4"}, "compressor.high_format='r3a5v4'"),
        ({"policy": "diffkv", "low_format": "r3a5v2"}, "compressor.low_format='r3a5v2'"),
        ({"policy": "uniform:kivi4"}, "pages of kivi4 are encoded whole"),
        ({"policy": "diffkv", "high_format": "kvarn"}, "compressor.high_format='kvarn'"),
        ({"policy": "diffkv", "low_format": "kivi2"}, "compressor.low_format='kivi2'"),
    ],
)
def test_codecs_in_settings_that_they_do_not_fit_are_refused(
    compressor: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        plan(**compressor)


def test_codecs_of_whole_pages_refuse_page_selection_and_odd_pages() -> None:
    for settings, says in (
        ({"decode": {"selection": {"method": "box"}}}, "pages of kvarn have no summaries"),
        ({"pool": {"page_bytes": 5120}}, "page_bytes=5120: 'kvarn' encodes"),
    ):
        config = AppConfig.from_mapping({**settings, "compressor": {"policy": "kvarn"}})
        with pytest.raises(ConfigError, match=says):
            PagePlan.of(config, GEOMETRY)


def test_formats_that_need_no_rotation_take_that_of_the_others() -> None:
    found = plan(policy="kivi", methods=("fp8", "kivi:2", "uniform:k8v4"), kv_rotation="none")
    assert {one.policy.kv_rotation for one in found.by_method.values()} == {KVRotation()}


def plain_k8v8(config: CompressorConfig, profile: Profile | None = None) -> Policy:
    """A policy of its own, without rotation."""
    return replace(
        uniform(replace(config, policy="uniform:k8v8"), profile),
        name=config.policy,
        kv_rotation=KVRotation(),
    )


def often(config: CompressorConfig, profile: Profile | None = None) -> Policy:
    """A policy that scores tokens at intervals of its own."""
    found = uniform(replace(config, policy="uniform:k8v4"), profile)
    return replace(found, name=config.policy, low_format="k4v2", alpha_high=1.0, score_every=3)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (f"{__name__}:plain_k8v8", "store keys and values in different coordinates"),
        (f"{__name__}:often", "scores tokens every 8 tokens and .* every 3"),
    ],
)
def test_methods_that_cannot_share_a_pool_are_refused_at_start(other: str, reason: str) -> None:
    config = AppConfig.from_mapping({"compressor": {"policy": "diffkv", "methods": [other]}})
    with pytest.raises(ConfigError, match=reason):
        policies_of(config.compressor)


@pytest.mark.parametrize(
    ("methods", "says"),
    [
        (["uniform:k3v3"], "no page format 'k3v3'"),
        (["difkv"], "did you mean 'diffkv'"),
        (["auto"], "compressor.policy='auto'"),
        ([f"uniform:k8v4{' ' * n}" for n in range(17)], "compressor.methods=17"),
    ],
)
def test_wrong_names_of_methods_are_refused(methods: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        AppConfig.from_mapping({"compressor": {"methods": methods}})
