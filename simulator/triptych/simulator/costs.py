"""Cost model: seconds for each piece of work, fitted to a measured server."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Self, cast

from triptych.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds, on an undisturbed machine. Defaults: SmolLM2-135M in bfloat16 on two CPU cores.

    A step takes a fixed time and some for each token or request in it; attention also takes
    time for each pair of tokens that it looks at.
    """

    arrive_s: float = 0.02
    """From the client to the router: HTTP, checks, tokenizing."""
    reply_s: float = 0.01
    """From a worker to the client."""
    hop_s: float = 0.002
    """A message between two processes."""
    encode_step_s: float = 0.013
    encode_token_s: float = 2.6e-4
    """For each feature of an image; SigLIP-B/16 with 196 of them
    (``benchmarks/serving/image_chats.py``). Not fitted by ``simulate fit``."""
    prefill_step_s: float = 0.01
    prefill_token_s: float = 6e-4
    prefill_pair_s: float = 4e-8
    """For each pair of a token that is read and one before it."""
    compress_step_s: float = 0.005
    compress_token_s: float = 6e-5
    decode_step_s: float = 0.015
    decode_request_s: float = 0.003
    decode_token_s: float = 5e-7
    """For each stored token that a step attends to."""

    def __post_init__(self) -> None:
        for name, value in self.as_dict().items():
            if not 0 <= value < 1e6:
                raise ConfigError(f"costs.{name}={value!r}: expected seconds from 0 on")

    def as_dict(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def of(cls, data: Mapping[str, object], source: str) -> Self:
        """Read what ``as_dict`` wrote.

        Raises: ConfigError naming the source and the entry
        """
        known = {one.name for one in fields(cls)}
        for name, value in data.items():
            if name not in known:
                raise ConfigError(f"{source}: no cost is called {name!r} (have {sorted(known)})")
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise ConfigError(f"{source}: {name} is {value!r}: expected a number")
        return cls(**{name: float(cast("float", value)) for name, value in data.items()})

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the ``costs`` of a file that ``triptych simulate fit`` wrote.

        Raises: ConfigError if it is none
        """
        try:
            data: object = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: cannot be read as costs: {error}") from error
        costs = cast("dict[str, object]", data).get("costs") if isinstance(data, dict) else None
        if not isinstance(costs, dict):
            raise ConfigError(f"{path}: no 'costs' in it: expected what `simulate fit` writes")
        return cls.of(cast("dict[str, object]", costs), str(path))
