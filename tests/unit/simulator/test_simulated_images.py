"""Simulated requests with images: the encode stage of its own, or that of prefill workers."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from triptych.core.config import EncodeConfig, RouterConfig
from triptych.core.errors import ConfigError
from triptych.simulator import Cluster, Costs, Job, Simulation, Trial
from triptych.simulator.capacity import saturation_rate

COSTS = Costs(encode_step_s=0.5, encode_token_s=0.01)
TOKENS = 20
APART = Cluster(
    encode=1, has_images=True, shared_cores=False, image_tokens=TOKENS, capacity_bytes=300 << 20
)
INSIDE = replace(APART, encode=0)
COLOCATED = replace(APART, encode=0, prefill=0, compress=0, decode=0, colocated=2)
IMAGE_S = TOKENS * COSTS.encode_token_s


def job(number: int, images: Sequence[str], at_s: float = 0.0) -> tuple[Job, ...]:
    return (
        Job(
            id=f"r{number}",
            prompt_tokens=30 + TOKENS * len(images),
            max_tokens=4,
            at_s=at_s,
            images=tuple((name, TOKENS) for name in images),
        ),
    )


def run(cluster: Cluster, jobs: list[tuple[Job, ...]]) -> Trial:
    return Simulation(cluster, COSTS).run(jobs)


@pytest.mark.parametrize("cluster", [APART, INSIDE, COLOCATED], ids=["apart", "inside", "all"])
def test_every_request_ends_and_each_image_is_encoded_once(cluster: Cluster) -> None:
    if cluster.colocated:  # each worker has a cache of its own
        cluster = replace(cluster, colocated=1)
    jobs = [job(number, ("a", f"own{number}", "a"), number * 0.1) for number in range(6)]
    trial = run(cluster, [*jobs, job(6, ())])
    assert [one.error for one in trial.outcomes] == [""] * 7
    assert trial.counters["images:encoded"] + trial.counters["images:cached"] >= 6
    if cluster.encode:
        features_s = trial.busy_s["encode"] % COSTS.encode_step_s
        assert trial.busy_s["encode"] >= COSTS.encode_step_s + 7 * IMAGE_S
        assert features_s == pytest.approx(7 * IMAGE_S % COSTS.encode_step_s)
    else:
        assert set(trial.busy_s) & {"encode+prefill", "all"}


def test_a_prompt_waits_for_its_features_and_others_do_not() -> None:
    trial = run(APART, [job(0, ("a", "b")), job(1, (), 0.01)])
    with_images, text = sorted(trial.outcomes, key=lambda one: one.job.id)
    assert with_images.began_s > COSTS.encode_step_s + 2 * IMAGE_S
    assert text.began_s < COSTS.encode_step_s
    assert text.last_s < with_images.began_s


def test_features_that_are_cached_take_no_time_and_the_cache_has_a_bound() -> None:
    jobs = [job(number, ("a",), 3.0 * number) for number in range(4)]
    assert run(APART, jobs).busy_s["encode"] == pytest.approx(COSTS.encode_step_s + IMAGE_S)
    without = replace(APART, encoding=EncodeConfig(cache_bytes=0))
    assert run(without, jobs).busy_s["encode"] == pytest.approx(4 * (COSTS.encode_step_s + IMAGE_S))


def test_a_step_has_as_many_images_as_its_pixels_allow() -> None:
    names = [f"image{number}" for number in range(8)]
    one_each = replace(APART, encoding=EncodeConfig(max_batch_pixels=1))
    assert run(APART, [job(0, names)]).busy_s["encode"] == pytest.approx(
        COSTS.encode_step_s + 8 * IMAGE_S
    )
    assert run(one_each, [job(0, names)]).busy_s["encode"] == pytest.approx(
        8 * (COSTS.encode_step_s + IMAGE_S)
    )


def test_equal_images_are_equal_prompts_for_the_prefix_cache_and_others_are_not() -> None:
    plan = replace(APART.plan, prefix_bytes=64 << 20)
    cluster = replace(APART, plan=plan, image_tokens=400)

    def turn(number: int, name: str) -> tuple[Job, ...]:
        text = (("text", 40),)
        images = ((name, 400),)
        return (Job(f"r{number}", 440, 4, 30.0 * number, segments=text, images=images),)

    trial = run(cluster, [turn(0, "a"), turn(1, "a"), turn(2, "b")])
    cached = [one.cached_tokens for one in sorted(trial.outcomes, key=lambda one: one.job.id)]
    assert cached[0] == cached[2] == 0
    assert cached[1] > 200


def test_shards_divide_encode_workers() -> None:
    cluster = replace(
        APART, encode=2, prefill=2, compress=2, decode=2, router=RouterConfig(shards=2)
    )
    trial = run(cluster, [job(number, (f"i{number}",), 0.1 * number) for number in range(8)])
    assert [one.error for one in trial.outcomes] == [""] * 8
    with pytest.raises(ConfigError, match="encode"):
        replace(cluster, encode=1)


def test_a_cluster_without_the_stage_has_no_encode_workers() -> None:
    with pytest.raises(ConfigError, match="encode"):
        Cluster(encode=1)


def test_capacity_counts_the_time_of_images() -> None:
    rate = saturation_rate(APART, COSTS, 130, 4, images=5)
    assert rate == pytest.approx(1 / (5 * (IMAGE_S + COSTS.encode_step_s / 20)), rel=0.1)
    assert saturation_rate(INSIDE, COSTS, 130, 4, images=5) < rate
    assert saturation_rate(APART, COSTS, 130, 4) > rate
