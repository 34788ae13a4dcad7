"""A server without a model, behind the shim of the peers: answers are numbers."""

import sys
from collections.abc import Sequence

from benchmarks.peers.shims.completions import OnTokens, serve


class Numbers:
    """Answers at once; ``short``: with a token too few."""

    def __init__(self, *, short: bool) -> None:
        self._short = short

    def submit(self, prompt: Sequence[int], output_tokens: int, on_tokens: OnTokens) -> None:
        for number in range(output_tokens - self._short):
            on_tokens([number])
        on_tokens(())

    def text(self, tokens: Sequence[int]) -> str:
        return f"{tokens[0]} "


if __name__ == "__main__":
    serve(Numbers(short=sys.argv[2] == "short"), int(sys.argv[1]))
