"""Which workers have the encode stage, and what the settings of the stage must agree on."""

import pytest

from triptych.core.config import AppConfig
from triptych.core.errors import ConfigError
from triptych.core.messages import STAGES, stages_of
from triptych.core.shards import shard_of
from triptych.deployments.app import stage_groups

OF_IMAGES = stages_of(has_images=True)


def config(**encode: object) -> AppConfig:
    return AppConfig.from_mapping({"encode": encode})


def test_the_stage_has_workers_of_its_own_or_those_of_prefill() -> None:
    assert stage_groups(config(), OF_IMAGES) == {stage: (stage,) for stage in OF_IMAGES}
    inside = stage_groups(config(worker="prefill"), OF_IMAGES)
    assert inside == {
        "prefill": ("encode", "prefill"),
        "compress": ("compress",),
        "decode": ("decode",),
    }


def test_a_model_without_images_has_no_such_stage() -> None:
    assert stage_groups(config(worker="prefill"), STAGES) == {stage: (stage,) for stage in STAGES}


def test_its_copies_may_follow_the_load() -> None:
    found = config(autoscaling={"max_replicas": 4})
    assert found.autoscaling("encode").most(found.encode.actor) == 4
    assert not config().autoscaling("encode").is_on


@pytest.mark.parametrize(
    ("encode", "reason"),
    [
        ({"autoscaling": {"max_replicas": 2}, "actor": {"num_replicas": 3}}, "num_replicas=3"),
        ({"worker": "prefill", "autoscaling": {"max_replicas": 2}}, "prefill.autoscaling"),
        ({"worker": "prefill", "actor": {"num_gpus": 1}}, r"set prefill\.actor"),
        ({"worker": "decode"}, "encode.worker"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    encode: dict[str, object], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        config(**encode)


def test_shards_have_equal_parts_of_its_copies() -> None:
    scaling = {"min_replicas": 2, "max_replicas": 4}
    given = {"encode": {"autoscaling": scaling, "actor": {"num_replicas": 2}}}
    every = AppConfig.from_mapping(
        {
            **given,
            "router": {"shards": 2},
            **{stage: {"actor": {"num_replicas": 2}} for stage in ("prefill", "compressor")},
            "decode": {"actor": {"num_replicas": 2}},
        }
    )
    one = shard_of(every, 0)
    assert (one.encode.actor.num_replicas, one.encode.autoscaling.max_replicas) == (1, 2)
    with pytest.raises(ConfigError, match=r"encode\.actor\.num_replicas=2: expected a multiple"):
        AppConfig.from_mapping({**given, "router": {"shards": 4}})
