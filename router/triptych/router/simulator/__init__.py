"""The server in virtual time: the real coordinator among workers that only pretend to compute."""

from triptych.router.simulator.cluster import Outcome, Simulation, Trial
from triptych.router.simulator.costs import Costs
from triptych.router.simulator.setup import Cluster, Job

__all__ = ["Cluster", "Costs", "Job", "Outcome", "Simulation", "Trial"]
