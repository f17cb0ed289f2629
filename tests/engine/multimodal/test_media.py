"""Pictures of every source and format, and those that must be refused before they cost anything."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest
from llmopt.base.errors import BadInput
from llmopt.engine.base.image_input import MediaLimits
from llmopt.engine.multimodal.media import load_image, load_images, sent_bytes
from PIL import Image

from ...support.pictures import SVG, data_url, encoded, picture, png_claiming, webp_claiming

LIMITS = MediaLimits(max_image_pixels=10_000, max_image_bytes=100_000)


@pytest.mark.parametrize("form", ["PNG", "BMP", "GIF", "WEBP", "JPEG"])
def test_every_format_gives_the_same_picture(form: str, tmp_path: Path) -> None:
    image = picture()
    data = encoded(image, form, **({"lossless": True} if form == "WEBP" else {}))
    path = tmp_path / "picture"
    path.write_bytes(data)
    for source in (data, path, str(path), data_url(data)):
        loaded = load_image(source, LIMITS)
        assert loaded.mode == "RGB" and loaded.size == image.size
        distance = np.abs(np.asarray(loaded, int) - np.asarray(image, int)).mean()
        assert distance < {"JPEG": 40, "GIF": 25}.get(form, 0.001)
    assert load_image(image).tobytes() == image.tobytes()


def test_the_first_frame_transparency_and_orientation() -> None:
    frames = [picture(seed=0).quantize(), picture(seed=3).quantize()]
    film = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert load_image(film).tobytes() == frames[0].convert("RGB").tobytes()
    clear = Image.new("RGBA", (2, 2), (255, 0, 0, 0))
    assert load_image(encoded(clear)).getpixel((0, 0)) == (255, 255, 255)
    turned = Image.Exif()
    turned[0x0112] = 6  # the camera was held upright
    assert load_image(encoded(picture(12, 8), "JPEG", exif=turned)).size == (8, 12)


WHOLE = encoded(picture(60, 60))
HOSTILE = [
    (WHOLE[: len(WHOLE) // 2], "truncated"),
    (WHOLE[:20], "broken or truncated"),
    (b"", "known here"),
    (SVG, "SVG"),
    (encoded(picture(), "TIFF"), "PNG, JPEG, WEBP, GIF or BMP"),
    (png_claiming(50_000, 50_000), "max-image-pixels"),
    (png_claiming(0, 7), "PNG, JPEG"),
    (webp_claiming(16_000, 16_000), "16000 x 16000"),
    (encoded(picture(101, 100)), "101 x 100"),
    (WHOLE + bytes(100_000), "max-image-bytes"),
]


@pytest.mark.parametrize(("data", "reason"), HOSTILE, ids=[reason for _, reason in HOSTILE])
def test_hostile_pictures_are_refused_in_one_line(data: bytes, reason: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BadInput, match=reason) as refusal:
        load_image(data_url(data), LIMITS)
    assert "\n" not in str(refusal.value)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 32 << 10  # KiB: 50,000 x 50,000 pixels would be 7 GiB


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png,abc",
        "data:image/png;base64",
        "data:image/png;base64,%%%",
        "file:///etc/passwd",
        "/etc/passwd",
        "ftp://host/picture.png",
        "",
    ],
)
def test_a_client_names_no_file_and_no_other_scheme(url: str) -> None:
    with pytest.raises(BadInput):
        sent_bytes(url, LIMITS)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(BadInput, match=r"nothing\.png: No such file"):
        load_image("nothing.png")


def test_images_of_a_prompt_are_limited_together() -> None:
    assert len(load_images([picture()] * 3, LIMITS)) == 3
    with pytest.raises(BadInput, match=r"17 images in a prompt: at most 16"):
        load_images([picture()] * 17, LIMITS)
    with pytest.raises(BadInput, match=r"images of a prompt have 50000 pixels: at most 40000"):
        load_images([picture(100, 100)] * 5, LIMITS)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_images": -1},
        {"max_image_bytes": 0},
        {"max_image_pixels": 0},
        {"fetch_timeout_seconds": 0.0},
        {"allowed_domains": frozenset(["https://host/"])},
    ],
)
def test_limits_out_of_range(fields: dict[str, object]) -> None:
    with pytest.raises(BadInput, match="--"):
        MediaLimits(**fields)  # type: ignore[arg-type]
