"""Parts of an encoded image, counted before it is decoded: a small file of many parts takes minutes.

Pillow reads the chunks of a header one by one in Python, and keeps them; libjpeg passes over the whole image
for each scan of a progressive JPEG, however short the scan.
"""

from __future__ import annotations

from PIL.JpegImagePlugin import MARKER

from ...quant.base.errors import BadInput

MAX_PARTS = 1 << 15
"""Chunks of a PNG, segments before a JPEG's first scan, blocks before a GIF's first frame."""
MAX_SCANS = 40
"""Of a JPEG with the previews in it; encoders write about ten."""
_RUN_LENGTHS = (1, 2)
"""BMP compressions that Pillow decodes in Python."""


def check_parts(data: bytes) -> None:
    """Refuse an image whose parts take long to read.

    Raises:
        BadInput: too many of them, or a BMP of run lengths.
    """
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
        if data.startswith(b"BM") and int.from_bytes(data[30:34], "little") in _RUN_LENGTHS:
            raise BadInput("a BMP compressed by run lengths is not decoded: send it as a PNG")
    if has_more:
        raise BadInput(f"an image file of more than {MAX_PARTS} parts is not decoded")


def _has_more_chunks(data: bytes) -> bool:
    place = 8
    for _ in range(MAX_PARTS):
        place += 12 + int.from_bytes(data[place : place + 4], "big")
        if place >= len(data):
            return False
    return True


def _has_more_segments(data: bytes) -> bool:
    """By Pillow's table of markers: bytes that are none are passed one by one, as there."""
    place = 2
    for _ in range(MAX_PARTS):
        marker = int.from_bytes(data[place : place + 2], "big")
        if marker == 0xFFDA or place >= len(data):
            return False
        if marker not in MARKER:
            place += 1
        elif MARKER[marker][2] is None:  # without a length
            place += 2
        else:
            place += 2 + int.from_bytes(data[place + 2 : place + 4], "big")
    return True


def _has_more_blocks(data: bytes) -> bool:
    flags = data[10]
    place = 13 + (6 << (flags & 7) if flags & 0x80 else 0)
    in_extension = False
    for _ in range(MAX_PARTS):
        if place >= len(data):
            return False
        head = data[place]
        if in_extension:
            in_extension = head != 0
            place += 1 + head
        elif head in b",;":  # the first frame, or the end
            return False
        else:
            in_extension = head == ord("!")
            place += 2 if in_extension else 1
    return True
