"""Ask a running server about held-out pictures, and count right answers.

    python -m examples.vision.ask --url http://127.0.0.1:8000 --methods "uniform:k8v4/tova"

Each method is asked the same questions: with the picture, and once without it. The first token of
an answer says nothing about the picture, so what is counted was read from compressed pages.
"""

import argparse
import base64
import io
import json
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import httpx
from PIL import Image

from examples.vision.scenes import Picture, Question, pictures, questions
from triptych.evals.metrics.text_overlap import bleu, rouge_1, rouge_l

SEED = 1
QUESTIONS_EACH = 4
TOP = 20
"""Most likely tokens whose probabilities are compared."""
ANSWER_TOKENS = 8
CONCURRENT = 4
WITHOUT = "without the image"


@dataclass(frozen=True)
class Answer:
    text: str
    word: dict[str, float]
    """Log probabilities of the most likely tokens in the place of the answer's word."""
    usage: dict[str, object]


@dataclass(frozen=True)
class Row:
    """A method over all questions."""

    method: str
    questions: int
    accuracy: float
    by_kind: dict[str, float]
    same_as_first: float
    """Answers that are those of the first method of the run."""
    bleu: float
    """Corpus BLEU to the answers of the first method, 0 to 100."""
    rouge_1: float
    rouge_l: float
    kl: float
    """Mean KL divergence from the first method's probabilities of the word, over its most likely
    tokens, in nats."""
    image_tokens: float
    """Image tokens of a prompt that its pages hold, the mean over head rows and questions."""
    image_bytes: float
    stored_bytes: float
    """Bytes of a request's pages after compression, the mean over questions."""


class Client:
    """Chats with one server."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=300, trust_env=False)
        (model, *_) = self._http.get("/v1/models").json()["data"]
        self._model = model["id"]

    def ask(self, text: str, image: Image.Image | None, method: str) -> Answer:
        """Raises: httpx.HTTPStatusError if the server refuses"""
        parts: list[dict[str, object]] = [{"type": "text", "text": text}]
        if image is not None:
            parts.insert(0, {"type": "image_url", "image_url": {"url": data_uri(image)}})
        body: dict[str, object] = {
            "model": self._model,
            "messages": [{"role": "user", "content": parts}],
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": TOP,
        }
        if method:
            body["compression"] = {"method": method}
        response = self._http.post("/v1/chat/completions", json=body)
        response.raise_for_status()
        answer = response.json()
        (choice,) = answer["choices"]
        tokens = choice["logprobs"]["content"]
        texts = [one["token"] for one in tokens]
        end = texts.index(".") if "." in texts else len(texts)
        place = tokens[max(0, end - 1)]  # "The", " color", " is", " red", "."
        word = {one["token"]: one["logprob"] for one in place["top_logprobs"]}
        return Answer(choice["message"]["content"], word, answer["usage"].get("compression", {}))


def data_uri(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def held_out(count: int) -> list[tuple[Picture, Question]]:
    """Questions about held-out pictures, at most ``QUESTIONS_EACH`` about one."""
    found = list[tuple[Picture, Question]]()
    for picture in islice(pictures("held_out", SEED), count):
        every = questions(picture)
        step = max(1, len(every) // QUESTIONS_EACH)
        found += [(picture, one) for one in every[::step][:QUESTIONS_EACH]]
    return found


def row_of(
    method: str, asked: Sequence[Question], answers: Sequence[Answer], first: Sequence[Answer]
) -> Row:
    hits = [one.text.strip() == each.sentence for each, one in zip(asked, answers, strict=True)]
    kinds = sorted({one.kind for one in asked})
    of_kind = {
        kind: [hit for hit, one in zip(hits, asked, strict=True) if one.kind == kind]
        for kind in kinds
    }
    images = [one.usage.get("modalities", {}).get("image", {}) for one in answers]  # pyright: ignore
    return Row(
        method=method,
        questions=len(asked),
        accuracy=_mean(hits),
        by_kind={kind: _mean(found) for kind, found in of_kind.items()},
        same_as_first=_mean([a.text == b.text for a, b in zip(answers, first, strict=True)]),
        bleu=round(bleu(texts_of(first), texts_of(answers)), 3),
        rouge_1=round(rouge_1(texts_of(first), texts_of(answers)), 5),
        rouge_l=round(rouge_l(texts_of(first), texts_of(answers)), 5),
        kl=_mean([divergence(b.word, a.word) for a, b in zip(answers, first, strict=True)]),
        image_tokens=_mean([one.get("stored_tokens", 0) for one in images]),
        image_bytes=_mean([one.get("stored_bytes", 0) for one in images]),
        stored_bytes=_mean([float(str(one.usage.get("stored_bytes", 0))) for one in answers]),
    )


def texts_of(answers: Sequence[Answer]) -> list[str]:
    return [one.text for one in answers]


def divergence(first: dict[str, float], other: dict[str, float]) -> float:
    """KL divergence over the tokens of ``first``, both renormalised; a missing token has the least
    probability of those that are told."""
    least = min(other.values())
    p = [math.exp(value) for value in first.values()]
    q = [math.exp(other.get(token, least)) for token in first]
    return sum(
        a / sum(p) * math.log((a / sum(p)) / (b / sum(q))) for a, b in zip(p, q, strict=True)
    )


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 5)


def measure(url: str, methods: Sequence[str], count: int) -> Iterator[Row]:
    """Ask about ``count`` held-out pictures with each method, then without the pictures.

    ``methods``: names that the server offers; "": its default. Others are compared with the first.
    """
    client, asked = Client(url), held_out(count)
    every, first = [question for _, question in asked], list[Answer]()

    def answers(method: str, *, with_image: bool = True) -> list[Answer]:
        def one(pair: tuple[Picture, Question]) -> Answer:
            picture, question = pair
            return client.ask(question.text, picture.image if with_image else None, method)

        with ThreadPoolExecutor(CONCURRENT) as threads:
            return list(threads.map(one, asked))

    for method in methods:
        found = answers(method)
        first = first or found
        yield row_of(method or "default", every, found, first)
    yield row_of(WITHOUT, every, answers(methods[0], with_image=False), first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--pictures", type=int, default=40)
    parser.add_argument("--methods", default="", help="separated by commas; default: the server's")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = list[Row]()
    for row in measure(given.url, given.methods.split(","), given.pictures):
        rows.append(row)
        print(json.dumps(asdict(row)), flush=True)
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
