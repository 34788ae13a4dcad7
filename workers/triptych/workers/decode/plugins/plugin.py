"""The interface of a plug-in of the decode step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

Facts = Mapping[str, Tensor]
"""Values at the end of a step, by name; one row for each request that has the plug-in."""

GIVEN = ("logits", "entropy", "token", "length", "position")
"""Values that the engine provides.

``logits``: the model's own, float32 [B, vocab], before bias, penalties and grammar.
``entropy``: entropy of their distribution in nats, float32 [B].
``token``: the token sampled in this step, int64 [B].
``length``: output tokens, this one included, int64 [B].
``position``: position of the input token of the step, int64 [B].
"""

END, MEMORY = "end", "memory"
"""Values that the engine takes from plug-ins. ``end``, bool [B]: the output ends with this token.
``memory``, float64 [B, n]: the state of the plug-in, its input at the next step."""

SCORES, EXITS = "scores", "exits"
CONDITIONS = {
    SCORES: "compressor.policy: diffkv, or another that tells tokens of answers apart by their "
    "attention, with score_every_tokens above 0",
    EXITS: "a model of the Llama, Mistral, Qwen2 or Qwen3 kind",
}
"""Conditions that a plug-in can need, and the settings that meet them. ``scores``: output tokens
have scores, from the attention that they receive. ``exits``: tokens can exit before the last layer,
which the worker knows once it has loaded the model."""

ALPHA_LOW, EXIT_ENTROPY, EXIT_DEPTH = "alpha_low", "exit_entropy", "exit_depth"
SETTINGS = (ALPHA_LOW, EXIT_ENTROPY, EXIT_DEPTH)
"""Settings that a plug-in can set for a request instead of running at each step. ``alpha_low``:
output tokens whose mean attention, times the tokens so far, is lower are dropped, if it is above
``compressor.alpha_low``. ``exit_entropy``, ``exit_depth``: tokens skip the layers after the share
``exit_depth`` if the entropy of the next token is below ``exit_entropy`` nats there."""


@dataclass(frozen=True)
class StepPlugin:
    """A plug-in: a frozen dataclass whose fields are its options: numbers, flags or texts.

    ``step`` computes the values that it ``provides`` from those that it ``needs``. A plug-in that
    provides a value runs before one that needs it. ``step`` must depend only on options and
    values, row by row: then an output does not depend on the rest of its batch, and a takeover
    worker computes the same.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    """Names of values, of the engine or of other plug-ins, and of conditions."""
    provides: ClassVar[tuple[str, ...]] = ()
    """Names of values and of settings. Only ``end`` can have several providers."""
    memory: ClassVar[int] = 0
    """Numbers of state per request, initially 0. If there are any, ``step`` gets them as the value
    ``memory`` and returns new ones under that name. They follow the request to other workers."""

    def step(self, facts: Facts) -> Facts:
        """Compute the provided values of one step; one row per request.

        Not called for a plug-in that provides only settings.
        """
        raise NotImplementedError

    def settings(self) -> Mapping[str, float]:
        """The settings that it provides, constant during a request."""
        return {}
