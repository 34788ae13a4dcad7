"""Tables of several methods over one set of arrays."""

from dataclasses import replace
from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.effort import examples
from triptych.core.config import AppConfig
from triptych.core.layout import Geometry
from triptych.core.pages import PagePlan
from triptych.workers.decode.checkpoint import Checkpoint

NAMES = ("diffkv", "leankv", *(f"uniform:{form}" for form in ("fp16", "k8v8", "k8v4", "k4v2")))
CONTEXT, SLOTS = 300, 3


def plan_of(names: list[str], *, has_prefixes: bool) -> PagePlan:
    default, *others = names
    settings: dict[str, object] = {"profile": "none", "policy": default, "methods": others}
    config = AppConfig.from_mapping({"compressor": settings})
    plan = PagePlan.of(config, Geometry(layers=2, kv_heads=2, head_dim=32))
    return plan if has_prefixes else replace(plan, prefix_bytes=0)


SOME = st.lists(st.sampled_from(NAMES), min_size=1, max_size=6, unique=True)


@settings(max_examples=examples(60), deadline=None)
@given(names=SOME, has_prefixes=st.booleans())
def test_a_method_has_its_own_of_the_tables_that_attention_reads(
    names: list[str], has_prefixes: bool
) -> None:
    plan = plan_of(names, has_prefixes=has_prefixes)
    tables = Checkpoint.create(plan, None, SLOTS, CONTEXT).tables
    assert [one.plan.policy.name for one in tables.methods] == names
    for one, other in combinations(tables.sections, 2):
        assert not np.shares_memory(one.tokens, other.tokens)
    for method in tables.methods:
        own = method.plan
        assert [table.layout for table in method.tables] == [own.recent, *own.classes]
        assert (method.fixed is not None) == own.has_fixed_pages
        assert len(method.places) == len(method.sections)
        for place, table in zip(method.places, method.sections, strict=True):
            section = tables.sections[place]
            assert (section.layout, section.backward) == (table.layout, table.backward)
            assert np.shares_memory(section.tokens, table.tokens)
            assert np.shares_memory(section.pages, table.pages)
            assert table.tokens.flags.c_contiguous
            assert table.width >= table.layout.pages(min(CONTEXT, table.room))
    first = tables.methods[0]
    alone = Checkpoint.create(plan_of(names[:1], has_prefixes=has_prefixes), None, SLOTS, CONTEXT)
    assert len(alone.sections) == len(first.sections), "a method alone has no table of others"


@settings(max_examples=examples(40), deadline=None)
@given(names=SOME, data=st.data())
def test_requests_of_different_methods_have_pages_of_their_own(
    names: list[str], data: st.DataObject
) -> None:
    """Rows of slots are filled, copied to another checkpoint, and emptied by the next request."""
    plan = plan_of(names, has_prefixes=False)
    checkpoint, other = (Checkpoint.create(plan, None, SLOTS, CONTEXT) for _ in range(2))
    rows, fresh = plan.geometry.head_rows, iter(range(1 << 20))
    held = dict[int, list[int]]()
    for slot in range(SLOTS):
        method = data.draw(st.sampled_from(checkpoint.tables.methods))
        checkpoint.assign(slot, method)
        left = CONTEXT // 2
        held[slot] = []
        for table in method.tables:
            counts = np.full(rows, data.draw(st.integers(0, min(left, table.room))), np.int32)
            left -= int(counts[0])
            wanted = rows * table.layout.pages(int(counts[0]))
            ids = np.array([next(fresh) for _ in range(wanted)], np.int32)
            table.fill(slot, counts, ids)
            held[slot] += ids.tolist()
    for slot, ids in held.items():
        method = checkpoint.tables_of(slot)
        assert [page for table in method.tables for page in table.read(slot)[1]] == ids
        others = [s for at, s in enumerate(checkpoint.sections) if at not in method.places]
        assert not any(table.tokens[:, slot].any() for table in others)
        other.copy_slot(checkpoint, slot, slot)
        copied = other.tables_of(slot)
        assert copied.plan.policy == method.plan.policy
        assert [page for table in copied.tables for page in table.read(slot)[1]] == ids
    checkpoint.assign(0, checkpoint.tables.methods[-1])
    assert not any(table.tokens[:, 0].any() for table in checkpoint.sections)
    assert all(checkpoint.tables_of(s).tables[0].read(s)[0].size == rows for s in range(SLOTS))
