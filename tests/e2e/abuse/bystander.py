"""A well-behaved client whose streams run while hostile requests are sent, and what it meets.

It has a process of its own: what the client of hostile requests does is no gap of a stream.
"""

import time
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from typing import Any

import openai

from tests.e2e.conftest import MODEL

PROMPT = "Tell a long story about a lighthouse."
TOKENS = 200
STOP_S = 120
"""Most time that the last stream takes."""


class Bystander:
    """Streams one answer after the other until ``stop``."""

    def __init__(self, url: str) -> None:
        spawn = get_context("spawn")
        self.faults = list[str]()
        """Streams that did not end as they should; known after ``stop``."""
        self._gap: Synchronized[float] = spawn.Value("d", 0.0)
        self._streams: Synchronized[int] = spawn.Value("i", 0)
        self._faults: SimpleQueue[str] = spawn.SimpleQueue()
        self._is_over = spawn.Event()
        shared = self._gap, self._streams, self._faults, self._is_over
        self._process = spawn.Process(target=stream_until, args=(url, *shared), daemon=True)
        self._process.start()

    @property
    def streams(self) -> int:
        """Streams that have ended."""
        return self._streams.value

    def stop(self) -> None:
        """Wait for the end of the present stream."""
        self._is_over.set()
        self._process.join(STOP_S)
        assert self._process.exitcode == 0, f"exit code {self._process.exitcode}"
        while not self._faults.empty():
            self.faults.append(self._faults.get())

    def take_gap(self) -> float:
        """Seconds of the largest gap between two tokens of a stream since the last call.

        The wait for the first token of a stream is not counted.
        """
        with self._gap.get_lock():
            gap, self._gap.value = self._gap.value, 0.0
        return gap


def stream_until(
    url: str,
    gap: "Synchronized[float]",
    streams: "Synchronized[int]",
    faults: "SimpleQueue[str]",
    is_over: Event,
) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    while not is_over.is_set():
        try:
            ending = _stream(client, gap)
        except openai.APIError as error:
            ending = repr(error)
        streams.value += 1
        if ending != "length":
            faults.put(str(ending))


def _stream(client: openai.OpenAI, gap: "Synchronized[float]") -> Any:
    ending, last = None, 0.0
    for chunk in client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=TOKENS,
        stream=True,
        temperature=0,
        extra_body={"ignore_eos": True},
    ):
        now = time.monotonic()
        if last:
            with gap.get_lock():
                gap.value = max(gap.value, now - last)
        last = now
        ending = chunk.choices[0].finish_reason or ending
    return ending
