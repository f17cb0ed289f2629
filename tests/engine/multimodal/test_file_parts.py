"""Small files that take minutes to decode are refused by what they consist of."""

from __future__ import annotations

import struct
import zlib

import pytest
from llmopt.base.errors import BadInput
from llmopt.engine.base.image_input import MediaLimits
from llmopt.engine.multimodal.media import MAX_PARTS, MAX_SCANS, decode_image

from ...support.pictures import encoded, picture

MANY = MAX_PARTS + 1
CHUNK = struct.pack(">I", 0) + b"teXt" + struct.pack(">I", zlib.crc32(b"teXt"))


def _with(form: str, place: int, parts: bytes) -> bytes:
    data = encoded(picture(), form)
    return data[:place] + parts + data[place:]


def _gif(extension: bytes) -> bytes:
    flags = encoded(picture(), "GIF")[10]
    return _with("GIF", 13 + (6 << (flags & 7)), extension)


def _jpeg(num_scans: int) -> bytes:
    data = encoded(picture(), "JPEG", progressive=True)
    last, end = data.rindex(b"\xff\xda"), data.rindex(b"\xff\xd9")
    more = num_scans - data.count(b"\xff\xda")
    return data[:end] + data[last:end] * more + data[end:]


def _bmp_of_runs(compression: int) -> bytes:
    data = bytearray(encoded(picture().convert("P"), "BMP"))
    data[30] = compression
    return bytes(data)


HOSTILE = {
    "chunks": (_with("PNG", 33, CHUNK * MANY), "parts"),
    "segments": (_with("JPEG", 2, b"\xff\xfe\0\2" * MANY), "parts"),
    "fill bytes": (_with("JPEG", 2, b"\xff" * MANY), "parts"),
    "bytes between segments": (_with("JPEG", 2, bytes(MANY)), "parts"),
    # What follows a marker without a length is read, and not passed over.
    "hidden": (_with("JPEG", 2, b"\xff\xf0\xff\xff" + b"\xff\xfe\0\2" * MANY), "parts"),
    "scans": (_jpeg(MAX_SCANS + 1), "scans"),
    "extensions": (_gif(b"!\xfe\1x\0" * MANY), "parts"),
    "blocks of an extension": (_gif(b"!\xfe" + b"\1x" * MANY + b"\0"), "parts"),
    "bytes between blocks": (_gif(b"x" * MANY), "parts"),
    "runs of bytes": (_bmp_of_runs(1), "run lengths"),
    "runs of 4 bits": (_bmp_of_runs(2), "run lengths"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_files_of_too_many_parts_are_refused(name: str) -> None:
    data, reason = HOSTILE[name]
    with pytest.raises(BadInput, match=reason):
        decode_image(data, MediaLimits())


@pytest.mark.parametrize(
    "data",
    [
        _with("PNG", 33, CHUNK * 1000),
        _with("JPEG", 2, b"\xff\xfe\0\2" * 1000 + b"\xff" * 7),
        _gif(b"!\xfe\3xyz\1,\0" * 1000),
        _jpeg(MAX_SCANS),
        encoded(picture(), "BMP"),
        encoded(picture(), "WEBP"),
    ],
)
def test_files_of_many_parts_are_decoded(data: bytes) -> None:
    assert decode_image(data, MediaLimits()).size == picture().size
