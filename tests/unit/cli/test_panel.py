"""What the start panel says about the context that is served."""

from pathlib import Path

import pytest

from tests.tiny import save_tiny_model
from triptych.cli.serving.panel import start_panel
from triptych.cli.serving.serve_file import HttpOptions, ServedApp
from triptych.core.config import AppConfig


@pytest.mark.parametrize(("capacity", "is_whole"), [(1 << 20, True), (300_000, False)])
def test_the_panel_states_the_context_that_the_pool_holds(
    capacity: int, is_whole: bool, tmp_path: Path
) -> None:
    pool = {"kv_cache_memory_bytes": capacity, "prefix_bytes": 0, "extent_pages": 1}
    model = {"name": str(save_tiny_model(tmp_path / "tiny"))}
    config = AppConfig.from_mapping({"model": model, "pool": pool})
    app = ServedApp(name="app", route_prefix="/", config=config)
    lines = dict(start_panel(app, HttpOptions()))
    assert ("tiny, 512 tokens of context" in lines["model"]) is is_whole
    assert (" of 512 tokens of context" in lines["model"]) is not is_whole
    assert ("warning" in lines) is not is_whole
    if not is_whole:
        assert "pool.kv_cache_memory_bytes=300000 holds requests of up to" in lines["warning"]
