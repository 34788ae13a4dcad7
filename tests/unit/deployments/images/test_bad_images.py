"""Bad images end with an error that says what to do, and the decoder goes on."""

import asyncio
import base64
import io
import random
import struct
import zlib
from collections.abc import Iterator

import pytest
from PIL import Image

from tests.tiny_vision import data_uri, random_images
from triptych.core.config import ImageLimitsConfig
from triptych.core.errors import Overloaded, RequestError
from triptych.deployments.images import ImageDecoder, ImageSource

LIMITS = ImageLimitsConfig(
    max_images=3,
    max_image_bytes=200_000,
    max_image_pixels=20_000,
    max_request_pixels=30_000,
    max_held_bytes=120_000,
)
KINDS = ("PNG", "JPEG", "WEBP", "GIF")


@pytest.fixture(scope="module")
def decoder() -> Iterator[ImageDecoder]:
    made = ImageDecoder(LIMITS)
    yield made
    made.close()


def uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def encoded(kind: str, seed: int) -> bytes:
    (image,) = random_images(1, seed)
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def png(width: int, height: int, data: bytes) -> bytes:
    """A PNG whose header may say anything."""

    def chunk(name: bytes, content: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(name + content))
        return struct.pack(">I", len(content)) + name + content + crc

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def catalogue() -> Iterator[str]:
    """230 URLs that are no image, or one beyond the limits."""
    luck = random.Random(0)
    for seed in range(40):  # cut short, in the headers or in the pixels
        for kind in KINDS:
            whole = encoded(kind, seed)
            yield uri(whole[: luck.randrange(1, len(whole) // 2)], f"image/{kind.lower()}")
    for _ in range(30):
        yield uri(luck.randbytes(luck.randrange(1, 3000)))
    bomb = zlib.compress(bytes(3_000_000), 9)
    for width, height in [(60_000, 60_000), (1 << 30, 1 << 30), (20_001, 1), (0, 5), (150, 1)]:
        yield uri(png(width, height, bomb))
    for form in ("BMP", "TIFF", "PPM", "ICO", "TGA", "PCX", "DDS"):
        yield uri(encoded(form, 1))
    for text in ("<svg xmlns='http://www.w3.org/2000/svg'/>", "%PDF-1.7", "GIF89a", "RIFFxxxxWEBP"):
        yield uri(text.encode())
    yield from (
        "http://169.254.169.254/latest/meta-data",
        "https://example.org/a.png",
        "file:///etc/passwd",
        "ftp://example.org/a.png",
        "//example.org/a.png",
        "/etc/passwd",
        "",
        "data:",
        "data:,",
        "data:image/png,abc",
        "data:image/png;base64",
        "data:image/png;base64,",
        "data:image/png;base64,!!!!",
        "data:image/svg+xml;base64,AAAA",
        "data:text/html;base64,AAAA",
        "data:application/octet-stream;base64,AAAA",
        "data:image/png;base64," + "A" * 400_000,
        "data:" + "x" * 10_000 + ",AAAA",
        "DATA:IMAGE/PNG;BASE64,AAAA",
        "data:image/png;base64,AAAA=AAAA",
        data_uri(Image.new("RGB", (200, 150))),
        data_uri(Image.new("RGB", (201, 2))),
        data_uri(Image.new("1", (1000, 1000))),
    )


def test_every_bad_image_is_refused_by_name_and_a_good_one_is_read_between(
    decoder: ImageDecoder,
) -> None:
    urls, good = list(catalogue()), data_uri(random_images(1, 5)[0])
    assert len(urls) > 200

    async def read() -> None:
        for number, url in enumerate(urls):
            with pytest.raises(RequestError) as error:
                await decoder.decode([ImageSource(url, "messages.0.content.1")])
            assert error.value.http_status == 400, url[:80]
            assert error.value.param == "messages.0.content.1"
            assert 10 < len(str(error.value)) < 400
            if number % 50 == 0:
                assert await decoder.decode([ImageSource(good, "")])

    asyncio.run(read())
    assert decoder.held_bytes == 0


def test_limits_of_a_request_are_named(decoder: ImageDecoder) -> None:
    good = [ImageSource(data_uri(Image.new("RGB", (150, 120 + n))), f"p{n}") for n in range(4)]
    for sources, name in ((good, "max_images"), (good[:2], "max_request_pixels")):
        with pytest.raises(RequestError, match=rf"ingress\.images\.{name}"):
            asyncio.run(decoder.decode(sources))
    held = asyncio.run(decoder.decode(good[:1])) + asyncio.run(decoder.decode(good[1:2]))
    with pytest.raises(Overloaded, match=r"ingress\.images\.max_held_bytes"):
        asyncio.run(decoder.decode(good[2:3]))
    del held
    assert decoder.held_bytes == 0


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_are_those_of_transformers(decoder: ImageDecoder, kind: str) -> None:
    """Orientation applied, transparency dropped, first frame of an animation."""
    frames = [one.resize((40, 30)) for one in random_images(2, 8)]
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    buffer = io.BytesIO()
    given = [one.convert("RGBA") if kind == "PNG" else one for one in frames]
    more = {"save_all": True, "append_images": given[1:]} if kind in ("GIF", "WEBP") else {}
    given[0].save(buffer, kind, **more, **({} if kind == "GIF" else {"exif": exif}))
    url = uri(buffer.getvalue(), f"image/{kind.lower()}")
    from transformers.image_utils import load_image  # noqa: PLC0415 - with its own pixels

    wanted = load_image(url)
    (image,) = asyncio.run(decoder.decode([ImageSource(url, "")]))
    assert (image.width, image.height) == wanted.size
    assert image.rgb == wanted.tobytes()
