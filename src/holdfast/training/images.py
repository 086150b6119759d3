"""A folder of images as training data: found, checked, and brought to one size, the same way every time.

Every image becomes a square of the wanted side: turned as its EXIF data says, laid on white where it is transparent,
scaled so that its shorter side fits, cut around its centre. Nothing is drawn at random, so a resumed run and any
number of ranks see the same pixels.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image

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


def image_problems(folder: Path) -> Iterator[str]:
    """Yields what keeps `folder` from being training data: it is missing, empty, or holds unreadable images."""
    if not folder.is_dir():
        yield f"--instance_data_dir {folder}: there is no such folder."
        return
    images = find_images(folder)
    if not images:
        yield f"--instance_data_dir {folder} holds no image files. Put the training images directly into it."
        return
    failures = [problem for path in images if (problem := _read_failure(path)) is not None]
    for path, reason in failures[:SHOWN_FAILURES]:
        yield f"{path} cannot be read as an image ({reason}). Repair it or take it out of the folder."
    if len(failures) > SHOWN_FAILURES:
        yield f"{len(failures) - SHOWN_FAILURES} more image(s) in {folder} cannot be read."


def _read_failure(path: Path) -> tuple[Path, str] | None:
    """Reads a whole file, since a truncated one opens without complaint."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            image.draft("RGB", (64, 64))  # JPEG only: decodes an eighth of the pixels from all of the bytes
            image.load()
    except UnidentifiedImageError:
        return path, "not a known image format"
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        return path, str(error)
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


def load_image(path: Path, resolution: int) -> NDArray[np.float32]:
    """Reads one image as pixels of shape (3, resolution, resolution) with values from -1 to 1."""
    import numpy as np
    from PIL import Image, ImageOps

    with Image.open(path) as file:
        image = to_rgb(ImageOps.exif_transpose(file))
    square = ImageOps.fit(image, (resolution, resolution), method=Image.Resampling.LANCZOS)
    pixels = np.asarray(square, dtype=np.float32) / np.float32(127.5) - np.float32(1.0)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


class ImageFolder:
    """Map-style dataset: item i is the i-th image by name, as `load_image` gives it."""

    def __init__(self, folder: str | Path, resolution: int) -> None:
        self.paths = find_images(Path(folder))
        self.resolution = resolution

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> NDArray[np.float32]:
        return load_image(self.paths[index], self.resolution)
