"""Messages about images: router, ingress and prefill workers with the encode stage."""

from collections.abc import Iterable
from dataclasses import dataclass

from triptych.core.handles import LeaseRef
from triptych.core.images import Image, ImageSpan
from triptych.core.messages.wire import message


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeImages:
    """Router to encode worker: compute the features of a request's images."""

    request: str
    images: tuple[ImageSpan, ...]
    cache_salt: str
    """Requests share features only if their salts are equal."""
    tenant: str
    source: str
    """Address of the ingress that has the pixels."""
    reader: str
    """Address of the prefill worker that gets ``ImagesEncoded``."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class WantImages:
    """Encode worker to ingress: send the pixels of these images of a request."""

    request: str
    digests: tuple[bytes, ...]


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class ImageData:
    """Ingress to encode worker: one image."""

    request: str
    digest: bytes
    width: int
    height: int
    rgb: bytes
    """As in ``core.images.Image``."""


def pixels_for(wanted: WantImages, images: Iterable[Image]) -> list[ImageData]:
    """Those of ``images`` that a worker asked for, each once."""
    found = {image.digest: image for image in images if image.digest in wanted.digests}
    return [
        ImageData(
            request=wanted.request,
            digest=image.digest,
            width=image.width,
            height=image.height,
            rgb=image.rgb,
        )
        for image in found.values()
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureHandle:
    """Features of a request's images in pages of the pool: float32 [features, channels].

    The rows of an image follow each other byte by byte, and each image begins with a page.
    """

    lease_ref: LeaseRef
    pages: bytes
    """Page ids of all images, in order, packed by ``triptych.kvpool.rpc.page_ranges.pack``."""
    images: tuple[int, ...]
    """Rows of each image."""
    channels: int


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class ImagesEncoded:
    """Encode worker to prefill worker and router: the features of a request's images are there."""

    request: str
    handle: FeatureHandle
    cached: int = 0
    """Images whose features were in the cache."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class ImagesRead:
    """Router to encode worker: the prompt is computed; free what is left of its features."""

    request: str
