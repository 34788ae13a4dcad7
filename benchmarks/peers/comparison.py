"""Take the turns of a plan, and write the result file after each."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.peers import results
from benchmarks.peers.measure import Conditions, measure_turn
from benchmarks.peers.peer import Peer
from benchmarks.peers.rounds import Measured, Plan, Turn
from benchmarks.peers.servers import Fleet
from benchmarks.peers.workloads import parse_workload
from triptych.cli.output import notes, progress_bars
from triptych.core.errors import BenchmarkError
from triptych.loadgen.report.host import HostInfo, host_info


@dataclass
class Comparison:
    """A plan, the servers that take turns, and what has been measured."""

    path: Path
    plan: Plan
    conditions: Conditions
    servers: dict[str, Peer]
    ports: dict[str, int]
    rows: list[Measured]
    host: HostInfo = field(default_factory=host_info)

    def take_turns(self, fleet: Fleet, on_turn: Callable[[], None]) -> None:
        """Measure what is missing.

        A server that does not start, or fails the warm-up, is skipped for the workload.
        """
        while turn := self.plan.next_turn(self.rows):
            try:
                self.rows.append(self.measure(fleet, turn))
            except BenchmarkError as error:
                place = (turn.workload, turn.server)
                notes.print(f"{place} is skipped: {error}", markup=False, style="red")
                self.plan = replace(self.plan, skipped=[*self.plan.skipped, place])
            self.write()
            on_turn()

    def measure(self, fleet: Fleet, turn: Turn) -> Measured:
        """One turn.

        Raises: BenchmarkError if the server does not start, or fails the warm-up
        """
        workload = parse_workload(turn.workload)
        needs = workload.needs(self.ports[turn.server])
        scope = f"{turn.workload}/{turn.round}/{turn.attempt}"
        with fleet.turn(self.servers[turn.server], needs) as server:
            date = datetime.now(UTC).isoformat(timespec="seconds")
            figures, errors = asyncio.run(measure_turn(server, workload, scope, self.conditions))
        return Measured(
            workload=turn.workload,
            round=turn.round,
            server=turn.server,
            attempt=turn.attempt,
            figures=figures,
            errors=errors,
            date=date,
            commit=str(self.host["commit"] or ""),
        )

    def write(self) -> dict[str, object]:
        return results.write(self.path, self.host, self.conditions, self.plan, self.rows)


def run(comparison: Comparison, fleet: Fleet) -> None:
    """Take all turns, with a progress bar for each workload."""
    workloads = comparison.plan.workloads
    with progress_bars(max(map(len, workloads))) as bars:
        each = comparison.plan.rounds * len(comparison.plan.servers)
        tasks = {name: bars.add_task(name, total=each) for name in workloads}

        def show() -> None:
            for name, task in tasks.items():
                bars.update(task, completed=comparison.plan.settled(comparison.rows, name))

        show()
        try:
            comparison.take_turns(fleet, show)
        finally:
            fleet.close()
