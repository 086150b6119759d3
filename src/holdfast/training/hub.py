"""Brings a base pipeline onto the machine: a folder as it is, a repository of the Hugging Face Hub through its cache.

One process of each node downloads, and only the files that count; the others wait. Access is checked first, so that a
missing or gated repository is answered at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from holdfast.errors import UsageError
from holdfast.training.once import once
from holdfast.training.pipeline_folder import choose_files

# 60 GB over a slow line; a download that is still running after this has most likely stalled.
DOWNLOAD_DEADLINE_S = 6 * 3600.0


def fetch_pipeline(
    name: str, parts: Iterable[str], revision: str | None, variant: str | None, cache_dir: str | None = None
) -> Path:
    """The folder that holds `parts` of the pipeline `name`, which is a folder or a repository; every rank calls this.

    Raises UsageError for a repository that is missing, gated or unreachable, before anything is downloaded.
    """
    if Path(name).is_dir():
        return Path(name)
    return Path(once(lambda: _download(name, list(parts), revision, variant, cache_dir), "node", DOWNLOAD_DEADLINE_S))


def _download(name: str, parts: list[str], revision: str | None, variant: str | None, cache_dir: str | None) -> str:
    """Checks access, lists the repository, downloads what counts. Offline mode takes what the cache has."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub import errors as hub

    network_error: type[Exception] = hub.HTTPError  # type: ignore[attr-defined]  # that of the client the hub uses
    at = f"{name}{f' at revision {revision}' if revision else ''}"
    try:
        if constants.HF_HUB_OFFLINE:
            return _cached(name, revision, cache_dir)
        api = HfApi()
        api.auth_check(name)
        files = choose_files(api.list_repo_files(name, revision=revision), parts, variant)
        return str(snapshot_download(name, revision=revision, allow_patterns=files, cache_dir=cache_dir))
    except hub.GatedRepoError as error:
        raise UsageError(
            f"{at} is gated. Accept its terms at https://huggingface.co/{name}, then log in (`hf auth login`) or set "
            "HF_TOKEN to a token of that account."
        ) from error
    except hub.RepositoryNotFoundError as error:
        raise UsageError(
            f"There is neither a folder nor a repository {name}. If the repository is private, set HF_TOKEN."
        ) from error
    except hub.RevisionNotFoundError as error:
        raise UsageError(f"{name} has no revision {revision}. Look at its branches and tags.") from error
    except (hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled) as error:
        raise UsageError(
            f"{at} is not in the local cache, and offline mode is on (HF_HUB_OFFLINE). Download it once with a "
            "connection, or give a folder."
        ) from error
    except (hub.HFValidationError, network_error, OSError) as error:
        raise UsageError(
            f"{at} cannot be downloaded: {without_token(str(error))}\n"
            "If it is in the local cache already, start again with HF_HUB_OFFLINE=1."
        ) from error


def _cached(name: str, revision: str | None, cache_dir: str | None) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return str(snapshot_download(name, revision=revision, local_files_only=True, cache_dir=cache_dir))
    except LocalEntryNotFoundError as error:
        # Since version 2 the hub calls a snapshot incomplete that lacks what `choose_files` left out.
        if path := getattr(error, "snapshot_path", None):
            return str(path)
        raise


def without_token(text: str) -> str:
    """`text` without the user's Hub token, should an error of a library quote it."""
    from huggingface_hub import get_token

    token = get_token()
    return text.replace(token, "***") if token else text
