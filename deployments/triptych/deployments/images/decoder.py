"""The ingress's side of images: data URIs, limits, and the child processes that decode."""

import asyncio
import atexit
import base64
import binascii
import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from weakref import finalize

from triptych.core.config import ImageLimitsConfig
from triptych.core.errors import Overloaded, RequestError, Unsupported
from triptych.core.images import Image
from triptych.deployments.images.decode_process import CPU_S, MEMORY_BYTES
from triptych.deployments.limited_processes import Job, LimitedProcesses, LimitExceeded

PROCESSES = 1
"""Pillow takes one core; a second process would take it from the stages."""
MAX_WAITING = 64
"""Images that wait to be decoded; one more is refused with 503."""
WALL_S = 20.0
"""For one image on a busy machine."""
TYPES = ("image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif")
LISTED = "png, jpeg, webp or gif"

_PIXEL = base64.b64decode(
    b"R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7"  # a GIF of one pixel
)
JOB = Job(
    name="images",
    module="triptych.deployments.images.decode_process",
    first=b'{"max_pixels": 1}\n' + _PIXEL,
    wall_s=WALL_S,
    ends={
        signal.SIGPROF: f"needs more than {CPU_S:g} s of processor time",
        signal.SIGABRT: f"needs more than {MEMORY_BYTES >> 20} MiB of memory",
        signal.SIGSEGV: "makes the decoder fail",
        signal.SIGBUS: "makes the decoder fail",
        signal.SIGKILL: f"needs more than {MEMORY_BYTES >> 20} MiB of memory",
    },
)


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image as a request names it."""

    url: str
    param: str
    """Where it stands in the body."""


class ImageDecoder:
    """Decodes the images of requests in a child process, which a hostile image may end."""

    def __init__(self, limits: ImageLimitsConfig) -> None:
        self._limits = limits
        self.held_bytes = 0
        """Bytes of all decoded images that are still in use."""
        self.processes = LimitedProcesses(JOB, count=PROCESSES, max_waiting=MAX_WAITING)

    def close(self) -> None:
        """End the child process."""
        self.processes.close()

    async def decode(self, sources: Sequence[ImageSource]) -> tuple[Image, ...]:
        """The images of one request, in order; equal ones are decoded once.

        Raises: RequestError naming the image, the limit and the way out; Overloaded if too many
            images wait, or those of running requests take too much memory
        """
        limits = self._limits
        if len(sources) > limits.max_images:
            raise RequestError(
                f"{len(sources)} images: a request has at most {limits.max_images} "
                "(ingress.images.max_images); send fewer",
                sources[limits.max_images].param,
            )
        encoded = [_bytes_of(source, limits) for source in sources]
        found = dict[bytes, Image]()
        try:
            await self._decode_all(sources, encoded, found)
        except BaseException:
            found.clear()  # else the traceback would keep them
            raise
        return tuple(found[given] for given in encoded)

    async def _decode_all(
        self, sources: Sequence[ImageSource], encoded: Sequence[bytes], found: dict[bytes, Image]
    ) -> None:
        pixels, most = 0, self._limits.max_request_pixels
        for source, given in zip(sources, encoded, strict=True):
            if given not in found:
                found[given] = await self._decode(given, source.param)
            pixels += found[given].width * found[given].height
            if pixels > most:
                raise RequestError(
                    f"the images have more than {most} pixels together "
                    "(ingress.images.max_request_pixels); send them smaller, or fewer",
                    source.param,
                )

    async def _decode(self, encoded: bytes, param: str) -> Image:
        head = json.dumps({"max_pixels": self._limits.max_image_pixels}).encode()
        try:
            reply = await self.processes.ask(head + b"\n" + encoded)
        except LimitExceeded as error:
            text = f"the image {error} to decode: send it smaller, or in another format"
            raise RequestError(text, param) from None
        told, _, rgb = reply.partition(b"\n")
        answer: dict[str, object] = json.loads(told)
        if "error" in answer:
            raise RequestError(f"the image: {answer['error']}", param)
        if self.held_bytes + len(rgb) > self._limits.max_held_bytes:
            raise Overloaded(
                f"running requests have {self.held_bytes} bytes of images: at most "
                f"{self._limits.max_held_bytes} (ingress.images.max_held_bytes)"
            )
        size = int(str(answer["width"])), int(str(answer["height"]))
        self.held_bytes += len(rgb)
        try:
            image = await asyncio.to_thread(Image.of, *size, rgb)
        except BaseException:
            self._let_go(len(rgb))
            raise
        finalize(image, self._let_go, len(rgb))
        return image

    def _let_go(self, nbytes: int) -> None:
        self.held_bytes -= nbytes


def _bytes_of(source: ImageSource, limits: ImageLimitsConfig) -> bytes:
    """The encoded image in a data URI.

    Raises: RequestError; Unsupported for another URL
    """
    head, comma, text = source.url[:MAX_HEAD].partition(",")
    scheme, colon, kind = head.partition(":")
    if scheme.lower() != "data" or not colon:
        text = (
            f"{source.url[:64]!r}: images come as data URIs (data:image/png;base64,...); this "
            "server fetches no URL"
        )
        raise Unsupported(text, source.param)
    media, *parameters = kind.lower().split(";")
    if not comma or "base64" not in parameters:
        text = f"{source.url[:64]!r}: expected data:image/<type>;base64,<data>"
        raise RequestError(text, source.param)
    if media not in TYPES:
        raise RequestError(f"{media[:64]!r}: expected an image of type {LISTED}", source.param)
    data = source.url[len(head) + 1 :]
    if len(data) // 4 * 3 > limits.max_image_bytes + 2:
        raise RequestError(
            f"the image has {len(data) // 4 * 3} bytes: at most {limits.max_image_bytes} "
            "(ingress.images.max_image_bytes); send it smaller",
            source.param,
        )
    try:
        found = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"the image is not base64: {error}", source.param) from error
    if not found:
        raise RequestError("the image is empty", source.param)
    return found


MAX_HEAD = 256
"""Characters before the data of a data URI."""


@cache
def process_decoder(limits: ImageLimitsConfig) -> ImageDecoder:
    """The decoder of this process. Its child process ends when this process does."""
    decoder = ImageDecoder(limits)
    atexit.register(decoder.close)
    return decoder
