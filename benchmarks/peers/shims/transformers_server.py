# The typing of continuous batching is incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingImports=false
"""Continuous batching of transformers behind HTTP.

    python transformers_server.py MODEL PORT PREFIX_CACHE CACHE_TOKENS

PREFIX_CACHE is 0 or 1. CACHE_TOKENS limits the memory of keys and values, which is otherwise more
than half of the machine's.
"""

import sys
from collections.abc import Sequence
from uuid import uuid4

import torch
from completions import OnTokens, serve  # beside this file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ContinuousBatchingConfig,
    GenerationConfig,
)
from transformers.generation.continuous_batching.requests import GenerationOutput

PAGE_TOKENS = 256
SPARE_PAGES = 16
NO_TOKEN = -1
"""Ends no answer."""


class Transformers:
    """Requests join between the steps of the manager's thread."""

    def __init__(self, model: str, *, prefix_cache: bool, cache_tokens: int) -> None:
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._manager = loaded.init_continuous_batching(
            GenerationConfig(do_sample=False, eos_token_id=NO_TOKEN),
            ContinuousBatchingConfig(
                page_size=PAGE_TOKENS,
                num_blocks=-(-cache_tokens // PAGE_TOKENS) + SPARE_PAGES,
                allow_block_sharing=prefix_cache,
            ),
        )
        self._manager.start()

    def submit(self, prompt: Sequence[int], output_tokens: int, on_tokens: OnTokens) -> None:
        name, count = str(uuid4()), 0

        def on_output(output: GenerationOutput) -> None:
            nonlocal count
            tokens, count = output.generated_tokens[count:], len(output.generated_tokens)
            if tokens:
                on_tokens(tokens)
            if output.is_finished():
                on_tokens(())

        self._manager.register_result_handler(name, on_output)
        self._manager.add_request(
            list(prompt),
            request_id=name,
            max_new_tokens=output_tokens,
            streaming=True,
            eos_token_id=NO_TOKEN,
        )

    def text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens)))


def main() -> None:
    model, port, prefix_cache, cache_tokens = sys.argv[1:]
    engine = Transformers(model, prefix_cache=prefix_cache == "1", cache_tokens=int(cache_tokens))
    serve(engine, int(port))


if __name__ == "__main__":
    main()
