"""A well-behaved client whose streams run while hostile requests are sent, and what it meets."""

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import openai

from tests.e2e.conftest import MODEL

PROMPT = "Tell a long story about a lighthouse."
TOKENS = 200


@dataclass
class Bystander:
    """Streams one answer after the other until ``stop``."""

    client: openai.OpenAI
    largest_gap_s: float = 0.0
    """Between two tokens of a stream; the wait for the first one is not counted."""
    streams: int = 0
    faults: list[str] = field(default_factory=list[str])
    """Streams that did not end as they should."""
    _is_over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Wait for the end of the present stream."""
        self._is_over.set()
        self._thread.join(120)
        assert not self._thread.is_alive()

    def take_gap(self) -> float:
        """The largest gap since the last call."""
        gap, self.largest_gap_s = self.largest_gap_s, 0.0
        return gap

    def _run(self) -> None:
        while not self._is_over.is_set():
            try:
                ending = self._stream()
            except openai.APIError as error:
                ending = repr(error)
            self.streams += 1
            if ending != "length":
                self.faults.append(str(ending))

    def _stream(self) -> Any:
        ending, last = None, 0.0
        for chunk in self.client.completions.create(
            model=MODEL,
            prompt=PROMPT,
            max_tokens=TOKENS,
            stream=True,
            temperature=0,
            extra_body={"ignore_eos": True},
        ):
            now = time.monotonic()
            if last:
                self.largest_gap_s = max(self.largest_gap_s, now - last)
            last = now
            ending = chunk.choices[0].finish_reason or ending
        return ending
