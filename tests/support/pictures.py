"""Pictures for tests: drawn, encoded, and hostile ones."""

from __future__ import annotations

import base64
import struct
import zlib
from io import BytesIO

from PIL import Image

SVG = b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"><rect width="9"/></svg>'


def picture(width: int = 12, height: int = 8, seed: int = 0) -> Image.Image:
    """A gradient whose colours depend on `seed`."""
    image = Image.new("RGB", (width, height))
    image.putdata(
        [
            ((x * 9 + seed * 40) % 256, (y * 17) % 256, (x * y + seed) % 256)
            for y in range(height)
            for x in range(width)
        ]
    )
    return image


def encoded(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    file = BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def png_claiming(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header claims any size."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + checksum

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1 << 16))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    )


def webp_claiming(width: int, height: int) -> bytes:
    """The head of an extended WebP whose canvas claims any size."""
    canvas = bytes([0x10, 0, 0, 0]) + b"".join(
        (side - 1).to_bytes(3, "little") for side in (width, height)
    )
    body = b"WEBPVP8X" + struct.pack("<I", len(canvas)) + canvas
    return b"RIFF" + struct.pack("<I", len(body)) + body
