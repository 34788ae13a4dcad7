"""Chats about pictures with right answers, to train the network that merges their image tokens.

    python -m examples.vision.checkpoint /tmp/smollm2-vision
    python -m examples.vision.chats /tmp/chats.jsonl
    triptych train compressor /tmp/smollm2-vision --chats /tmp/chats.jsonl --documents 250 \\
        --held-out 30 --chunk-tokens 2

Pictures are of the split for training, and none that the tower was trained on.
"""

import argparse
import json
from itertools import islice
from pathlib import Path

import numpy as np

from examples.vision.ask import data_uri
from examples.vision.scenes import pictures, questions

SEED = 3_000_000


def write_chats(path: Path, count: int) -> None:
    """One question about each of ``count`` pictures, an OpenAI request a line with its answer."""
    luck, lines = np.random.default_rng(SEED), list[str]()
    for picture in islice(pictures("train", SEED), count):
        every = questions(picture)
        asked = every[int(luck.integers(len(every)))]
        parts = [
            {"type": "image_url", "image_url": {"url": data_uri(picture.image)}},
            {"type": "text", "text": asked.text},
        ]
        messages = [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": asked.sentence},
        ]
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", type=int, default=300)
    given = parser.parse_args()
    write_chats(given.file, given.count)


if __name__ == "__main__":
    main()
