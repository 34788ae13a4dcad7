"""What Serve is told about replicas: its own machinery around our policy."""

from typing import Any

import pytest
from ray.serve.autoscaling_policy import _apply_autoscaling_config  # pyright: ignore
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from triptych.core.config import AppConfig
from triptych.core.errors import ConfigError
from triptych.deployments.app import _replicas  # pyright: ignore[reportPrivateUsage]
from triptych.deployments.placement.autoscaling import WANTED, policy


def config(**prefill: object) -> AppConfig:
    return AppConfig.from_mapping({"prefill": prefill})


def context(told: dict[str, float], current: int, settings: AutoscalingConfig) -> Any:
    return AutoscalingContext(
        deployment_id=None,  # pyright: ignore
        deployment_name="Prefill",
        app_name="default",
        current_num_replicas=current,
        target_num_replicas=current,
        running_replicas=[],
        total_num_requests=0.0,
        total_queued_requests=0.0,
        aggregated_metrics={WANTED: told} if told else {},  # pyright: ignore
        raw_metrics=None,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=8,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=None,
        config=settings,
    )


def scaled(told: dict[str, float], current: int, **settings: object) -> int:
    """What Serve makes of it, with no delays."""
    scaling = {"max_replicas": 8, "upscale_delay_s": 0, "downscale_delay_s": 0, **settings}
    found = _replicas(config(autoscaling=scaling), "prefill")["autoscaling_config"]
    count, _ = _apply_autoscaling_config(policy)(context(told, current, found))
    return count


def test_as_many_as_the_router_wants() -> None:
    assert scaled({"a": 2.2, "b": 3.1}, current=2) == 4
    assert scaled({"a": 0.3}, current=4) == 1


def test_a_router_that_says_nothing_changes_nothing() -> None:
    assert scaled({}, current=3) == 3


def test_delays_hold_for_a_while() -> None:
    assert scaled({"a": 5.0}, current=2, upscale_delay_s=30) == 2
    assert scaled({"a": 1.0}, current=2, downscale_delay_s=30) == 2


def test_without_a_maximum_the_number_is_fixed() -> None:
    assert _replicas(config(actor={"num_replicas": 3}), "prefill") == {"num_replicas": 3}


def test_a_stage_cannot_begin_with_a_number_that_it_may_not_have() -> None:
    with pytest.raises(ConfigError, match=r"prefill.actor.num_replicas=3: .*max_replicas \(2\)"):
        config(actor={"num_replicas": 3}, autoscaling={"max_replicas": 2})
    with pytest.raises(ConfigError, match="min_replicas"):
        config(autoscaling={"max_replicas": 2, "min_replicas": 3})
