"""Where the conformance suite runs as on a GPU: as engines do."""

from tests.unit.workers.gpu.conftest import IS_INTERPRETED, device, quick_device

if IS_INTERPRETED:
    from tests.far import far, quick_far

    __all__ = ["device", "far", "quick_device", "quick_far"]
else:
    __all__ = ["device", "quick_device"]
