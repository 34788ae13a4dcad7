# The peer's packages are not installed where the types are checked.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportAttributeAccessIssue=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
"""OpenVINO GenAI's continuous batching behind HTTP.

    python openvino_server.py MODEL PORT PREFIX_CACHE

MODEL is a directory in OpenVINO's form; PREFIX_CACHE is 0 or 1.
"""

import sys
from collections.abc import Sequence
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
from completions import OnTokens, serve  # beside this file
from openvino import Tensor
from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig


class OpenVino:
    """Requests join between the steps of a pipeline."""

    def __init__(self, model: str, *, prefix_cache: bool) -> None:
        options = SchedulerConfig()
        options.enable_prefix_caching = prefix_cache
        self._pipeline = ContinuousBatchingPipeline(model, options, "CPU")
        self._tokenizer = self._pipeline.get_tokenizer()
        self._arrived = SimpleQueue[tuple[Sequence[int], int, OnTokens]]()
        self._running = list[tuple[Any, OnTokens]]()
        self._count = 0
        Thread(target=self._run, daemon=True).start()

    def submit(self, prompt: Sequence[int], output_tokens: int, on_tokens: OnTokens) -> None:
        self._arrived.put((prompt, output_tokens, on_tokens))

    def text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens)))

    def _run(self) -> None:
        while True:
            while not (self._running and self._arrived.empty()):
                self._begin(*self._arrived.get())
            self._pipeline.step()
            self._running = [one for one in self._running if self._deliver(*one)]

    def _begin(self, prompt: Sequence[int], output_tokens: int, on_tokens: OnTokens) -> None:
        options = GenerationConfig()
        options.max_new_tokens = output_tokens
        options.ignore_eos = True
        ids = Tensor(np.array([prompt], dtype=np.int64))
        self._count += 1
        handle = self._pipeline.add_request(self._count, ids, options)
        self._running.append((handle, on_tokens))

    def _deliver(self, handle: Any, on_tokens: OnTokens) -> bool:
        """Pass on new tokens; False at the end of the answer."""
        if handle.can_read():
            (output,) = handle.read().values()
            on_tokens(output.generated_ids)
        is_running = handle.get_status().name == "RUNNING"
        if not is_running:
            on_tokens(())
        return is_running


def main() -> None:
    model, port, prefix_cache = sys.argv[1:]
    serve(OpenVino(model, prefix_cache=prefix_cache == "1"), int(port))


if __name__ == "__main__":
    main()
