"""Compression by modality: tokens of images are kept, stored and merged by their own method."""

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.learned import CHUNK_TOKENS, IMAGE_CHUNK_TOKENS, networks_beside
from tests.unit.conformance.rows import compress, stored
from tests.unit.workers.decode.test_resume import Stages
from tests.unit.workers.test_local_server import greedy
from triptych.core.config import AppConfig, CompressorConfig
from triptych.core.errors import ConfigError
from triptych.core.images import Segment, all_segments
from triptych.core.messages import Compressed, CompressionReport, Request
from triptych.core.methods.table import policies_of
from triptych.kernels.pages import segments
from triptych.workers.compress.learned.known_networks import find_networks
from triptych.workers.kv.handle_codec import unpack_run
from triptych.workers.models.facts import describe

TOKENS = 250
IMAGES = (Segment("image", 20, 84), Segment("image", 100, 196))
SETTINGS: Mapping[str, object] = {
    "recent_window_tokens": 4,
    "high_window_tokens": 4,
    "kv_rotation": "hadamard",
    "image_keep_share": 0.25,
    "keep_share": 0.9,
}
PROMPT = tuple(random.Random(3).choices(range(2, 250), k=TOKENS))
REQUEST = Request(id="r", prompt=PROMPT, sampling=greedy(4), reply_to="client")
Held = dict[str, list[set[int]]]
"""Positions of each head row, by format."""
Vectors = dict[tuple[int, int], torch.Tensor]
"""Key and value by head row and position."""


def run(
    model: Path,
    policy: str,
    segments: tuple[Segment, ...] = IMAGES,
    request: Request = REQUEST,
    **settings: object,
) -> tuple[Stages, Held, CompressionReport]:
    """Compress the prompt: what the pages hold, and the report."""
    stages = Stages.of(model, {**SETTINGS, "policy": policy, **settings})
    ((_, done),) = compress(stages, [request], segments=segments)
    held = Held()
    for name, _, _, positions in stored(stages, done):
        held[name] = [set(row[row >= 0].tolist()) for row in positions]
    return stages, held, done.report


def high_vectors(stages: Stages, done: Compressed, wanted: set[int]) -> Vectors:
    """Keys and values in high pages, of the tokens at some positions."""
    _, (_, keys, values, at), *_ = stored(stages, done)
    return {
        (row, position): torch.cat((keys[row, place], values[row, place]))
        for row in range(len(at))
        for place, position in enumerate(at[row].tolist())
        if position in wanted
    }


def positions(segments: tuple[Segment, ...]) -> set[int]:
    return {at for one in segments for at in range(one.start, one.end)}


def leaving(stages: Stages) -> set[int]:
    """Tokens about which methods decide: not the sink, and not the newest ones."""
    sink = stages.plan.sink_tokens
    return set(range(sink, sink + stages.plan.leaving_tokens(TOKENS)))


def test_image_tokens_have_a_format_of_their_own(tiny_model: Path) -> None:
    stages, held, report = run(tiny_model, "uniform:k8v4/uniform:k4v2")
    of_images, moved = positions(IMAGES), leaving(stages)
    assert all(row == moved - of_images for row in held["k8v4"])
    assert all(row == moved & of_images for row in held["k4v2"])
    text, image = report.modalities
    assert (text.modality, text.tokens, image.modality, image.tokens) == ("text", 90, "image", 160)
    assert (text.stored_tokens, image.stored_tokens) == (90, 160)
    assert text.raw_bytes + image.raw_bytes == report.raw_bytes
    assert text.stored_bytes + image.stored_bytes == report.stored_bytes
    assert image.stored_bytes / image.tokens < text.stored_bytes / text.tokens


@pytest.mark.parametrize(
    "rule", ["knorm", "keydiff", "tova", "snapkv", "adakv", "h2o", "kvcrush", "cake"]
)
def test_a_rule_keeps_its_share_of_the_image_tokens_and_all_text(
    tiny_model: Path, rule: str
) -> None:
    stages, held, report = run(tiny_model, f"uniform:k8v4/{rule}")
    of_images, moved = positions(IMAGES), leaving(stages)
    rows = held["k8v4"]
    assert all(moved - of_images <= row for row in rows), "text is whole"
    kept = [len(row & of_images) for row in rows]
    assert of_images <= moved, "this prompt tests the rule for every image token"
    assert sum(kept) == 40 * len(rows), "0.25 of 160, the mean over head rows"
    if rule not in ("adakv", "cake"):
        assert set(kept) == {40}
    assert report.modalities[1].stored_tokens == 40


def test_text_may_have_the_rule_and_images_none(tiny_model: Path) -> None:
    stages, held, _ = run(tiny_model, "knorm/uniform:k8v4", keep_share=0.5)
    of_images = positions(IMAGES)
    assert all(of_images <= row for row in held["k8v4"])
    others = set(range(TOKENS)) - leaving(stages)
    assert all(len((row | others) - of_images) == 45 for row in held["k8v4"])


def test_kept_tokens_are_the_best_of_the_images(tiny_model: Path) -> None:
    """The same tokens as if the images were judged with a budget that only they can fill."""
    _, alone, _ = run(tiny_model, "tova", segments=(), keep_share=1.0)
    _, held, _ = run(tiny_model, "uniform:k8v4/tova", image_keep_share=0.5)
    _, fewer, _ = run(tiny_model, "uniform:k8v4/tova", image_keep_share=0.25)
    of_images = positions(IMAGES)
    for every, more, less in zip(alone["k8v4"], held["k8v4"], fewer["k8v4"], strict=True):
        assert less & of_images < more & of_images < every


def test_without_images_a_pair_is_its_text_method(tiny_model: Path) -> None:
    stages, held, report = run(tiny_model, "uniform:k8v4/tova", segments=())
    assert all(row == leaving(stages) for row in held["k8v4"])
    assert not any(held["k4v2"])
    assert not report.modalities


def test_a_high_floor_keeps_images_high(tiny_model: Path) -> None:
    for policy in ("uniform:k8v4/tova", "uniform:k8v4/uniform:k4v2"):
        stages, held, _ = run(tiny_model, policy, request=replace(REQUEST, floor="high"))
        assert all(row == leaving(stages) for row in held["k8v4"])


def test_text_is_merged_by_segments_and_images_are_kept(tiny_model: Path) -> None:
    """No merged token has members on both sides of the border of an image."""
    learned = networks_beside(tiny_model)
    stages, held, report = run(tiny_model, "learned:merge", learned=learned)
    moved, of_images = leaving(stages), positions(IMAGES)
    first, end = min(moved), max(moved) + 1
    expected = set(of_images & moved)
    for start, stop in ((first, 20), (84, 100), (196, end)):
        chunks = (stop - start) // CHUNK_TOKENS
        merged = {start + (index + 1) * CHUNK_TOKENS - 1 for index in range(chunks)}
        expected |= merged | set(range(start + chunks * CHUNK_TOKENS, stop))
    assert all(row == expected for row in held["k8v4"])
    text, image = report.modalities
    assert image.stored_tokens == image.tokens
    assert text.stored_tokens == len(expected - of_images) + TOKENS - len(moved)


@pytest.mark.parametrize(
    ("policy", "merged"),
    [
        ("uniform:k8v4/learned:merge", {"image"}),
        ("learned:merge/learned:merge", {"text", "image"}),
        ("learned:paper/learned:merge", {"text", "image"}),
        ("learned:merge/uniform:k8v4", {"text"}),
    ],
)
def test_each_modality_is_merged_by_its_own_network(
    tiny_model: Path, policy: str, merged: set[str]
) -> None:
    """Chunks of images have four tokens, those of text three; neither crosses a border."""
    learned = networks_beside(tiny_model)
    stages, held, report = run(tiny_model, policy, learned=learned)
    moved, of_images = leaving(stages), positions(IMAGES)
    expected = set[int]()
    for segment in all_segments(IMAGES, TOKENS):
        inside = sorted(moved & set(range(segment.start, segment.end)))
        k = {"text": CHUNK_TOKENS, "image": IMAGE_CHUNK_TOKENS}[segment.modality]
        if segment.modality not in merged:
            k = 1
        whole = len(inside) // k * k
        expected |= {*inside[k - 1 : whole : k], *inside[whole:]}
    assert all(row == expected for row in held["k8v4"])
    text, image = report.modalities
    here = len(of_images - moved) + len(of_images & expected)
    assert (image.tokens, image.stored_tokens) == (160, here)
    assert text.stored_tokens == len(expected - of_images) + TOKENS - len(moved | of_images)


def test_merged_tokens_of_images_are_the_same_beside_merged_text(tiny_model: Path) -> None:
    """They stand in other places of the pages, and nothing else is different."""
    found = list[Vectors]()
    for policy in ("uniform:k8v4/learned:merge", "learned:merge/learned:merge"):
        settings = {**SETTINGS, "recent_window_tokens": 64, "high_window_tokens": 64}
        settings |= {"policy": policy, "learned": networks_beside(tiny_model)}
        stages = Stages.of(tiny_model, settings)
        ((_, done),) = compress(stages, [REQUEST], segments=IMAGES)
        found.append(high_vectors(stages, done, positions(IMAGES)))
    alone, together = found
    common = alone.keys() & together.keys()
    assert len(common) > 30 * 4
    assert all(torch.equal(alone[one], together[one]) for one in common)


def test_images_are_not_merged_without_a_network_for_them(tiny_model: Path) -> None:
    texts = [one for one in networks_beside(tiny_model) if ".image." not in one]
    with pytest.raises(ConfigError, match=r"modality 'image'.*triptych train compressor --chats'"):
        run(tiny_model, "uniform:k8v4/learned:merge", learned=texts)


def test_unmerged_tokens_beside_merged_ones_are_stored_as_without_a_merger(
    tiny_model: Path,
) -> None:
    """All of the prompt is an image: nothing is merged, and no token has a bias."""
    whole, found = (Segment("image", 0, TOKENS),), list[Vectors]()
    for policy in ("learned:merge", "knorm"):  # neither uses the prefix cache
        settings = {**SETTINGS, "policy": policy, "learned": networks_beside(tiny_model)}
        settings["keep_share"] = 1.0
        stages = Stages.of(tiny_model, settings)
        ((_, done),) = compress(stages, [REQUEST], segments=whole)
        found.append(high_vectors(stages, done, set(range(TOKENS))))
        if policy == "learned:merge":
            plan, pool = stages.plan, stages.pool
            rows = plan.geometry.head_rows
            _, ids = unpack_run(done.handle.runs[1], plan.high, rows, pool.capacity_pages)
            biases = segments(torch.from_numpy(pool.arena.data), plan.high).scores[ids]
            assert not biases.any()
    merged, plain = found
    assert len(plain) > 200 * 4
    assert plain.keys() <= merged.keys()
    assert all(torch.equal(merged[one], plain[one]) for one in plain)


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ("uniform:fp16/snapkv", "16-bit"),
        ("uniform:k8v4/uniform:fp16", "16-bit"),
        ("diffkv/snapkv", "one score"),
        ("snapkv/tova", "one score"),
        ("diffkv/uniform:k4v4", "two formats"),
        ("uniform:k4v2/uniform:k8v4", "fewer bits"),
        ("snapkv/learned:merge", "no token beside them is dropped"),
        ("learned:merge/diffkv", "no token beside them is dropped"),
        ("learned:merge/uniform:k4v2", "in the same format"),
    ],
)
def test_pairs_that_cannot_share_a_request_are_refused(
    tiny_model: Path, policy: str, reason: str
) -> None:
    config = AppConfig(compressor=CompressorConfig(learned=tuple(networks_beside(tiny_model))))
    files = find_networks(config, describe(tiny_model))
    with pytest.raises(ConfigError, match=reason):
        policies_of(CompressorConfig(policy=policy), learned=files)


def test_methods_with_and_without_a_part_for_images_are_offered_together() -> None:
    config = CompressorConfig(
        policy="uniform:k8v4", methods=("uniform:k8v4/snapkv", "diffkv/uniform:k4v2")
    )
    plain, pruned, low = policies_of(config)
    assert plain.images is None
    assert (pruned.observing_rule, pruned.retention) == (pruned.images.retention, None)
    assert low.images == replace(low.images, high_format="k4v2")
    assert [one.decides_by_whole_prompt for one in (plain, pruned, low)] == [False, True, True]
