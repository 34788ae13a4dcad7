"""Features of images in place of the embeddings of their placeholders."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class FeatureRows:
    """Tokens of a batch whose input is given, not looked up in the embedding."""

    at: Tensor
    """Their places in the batch: int64 [N]."""
    features: Tensor
    """[N, channels] float32."""

    def put_into(self, hidden: Tensor) -> Tensor:
        """The inputs of a batch with these in their places.

        Shapes:  hidden (T, E) -> (T, E) of its dtype
        """
        return hidden.index_copy(0, self.at, self.features.to(hidden.dtype))
