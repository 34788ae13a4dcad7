"""Page limits of requests that have not joined: kept until they do, and bounded."""

from pathlib import Path

from tests.unit.workers.decode.test_resume import Stages
from triptych.core.messages import PageLimit
from triptych.workers.decode.decode_engine import MOST_LIMITS


def test_limits_of_requests_that_never_come_are_dropped(tiny_model: Path) -> None:
    engine = Stages.of(tiny_model, "diffkv").engines["decode"]
    for number in range(MOST_LIMITS + 10):
        assert engine.accept(PageLimit(request=f"r{number}", pages=5)) == []
    assert len(engine._limits) == MOST_LIMITS
    assert "r9" not in engine._limits
    assert f"r{MOST_LIMITS + 9}" in engine._limits
    engine.cancel(["r10"])
    assert "r10" not in engine._limits
    engine.abandon()
    assert not engine._limits
