"""Where the base files of a checkpoint are now: looked for by content, in places that are known or noted, and nowhere else.

A noted path comes out of the checkpoint, which may be a stranger's: a file there is opened only if it is a plain file of the
size that is wanted, and read only if its digest is the wanted one, too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from holdfast.core.layout import BaseFile, Named
from holdfast.core.manifest import BaseNote
from holdfast.core.safetensors import Entry
from holdfast.engine.blocks import BlockFile
from holdfast.engine.digests import compute_sha256, sha256_of
from holdfast.errors import CorruptCheckpoint, IncompatibleCheckpoint
from holdfast.formats.huggingface import StoredTensor, tensors_of_file
from holdfast.storage import LocalFolder, Storage

PAGE = 4096
"""There are no hashes of blocks, so reads are rounded out to pages."""


class BaseFiles:
    """Of one checkpoint. `folders` are looked into first: those that a user names."""

    def __init__(self, where: str, notes: Callable[[], tuple[BaseNote, ...]]) -> None:
        self._where, self._notes = where, notes
        self.folders: list[Path] = []
        self._found: dict[BaseFile, tuple[Storage, str]] = {}
        self._tensors: dict[BaseFile, dict[str, StoredTensor]] = {}

    @property
    def noted(self) -> str:
        """The bases as they were noted, for messages."""
        return ", ".join(dict.fromkeys(map(str, self._notes()))) or "a base that was not noted"

    def folders_of(self, model: str | None = None) -> list[Path]:
        """The folders that were noted, all or those of a model."""
        return [Path(path) for path in dict.fromkeys(n.path for n in self._notes() if model in (None, n.model))]

    def know(self, file: BaseFile, storage: Storage, path: str) -> None:
        """It is there: its digest was compared."""
        self._found[file] = storage, path

    def find(self, file: BaseFile) -> BlockFile:
        """The file with that content.

        Raises:
            IncompatibleCheckpoint: it is in none of the places, or another one is.
        """
        if file not in self._found:
            tried = []
            noted = self.folders_of()
            places = [p for folder in self.folders for p in (folder, *(folder / note.name for note in noted))] + noted
            for folder in places:
                problem = difference(LocalFolder(folder, follow_links=True), file.file, file)
                if problem is None:
                    self._found[file] = LocalFolder(folder, follow_links=True), file.file
                    break
                tried.append(f"{folder / file.file} {problem}")
            else:
                raise IncompatibleCheckpoint(
                    f"{self._where} names frozen weights of {self.noted}, and {file.file} (sha256 {file.sha256[:12]}…) was not found: "
                    f"{'; '.join(dict.fromkeys(tried)) or 'no folder is known'}. Give the folder of that base: load_pretrained or "
                    "Checkpointer(base=...) for a resume, --base for an export"
                )
        storage, path = self._found[file]
        return BlockFile(storage, path, file.size, block_size=PAGE)

    def entry(self, named: Named) -> Entry:
        """Where a tensor lies in its file.

        Raises:
            IncompatibleCheckpoint: the file is not found.
            CorruptCheckpoint: it has no such tensor.
        """
        if named.file not in self._tensors:
            file = self.find(named.file)
            self._tensors[named.file] = tensors_of_file(file.storage, file.path)
        stored = self._tensors[named.file].get(named.tensor)
        if stored is None:
            raise CorruptCheckpoint(f"{self._where} names a tensor {named.tensor!r} that its base {named.file.file} does not have")
        return stored.entry


    def damaged(self, file: BaseFile) -> str | None:
        """Read all of a file where it was found, or say that it was not; None where it holds what was named."""
        try:
            found = self.find(file)
        except IncompatibleCheckpoint as error:
            return str(error.args[0])
        now = compute_sha256(found.storage, found.path)
        if now == file.sha256:
            return None
        return f"{found.path} of the base {found.storage.describe()} is not what it was (sha256 {now[:12]}…, not {file.sha256[:12]}…)"


def difference(storage: LocalFolder, path: str, wanted: BaseFile) -> str | None:
    """What keeps a file from being the wanted one; None where it is."""
    try:
        if not (storage.root / path).is_file():
            return "is not there"
        if (size := storage.size(path)) != wanted.size:
            return f"has {size:,} bytes and not {wanted.size:,}"
        found = sha256_of(storage, path)
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    return None if found == wanted.sha256 else f"is another file (sha256 {found[:12]}…)"
