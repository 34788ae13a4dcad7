"""The pictures of the vision example, and the model that is trained on them."""

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.vision import checkpoint, train
from examples.vision.ask import divergence, held_out
from examples.vision.scenes import ANSWERS, Picture, is_held_out, pictures, questions
from triptych.core.config import AppConfig
from triptych.core.images import Image
from triptych.core.messages import Sampling
from triptych.workers.local import LocalServer
from triptych.workers.models.vision.vision_processor import read_processor
from triptych.workers.models.vision.vision_tower import VisionTower


def some(split: train.Split, seed: int, count: int) -> list[Picture]:
    return list(islice(pictures(split, seed), count))


def test_equal_seeds_draw_equal_pictures() -> None:
    for one, other in zip(some("train", 4, 8), some("train", 4, 8), strict=True):
        assert one.facts == other.facts
        assert one.image.tobytes() == other.image.tobytes()


def test_no_held_out_combination_is_in_a_training_picture() -> None:
    for split in ("train", "held_out"):
        shapes = [one.facts for one in some(split, 0, 200) if "digit" not in one.facts]
        found = [is_held_out(one["shape"], one["colour"], one["count"]) for one in shapes]
        assert found == [split == "held_out"] * len(shapes)


def test_questions_have_one_right_answer() -> None:
    for picture in some("train", 1, 100):
        asked = questions(picture)
        assert len({one.text for one in asked}) == len(asked) >= 2
        assert all(one.answer in ANSWERS[one.kind] for one in asked)


def test_each_row_of_patches_tells_what_one_question_asks() -> None:
    for picture in some("train", 2, 20):
        words = "".join(train.WORDS[index] for index in train.words_of_patches(picture))
        rows = dict(row.split(":") for row in words.rstrip(",").split(","))
        assert len(rows) == len(ANSWERS)
        for kind, row in zip(ANSWERS, rows.values(), strict=True):
            known = picture.facts.get(kind, "none")
            assert row == known * 3 if kind == "digit" and known != "none" else f" {known}" * 3


def test_the_divergence_of_equal_probabilities_is_zero() -> None:
    assert divergence({"a": -1.0, "b": -0.5}, {"a": -1.0, "b": -0.5}) == pytest.approx(0)
    assert divergence({"a": -0.1, "b": -3.0}, {"a": -3.0, "b": -0.1}) > 1


@pytest.mark.slow
def test_the_committed_model_answers_over_the_stages_as_in_transformers(tmp_path: Path) -> None:
    """The pixels of the training are those of the processor, and most answers are right."""
    path = checkpoint.assemble(tmp_path / "model")
    asked = held_out(12)
    images = [Image.of(*one.image.size, one.image.tobytes()) for one, _ in asked]
    rgb = np.stack([np.asarray(one.image) for one, _ in asked])
    pixels = torch.from_numpy(rgb).permute(0, 3, 1, 2).float() / 127.5 - 1
    made = read_processor(path).pixel_values(images)["pixel_values"]
    torch.testing.assert_close(made, pixels, atol=1e-5, rtol=0)
    tower = VisionTower.read(path, "float32", torch.device("cpu"))
    (found,) = tower.encode(images[:1])
    assert found.shape == (checkpoint.IMAGE_TOKENS, 576)
    tokenizer = checkpoint.processor(checkpoint.language_model()).tokenizer
    config = AppConfig.from_mapping({"pool": {"kv_cache_memory_bytes": 128 << 20}})
    greedy = Sampling(temperature=0.0, max_tokens=8)
    with LocalServer(config, path) as server:
        requests = [
            server.request(
                tokenizer(
                    f"<|im_start|>user\n{checkpoint.PLACEHOLDER}{one.text}<|im_end|>\n"
                    "<|im_start|>assistant\n",
                    add_special_tokens=False,
                )["input_ids"],
                greedy,
                [image],
            )
            for (_, one), image in zip(asked, images, strict=True)
        ]
        answers = server.complete(requests)
    right = [
        answer.text.strip() == one.sentence for answer, (_, one) in zip(answers, asked, strict=True)
    ]
    assert sum(right) >= 0.6 * len(right)
