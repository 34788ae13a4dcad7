"""Training goes on where it was killed, and stops when it no longer helps."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from triptych.evals.training.fit import FitPlan, FitState, fit

PLAN = FitPlan(steps=23, learning_rate=0.05, evaluate_every=5, patience=10)


class Line(nn.Module):
    """Two independent lines y = a x + b."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.zeros(2, 1))
        self.height = nn.Parameter(torch.zeros(2, 1))
        self.scale = nn.Buffer(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.slope * x + self.height) * self.scale


class Lines:
    """Fits 3 x - 1 and -2 x + 5 to noisy points that depend on the step alone."""

    def __init__(self, noise: float = 0.1) -> None:
        self.network, self.noise = Line(), noise

    def loss(self, step: int) -> Tensor:
        draw = torch.Generator().manual_seed(step)
        x = torch.randn(2, 16, generator=draw)
        target = torch.tensor([[3.0], [-2.0]]) * x + torch.tensor([[-1.0], [5.0]])
        noise = torch.randn(2, 16, generator=draw) * self.noise
        return (self.network(x) - target - noise).square().mean(1)

    @torch.no_grad()
    def held_out_loss(self) -> float:
        return float(self.loss(10_000).mean())


class Killed(Exception):
    pass


def run(folder: Path, kill_at: int | None = None) -> tuple[FitState, dict[str, Tensor]]:
    lines = Lines()

    def advance(step: int, _loss: float | None) -> None:
        if step == kill_at:
            raise Killed

    state = fit(lines, PLAN, folder / "state.safetensors", "lines", advance)
    return state, lines.network.state_dict()


@pytest.mark.parametrize("kill_at", [0, 1, 4, 5, 7, 10, 19, 22, 23])
def test_a_training_killed_at_any_step_and_resumed_gives_the_same(
    kill_at: int, tmp_path: Path
) -> None:
    whole, expected = run(tmp_path / "whole")
    with pytest.raises(Killed):
        run(tmp_path / "cut", kill_at)
    resumed, found = run(tmp_path / "cut")
    assert resumed.losses == whole.losses
    assert resumed.best_step == whole.best_step
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_it_resumes_and_does_not_begin_anew(tmp_path: Path) -> None:
    steps = list[int]()
    with pytest.raises(Killed):
        run(tmp_path, 17)
    fit(Lines(), PLAN, tmp_path / "state.safetensors", "lines", lambda step, _: steps.append(step))
    assert steps == list(range(16, 24))


def test_the_state_of_another_training_is_not_used(tmp_path: Path) -> None:
    run(tmp_path)
    steps = list[int]()
    fit(Lines(), PLAN, tmp_path / "state.safetensors", "other", lambda step, _: steps.append(step))
    assert steps == list(range(24))


def test_a_torn_save_leaves_the_state_before_it(tmp_path: Path) -> None:
    _, expected = run(tmp_path)
    (tmp_path / "state.safetensors.partial").write_bytes(b"torn")
    _, found = run(tmp_path)
    assert torch.equal(found["slope"], expected["slope"])


def test_it_fits_and_returns_the_best_network(tmp_path: Path) -> None:
    lines = Lines(noise=0.0)
    plan = FitPlan(steps=400, learning_rate=0.1, evaluate_every=20, patience=20)
    state = fit(lines, plan, tmp_path / "state.safetensors", "lines", lambda _step, _loss: None)
    assert state.best_loss < 1e-3
    assert lines.held_out_loss() == state.best_loss
    assert lines.network.slope[:, 0].tolist() == pytest.approx([3, -2], abs=0.1)


def test_it_stops_early_and_takes_the_best_tensors_back(tmp_path: Path) -> None:
    class Worsening(Lines):
        def held_out_loss(self) -> float:
            return float(self.network.slope.detach().abs().sum())  # grows from 0 on

    worsening = Worsening()
    plan = FitPlan(steps=500, learning_rate=0.1, evaluate_every=10, patience=3)
    state = fit(worsening, plan, tmp_path / "state.safetensors", "w", lambda _step, _loss: None)
    assert state.step == 30
    assert state.best_step == 0
    assert not worsening.network.slope.any()


def test_one_group_with_a_large_gradient_does_not_slow_the_others_down(tmp_path: Path) -> None:
    """Clipping by one norm for all would divide the gradient of the second line by a million."""

    class Steep(Lines):
        def loss(self, step: int) -> Tensor:
            return super().loss(step) * torch.tensor([1e6, 1.0])

    steep = Steep()
    optimizer = torch.optim.SGD(steep.network.parameters(), lr=0.0)
    optimizer.zero_grad()
    steep.loss(0).sum().backward()
    from triptych.evals.training.fit import clip_groups  # noqa: PLC0415

    before = steep.network.height.grad.clone()  # type: ignore[union-attr]
    clip_groups(steep.network)
    after = steep.network.height.grad
    assert after is not None
    norms = (steep.network.slope.grad.square() + after.square()).sqrt()  # type: ignore[union-attr]
    assert norms[:, 0].tolist() == pytest.approx([1, min(1, float(norms[1, 0]))])
    assert float(after[1, 0]) * float(before[1, 0]) > 0
    assert float(norms[1, 0]) > 0.5
