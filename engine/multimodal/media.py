"""Pictures from data URLs, files and named hosts, under limits that hold before a pixel is decoded.

Parts of an encoded image are counted first, as small files of many parts take minutes: Pillow reads header
chunks in Python, and libjpeg passes over the image for each scan.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from urllib.parse import urlsplit

from PIL import Image, ImageOps
from PIL.JpegImagePlugin import MARKER

from ...base.atomic_io import expanded
from ...base.errors import BadInput, first_line
from ..base.image_input import MediaLimits
from .remote import RemoteMedia

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats that are decoded; the first frame of an animation. Vector formats run programs and are refused."""
NAMED_FORMATS = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
ImageSource = Image.Image | Path | str | bytes


def load_image(source: ImageSource, limits: MediaLimits | None = None) -> Image.Image:
    """RGB of a PIL image, bytes, path, data URL, or URL of an allowed host; BadInput: what is wrong."""
    limits = limits or MediaLimits()
    if isinstance(source, Image.Image):
        limits.check_pixels(*source.size)
        return _rgb(source)
    if isinstance(source, bytes):
        return decode_image(source, limits)
    if isinstance(source, str) and source.partition(":")[0].lower() in ("data", "http", "https"):
        return decode_image(sent_bytes(source, limits), limits)
    return decode_image(_read(Path(source), limits), limits, str(source))


def load_images(sources: Sequence[ImageSource], limits: MediaLimits) -> list[Image.Image]:
    """The images of a prompt, as `load_image`. BadInput: one is wrong, or too many images or pixels."""
    limits.check_count(len(sources))
    images: list[Image.Image] = []
    num_pixels = 0
    for source in sources:
        images.append(load_image(source, limits))
        num_pixels += images[-1].width * images[-1].height
        limits.check_prompt_pixels(num_pixels)
    return images


def is_data_url(url: str) -> bool:
    return url[:5].lower() == "data:"


def sent_bytes(url: str, limits: MediaLimits) -> bytes:
    """A client's encoded image: by data URL or allowed http(s) URL, never a path; BadInput: what is wrong."""
    if is_data_url(url):
        head, comma, content = url.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise BadInput("an image's data URL is data:image/...;base64, and the bytes in base64")
        if len(content) > limits.max_image_bytes * 4 // 3 + 4:
            raise _too_long(limits)
        try:
            return base64.b64decode(content, validate=True)
        except ValueError as error:  # also binascii.Error
            raise BadInput(
                f"an image's data URL is not base64: {first_line(error)[:200]}"
            ) from error
    if url[:6].partition(":")[0].lower() in ("http", "https"):
        most = limits.max_image_bytes, limits.fetch_timeout_seconds
        return RemoteMedia(limits.allowed_domains, *most).fetch(url)
    raise BadInput("an image URL is a data: URL, or http(s) of an allowed host")


def decode_image(data: bytes, limits: MediaLimits, name: str = "the image") -> Image.Image:
    """RGB, transparency on white, turned by EXIF. BadInput: another format, too many pixels, broken."""
    with _opened(data, limits, name) as image:
        image.load()
        return _rgb(ImageOps.exif_transpose(image))


def num_pixels(data: bytes, limits: MediaLimits) -> int:
    """Pixels of an encoded image, by its header; raises as `decode_image`."""
    with _opened(data, limits, "the image") as image:
        return image.width * image.height


@contextmanager
def _opened(data: bytes, limits: MediaLimits, name: str) -> Iterator[Image.Image]:
    """The image with its header read; errors in the block become `BadInput` too."""
    if len(data) > limits.max_image_bytes:
        raise _too_long(limits)
    check_parts(data)
    if (size := _webp_size(data)) is not None:  # its decoder allocates the canvas when it opens
        limits.check_pixels(*size)
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            limits.check_pixels(*image.size)
            yield image
    except BadInput:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadInput(
            f"{name} has more pixels than the {limits.max_image_pixels} of --max-image-pixels"
        ) from error
    except Image.UnidentifiedImageError as error:
        kind = "SVG" if b"<svg" in data[:4096].lower() else "no image that is known here"
        raise BadInput(f"{name} is {kind}: {NAMED_FORMATS} are taken") from error
    except Exception as error:
        # Decoders of untrusted bytes raise anything, from OSError to struct.error.
        raise BadInput(f"{name} is broken or truncated: {first_line(error)[:200]}") from error


def _rgb(image: Image.Image) -> Image.Image:
    """RGB as transformers' and vLLM's loaders convert to it."""
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    if image.mode in ("RGBA", "LA", "PA"):
        image = image.convert("RGBA")
        white = Image.new("RGB", image.size, (255, 255, 255))
        white.paste(image, mask=image.getchannel("A"))
        return white
    return image.convert("RGB")


def _read(path: Path, limits: MediaLimits) -> bytes:
    if urlsplit(str(path)).scheme == "file":
        raise BadInput(f"{path}: give the path itself, without file:")
    try:
        with expanded(path).open("rb") as file:
            data = file.read(limits.max_image_bytes + 1)
    except OSError as error:
        raise BadInput(f"cannot read the image {path}: {error.strerror or error}") from error
    if len(data) > limits.max_image_bytes:
        raise _too_long(limits)
    return data


def _webp_size(data: bytes) -> tuple[int, int] | None:
    """Width and height in a WebP's header (RFC 9649, sections 2.5 to 2.7); None for other formats."""
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or len(data) < 30:
        return None

    def number(start: int, stop: int) -> int:
        return int.from_bytes(data[start:stop], "little")

    match data[12:16]:
        case b"VP8X":
            return 1 + number(24, 27), 1 + number(27, 30)
        case b"VP8L":
            return 1 + (number(21, 25) & 0x3FFF), 1 + (number(21, 25) >> 14 & 0x3FFF)
        case b"VP8 ":
            return number(26, 28) & 0x3FFF, number(28, 30) & 0x3FFF
    return None


def _too_long(limits: MediaLimits) -> BadInput:
    return BadInput(f"an image has more than {limits.max_image_bytes} bytes (--max-image-bytes)")


MAX_PARTS = 1 << 15
"""Chunks of a PNG, segments before a JPEG's first scan, blocks before a GIF's first frame."""
MAX_SCANS = 40
"""Limit of a JPEG with the previews in it; encoders write about ten."""


def check_parts(data: bytes) -> None:
    """Raises BadInput for an image whose parts take long to read: too many, or a BMP of run lengths."""
    if data.startswith(b"\x89PNG"):
        has_more = _has_more_chunks(data)
    elif data.startswith(b"\xff\xd8"):
        has_more = _has_more_segments(data)
        # In compressed data, 0x00 or a restart marker follows 0xFF.
        if (num_scans := data.count(b"\xff\xda")) > MAX_SCANS:
            raise BadInput(f"a JPEG of {num_scans} scans: at most {MAX_SCANS} are decoded")
    elif data.startswith(b"GIF8") and len(data) > 10:
        has_more = _has_more_blocks(data)
    else:
        has_more = False
        # Pillow decodes run lengths in Python.
        if data.startswith(b"BM") and int.from_bytes(data[30:34], "little") in (1, 2):
            raise BadInput("a BMP compressed by run lengths is not decoded: send it as a PNG")
    if has_more:
        raise BadInput(f"an image file of more than {MAX_PARTS} parts is not decoded")


def _has_more_chunks(data: bytes) -> bool:
    offset = 8
    for _ in range(MAX_PARTS):
        offset += 12 + int.from_bytes(data[offset : offset + 4], "big")
        if offset >= len(data):
            return False
    return True


def _has_more_segments(data: bytes) -> bool:
    """By Pillow's table of markers: bytes that are none are passed one by one, as there."""
    offset = 2
    for _ in range(MAX_PARTS):
        marker = int.from_bytes(data[offset : offset + 2], "big")
        if marker == 0xFFDA or offset >= len(data):
            return False
        if marker not in MARKER:
            offset += 1
        elif MARKER[marker][2] is None:  # without a length
            offset += 2
        else:
            offset += 2 + int.from_bytes(data[offset + 2 : offset + 4], "big")
    return True


def _has_more_blocks(data: bytes) -> bool:
    flags = data[10]
    offset = 13 + (6 << (flags & 7) if flags & 0x80 else 0)
    in_extension = False
    for _ in range(MAX_PARTS):
        if offset >= len(data):
            return False
        head = data[offset]
        if in_extension:
            in_extension = head != 0
            offset += 1 + head
        elif head in b",;":  # the first frame, or the end
            return False
        else:
            in_extension = head == ord("!")
            offset += 2 if in_extension else 1
    return True
