"""Images and text through all stages in one process, against transformers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny_vision import (
    Reference,
    random_images,
    save_tiny_gemma3,
    save_tiny_idefics3,
    save_tiny_idefics3_with_tiles,
    save_tiny_mistral3,
    save_tiny_qwen2_vl,
    save_tiny_smolvlm,
    save_tiny_vision_model,
)
from tests.unit.workers.settled import booked_in_the_end
from triptych.core.config import AppConfig
from triptych.core.images import Image
from triptych.core.messages import Sampling
from triptych.workers.local import Completion, LocalServer

PICTURES = random_images(10, seed=1)
CASES = [
    ("a<image>b", [0]),
    ("<image>.<image>!", [1, 1]),
    ("text alone", []),
    ("<image>x<image>yy<image> z", [2, 3, 4]),
    ("q<image>" * 10 + " end", list(range(10))),
]
GREEDY = Sampling(temperature=0.0, max_tokens=16, ignore_eos=True)


@pytest.fixture(
    scope="module",
    params=[
        save_tiny_vision_model,
        save_tiny_idefics3,
        save_tiny_idefics3_with_tiles,
        save_tiny_smolvlm,
        save_tiny_qwen2_vl,
        save_tiny_mistral3,
        save_tiny_gemma3,
    ],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return request.param(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[LocalServer]:
    config = AppConfig.from_mapping(
        {
            "model": {"name": "tiny", "dtype": "float32"},
            "pool": {
                "kv_cache_memory_bytes": 32 << 20,
                "extent_pages": 64,
                "prefix_bytes": 8 << 20,
            },
            "compressor": {"policy": "uniform:fp16"},
            "prefill": {"max_num_batched_tokens": 48},
            "encode": {"cache_bytes": 1 << 20, "max_batch_pixels": 10_000},
        }
    )
    with LocalServer(config, model) as server:
        yield server


def pictures(numbers: list[int]) -> list[Image]:
    return [Image.of(*PICTURES[one].size, PICTURES[one].tobytes()) for one in numbers]


def ask(
    server: LocalServer, reference: Reference, cases: list[tuple[str, list[int]]], salt: str = ""
) -> list[Completion]:
    requests = list[object]()
    for text, numbers in cases:
        requests.append(
            server.request(reference.ids(text), GREEDY, pictures(numbers), cache_salt=salt)
        )
    return server.complete(requests)


def test_ten_images_and_text_in_any_order_have_the_tokens_of_transformers(
    server: LocalServer, reference: Reference
) -> None:
    wanted = [
        reference.tokens(text, [PICTURES[one] for one in numbers], 16) for text, numbers in CASES
    ]
    assert sum(map(len, wanted)) > 40
    for _ in range(2):  # the second time images, and beginnings of prompts, are cached
        answers = ask(server, reference, CASES)
        assert [
            answer.tokens[: len(tokens)] for answer, tokens in zip(answers, wanted, strict=True)
        ] == wanted
    assert answers[-1].cached_tokens > 100
    assert server.counters["images:cached"] >= 15
    assert not booked_in_the_end(server)


def test_the_same_text_with_another_image_takes_nothing_of_it_from_the_prefix_cache(
    server: LocalServer, reference: Reference
) -> None:
    text = "<image>-" * 6
    for numbers in ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 6], [9, 1, 2, 3, 4, 5]):
        (answer,) = ask(server, reference, [(text, numbers)])
        wanted = reference.tokens(text, [PICTURES[one] for one in numbers], 16)
        assert answer.tokens[: len(wanted)] == wanted
    assert answer.cached_tokens == 0


def test_tenants_share_no_features(server: LocalServer, reference: Reference) -> None:
    before = server.counters.get("images:encoded", 0)
    for salt in ("one", "two", "one"):
        ask(server, reference, [("<image>?", [7])], salt)
    assert server.counters["images:encoded"] == before + 2


def test_text_with_an_image_token_of_its_own_is_text_alone(
    server: LocalServer, reference: Reference
) -> None:
    """A prompt of token ids may name it; without images it is a token as any other."""
    (answer,) = ask(server, reference, [("a<image>b", [])])
    assert answer.finish == "length"


def test_usage_tells_tokens_and_bytes_by_modality(
    server: LocalServer, reference: Reference
) -> None:
    given = "some text <image>, <image> and more"
    (answer,) = ask(server, reference, [(given, [0, 1])])
    assert answer.report is not None
    text, image = answer.report.modalities
    placeholder = reference.model.config.image_token_id
    features = reference.prompt(given, PICTURES[:2]).count(placeholder)
    assert image.modality == "image"
    assert features <= image.tokens == image.stored_tokens
    assert text.tokens == text.stored_tokens
    assert text.raw_bytes + image.raw_bytes == answer.report.raw_bytes
    assert text.stored_bytes + image.stored_bytes == answer.report.stored_bytes
    (plain,) = ask(server, reference, [("text alone", [])])
    assert plain.report is not None
    assert not plain.report.modalities
