"""What a plug-in of the decode step is."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

Facts = Mapping[str, Tensor]
"""What is known at the end of a step, by name; a row for each request that has the plug-in."""

GIVEN = ("logits", "entropy", "token", "length", "position")
"""Facts of the engine itself.

``logits``: the model's own, float32 [B, vocab], before bias, penalties and grammar.
``entropy``: of the distribution that they stand for, in nats, float32 [B].
``token``: drawn in this step, int64 [B].
``length``: tokens of the answer with it, int64 [B].
``position``: of the token that the step read, int64 [B].
"""

END, MEMORY = "end", "memory"
"""What the engine takes from plug-ins: ``end``, bool [B], says whose answer ends with this token;
``memory``, float64 [B, n], is given back with the next step."""

SCORES, EXITS = "scores", "exits"
CONDITIONS = {
    SCORES: "compressor.policy: diffkv, or another that tells tokens of answers apart by their "
    "attention, with score_every_tokens above 0",
    EXITS: "a model of the Llama, Mistral, Qwen2 or Qwen3 kind",
}
"""What a plug-in may need of the server, and what it takes. ``scores``: the attention that tokens
of answers receive is counted. ``exits``: tokens can leave a step before the last layer, which the
worker knows once it has its model."""

ALPHA_LOW, EXIT_ENTROPY, EXIT_DEPTH = "alpha_low", "exit_entropy", "exit_depth"
SETTINGS = (ALPHA_LOW, EXIT_ENTROPY, EXIT_DEPTH)
"""What a plug-in may set for a request instead of looking at its steps. ``alpha_low``: tokens of
the answer with less mean attention, times the tokens so far, are dropped, if that is more than
``compressor.alpha_low``. ``exit_entropy``, ``exit_depth``: tokens skip the layers behind that share
of them if their next one is clear by then, to less than so many nats."""


@dataclass(frozen=True)
class StepPlugin:
    """A plug-in: a frozen dataclass whose fields are its options, plain numbers, flags or texts.

    It looks at the facts that it ``needs`` and makes those that it ``provides``. Whoever provides
    a fact runs before whoever needs it. ``step`` must depend on nothing but options and facts, row
    by row: then an answer does not depend on what shares its batch, and a worker that takes over
    comes to the same.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    """Names of facts, the engine's or of other plug-ins, and conditions."""
    provides: ClassVar[tuple[str, ...]] = ()
    """Names of facts and of settings. Only ``end`` may be provided by several."""
    memory: ClassVar[int] = 0
    """Numbers that are kept of each answer from one step to the next, at first 0. With some,
    ``step`` is given them as the fact ``memory``, and gives new ones back under that name. They go
    wherever the answer goes on."""

    def step(self, facts: Facts) -> Facts:
        """Look at one step of some requests, one in each row.

        Not called of a plug-in that provides nothing but settings.
        """
        raise NotImplementedError

    def settings(self) -> Mapping[str, float]:
        """The settings that it provides, for as long as a request is answered."""
        return {}
