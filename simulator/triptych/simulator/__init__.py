"""The simulator: the real scheduler with simulated workers, in virtual time."""

from triptych.simulator.cluster import Outcome, Simulation, Trial
from triptych.simulator.costs import Costs
from triptych.simulator.setup import Cluster, Job

__all__ = ["Cluster", "Costs", "Job", "Outcome", "Simulation", "Trial"]
