"""Images through all stages with a compression method of their own."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.tiny_vision import Reference, random_images, save_tiny_vision_model
from tests.unit.workers.settled import booked_in_the_end
from triptych.core.config import AppConfig
from triptych.core.images import Image
from triptych.core.messages import Request, Sampling
from triptych.workers.local import Completion, LocalServer

METHODS = ("uniform:k8v4", "uniform:k8v4/tova", "uniform:k8v4/uniform:k4v2", "knorm/uniform:k8v4")
TEXT = "some words before " + "<image>" * 6 + " and a question behind them, of some length"
GREEDY = Sampling(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vision_model(tmp_path_factory.mktemp("vision"))


def run(model: Path, prefill: dict[str, object], **more: object) -> dict[str, Completion]:
    """The answer of each method to one chat with six images, all in one batch."""
    config = AppConfig.from_mapping(
        {
            "model": {"name": "tiny", "dtype": "float32"},
            "pool": {"kv_cache_memory_bytes": 32 << 20, "extent_pages": 64, "prefix_bytes": 0},
            "compressor": {
                "profile": "none",
                "policy": METHODS[0],
                "methods": METHODS[1:],
                "recent_window_tokens": 4,
                "image_keep_share": 0.25,
            },
            "encode": {"cache_bytes": 1 << 20},
            "prefill": prefill,
            **more,
        }
    )
    pictures = [Image.of(*one.size, one.tobytes()) for one in random_images(6, seed=4)]
    ids = Reference(model).processor.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    with LocalServer(config, model) as server:
        requests = list[Request]()
        for method in METHODS:
            asked = server.request(ids, GREEDY, pictures)
            requests.append(replace(asked, method=method))
        found = server.complete(requests)
        assert not booked_in_the_end(server)
    assert [one.error for one in found] == [None] * len(METHODS)
    return dict(zip(METHODS, found, strict=True))


def test_a_method_decides_about_the_tokens_of_its_modality_alone(model: Path) -> None:
    found = run(model, {})
    reports = {method: one.report for method, one in found.items()}
    plain = reports[METHODS[0]]
    assert plain is not None
    text, image = plain.modalities
    assert (image.tokens, image.stored_tokens) == (96, 96)
    for method in METHODS[1:3]:
        report = reports[method]
        assert report is not None
        assert report.policy == method
        assert report.modalities[0].stored_tokens == text.stored_tokens
        assert report.modalities[1].stored_bytes < image.stored_bytes
    pruned = reports[METHODS[1]]
    assert pruned is not None
    assert pruned.modalities[1].stored_tokens < 48
    pruned_text = reports[METHODS[3]]
    assert pruned_text is not None
    assert pruned_text.modalities[0].stored_tokens < text.stored_tokens
    assert pruned_text.modalities[1].stored_tokens == 96


def test_chunks_and_early_layers_change_nothing(model: Path) -> None:
    whole = run(model, {"max_num_batched_tokens": 512})
    for prefill, more in (
        ({"max_num_batched_tokens": 50}, {"experimental": {"layers_at_once": 0}}),
        ({"max_num_batched_tokens": 64}, {"experimental": {"layers_at_once": 1}}),
    ):
        found = run(model, prefill, **more)
        for method, one in found.items():
            assert one.tokens == whole[method].tokens, (method, prefill)
            assert one.report == whole[method].report
