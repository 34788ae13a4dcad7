"""Grids of images against transformers' processors, and models whose rule is another one."""

import json
from pathlib import Path
from random import Random

import numpy as np
import pytest
from PIL import Image as Pillow
from transformers import Idefics3ImageProcessorPil, SmolVLMImageProcessorPil
from transformers.image_utils import ChannelDimension
from transformers.models.pixtral.image_processing_pil_pixtral import (
    get_resize_output_image_size,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from tests.tiny_vision import (
    IMAGE_TOKENS,
    Reference,
    random_images,
    save_tiny_gemma3,
    save_tiny_idefics3_with_tiles,
    save_tiny_qwen2_vl,
)
from triptych.core.errors import ModelError, RequestError
from triptych.core.images import Image, Resizing, Rows, Tiling, expand_images
from triptych.workers.compress.learned.rope_frame import RopeFrame
from triptych.workers.models.facts import describe
from triptych.workers.models.tokenizer import open_tokenizer, with_images
from triptych.workers.models.vision.vision_processor import observe_vision

LONGEST, TILE = 40, 10


@pytest.mark.parametrize("kind", [Idefics3ImageProcessorPil, SmolVLMImageProcessorPil])
def test_tiles_are_those_of_transformers(kind: type[Idefics3ImageProcessorPil]) -> None:
    luck, ours = Random(3), Tiling(longest_edge=LONGEST, tile=TILE)
    made = kind(size={"longest_edge": LONGEST}, max_image_size={"longest_edge": TILE})
    seen = set[tuple[int, int]]()
    for _ in range(150):
        width, height = (int(10 ** luck.uniform(0.5, 2.5)) for _ in range(2))
        image = Pillow.new("RGB", (width, height))
        found = made(images=[image], return_row_col_info=True)
        theirs = int(found["rows"][0][0]), int(found["cols"][0][0])
        assert ours.grid(width, height) == theirs, (width, height)
        seen.add(theirs)
    assert seen == set(ours.grids)


def test_resized_images_have_the_features_of_transformers() -> None:
    luck, unit = Random(4), 28
    ours = Resizing(unit=unit, least_pixels=56 * 56, most_pixels=28 * 28 * 1280)
    for _ in range(3000):
        width, height = (int(10 ** luck.uniform(0.5, 3.7)) for _ in range(2))
        if max(width, height) > 200 * min(width, height):
            with pytest.raises(RequestError, match=f"{width} x {height} pixels"):
                ours.grid(width, height)
            continue
        tall, wide = smart_resize(height, width, unit, ours.least_pixels, ours.most_pixels)
        assert ours.grid(width, height) == (tall // unit, wide // unit), (width, height)


def test_rows_are_those_of_transformers() -> None:
    luck, ours = Random(5), Rows(unit=28, longest_edge=1540, row_end=7, image_end=8)
    last = ChannelDimension.LAST
    limits = {"size": (1540, 1540), "patch_size": (28, 28), "input_data_format": last}
    for _ in range(300):
        width, height = (int(10 ** luck.uniform(0.1, 3.3)) for _ in range(2))
        blank = np.zeros((height, width, 3), np.uint8)
        tall, wide = get_resize_output_image_size(blank, **limits)
        if tall and wide:
            assert ours.grid(width, height) == (tall // 28, wide // 28), (width, height)
            continue
        with pytest.raises(RequestError, match="nothing of it is left"):
            ours.grid(width, height)
    assert ours.tokens_of(9, (2, 3)) == (9, 9, 9, 7, 9, 9, 9, 8)


def test_a_model_with_another_rule_reads_no_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_tiny_idefics3_with_tiles(tmp_path)
    assert observe_vision(model).layout is not None

    def other_grid(tiling: Tiling, width: int, height: int) -> tuple[int, int]:
        return tiling.grids[0]

    monkeypatch.setattr(Tiling, "grid", other_grid)
    found = observe_vision(model)
    assert found.layout is None
    assert "other tokens" in found.reason


def test_positions_by_row_and_column_need_fused_layers(tmp_path: Path) -> None:
    """transformers' layers of the text part alone would take three positions for three prompts."""
    model = save_tiny_qwen2_vl(tmp_path)
    assert observe_vision(model).layout is not None
    config = json.loads((model / "config.json").read_text())
    config["text_config"]["hidden_act"] = "gelu"
    (model / "config.json").write_text(json.dumps(config))
    found = observe_vision(model)
    assert found.layout is None
    assert "fused" in found.reason


def test_learned_compression_refuses_positions_by_row_and_column(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="M-RoPE"):
        RopeFrame.of(describe(save_tiny_qwen2_vl(tmp_path)))


# ------------------------------------------------------------------ Gemma 3


def change(model: Path, file: str, **settings: object) -> None:
    known = json.loads((model / file).read_text())
    (model / file).write_text(json.dumps(known | settings))


def test_a_rendered_chat_has_the_tokens_of_the_familys_processor(tmp_path: Path) -> None:
    """What the template writes for an image is not what its features stand behind."""
    model = save_tiny_gemma3(tmp_path)
    layout = observe_vision(model).layout
    assert layout is not None
    pictures = random_images(2, seed=2)
    parts = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}]
    chat: list[dict[str, object]] = [{"role": "user", "content": parts}]
    tokenizer = with_images(open_tokenizer(model), layout)
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
    images = [Image.of(*one.size, one.tobytes()) for one in pictures]
    ids = tokenizer.encode(text, add_special_tokens=False)
    tokens, spans = expand_images(ids, images, layout)
    reference = Reference(model)
    assert tokens == reference.prompt(reference.chat(chat, pictures), pictures)
    assert [one.features for one in spans] == [IMAGE_TOKENS, IMAGE_TOKENS]


def test_crops_of_images_are_refused(tmp_path: Path) -> None:
    model = save_tiny_gemma3(tmp_path)
    file = "processor_config.json"
    known = json.loads((model / file).read_text())["image_processor"]
    change(model, file, image_processor=known | {"do_pan_and_scan": True})
    assert "do_pan_and_scan" in observe_vision(model).reason


def test_images_longer_than_a_window_are_refused(tmp_path: Path) -> None:
    model = save_tiny_gemma3(tmp_path)
    known = json.loads((model / "config.json").read_text())["text_config"]
    change(model, "config.json", text_config=known | {"sliding_window": IMAGE_TOKENS - 1})
    assert "longer than the window" in observe_vision(model).reason
