"""Windows over a sequence that is longer than the model's context."""

from dataclasses import dataclass, replace

from triptych.core.config import AppConfig, require
from triptych.core.messages import Request


@dataclass(frozen=True, slots=True)
class Windows:
    """Stretches of ``size`` tokens; each begins with the last ``overlap`` tokens of the one before.

    Where a sequence stands in its windows depends on its length alone, so whoever computes a token
    again reads the same. Each window is read anew, from position 0: keys of the one before would
    be turned by positions, and hold what tokens say that the model sees no more.

    Source: TinyServe, section 4.1 (windows with an overlap of 1,024 tokens above 2,048)
    """

    size: int
    overlap: int

    @classmethod
    def of(cls, config: AppConfig, context_tokens: int) -> "Windows | None":
        """The windows that the settings ask for; None if no sequence may exceed the context.

        Raises: ConfigError if they do not fit the context
        """
        longest, overlap = (
            config.model.max_model_len,
            config.experimental.context_window_overlap_tokens,
        )
        if longest == "auto" or longest <= context_tokens:
            return None
        if overlap == "auto":
            return cls(context_tokens, context_tokens // 2)
        name = "experimental.context_window_overlap_tokens"
        must = f"less than the context of {context_tokens}"
        require(overlap < context_tokens, name, overlap, must)
        return cls(context_tokens, overlap)

    def begin(self, tokens: int) -> int:
        """Start of the window in which the token after ``tokens`` tokens is sampled.

        >>> windows = Windows(size=8, overlap=3)
        >>> [windows.begin(tokens) for tokens in (0, 7, 8, 12, 13)]
        [0, 0, 5, 5, 10]
        """
        beyond, stride = tokens + 1 - self.size, self.size - self.overlap
        return 0 if beyond <= 0 else -(-beyond // stride) * stride

    def cut(self, request: Request) -> Request:
        """The request limited to its present window."""
        skipped = self.begin(len(request.prompt) + len(request.output_tokens))
        room = skipped + self.size - len(request.prompt)
        sampling = request.sampling
        if not skipped and sampling.max_tokens <= room:
            return request
        return replace(
            request,
            skipped=skipped,
            goes_on=room < sampling.max_tokens,
            sampling=replace(sampling, max_tokens=min(room, sampling.max_tokens)),
        )
