"""Train a small patch encoder and a projector in front of the frozen default language model.

    python -m examples.vision.train --out vision.safetensors --report report.json

First each patch learns a word for what is there, in the space of the language model's embeddings;
its layers are not run for that. Then the answers to questions are learned
through all layers, which stay as they are. All questions of a picture are one sequence: each reads
the picture and itself, so the picture is computed once.

Source: Frozen and LLaVA (a language model that is not trained)
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer

from examples.vision.checkpoint import (
    IMAGE_TOKENS,
    VISION_FILE,
    is_vision,
    language_model,
    new_model,
    save_vision,
)
from examples.vision.scenes import (
    ANSWERS,
    NAMES,
    Picture,
    Question,
    Split,
    pictures,
    questions,
)

KEYS = {kind: f" {name}" for kind, name in NAMES.items()}
"""What a row of patches begins with, by kind of question."""
NOTHING, COLON, COMMA = " none", ":", ","
WORDS = (
    *(word if kind == "digit" else f" {word}" for kind in ANSWERS for word in ANSWERS[kind]),
    *KEYS.values(),
    NOTHING,
    COLON,
    COMMA,
)
"""Texts of one token each."""
FACTS = sum(map(len, ANSWERS.values()))
"""The first words tell one picture from another."""
USUAL_WEIGHT = 0.1
"""Of the other words in the loss."""
WORD_BATCH = 32
"""Pictures of a step that learns words."""
ANSWER_BATCH = 2
"""Pictures of a step that learns answers."""
MOST_QUESTIONS = 8
"""Questions of a picture in a step."""
SAVE_EVERY = 20
"""Steps between two lines of progress, and two saved states."""
FIRST = 1_000_000
"""Seed of the first pictures with questions; those of the words count from 0."""


@dataclass(frozen=True)
class Accuracy:
    """Answers that are right to the last token, of held-out pictures."""

    questions: int
    with_image: float
    without_image: float
    """The same prompts without the picture."""
    most_frequent: float
    """Always the answer to this kind of question that is most frequent in training."""
    by_kind: dict[str, float]
    """With the picture, by kind of question."""


class Learner:
    """Tower and projector in float32; the language model in bfloat16, frozen."""

    def __init__(self, language: Path) -> None:
        self.model: Any = new_model(language).requires_grad_(False)
        self.inner = self.model.model
        for part in (self.inner.vision_tower, self.inner.multi_modal_projector):
            part.float().requires_grad_(True)
        self.tokenizer = AutoTokenizer.from_pretrained(language, local_files_only=True)
        self.embed = self.inner.language_model.embed_tokens
        self.head = self._ids("<|im_start|>user\n")
        self.words = self.embed(torch.cat([self._ids(word) for word in WORDS])).float()
        self.scale = torch.nn.Parameter(torch.tensor(2.7))

    def parameters(self) -> list[torch.nn.Parameter]:
        return [one for one in self.model.parameters() if one.requires_grad]

    def features(self, some: Sequence[Picture]) -> Tensor:
        """-> [pictures, IMAGE_TOKENS, channels] float32"""
        rgb = np.stack([np.asarray(one.image) for one in some])
        pixels = torch.from_numpy(rgb).permute(0, 3, 1, 2).float() / 127.5 - 1  # as the processor
        found = self.model.get_image_features(pixel_values=pixels).pooler_output
        return torch.stack(list(found)).reshape(len(some), IMAGE_TOKENS, -1)

    def word_loss(self, some: Sequence[Picture]) -> Tensor:
        """Cross entropy of the word of each patch by its similarity, and the length of features.

        Words that are the same in all pictures count little, and learn themselves.
        """
        features = self.features(some)
        cosine = F.normalize(features, dim=-1) @ F.normalize(self.words, dim=-1).T
        targets = torch.from_numpy(np.stack([words_of_patches(one) for one in some]))
        length = features.norm(dim=-1).log() - self.words.norm(dim=-1).mean().log()
        loss = F.cross_entropy(
            (cosine * self.scale.exp()).flatten(0, 1), targets.flatten(), reduction="none"
        )
        weight = torch.where(targets.flatten() < FACTS, 1.0, USUAL_WEIGHT)
        return (loss * weight).sum() / weight.sum() + 0.1 * length.square().mean()

    def answer_loss(self, some: Sequence[tuple[Picture, list[Question]]]) -> Tensor:
        """Mean cross entropy of the tokens of the answers."""
        logits, targets, _ = self.answers(some)
        return F.cross_entropy(logits.float(), targets)

    def answers(
        self, some: Sequence[tuple[Picture, list[Question]]], *, with_image: bool = True
    ) -> tuple[Tensor, Tensor, list[int]]:
        """Logits at the tokens of answers [N, vocabulary], these tokens, and how many each has."""
        hidden = [self.embed(self.head)[None].expand(len(some), -1, -1)]
        if with_image:
            hidden.append(self.features([picture for picture, _ in some]).to(hidden[0].dtype))
        first = sum(part.shape[1] for part in hidden)
        rows = [[self._turn(one) for one in asked] for _, asked in some]
        lengths = [sum(len(ask) + len(answer) for ask, answer in row) for row in rows]
        width = first + max(lengths)
        ids = torch.zeros(len(some), width - first, dtype=torch.int64)
        positions = torch.arange(width).repeat(len(some), 1)
        branch = torch.full((len(some), width), -1)
        branch[:, :first] = 0
        places, targets, counts = list[tuple[int, int]](), list[int](), list[int]()
        for index, row in enumerate(rows):
            at = first
            for number, (ask, answer) in enumerate(row, 1):
                turn = torch.cat((ask, answer))
                ids[index, at - first : at - first + len(turn)] = turn
                positions[index, at : at + len(turn)] = first + torch.arange(len(turn))
                branch[index, at : at + len(turn)] = number
                start = at + len(ask) - 1
                places += [(index, start + step) for step in range(len(answer))]
                targets += answer.tolist()
                counts.append(len(answer))
                at += len(turn)
        inputs = torch.cat((*hidden, self.embed(ids)), 1)
        seen = (branch[:, None] == 0) | (branch[:, None] == branch[:, :, None])
        seen &= torch.ones(width, width, dtype=torch.bool).tril()
        mask = torch.zeros(seen.shape, dtype=inputs.dtype)
        mask.masked_fill_(~seen, torch.finfo(inputs.dtype).min)
        out = self.inner.language_model(
            inputs_embeds=inputs,
            attention_mask=mask[:, None],
            position_ids=positions,
            use_cache=False,
        ).last_hidden_state
        at = torch.tensor(places)
        return self.model.lm_head(out[at[:, 0], at[:, 1]]), torch.tensor(targets), counts

    def _turn(self, question: Question) -> tuple[Tensor, Tensor]:
        """Tokens of a question, and of its answer."""
        ask = f"{question.text}<|im_end|>\n<|im_start|>assistant\n"
        return self._ids(ask), self._ids(f"{question.sentence}<|im_end|>")

    def _ids(self, text: str) -> Tensor:
        return torch.tensor(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def words_of_patches(picture: Picture) -> np.ndarray:
    """The word for each patch, as an index in ``WORDS``: int64 [IMAGE_TOKENS].

    The six rows of patches read " color: red red red," and so on, a row for each kind of question.
    """
    found = list[str]()
    for kind in ANSWERS:
        known = picture.facts.get(kind)
        word = NOTHING if known is None else known if kind == "digit" else f" {known}"
        found += [KEYS[kind], COLON, word, word, word, COMMA]
    return np.array([WORDS.index(word) for word in found])


def asked(
    split: Split, seed: int, most: int = MOST_QUESTIONS
) -> Iterator[tuple[Picture, list[Question]]]:
    """Pictures, and some of the questions about each."""
    luck = np.random.default_rng(seed)
    for picture in pictures(split, seed):
        every = questions(picture)
        kept = sorted(luck.permutation(len(every))[:most])
        yield picture, [every[index] for index in kept]


@dataclass
class Stage:
    """One part of the training: AdamW with a warm-up and a cosine.

    A step is a function of its number, so a run that was killed goes on where it was saved.
    """

    name: str
    parameters: Sequence[torch.nn.Parameter]
    loss_of: Callable[[int], Tensor]
    steps: int
    rate: float

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.parameters, lr=self.rate, weight_decay=0.01)
        self.step, self.seconds = 0, 0.0
        self.losses = list[float]()

    def run(self, save: Callable[["Stage"], None]) -> None:
        """Do the steps that are left; prints progress."""
        while self.step < self.steps:
            began = time.monotonic()
            self._advance()
            self.seconds += time.monotonic() - began
            if self.step % SAVE_EVERY == 0 or self.step == self.steps:
                recent = sum(self.losses[-SAVE_EVERY:]) / len(self.losses[-SAVE_EVERY:])
                print(
                    f"{self.name} {self.step}/{self.steps}: loss {recent:.3f}, "
                    f"{self.seconds:.0f} s",
                    flush=True,
                )
                save(self)

    def _advance(self) -> None:
        warm = max(1, self.steps // 20)
        share = min((self.step + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * self.step / self.steps))
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * share
        self.optimizer.zero_grad()
        loss = self.loss_of(self.step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.losses.append(loss.item())
        self.step += 1

    def state(self) -> dict[str, object]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "losses": self.losses,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds, self.losses = state["step"], state["seconds"], state["losses"]


@torch.inference_mode()
def measure(learner: Learner, count: int) -> Accuracy:
    """Accuracy of greedy answers on held-out pictures, and its floors."""
    frequent = _most_frequent()
    kinds, right, blind, guessed = list[str](), list[bool](), list[bool](), list[bool]()
    for picture, some in islice(asked("held_out", 1), count):
        kinds += [one.kind for one in some]
        guessed += [frequent[one.kind] == one.answer for one in some]
        for found, with_image in ((right, True), (blind, False)):
            logits, targets, counts = learner.answers([(picture, some)], with_image=with_image)
            hits = (logits.argmax(-1) == targets).split(counts)
            found += [bool(hit.all()) for hit in hits]
    by_kind = {
        kind: _mean([hit for hit, one in zip(right, kinds, strict=True) if one == kind])
        for kind in sorted(set(kinds))
    }
    return Accuracy(len(kinds), _mean(right), _mean(blind), _mean(guessed), by_kind)


def _mean(hits: Sequence[bool]) -> float:
    return round(sum(hits) / len(hits), 4)


def _most_frequent() -> dict[str, str]:
    answers: dict[str, list[str]] = {}
    for _, some in islice(asked("train", 2), 500):
        for one in some:
            answers.setdefault(one.kind, []).append(one.answer)
    return {kind: max(set(found), key=found.count) for kind, found in answers.items()}


def train(learner: Learner, stages: Sequence[Stage], saved: Path | None) -> dict[str, object]:
    """Run the stages, from ``saved`` on if there is such a file; what it took."""
    if saved is not None and saved.exists():
        state = torch.load(saved, weights_only=True)
        learner.model.load_state_dict(state["vision"], strict=False)
        learner.scale.data = state["scale"]
        for stage in stages:
            stage.restore(state["stages"][stage.name])

    def save(_: Stage) -> None:
        if saved is not None:
            vision = {
                name: tensor
                for name, tensor in learner.model.state_dict().items()
                if is_vision(name)
            }
            done = {stage.name: stage.state() for stage in stages}
            new = saved.with_suffix(".new")
            torch.save({"vision": vision, "scale": learner.scale.data, "stages": done}, new)
            new.rename(saved)

    for stage in stages:
        stage.run(save)
    return {
        "steps": {stage.name: stage.steps for stage in stages},
        "seconds": {stage.name: round(stage.seconds) for stage in stages},
        "last_loss": {stage.name: round(float(np.mean(stage.losses[-20:])), 4) for stage in stages},
        "threads": torch.get_num_threads(),
    }


def stages_of(learner: Learner, word_steps: int, answer_steps: int) -> list[Stage]:
    def words(step: int) -> Tensor:
        return learner.word_loss(list(islice(pictures("train", step), WORD_BATCH)))

    def answers(step: int) -> Tensor:
        return learner.answer_loss(list(islice(asked("train", FIRST + step), ANSWER_BATCH)))

    parameters = learner.parameters()
    return [
        Stage("words", [*parameters, learner.scale], words, word_steps, 2e-3),
        Stage("answers", parameters, answers, answer_steps, 1e-3),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=VISION_FILE)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--saved", type=Path, help="state of the training: goes on from there")
    parser.add_argument("--word-steps", type=int, default=2500)
    parser.add_argument("--answer-steps", type=int, default=400)
    parser.add_argument("--held-out", type=int, default=60, help="pictures that are measured")
    given = parser.parse_args()
    learner = Learner(language_model())
    stages = stages_of(learner, given.word_steps, given.answer_steps)
    report = train(learner, stages, given.saved)
    save_vision(learner.model, given.out)
    report |= asdict(measure(learner, given.held_out))
    print(json.dumps(report, indent=2))
    if given.report:
        given.report.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
