"""Fixtures that the tests of recipes share."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.testing.models_flux2 import image_pairs, tiny_flux2


@pytest.fixture(scope="session")
def flux2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Flux2 pipeline; never written to by tests."""
    return tiny_flux2(tmp_path_factory.mktemp("models") / "flux2")


@pytest.fixture(scope="session")
def klein_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Flux2 Klein pipeline; never written to by tests."""
    return tiny_flux2(tmp_path_factory.mktemp("models") / "klein", klein=True)


@pytest.fixture(scope="session")
def pair_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six image pairs in parquet, two with the same caption; never written to by tests."""
    return image_pairs(tmp_path_factory.mktemp("data") / "pairs")
