"""Images of every kind become the same square of pixels each time; a bad folder is named."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from holdfast.training.images import Cut, Unreadable, examine, find_images, open_image


def load_image(path, side: int) -> np.ndarray:
    return Cut(side, side).pixels(open_image(path.read_bytes()))


def gradient(height: int, width: int) -> np.ndarray:
    rows, columns = np.mgrid[0:height, 0:width]
    return np.stack([rows * 255 // height, columns * 255 // width, np.full_like(rows, 128)], -1).astype(np.uint8)


def test_real_photos_become_squares_from_minus_one_to_one(photo_folder):
    paths = find_images(photo_folder)
    assert len(paths) == 5
    for path in paths:
        pixels = load_image(path, 32)
        assert pixels.shape == (3, 32, 32)
        assert pixels.dtype == np.float32
        assert -1 <= pixels.min() < pixels.max() <= 1
        np.testing.assert_array_equal(pixels, load_image(path, 32))


def test_an_image_of_the_wanted_size_is_kept_exactly(tmp_path):
    Image.fromarray(gradient(16, 16)).save(tmp_path / "a.png")
    expected = gradient(16, 16).astype(np.float32).transpose(2, 0, 1) / 127.5 - 1
    np.testing.assert_allclose(load_image(tmp_path / "a.png", 16), expected, atol=1e-6)


def test_the_middle_of_a_wide_image_is_taken(tmp_path):
    wide = np.zeros((16, 48, 3), np.uint8)
    wide[:, 16:32] = 255
    Image.fromarray(wide).save(tmp_path / "a.png")
    np.testing.assert_array_equal(load_image(tmp_path / "a.png", 16), np.ones((3, 16, 16), np.float32))


def test_exif_orientation_is_honoured(tmp_path):
    upright = Image.fromarray(gradient(16, 16))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 270 degrees to see it upright
    upright.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "turned.png", exif=exif)
    upright.save(tmp_path / "upright.png")
    np.testing.assert_array_equal(load_image(tmp_path / "turned.png", 16), load_image(tmp_path / "upright.png", 16))


GREY = gradient(16, 16)[..., 1]


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (Image.fromarray(GREY), GREY),
        (Image.fromarray(GREY.astype(np.uint16) * 257), GREY),
        (Image.fromarray(GREY.astype(np.int32)), GREY),
        (Image.fromarray(GREY > 127), np.where(GREY > 127, 255, 0)),
        (Image.fromarray(np.dstack([GREY, GREY, GREY, np.full_like(GREY, 255)])), GREY),
        (Image.fromarray(np.dstack([GREY, GREY, GREY, np.zeros_like(GREY)])), np.full_like(GREY, 255)),
        (Image.fromarray(np.dstack([GREY, np.zeros_like(GREY)])), np.full_like(GREY, 255)),
        (Image.fromarray(GREY).convert("P"), GREY),
    ],
    ids=["L", "I;16", "I", "1", "RGBA opaque", "RGBA transparent", "LA transparent", "P"],
)
def test_any_mode(tmp_path, image, expected):
    path = tmp_path / ("a.tif" if image.mode == "I" else "a.png")
    image.save(path)
    pixels = np.rint((load_image(path, 16) + 1) * 127.5)
    np.testing.assert_array_equal(pixels, np.broadcast_to(expected, (3, 16, 16)))


def test_float_images_keep_their_range(tmp_path):
    Image.fromarray(GREY.astype(np.float32) / 255).save(tmp_path / "a.tif")
    np.testing.assert_array_equal(np.rint((load_image(tmp_path / "a.tif", 16) + 1) * 127.5)[0], GREY)


def test_order_is_that_of_the_names_and_sidecars_are_passed_over(tmp_path):
    for name in ("b.PNG", "a.jpeg", "c.webp"):
        Image.fromarray(gradient(8, 8)).save(tmp_path / name)
    (tmp_path / "a.txt").write_text("a caption")
    (tmp_path / ".hidden.png").write_bytes(b"")
    (tmp_path / "folder.png").mkdir()
    assert [path.name for path in find_images(tmp_path)] == ["a.jpeg", "b.PNG", "c.webp"]


@pytest.mark.parametrize("ending", ["jpg", "png"])
def test_a_truncated_image_is_unreadable(tmp_path, photo_folder, ending):
    with Image.open(find_images(photo_folder)[0]) as photo:
        photo.convert("RGB").save(tmp_path / f"good.{ending}")
        size = photo.size
    whole = (tmp_path / f"good.{ending}").read_bytes()
    assert examine(whole) == (size[1], size[0])
    with pytest.raises(Unreadable):
        examine(whole[: len(whole) // 2])


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "it is empty"), (b"no image", "not a known image format"), (b"P6 0 0 255\n", None)],
    ids=["empty", "text", "no pixels"],
)
def test_what_is_no_image_is_unreadable(content, reason):
    with pytest.raises(Unreadable) as raised:
        examine(content)
    assert reason is None or str(raised.value) == reason


def test_the_size_is_that_of_the_image_as_it_is_seen(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(gradient(16, 48)).save(tmp_path / "turned.jpg", exif=exif)
    assert examine((tmp_path / "turned.jpg").read_bytes()) == (48, 16)
