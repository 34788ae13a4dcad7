"""The page layouts of a server whose decode workers have GPUs, for each method that it can offer.

Kernels that are compiled ahead of time and benchmarks take their layouts from here, so that what is
checked and measured is what engines run.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product

from triptych.core.config import AppConfig
from triptych.core.layout import Geometry, PageLayout
from triptych.core.methods.learned_files import LearnedFile
from triptych.core.methods.table import offered_methods
from triptych.core.pages import PagePlan
from triptych.core.profile import Profile, Settings
from triptych.core.table_layouts import TableLayouts

MERGER = LearnedFile(
    path="", kind="merger", tensors="", chunk_tokens=5, frequencies=(1.0,)
)  # layouts depend on its kind alone
PROFILED = "diffkv k4v2c"
"""The default of the included profile: ``diffkv`` with limited low values (decision 86)."""
FIRST = ("diffkv", PROFILED, "uniform:k8v4", "uniform:fp16")
"""Methods in front: the defaults of models with a profile, that of others, and 16 bits."""


@dataclass(frozen=True)
class ServedLayouts:
    """The layouts of a method on a GPU."""

    method: str
    plan: PagePlan

    @property
    def sections(self) -> tuple[tuple[PageLayout, bool], ...]:
        """Page layouts that one call of attention reads (``TableLayouts.sections``)."""
        return TableLayouts.of(self.plan).sections

    @property
    def moves(self) -> Iterator[tuple[PageLayout, PageLayout]]:
        """Source and target of the tokens that compressor and decode move between pages."""
        plan = self.plan
        if not plan.compresses:
            return
        yield plan.raw, plan.recent
        yield from product((plan.raw, plan.recent), plan.classes)
        if plan.low is not None:
            yield plan.high, plan.low

    @property
    def copies(self) -> Iterator[tuple[PageLayout, PageLayout]]:
        """Source and target of the tokens that the prefix cache copies."""
        plan = self.plan
        if plan.caches_prompts:
            high = plan.high
            yield from ((layout, high) for layout in (plan.raw, plan.recent, *plan.classes))
            yield high, plan.raw


def _profile(geometry: Geometry) -> Profile:
    """A profile with an order of RoPE pairs, on which layouts do not depend."""
    pairs = geometry.head_dim // 2
    order = bytes(range(pairs)) * geometry.head_rows if pairs <= 256 else b""
    return Profile(
        model="",
        weights="",
        geometry=geometry,
        settings=Settings(),
        pair_order=Profile.pack(order),
    )


@cache
def served_layouts(head_dim: int) -> dict[str, ServedLayouts]:
    """Layouts by method; of methods with the same layouts only the first one.

    >>> [layout.format.name for layout, _ in served_layouts(64)["diffkv"].sections]
    ['k8v8', 'k8v4', 'k4v2', 'k8v4']
    """
    found = dict[tuple[tuple[PageLayout, bool], ...], ServedLayouts]()
    geometry = Geometry(1, 8, head_dim)
    profile = _profile(geometry)
    for name in dict.fromkeys((*FIRST, *offered_methods([MERGER], profile))):
        policy, *low_format = name.split()
        method = {"policy": policy, **({"low_format": low_format[0]} if low_format else {})}
        config = AppConfig.from_mapping(
            {"compressor": method, "decode": {"actor": {"num_gpus": 1}}}
        )
        plan = PagePlan.of(config, geometry, profile, learned=[MERGER])
        served = ServedLayouts(name, plan)
        found.setdefault(served.sections, served)
    return {one.method: one for one in found.values()}
