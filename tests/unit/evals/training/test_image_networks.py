"""Training the network for image tokens: chats, captures, chunks, and the file that is served."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.tiny_vision import IMAGE_TOKENS, data_uri, random_images, save_tiny_vision_model
from triptych.core.config import AppConfig
from triptych.core.errors import ConfigError
from triptych.core.images import IMAGE
from triptych.evals.methods.replaced_cache import ReplacedCache
from triptych.evals.training.captures import CapturePlan, capture_samples, read_capture
from triptych.evals.training.fit import FitPlan
from triptych.evals.training.learned_networks import MergerPlan, train_merger
from triptych.evals.training.merger_training import MergerReport
from triptych.evals.training.output_matching import chunk_plan_of, context_of, output_error
from triptych.evals.training.samples import chat_samples
from triptych.workers.compress.learned.known_networks import find_networks
from triptych.workers.models.facts import describe

COUNT = 5
CHUNK_TOKENS = 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vision_model(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One or two images in each; one is a file beside the chats."""
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    pictures, lines = random_images(COUNT + 1, seed=4), list[str]()
    pictures[0].save(path.with_name("first.png"))
    urls = ["first.png", *map(data_uri, pictures[1:])]
    for number in range(COUNT):
        parts = [
            {"type": "text", "text": "look"},
            *(image(url) for url in urls[number : number + 1 + number % 2]),
            {"type": "text", "text": f"what is number {number}?"},
        ]
        lines.append(chat(parts, "a picture"))
    path.write_text("\n".join(lines) + "\n\n")
    return path


def image(url: str) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url}}


def chat(parts: object, answer: str) -> str:
    asked = {"role": "user", "content": parts}
    return json.dumps({"messages": [asked, {"role": "assistant", "content": answer}]})


def begin(_name: str, _steps: int) -> Callable[..., None]:
    return lambda _step, _loss: None


def test_a_context_ends_with_the_last_image_and_the_rest_reads_it(
    model: Path, chats: Path, tmp_path: Path
) -> None:
    samples = chat_samples(model, chats, COUNT)
    plan = CapturePlan(documents=3, held_out=2)
    captures = capture_samples(model, describe(model), plan, samples, tmp_path, lambda: None)
    assert (len(captures.files), len(captures.held_out)) == (3, 2)
    for sample, file in zip(samples.every, (*captures.files, *captures.held_out), strict=True):
        capture = read_capture(file)
        assert capture.context == sample.context == sample.spans[-1].stop
        assert capture.images == list(sample.segments)
        assert capture.queries.shape[2] == len(sample.continuation) > len("a picture")
        found = chunk_plan_of(capture, CHUNK_TOKENS, offset=3)
        starts = found.chunks[IMAGE]
        assert len(starts) == len(sample.images) * (IMAGE_TOKENS // CHUNK_TOKENS)
        assert starts[0] == sample.spans[0].start, "served images begin with a chunk"
        cache = context_of(capture)
        full = ReplacedCache(cache.keys, cache.values, torch.zeros(cache.keys.shape[:3]))
        error, _ = output_error(full, capture)
        assert float(error.max()) < 1e-4, "it holds what the model computed with these images"


def test_other_images_give_another_capture(model: Path, chats: Path, tmp_path: Path) -> None:
    """Tokens of images are alike; captures of an earlier run are kept for the same images only."""
    samples, facts = chat_samples(model, chats, 2), describe(model)
    plan = CapturePlan(documents=1, held_out=1)
    first, second = samples.every
    changed = replace(first, images=second.images[:1])

    def keys() -> torch.Tensor:
        captures = capture_samples(model, facts, plan, samples, tmp_path, lambda: None)
        return read_capture(captures.files[0]).keys

    before = keys()
    assert torch.equal(before, keys())
    samples = replace(samples, every=(changed, second))
    assert not torch.equal(before, keys())


@pytest.mark.parametrize("variant", ["gated", "paper"])
def test_the_network_of_images_is_trained_and_served_for_images(
    model: Path, chats: Path, tmp_path: Path, variant: str
) -> None:
    plan = MergerPlan(
        model=str(model),
        variant=variant,  # type: ignore[arg-type]
        chats=chats,
        chunk_tokens=CHUNK_TOKENS,
        captures=CapturePlan(documents=3, held_out=2),
        fit=FitPlan(steps=12, evaluate_every=4, learning_rate=1e-2),
        polish_steps=2,
        batch=2,
        hidden=8,
    )
    output = tmp_path / "network.safetensors"
    trained = train_merger(plan, output, tmp_path / "work", begin)
    assert trained.record.modality == IMAGE
    assert isinstance(trained.report, MergerReport)
    if variant == "gated":  # the other one starts from nothing
        assert trained.report.error < trained.report.mean_pooling_error
    losses = [loss for _, loss in trained.states["matching"].losses]
    assert min(losses[1:]) < losses[0]
    config = AppConfig.from_mapping({"compressor": {"learned": [str(output)]}})
    (file,) = find_networks(config, describe(model))
    assert (file.modality, file.chunk_tokens) == (IMAGE, CHUNK_TOKENS)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "JSONDecodeError"),
        ("{}", "messages"),
        (chat("no picture", "yes"), "there is no image"),
        (chat([image("absent.png")], "yes"), "absent.png"),
        (chat([image("https://example.org/a.png")], "yes"), "neither a data URI nor a file"),
        (chat([image("data:image/png;base64,????")], "yes"), "not base64"),
        (chat([image("data:image/png;base64,aGFsbG8=")], "yes"), "cannot identify image"),
        (chat([image("first.png"), {"type": "text", "text": "<image>"}], "y"), "2 image tokens"),
        (json.dumps({"messages": [{"role": "user", "content": "a"}]}), "assistant"),
    ],
)
def test_the_line_that_is_no_chat_with_images_is_named(
    model: Path, chats: Path, tmp_path: Path, line: str, reason: str
) -> None:
    (tmp_path / "first.png").write_bytes(chats.with_name("first.png").read_bytes())
    file = tmp_path / "chats.jsonl"
    file.write_text(chat([image("first.png")], "yes") + "\n" + line + "\n")
    with pytest.raises(ConfigError, match=f"line 2: .*{reason}"):
        chat_samples(model, file, 2)


def test_too_few_chats_an_absent_file_and_a_model_without_images_are_refused(
    model: Path, chats: Path, tiny_model: Path
) -> None:
    with pytest.raises(ConfigError, match=f"{COUNT} chats; 9 are to be trained on and held out"):
        chat_samples(model, chats, 9)
    with pytest.raises(ConfigError, match="No such file"):
        chat_samples(model, chats.with_name("none"), 1)
    with pytest.raises(ConfigError, match="reads text only"):
        chat_samples(tiny_model, chats, 1)
