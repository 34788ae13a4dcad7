"""Files of learned networks, as settings and page plans know them."""

from dataclasses import dataclass
from typing import Literal

from triptych.core.images import TEXT, Modality

NetworkKind = Literal["scorer", "merger", "paper_merger"]
"""``merger`` pools by significance and corrects by networks; ``paper_merger``: FastCache's plain
networks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedFile:
    """A file of networks that fits the model that is served."""

    path: str
    kind: NetworkKind
    modality: Modality = TEXT
    """Of the tokens that it reads."""
    tensors: str
    """SHA-256 of its tensors: a file that was replaced since is not used."""
    chunk_tokens: int = 0
    """Tokens that are merged into one; 0 for a scorer."""
    frequencies: tuple[float, ...] = ()
    """RoPE frequencies of the model, in radians per position; they are not in the file."""
