"""The server in virtual time: the real coordinator among workers that only pretend to compute."""

from triptych.simulator.cluster import Outcome, Simulation, Trial
from triptych.simulator.costs import Costs
from triptych.simulator.setup import Cluster, Job

__all__ = ["Cluster", "Costs", "Job", "Outcome", "Simulation", "Trial"]
