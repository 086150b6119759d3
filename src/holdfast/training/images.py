"""Images as training data: found, checked, and brought to a size, the same way every time.

Every image is turned as its EXIF data says, laid on white where it is transparent, scaled so that it covers the wanted size,
and cut. Where it is cut and whether it is mirrored is drawn from the run's seed and the sample's number, or fixed: a resumed
run and any number of ranks see the same pixels, with caches and without.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image

    from holdfast.training.config import DiffusionConfig


def find_images(folder: Path) -> list[Path]:
    """The image files of `folder` (not of folders inside it) in the order of their names.

    What is an image is decided by the file name's ending; captions and other sidecar files are passed over.
    """
    from PIL import Image

    endings = Image.registered_extensions()
    return sorted(
        path
        for path in folder.iterdir()
        if path.suffix.lower() in endings and path.is_file() and not path.name.startswith(".")
    )


class Unreadable(Exception):
    """These bytes are no image; the message says why."""


def examine(content: bytes) -> tuple[int, int]:
    """Height and width of an image, turned as its EXIF data says; all of it is decoded, since a truncated file opens well.

    Raises:
        Unreadable: it is none, or has no pixels.
    """
    from PIL import ExifTags, Image, UnidentifiedImageError

    if not content:
        raise Unreadable("it is empty")
    try:
        with Image.open(io.BytesIO(content)) as image:
            width, height = image.size
            lying = image.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
            image.draft("RGB", (64, 64))  # JPEG only: decodes an eighth of the pixels from all of the bytes
            image.load()
    except UnidentifiedImageError:
        raise Unreadable("not a known image format") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise Unreadable(str(error)) from None
    if not width or not height:
        raise Unreadable("it has no pixels")
    return (width, height) if lying else (height, width)


def to_rgb(image: Image.Image) -> Image.Image:
    """Any mode to 8-bit RGB: 16-bit and float images keep their range, transparent parts turn white."""
    import numpy as np
    from PIL import Image

    if image.mode == "F" or image.mode.startswith("I"):
        # Pillow itself would cut everything above 255 to white. The range is the smallest usual one that fits.
        values = np.asarray(image, dtype=np.float64)
        ranges = {"F": (1.0, 255.0, 65535.0), "I": (255.0, 65535.0)}.get(image.mode, (65535.0,))
        peak = values.max(initial=0.0)
        white = next((top for top in ranges if peak <= top), peak)
        image = Image.fromarray((values / white * 255.0).clip(0, 255).round().astype(np.uint8), mode="L")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def open_image(content: bytes) -> Image.Image:
    """An image in RGB, turned as its EXIF data says."""
    from PIL import Image, ImageOps

    with Image.open(io.BytesIO(content)) as opened:
        return to_rgb(ImageOps.exif_transpose(opened))


@dataclass(frozen=True)
class Cut:
    """How an image is brought to a size: which part of what does not fit stays (0 to 1, left and top), and whether mirrored."""

    height: int
    width: int
    centre: tuple[float, float] = (0.5, 0.5)
    mirrored: bool = False
    interpolation: str = "lanczos"

    def pixels(self, image: Image.Image) -> NDArray[np.float32]:
        """Pixels of shape (3, height, width) with values from -1 to 1."""
        return scaled(self.part(image))

    def part(self, image: Image.Image) -> NDArray[np.uint8]:
        """What is left of the image, of shape (height, width, 3)."""
        import numpy as np
        from PIL import Image, ImageOps

        method = Image.Resampling[self.interpolation.upper()]
        part = ImageOps.fit(image, (self.width, self.height), method=method, centering=self.centre)
        if self.mirrored:
            part = ImageOps.mirror(part)
        return np.asarray(part)


def scaled(part: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Pixels of shape (3, height, width) with values from -1 to 1, from bytes of shape (height, width, 3)."""
    import numpy as np

    values = part.astype(np.float32) / np.float32(127.5) - np.float32(1.0)
    return np.ascontiguousarray(values.transpose(2, 0, 1))


def cut_of(config: DiffusionConfig, number: int, height: int, width: int) -> Cut:
    """How sample `number` of a run is cut: the same at each pass."""
    import numpy as np

    draws = np.random.default_rng([config.seed, number])
    across, down, side = (float(value) for value in draws.random(3))
    centre = (0.5, 0.5) if config.center_crop else (across, down)
    return Cut(height, width, centre, config.random_flip and side < 0.5, config.image_interpolation_mode)
