# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch leaves optimizers and Tensor.norm untyped in part.
"""Trains small networks by gradient descent, with early stopping, and resumes after a kill.

A step is a function of its number and of the state before it, and the state is saved whole. So a
training that is killed at any step and resumed gives the same network, to the bit, as one that is
not (with the same number of threads).
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from math import cos, inf, pi
from pathlib import Path
from typing import Protocol, cast

import torch
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as format_tensors
from torch import Tensor, nn

from triptych.core.config import require

STATE = "triptych_training"
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""What Adam keeps for each parameter."""
GRADIENT_LIMIT = 1.0
"""Largest norm of the gradient of one group of networks, such as a layer."""

Advance = Callable[[int, float | None], None]
"""Called after each step with its number and, if it was computed, the held-out loss."""


class Objective(Protocol):
    """A network to train, and its loss in each step and on held-out documents."""

    @property
    def network(self) -> nn.Module:
        """All parameters have independent groups (layers, head rows) as their first dimension."""
        ...

    def loss(self, step: int) -> Tensor:
        """Loss of each group in a step, or of all: any shape; its sum is minimized."""
        ...

    def held_out_loss(self) -> float:
        """Mean loss on held-out documents."""
        ...


@dataclass(frozen=True, kw_only=True)
class FitPlan:
    """Length and rates of a training."""

    steps: int = 300
    learning_rate: float = 1e-3
    """Of the first step; falls to 0 as a cosine."""
    evaluate_every: int = 25
    """Steps between two held-out losses; the state is saved then."""
    patience: int = 4
    """Training stops after this many held-out losses that are no improvement."""

    def __post_init__(self) -> None:
        require(self.steps >= 1, "steps", self.steps, ">= 1")
        require(self.learning_rate > 0, "learning_rate", self.learning_rate, "> 0")
        require(self.evaluate_every >= 1, "evaluate_every", self.evaluate_every, ">= 1")
        require(self.patience >= 1, "patience", self.patience, ">= 1")


@dataclass
class FitState:
    """All that a training has found so far."""

    step: int = 0
    """Steps done."""
    best_step: int = 0
    best_loss: float = inf
    losses: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    """Steps done and held-out loss, at each evaluation."""
    best: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Tensors of the network at ``best_step``."""

    def record(self, network: nn.Module, loss: float) -> None:
        self.losses.append((self.step, loss))
        if loss < self.best_loss:
            self.best_step, self.best_loss = self.step, loss
            self.best = {name: part.detach().clone() for name, part in network.state_dict().items()}

    def is_over(self, plan: FitPlan) -> bool:
        """Whether all steps are done, or the last ``patience`` evaluations were no improvement."""
        since = sum(step > self.best_step for step, _ in self.losses)
        return self.step >= plan.steps or since >= plan.patience


def fit(
    objective: Objective, plan: FitPlan, state_file: Path, name: str, advance: Advance
) -> FitState:
    """Train, or resume; the network has its best tensors afterwards.

    ``name``: everything that the result depends on besides the plan. A state file of something
    else is not used.

    Raises: OSError if the state cannot be written
    """
    network = objective.network
    optimizer = torch.optim.Adam(network.parameters(), lr=plan.learning_rate)
    bound = hashlib.sha256(repr((name, plan)).encode()).hexdigest()
    state = _resume(state_file, bound, network, optimizer)
    if not state.losses:
        state.record(network, objective.held_out_loss())
        advance(0, state.best_loss)
    while not state.is_over(plan):
        _step(objective, optimizer, _rate(plan, state.step), state.step)
        state.step += 1
        is_due = state.step % plan.evaluate_every == 0 or state.step == plan.steps
        if is_due:
            state.record(network, objective.held_out_loss())
            _save(state_file, bound, network, optimizer, state)
        advance(state.step, state.losses[-1][1] if is_due else None)
    network.load_state_dict(state.best)
    return state


def _rate(plan: FitPlan, step: int) -> float:
    return plan.learning_rate * (1 + cos(pi * step / plan.steps)) / 2


def _step(objective: Objective, optimizer: torch.optim.Adam, rate: float, step: int) -> None:
    optimizer.param_groups[0]["lr"] = rate
    optimizer.zero_grad()
    objective.loss(step).sum().backward()
    clip_groups(objective.network)
    optimizer.step()


def clip_groups(network: nn.Module) -> None:
    """Limit the gradient of each group, so that no group slows another one down."""
    gradients = [part.grad for part in network.parameters() if part.grad is not None]
    groups = min(len(gradient) for gradient in gradients)
    squares = sum(gradient.view(groups, -1).square().sum(1) for gradient in gradients)
    norms = cast("Tensor", squares).sqrt()
    factors = GRADIENT_LIMIT / norms.clamp_min(GRADIENT_LIMIT)
    for gradient in gradients:
        gradient.view(groups, -1).mul_(factors[:, None])


# ------------------------------------------------------------------ the state file


def _save(
    file: Path, bound: str, network: nn.Module, optimizer: torch.optim.Adam, state: FitState
) -> None:
    tensors = {f"now.{name}": part for name, part in network.state_dict().items()}
    tensors |= {f"best.{name}": part for name, part in state.best.items()}
    for name, part in network.named_parameters():
        moments = cast("dict[str, Tensor]", optimizer.state[part])
        tensors |= {f"adam.{key}.{name}": moment for key, moment in moments.items()}
    about = {
        "bound": bound,
        "step": state.step,
        "best_step": state.best_step,
        "best_loss": state.best_loss,
        "losses": state.losses,
    }
    whole = {name: part.detach().contiguous().clone() for name, part in tensors.items()}
    partial = file.with_name(file.name + ".partial")
    file.parent.mkdir(parents=True, exist_ok=True)
    partial.write_bytes(format_tensors(whole, {STATE: json.dumps(about)}))
    partial.replace(file)


def _resume(file: Path, bound: str, network: nn.Module, optimizer: torch.optim.Adam) -> FitState:
    """The saved state, put into network and optimizer; a new one if there is none for this."""
    if not file.is_file():
        return FitState()
    data = file.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    about = json.loads(header["__metadata__"][STATE])
    if about["bound"] != bound:
        return FitState()
    tensors = parse_tensors(data)
    network.load_state_dict(_part(tensors, "now."))
    for name, part in network.named_parameters():
        if f"adam.step.{name}" in tensors:  # else no loss depends on it
            optimizer.state[part] = {key: tensors[f"adam.{key}.{name}"] for key in MOMENTS}
    return FitState(
        step=about["step"],
        best_step=about["best_step"],
        best_loss=about["best_loss"],
        losses=[(step, loss) for step, loss in about["losses"]],
        best=_part(tensors, "best."),
    )


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
