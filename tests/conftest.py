"""Fixtures that every test folder shares."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from holdfast.testing.pool import RankPool

# The machine may be busy with other ranks: how long an example takes says nothing about the code.
settings.register_profile("holdfast", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("holdfast")


# Digests of base files are kept there, by the ranks of the pool, too.
os.environ["HOLDFAST_CACHE"] = tempfile.mkdtemp(prefix="holdfast-tests-")


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Real ranks: `pool.run(function, world_size, *args)` with a top-level function of the test file."""
    with RankPool() as ranks:
        yield ranks


@pytest.fixture(scope="session")
def flux_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random FluxPipeline folder; never written to by tests."""
    from holdfast.testing.models import tiny_flux

    return tiny_flux(tmp_path_factory.mktemp("models") / "flux")


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama folder; never written to by tests."""
    from holdfast.testing.models import tiny_llama

    return tiny_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def photo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five real photos; never written to by tests."""
    from holdfast.testing.models import photos

    return photos(tmp_path_factory.mktemp("data") / "photos")
