"""Images as training data: found, checked, and brought to a size, the same way every time.

Every image is turned as its EXIF data says, laid on white where it is transparent, scaled so that it covers the wanted size,
and cut. Where it is cut and whether it is mirrored is drawn from the run's seed and the sample's number, or fixed: a resumed
run and any number of ranks see the same pixels, with caches and without.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image

    from holdfast.training.config import DiffusionConfig

# Errors of one bad folder are alike: a reader needs the first few and the count.
SHOWN_FAILURES = 10


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


def image_problems(folder: Path, skip: bool = False) -> Iterator[str]:
    """Yields what keeps `folder` from being training data: it is missing, empty, or holds unreadable images (unless `skip`)."""
    if not folder.is_dir():
        yield f"--instance_data_dir {folder}: there is no such folder."
        return
    images = find_images(folder)
    if not images:
        yield f"--instance_data_dir {folder} holds no image files. Put the training images directly into it."
        return
    failures = [] if skip else [(path, why) for path in images if (why := read_failure(path.read_bytes)) is not None]
    for path, reason in failures[:SHOWN_FAILURES]:
        yield f"{path} cannot be read as an image ({reason}). Repair it or take it out of the folder."
    if len(failures) > SHOWN_FAILURES:
        yield f"{len(failures) - SHOWN_FAILURES} more image(s) in {folder} cannot be read."


def read_failure(read: Callable[[], bytes]) -> str | None:
    """Why the bytes are no image, None where they are one; all of it is decoded, since a truncated file opens well."""
    from PIL import Image, UnidentifiedImageError

    try:
        content = read()
        if not content:
            return "it is empty"
        with Image.open(io.BytesIO(content)) as image:
            image.draft("RGB", (64, 64))  # JPEG only: decodes an eighth of the pixels from all of the bytes
            image.load()
    except UnidentifiedImageError:
        return "not a known image format"
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        return str(error)
    return None


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


def open_image(file: Path | io.BytesIO) -> Image.Image:
    """An image in RGB, turned as its EXIF data says."""
    from PIL import Image, ImageOps

    with Image.open(file) as opened:
        return to_rgb(ImageOps.exif_transpose(opened))


def size_of(file: Path | io.BytesIO) -> tuple[int, int]:
    """Height and width of an image, turned as its EXIF data says; nothing is decoded."""
    from PIL import ExifTags, Image

    with Image.open(file) as opened:
        width, height = opened.size
        lying = opened.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
    return (width, height) if lying else (height, width)


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
        import numpy as np
        from PIL import Image, ImageOps

        method = Image.Resampling[self.interpolation.upper()]
        part = ImageOps.fit(image, (self.width, self.height), method=method, centering=self.centre)
        if self.mirrored:
            part = ImageOps.mirror(part)
        values = np.asarray(part, dtype=np.float32) / np.float32(127.5) - np.float32(1.0)
        return np.ascontiguousarray(values.transpose(2, 0, 1))


def cut_of(config: DiffusionConfig, number: int, height: int, width: int) -> Cut:
    """How sample `number` of a run is cut: the same at each pass."""
    import numpy as np

    draws = np.random.default_rng([config.seed, number])
    across, down, side = (float(value) for value in draws.random(3))
    centre = (0.5, 0.5) if config.center_crop else (across, down)
    return Cut(height, width, centre, config.random_flip and side < 0.5, config.image_interpolation_mode)
