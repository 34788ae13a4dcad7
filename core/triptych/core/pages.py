"""What router and stages must agree on: the shape of pages, which formats hold what, the window."""

from dataclasses import dataclass
from functools import cached_property

from triptych.core.config import AppConfig
from triptych.core.errors import ConfigError
from triptych.core.layout import FORMATS, Geometry, PageLayout, default_page_bytes, page_format


@dataclass(frozen=True)
class PagePlan:
    """Where a request's keys and values go: raw 16-bit pages first, then the policy's format.

    A token is written to a raw page. The newest ``window_tokens`` tokens stay there; when a
    whole raw page is older than that, its tokens move into pages of the ``stored`` format.
    So raw pages are the prefill stage's output, the recent window, and the write buffer of
    the decode stage, and they pass from stage to stage as they are.
    """

    geometry: Geometry
    page_bytes: int
    stored_format: str
    window_tokens: int

    @classmethod
    def of(cls, config: AppConfig, geometry: Geometry) -> "PagePlan":
        """Resolve the settings that depend on the model."""
        page = config.pool.page_bytes
        plan = cls(
            geometry,
            default_page_bytes(geometry.head_dim) if page == "auto" else page,
            config.compressor.format_name,
            config.compressor.recent_window_tokens,
        )
        plan.check_formats()
        plan.check_capacity(config.pool.capacity_bytes)
        return plan

    def check_formats(self) -> None:
        """Raise ConfigError when a page is too small for one token of a format in use."""
        PageLayout(self.raw.format, self.geometry.head_dim, self.page_bytes)
        PageLayout(self.stored.format, self.geometry.head_dim, self.page_bytes)

    def check_capacity(self, capacity_bytes: int) -> None:
        """Raise ConfigError when the pool cannot hold even one short request."""
        least = 4 * self.geometry.head_rows * self.page_bytes
        if capacity_bytes < least:
            raise ConfigError(
                f"pool.capacity_bytes={capacity_bytes}: this model needs at least {least} bytes "
                f"(four pages of {self.page_bytes} bytes for each of {self.geometry.head_rows} "
                "layers x KV heads)"
            )

    @cached_property
    def raw(self) -> PageLayout:
        """16-bit pages, token by token."""
        return PageLayout(FORMATS["fp16"], self.geometry.head_dim, self.page_bytes)

    @cached_property
    def stored(self) -> PageLayout:
        """Pages of the policy's format."""
        return PageLayout(page_format(self.stored_format), self.geometry.head_dim, self.page_bytes)

    @property
    def compresses(self) -> bool:
        """False if the policy keeps 16 bits: then raw pages are the final ones."""
        return self.stored.format.is_quantized

    def leaving_pages(self, raw_tokens: int) -> int:
        """Raw pages of a head row, oldest first, that hold no token of the window."""
        if not self.compresses:
            return 0
        return max(0, raw_tokens - self.window_tokens) // self.raw.tokens

    def raw_bytes(self, tokens: int) -> int:
        """Bytes of the keys and values of ``tokens`` tokens in 16 bits, without any page."""
        return tokens * self.geometry.head_rows * self.geometry.head_dim * 4
