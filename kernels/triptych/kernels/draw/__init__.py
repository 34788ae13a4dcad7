"""Op of sampling: one token for each row of logits, with the settings of the row."""

from triptych.kernels.draw import reference
from triptych.kernels.op import Op

draw_tokens = Op(
    name="draw_tokens",
    spec=reference.draw_tokens,
    fast={
        "cpu": "triptych.kernels.draw.cpu:draw_tokens",
        "cuda": "triptych.kernels.draw.gpu:draw_tokens",
    },
)
