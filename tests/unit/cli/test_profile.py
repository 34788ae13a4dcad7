"""``triptych profile`` as a user calls it."""

import json
from pathlib import Path

import pytest
import yaml

from tests.tiny import DIFFKV, save_tiny_model
from tests.unit.cli.conftest import Run
from triptych.cli.measure.profile import overhead_of
from triptych.workers.profiling.profiler import Profiler, Step


@pytest.fixture(scope="module")
def serve_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profile")
    args = {
        "model": {"name": str(save_tiny_model(folder / "tiny")), "dtype": "float32"},
        "compressor": {"profile": "none", **DIFFKV},
        "pool": {"kv_cache_memory_bytes": 16 << 20},
    }
    app = {"name": "triptych", "import_path": "triptych.deployments.app:build_app", "args": args}
    (folder / "serve.yaml").write_text(yaml.safe_dump({"applications": [app]}))
    return folder / "serve.yaml"


def test_it_writes_figures_a_trace_and_pictures(run: Run, serve_file: Path, tmp_path: Path) -> None:
    asked = ["--requests", "2", "--prompt", "80", "--answer", "12", "--overhead"]
    files = ["--json", str(tmp_path / "p.json"), "--trace", str(tmp_path / "t.json")]
    code, out, err = run(
        "profile", "--config", str(serve_file), *asked, *files, "--plot", str(tmp_path / "p")
    )
    assert code == 0, err
    assert "decode_attention" in out
    assert "a step that is looked at takes" in out
    figures = json.loads((tmp_path / "p.json").read_text())
    assert {row["stage"] for row in figures["parts"]} == {"prefill", "compress", "decode"}
    assert [row["layer"] for row in figures["layers"]] == [0, 1]
    assert figures["seconds_by_state"]["decoding"] > 0
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert (tmp_path / "p.png").stat().st_size > 10_000
    assert (tmp_path / "p.svg").exists()


def test_what_looking_costs_is_counted_from_neighbours() -> None:
    """Steps that grow, a spike, and 5 % more for each that is looked at."""
    profiler = Profiler(100)
    assert overhead_of(profiler) is None
    for at in range(40):
        is_watched = at % 3 == 0
        took_s = (1.0 + at / 1000) * (5.0 if at == 20 else 1.0) * (1.05 if is_watched else 1.0)
        step = Step("decode", 10.0 * at, 10.0 * at + took_s, tokens=1)
        (profiler.steps if is_watched else profiler.unprofiled).append(step)
    assert overhead_of(profiler) == pytest.approx(0.05, abs=0.002)
