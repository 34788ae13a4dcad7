"""``decode.selection.method: a2ats`` served: codebooks of the model rank the pages of a request."""

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tiny import save_tiny_model, save_tiny_qwen3
from tests.unit.conformance.rows import profile_beside
from triptych.core.config import AppConfig
from triptych.core.errors import ConfigError, ModelError
from triptych.core.messages import Sampling
from triptych.evals.studies.codebook_study import CodebookStudy, fit_key_codebooks
from triptych.workers.decode.codebook_file import check_codebooks
from triptych.workers.local import LocalServer
from triptych.workers.models.facts import describe

PROMPT = tuple(random.Random(5).choices(range(2, 250), k=400))
GREEDY = Sampling(max_tokens=40, temperature=0.0, ignore_eos=True)


def fitted(model: Path) -> Path:
    output = model.with_name(f"{model.name}-codebooks.safetensors")  # not among its weights
    fit_key_codebooks(model, CodebookStudy(context=300, documents=1), output, lambda _: None)
    return output


@pytest.fixture(scope="module")
def books(tiny_model: Path) -> Path:
    return fitted(tiny_model)


def settings(books: object, compressor: Mapping[str, object], **selection: object) -> AppConfig:
    chosen = {"method": "a2ats", "codebooks": str(books), "budget_tokens": 0, **selection}
    return AppConfig.from_mapping(
        {
            "model": {"name": "tiny", "dtype": "float32"},
            "pool": {"kv_cache_memory_bytes": 64 << 20, "extent_pages": 64},
            "compressor": {"kv_rotation": "hadamard", "high_window_tokens": 8, **compressor},
            "decode": {"selection": chosen},
        }
    )


def answers(
    config: AppConfig, model: Path, lengths: tuple[int, ...] = (300, 400)
) -> list[list[int]]:
    with LocalServer(config, model) as server:
        asked = [server.request(PROMPT[:count], GREEDY) for count in lengths]
        done = server.complete(asked)
        alone = [server.complete([replace(one, id=f"{one.id} alone")])[0] for one in asked]
    assert [one.error for one in done] == [None] * len(lengths)
    assert [one.tokens for one in alone] == [one.tokens for one in done]
    return [list(one.tokens) for one in done]


@pytest.mark.parametrize(
    "compressor",
    [
        {"policy": "uniform:fp16", "kv_rotation": "none"},
        {"policy": "diffkv", "recent_window_tokens": 8, "methods": ["uniform:k8v4", "snapkv"]},
    ],
)
def test_a_share_of_one_answers_as_without_selection_and_less_reads_less(
    tiny_model: Path, books: Path, compressor: Mapping[str, object]
) -> None:
    every = answers(settings(books, compressor, keep_fraction=1.0), tiny_model)
    plain = settings(books, compressor, method="none", codebooks="")
    assert every == answers(plain, tiny_model)
    some = settings(books, compressor, keep_fraction=0.3, sink_tokens=1, window_tokens=8)
    assert len(answers(some, tiny_model)[0]) == 40


def test_another_model_is_served_with_books_of_its_own_and_refuses_others(
    tmp_path: Path, books: Path
) -> None:
    model = save_tiny_qwen3(tmp_path / "qwen3")
    compressor = {"policy": "uniform:k8v4"}
    with pytest.raises(ConfigError, match=r"fitted to another model.*run 'triptych codebooks'"):
        answers(settings(books, compressor), model)
    assert len(answers(settings(fitted(model), compressor), model)) == 2


def test_files_that_are_missing_torn_or_changed_are_refused(tmp_path: Path, books: Path) -> None:
    facts = describe(save_tiny_model(tmp_path / "tiny"))
    content = books.read_bytes()
    torn, changed = tmp_path / "torn", tmp_path / "changed"
    torn.write_bytes(content[: len(content) // 2])
    changed.write_bytes(content[:-5] + b"\x01\x02\x03\x04\x05")
    compressor = {"policy": "uniform:k8v4"}
    with pytest.raises(ConfigError, match=r"there is no such file: run 'triptych codebooks'"):
        check_codebooks(settings(tmp_path / "none", compressor), facts)
    with pytest.raises(ModelError):
        check_codebooks(settings(torn, compressor), facts)
    with pytest.raises(ModelError, match="damaged"):
        check_codebooks(settings(changed, compressor), facts)
    check_codebooks(settings(books, compressor), facts)


def test_settings_that_do_not_fit_are_refused(tiny_model: Path, books: Path) -> None:
    compressor = {"policy": "uniform:k8v4"}
    for selection in ({"codebooks": ""}, {"method": "box"}):
        with pytest.raises(ConfigError, match=r"decode.selection.codebooks.*triptych codebooks"):
            settings(books, compressor, **selection)
    with pytest.raises(ConfigError, match="omitted_mass"):
        settings(books, compressor, omitted_mass=0.1)
    for method in ("oscar", "block_gtq"):
        compressor = {"policy": method, "profile": profile_beside(tiny_model)}
        with pytest.raises(ConfigError, match="coordinates of each head mix what RoPE turns"):
            answers(settings(books, compressor), tiny_model)
