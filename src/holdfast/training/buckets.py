"""Aspect ratio buckets: images are trained in the shape nearest to their own. How batches are made of them: `holdfast.DataLoader`."""

from __future__ import annotations

import math
from collections.abc import Sequence

Size = tuple[int, int]

# Ratios of height to width, as in the usual lists of shapes for 1024 x 1024.
_RATIOS = (1.0, 1.78, 1 / 1.78, 1.33, 1 / 1.33, 1.5, 1 / 1.5)


def parse_buckets(text: str) -> list[Size]:
    """`1024,1024;768,1360` as (height, width) pairs."""
    sides = [[int(number) for number in part.split(",")] for part in text.split(";")]
    return [(height, width) for height, width in sides]


def usual_buckets(resolution: int, multiple: int) -> list[Size]:
    """Shapes of about the area of a square of `resolution`, with sides that are multiples of `multiple`."""
    sizes = []
    for ratio in _RATIOS:
        height = max(1, round(resolution * ratio**0.5 / multiple)) * multiple
        width = max(1, round(resolution / ratio**0.5 / multiple)) * multiple
        sizes.append((height, width))
    return list(dict.fromkeys(sizes))


def nearest_bucket(height: int, width: int, buckets: Sequence[Size]) -> Size:
    """The bucket whose ratio is nearest to the image's; of several with one ratio that of the nearest area."""

    def distance(size: Size) -> tuple[float, float]:
        ratio = round(abs(math.log(size[0] / size[1]) - math.log(height / width)), 9)
        return ratio, abs(math.log(size[0] * size[1]) - math.log(height * width))

    return min(buckets, key=distance)
