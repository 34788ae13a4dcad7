"""What the builder decides once, and every actor of the application is given."""

import secrets
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from triptych.core.config import AppConfig
from triptych.core.errors import ConfigError
from triptych.core.pages import PagePlan
from triptych.core.plugin_overrides import Offer
from triptych.core.profile import Fidelity
from triptych.core.shards import shard_of
from triptych.router import Windows


@dataclass(frozen=True)
class AppPlan:
    """Settings, resolved: which model, which pages, which addresses."""

    config: AppConfig
    """That of one cell (``core.cells``)."""
    model_path: Path
    pages: PagePlan
    context_tokens: int
    """That the model reads at once."""
    weights: str
    """Hash of the model's weights."""
    run_dir: Path
    """Holds the application's sockets; only this user may enter it. Of several nodes, each has its
    own."""
    nodes: int = 1
    """Nodes with a pool; if there are several, what passes between them goes over TCP."""
    fidelity: tuple[Fidelity, ...] = ()
    """What calibration measured with these settings, by length of context."""
    offers: tuple[Offer, ...] = ()
    """What requests may change of the decode step's plug-ins."""
    token: str = field(default="", repr=False)
    """What processes of different nodes show each other if no file says it."""
    cells: int = 1
    """Routers of the application."""
    cell: int = 0
    """Which of their cells this is the plan of."""

    def of_cell(self, config: AppConfig, index: int) -> Self:
        """The plan of another cell; ``config`` is the whole application's."""
        return replace(self, config=shard_of(config, index), cell=index)

    def named(self, role: str) -> str:
        """What a cell calls something that each cell has."""
        return role if self.cells == 1 else f"{role}-{self.cell}"

    @property
    def windows(self) -> Windows | None:
        """How sequences are read that are longer than the context; None: they are not taken."""
        return Windows.of(self.config, self.context_tokens)

    @property
    def longest_tokens(self) -> int:
        """Prompt plus answer that clients may ask for."""
        asked = self.config.model.max_model_len
        return self.context_tokens if asked == "auto" else max(self.context_tokens, asked)

    @property
    def pool_pages(self) -> int:
        return self.config.pool.kv_cache_memory_bytes // self.pages.page_bytes

    @property
    def bookable_bytes(self) -> int:
        """Page memory that requests may book: no worker's stock, no prefix that is kept."""
        return self.pool_pages * self.pages.page_bytes - self._stock_bytes - self.pages.prefix_bytes

    @property
    def _stock_bytes(self) -> int:
        """The most that workers keep in stock."""
        return 2 * self.config.pool.extent_pages * self.workers * self.pages.page_bytes

    @property
    def workers(self) -> int:
        """Processes that take pages, at the most."""
        return sum(group.most for group in self.config.worker_groups().values())

    @property
    def readers(self) -> int:
        """Processes that read prompts, at first."""
        config = self.config
        stage = config.decode if config.topology == "colocated" else config.prefill
        return stage.actor.num_replicas

    def check(self) -> None:
        """Raise ConfigError if windows do not fit the context, or there is too little memory."""
        Windows.of(self.config, self.context_tokens)
        self._check_stock()

    def _check_stock(self) -> None:
        """Raise ConfigError if stocks and prefixes leave too little for requests."""
        capacity, page = self.config.pool.kv_cache_memory_bytes, self.pages.page_bytes
        if 2 * (self.pool_pages * page - self._stock_bytes) < capacity:
            raise ConfigError(
                f"pool.extent_pages={self.config.pool.extent_pages}: {self.workers} workers may "
                f"keep twice as many pages of {page} bytes each, more than half of "
                f"pool.kv_cache_memory_bytes={capacity}{self._each}: lower the one or raise the "
                "other"
            )
        if 4 * self.bookable_bytes < capacity:
            raise ConfigError(
                f"pool.prefix_bytes={self.pages.prefix_bytes}: with what workers keep in stock it "
                f"leaves {self.bookable_bytes} bytes of "
                f"pool.kv_cache_memory_bytes={capacity}{self._each} "
                "for requests, less than a quarter: lower it or raise the capacity"
            )

    @property
    def _each(self) -> str:
        return f" in each of {self.cells} cells" if self.cells > 1 else ""

    @property
    def pool_address(self) -> str:
        return f"unix:{self.run_dir / self.named('pool')}.sock"

    @property
    def router_address(self) -> str:
        return self.address(self.named("router"))

    @property
    def router_addresses(self) -> tuple[str, ...]:
        """Those of all cells, the first one's first."""
        return tuple(replace(self, cell=cell).router_address for cell in range(self.cells))

    @property
    def turns(self) -> Path:
        """Where the stages of this machine take turns on its cores."""
        return self.run_dir / "turns"

    def address(self, name: str) -> str:
        """What others call the process of that name: its socket, or of several nodes its name."""
        return f"unix:{self.run_dir / name}.sock" if self.nodes == 1 else name


def new_name(role: str) -> str:
    """A process name that no earlier process had."""
    return f"{role}-{secrets.token_hex(4)}"
