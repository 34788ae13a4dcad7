"""Which worker of a stage takes a request, written out: what the roster's rankings must agree with.

Ties go to the first name.
"""

from collections.abc import Callable, Collection, Iterable

from triptych.router.snapshot import WorkerLoad


def has_room(load: WorkerLoad, *, tokens: int, limit_tokens: int) -> bool:
    """Whether a prefill worker takes a prompt of ``tokens`` tokens now.

    It takes prompts of ``limit_tokens`` tokens in all; a longer one it takes alone, but lets short
    ones overtake it, chunk by chunk (``PrefillWorkers.tokens_before``).
    """
    if "prefill" not in load.stages or load.is_full or (load.role == "decode" and load.running):
        return False
    return load.queue_tokens == 0 or load.queue_tokens + tokens <= limit_tokens


def choose_prefill(
    loads: Iterable[WorkerLoad], *, tokens: int, limit_tokens: int, fits: Callable[[str], bool]
) -> WorkerLoad | None:
    """The prefill worker with the fewest tokens to read that has room, or None.

    ``fits`` answers for an arena whether the request could be booked with its raw pages there.
    """
    able = (
        load
        for load in loads
        if has_room(load, tokens=tokens, limit_tokens=limit_tokens) and fits(load.arena)
    )
    return min(able, key=lambda load: (load.queue_tokens, load.name), default=None)


def choose_compressor(
    loads: Iterable[WorkerLoad], *, holder: str, arenas: Collection[str] | None = None
) -> WorkerLoad | None:
    """The compressor with the fewest tokens to compress; before all others the one at ``holder``.

    A worker with several stages keeps its own request: it needs no hop to another process. With
    ``arenas``: one that stores there.
    """
    able = (
        load
        for load in loads
        if "compress" in load.stages
        and not load.is_full
        and (arenas is None or load.arena in arenas)
    )
    return min(
        able,
        key=lambda load: (load.address != holder, load.compress_tokens, load.name),
        default=None,
    )


def choose_decode(
    loads: Iterable[WorkerLoad],
    *,
    free_bytes: Callable[[str], int],
    fits: Callable[[str], bool],
) -> WorkerLoad | None:
    """The decode worker with most free bytes, then most free slots, that can take a request.

    ``free_bytes`` and ``fits`` answer for an arena: how much is free, and whether the
    request could be booked there.
    """
    able = (load for load in loads if load.free_slots > 0 and fits(load.arena))
    return min(
        able,
        key=lambda load: (-free_bytes(load.arena), -load.free_slots, load.name),
        default=None,
    )
