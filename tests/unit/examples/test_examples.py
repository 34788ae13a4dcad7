"""The examples do what they say, with a tiny model."""

import importlib
import json
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from tests.tiny import save_tiny_model
from triptych.cli.main import app
from triptych.core.config import AppConfig, CompressorConfig
from triptych.core.errors import ConfigError
from triptych.core.methods.table import policy_of

EXAMPLES = Path(__file__).parents[3] / "examples"
TESTED = {"generate_offline", "evaluate_codec", "rare_is_precious", "newest_first", "loop_stop"}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == TESTED


def test_an_answer_without_ray(tiny_model: str) -> None:
    module = load("generate_offline")
    text = module.main(tiny_model)
    assert text
    assert module.main(tiny_model) == text


def test_a_codec_is_compared_with_the_full_cache(tiny_model: str) -> None:
    results = load("evaluate_codec").main(tiny_model, context=200, documents=1)
    told = {row.method: row.summary for row in results.rows if row.context == 200}
    assert told["full"].kl == 0 < told["uniform:k8v4"].kl < told["uniform:k4v2"].kl


def test_a_policy_of_ones_own_compresses_and_its_name_is_told(tiny_model: str) -> None:
    plain, own = load("rare_is_precious").main(tiny_model).values()
    assert own.policy == "rare_is_precious:policy"
    assert own.stored_bytes < plain.stored_bytes < plain.raw_bytes


def test_a_plugin_of_the_decode_step_ends_an_answer_that_goes_in_circles(tiny_model: str) -> None:
    """With the last of so many equal tokens; the prefill draws the first one of an answer."""
    plain, ended = load("loop_stop").main(tiny_model, times=2)
    pairs = enumerate(pairwise(plain[1:]), 3)
    length = next((i for i, (one, next_one) in pairs if one == next_one), 60)
    assert ended == plain[:length]


def test_a_batching_policy_of_ones_own_decides() -> None:
    assert load("newest_first").main() == ["a", "d"]


def test_the_simulator_takes_a_batching_policy_by_its_file(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    line = f"simulate --replicas 3 --requests 40 --policy newest_first:policy --json {out}"
    done = CliRunner().invoke(app, line.split())
    assert done.exit_code == 0, done.output
    assert "newest_first:policy" in json.dumps(json.loads(out.read_text()))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("rare_is_precious:nothing", "cannot be imported"),
        ("no_such_module_here:policy", "is it on PYTHONPATH?"),
        ("rare_is_precious", "no plug-in 'rare_is_precious'"),
        ("os:path:join", "no plug-in"),
        ("../evil:policy", "no plug-in"),
    ],
)
def test_a_name_that_leads_nowhere_is_named(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=r"compression_policies") as caught:
        policy_of(CompressorConfig(policy=name))
    assert says in str(caught.value)


def test_names_are_taken_from_the_configuration() -> None:
    config = AppConfig.from_mapping({"compressor": {"policy": "rare_is_precious:policy"}})
    assert policy_of(config.compressor).high_format == "k8v8"
