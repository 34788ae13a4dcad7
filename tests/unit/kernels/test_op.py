import pytest
import torch

from triptych.core.errors import ConfigError
from triptych.kernels import OPS, Op


def double(number: torch.Tensor) -> torch.Tensor:
    return number * 2


def test_a_device_without_a_backend_is_an_error_that_names_the_backends() -> None:
    op = Op(name="double", spec=double, fast={"cpu": f"{__name__}:double"})
    with pytest.raises(ConfigError, match=r"double has no 'meta' backend \(have reference, cpu\)"):
        op(torch.empty(1, device="meta"))


def test_a_call_without_tensors_is_an_error() -> None:
    op = Op(name="double", spec=double)
    with pytest.raises(ConfigError, match="no tensor"):
        op(3)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", OPS)
def test_every_backend_of_every_op_can_be_loaded(name: str) -> None:
    assert OPS[name].backends[:2] == ["reference", "cpu"]
    for backend in OPS[name].backends:
        assert callable(OPS[name].on(backend))
