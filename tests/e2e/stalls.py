"""Stop each process of a server for some seconds while clients stream.

    python -m tests.e2e.stalls --seconds 1,5,15,30 --json benchmarks/results/stalls.json
    python -m tests.e2e.stalls --no-prefix-cache --victims Prefill,Compressor,Decode

The same prompts are sent each time, so with a prefix cache there is little left to prefill and to
compress: stall these two stages without one.

A stopped process (SIGSTOP) keeps its memory, its sockets and its place in everybody's tables, as a
process of an overloaded or swapping machine does. Every stream must end whole or with an error
event, all bookings and pages must be returned, and after a stall of a prefill, compressor or decode
worker no text may differ from that of an undisturbed run. Exit code 1 if one of these fails.
"""

import argparse
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.progress import track

from tests.e2e.conftest import MODEL, Server, serve_run
from triptych.cli.list_options import names, numbers
from triptych.cli.output import console, make_table, write_json
from triptych.loadgen.report.host import host_info

VICTIMS = ("Prefill", "Compressor", "Decode", "Router", "Ingress", "Pool")
KEEP_TEXTS = ("Prefill", "Compressor", "Decode")
CLIENTS, MAX_TOKENS = 8, 96
RETURNED_WITHIN_S = 60
PROMPTS = [f"{i}: " + "The harbour wall was built in 1903. " * (4 + 5 * i) for i in range(CLIENTS)]


@dataclass(frozen=True, kw_only=True)
class Stall:
    """One stall and its outcome."""

    victim: str
    seconds: float
    endings: dict[str, int]
    """Streams by finish reason or error code; ``cut`` and ``shapeless`` are faults."""
    changed_texts: int
    returned_s: float | None
    """Seconds after the last stream until bookings and pages were zero; None: never."""
    took_s: float

    @property
    def faults(self) -> list[str]:
        """What must not happen."""
        bad = [f"{n} streams: {end}" for end, n in self.endings.items() if _is_fault(end)]
        if self.returned_s is None:
            bad.append("bookings or pages are left")
        if self.changed_texts and self.victim in KEEP_TEXTS:
            bad.append(f"{self.changed_texts} texts changed")
        return bad


def _is_fault(ending: str) -> bool:
    return ending in ("", "None") or ending.startswith(("cut", "shapeless"))


def is_empty(server: Server) -> bool:
    """Whether no request has bookings or pages."""
    return server.metric("triptych_router_booked_bytes") == 0 and server.pages_held() == 0


def undisturbed(server: Server, rounds: int = 3) -> list[set[str]]:
    """The texts of each prompt without a stall: neighbours in a batch may change a token."""
    texts = [set[str]() for _ in PROMPTS]
    for _ in range(rounds):
        crowd = server.crowd(PROMPTS, MAX_TOKENS)
        endings = crowd.join()
        assert endings == {"length": CLIENTS}, endings
        for known, text in zip(texts, crowd.texts, strict=True):
            known.add(text)
    return texts


def stall(server: Server, victim: str, seconds: float, expected: Sequence[set[str]]) -> Stall:
    """Stop one process for so long, after each stream has begun."""
    server.wait_until(server.is_healthy, timeout_s=120)
    began = time.monotonic()
    crowd = server.crowd(PROMPTS, MAX_TOKENS)
    # Prefill and compressor have work until the last prompt is done, decode from the first one on.
    crowd.wait_for_chunks(1, clients=1 if victim in ("Prefill", "Compressor") else CLIENTS // 2)
    # Ray names a process by what it runs, for a moment by nothing that is ours.
    server.wait_until(lambda: bool(server.replicas(victim)), timeout_s=30)
    process = server.replicas(victim)[0]
    process.send_signal(signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        if process.is_running():
            process.send_signal(signal.SIGCONT)
    endings = crowd.join()
    changed = sum(
        text not in known
        for text, known, ending in zip(crowd.texts, expected, crowd.endings, strict=True)
        if ending == "length"
    )
    return Stall(
        victim=victim,
        seconds=seconds,
        endings=dict(endings),
        changed_texts=changed,
        returned_s=_returned_s(server),
        took_s=round(time.monotonic() - began, 1),
    )


def _returned_s(server: Server) -> float | None:
    try:
        return round(server.wait_until(lambda: is_empty(server), RETURNED_WITHIN_S), 1)
    except AssertionError:
        return None


def run(
    victims: Sequence[str],
    lengths: Sequence[float],
    tell: Callable[[Stall], None],
    settings: dict[str, Any],
) -> None:
    """All stalls on one server with these settings."""
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        server = stack.enter_context(serve_run(Path(folder), settings))
        expected = undisturbed(server)
        each = [(victim, seconds) for victim in victims for seconds in lengths]
        for victim, seconds in track(each, "stalls", console=console):
            tell(stall(server, victim, seconds, expected))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--victims", default=",".join(VICTIMS))
    parser.add_argument("--seconds", default="1,5,15,30")
    parser.add_argument("--no-prefix-cache", action="store_true")
    parser.add_argument(
        "--dtype", default="bfloat16", help="float32 has less noise between batches"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    host, stalls = host_info(), list[Stall]()

    def tell(one: Stall) -> None:
        stalls.append(one)
        console.print(one.victim, one.seconds, one.endings, one.faults or "", soft_wrap=True)
        sys.stdout.flush()

    settings = {
        "model": {"name": MODEL, "dtype": options.dtype},
        "pool": {"prefix_bytes": 0} if options.no_prefix_cache else {},
    }
    run(names(options.victims), numbers(options.seconds), tell, settings)
    lines: list[list[Any]] = [
        [s.victim, s.seconds, str(s.endings), s.changed_texts, s.returned_s, "; ".join(s.faults)]
        for s in stalls
    ]
    heads = ("stopped", "s", "streams", "changed texts", "returned after s", "faults")
    console.print(make_table(heads, lines))
    if options.json:
        rows = [asdict(one) | {"faults": one.faults} for one in stalls]
        totals = Counter(fault for one in stalls for fault in one.faults)
        write_json({"host": host, "faults": dict(totals), "stalls": rows}, options.json)
    return 1 if any(one.faults for one in stalls) else 0


if __name__ == "__main__":
    sys.exit(main())
