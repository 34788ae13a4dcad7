"""The child process that decodes images: ``python -m`` this module, with a pipe's number.

A frame is a JSON line with limits, and the encoded image behind it. The answer is a JSON line, and
the pixels behind it, RGB row by row. What else the file holds, such as its metadata, goes no
further. ``EXIF``'s orientation is applied and transparency is dropped, as transformers'
``load_image`` does.
"""

import io
import json
import sys
import warnings
from collections.abc import Mapping

from PIL import Image, ImageOps, UnidentifiedImageError

from triptych.deployments.limited_processes import answer_frames

CPU_S = 4.0
"""Processor time for one image. A JPEG of 12 million pixels takes 0.2 s."""
MEMORY_BYTES = 640 << 20
"""Memory for one image, in all forms that it has while it is decoded."""
STACK_BYTES = 4 << 20
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Of an animation only the first frame is read."""
MOST_ASPECT = 100
"""Longest side divided by the shortest. Models scale images to a given shortest side, which would
make a line of some pixels' height a million pixels long."""

Image.MAX_IMAGE_PIXELS = None  # the limit is checked below, with a message of our own
Image.preinit()


def answer(frame: bytes) -> bytes:
    """The pixels of an image, or what is wrong with it."""
    head, _, encoded = frame.partition(b"\n")
    limits: dict[str, int] = json.loads(head)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            size, rgb = _decoded(encoded, limits["max_pixels"])
    except _Refused as error:
        return _reply({"error": str(error)})
    except UnidentifiedImageError:
        return _reply({"error": f"not an image of type {_listed()}"})
    except MemoryError:
        limit = MEMORY_BYTES >> 20
        return _reply(
            {"error": f"needs more than {limit} MiB of memory to decode: send it smaller"}
        )
    except Exception as error:  # noqa: BLE001 - Pillow raises many types for broken files
        text = " ".join(str(error).split())[:120]
        return _reply({"error": f"cannot be decoded ({type(error).__name__}: {text})"})
    return _reply({"width": size[0], "height": size[1]}, rgb)


class _Refused(Exception):
    """The image exceeds a limit."""


def _decoded(encoded: bytes, max_pixels: int) -> tuple[tuple[int, int], bytes]:
    with Image.open(io.BytesIO(encoded), formats=FORMATS) as image:
        width, height = image.size
        if width * height > max_pixels:
            raise _Refused(
                f"{width} x {height} pixels: at most {max_pixels} "
                "(ingress.images.max_image_pixels); send it smaller"
            )
        if max(width, height) > MOST_ASPECT * min(width, height):
            raise _Refused(
                f"{width} x {height} pixels: one side is over {MOST_ASPECT} times the other"
            )
        image.load()
        upright = ImageOps.exif_transpose(image).convert("RGB")
    return upright.size, upright.tobytes()


def _reply(told: Mapping[str, object], rgb: bytes = b"") -> bytes:
    return json.dumps(told).encode() + b"\n" + rgb


def _listed() -> str:
    return "png, jpeg, webp or gif"


if __name__ == "__main__":
    answer_frames(
        int(sys.argv[1]), answer, cpu_s=CPU_S, memory_bytes=MEMORY_BYTES, stack_bytes=STACK_BYTES
    )
