"""A Hugging Face Hub on this machine: the few requests that a download and an upload make, answered from a folder."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY, GATED, TOKEN = "owner/flux", "owner/gated", "hf_secrettokenoftheuser"


class Hub(ThreadingHTTPServer):
    """Serves `folder` as REPOSITORY with the branch `main`; GATED needs TOKEN. `served` lists the files given out.

    With TOKEN files may be uploaded to any repository: `uploaded` has them by `owner/name/path`.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        self.served: list[str] = []
        self.requests: list[str] = []
        self.uploaded: dict[str, bytes] = {}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.respond()

    def do_GET(self) -> None:
        self.respond()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        path = unquote(urlsplit(self.path).path).strip("/")
        self.server.requests.append(f"{self.command} {self.path}")
        repository = "/".join(path.removeprefix("api/models/").split("/")[:2])
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.refuse(401, "Unauthorized")
        elif path == "api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted.get('organization') or 'somebody'}/{wanted['name']}"
            self.send_json({"url": f"{self.server.address}/{name}"})
        elif path == "api/validate-yaml":
            self.send_json({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            modes = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]]
            self.send_json({"files": modes})
        else:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    name = f"{repository}/{line['value']['path']}"
                    self.server.uploaded[name] = base64.b64decode(line["value"]["content"])
            self.send_json({"success": True, "commitOid": COMMIT, "commitUrl": f"{self.server.address}/{repository}/commit/{COMMIT}"})

    def respond(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.server.requests.append(f"{self.command} {self.path}")
        parts = path.removeprefix("api/models/").split("/")
        repository, rest = "/".join(parts[:2]), parts[2:]
        if repository not in (REPOSITORY, GATED):
            self.refuse(404, "RepoNotFound")
        elif repository == GATED and self.headers.get("Authorization") != f"Bearer {TOKEN}" and rest:
            self.refuse(403, "GatedRepo")
        elif not path.startswith("api/"):
            self.send_file("/".join(rest[2:]))
        elif rest[:1] == ["auth-check"]:
            self.send(b"{}")
        elif rest[:1] in (["revision"], ["tree"]) and rest[1] not in ("main", COMMIT):
            self.refuse(404, "RevisionNotFound")
        elif rest[:1] == ["tree"]:
            self.send_json([self.entry(name) for name in self.server.files])
        else:
            self.send_json({"id": repository, "sha": COMMIT, "siblings": [{"rfilename": n} for n in self.server.files]})

    def entry(self, name: str) -> dict[str, object]:
        content = self.server.files[name].read_bytes()
        return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def send_file(self, name: str) -> None:
        if name not in self.server.files:
            return self.refuse(404, "EntryNotFound")
        content = self.server.files[name].read_bytes()
        if self.command == "GET":
            self.server.served.append(name)
        tag = f'"{hashlib.sha1(content).hexdigest()}"'
        return self.send(content, {"ETag": tag, "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"})

    def send_json(self, value: object) -> None:
        self.send(json.dumps(value).encode(), {"Content-Type": "application/json"})

    def refuse(self, status: int, code: str) -> None:
        self.send(b'{"error": "no"}', {"X-Error-Code": code, "X-Error-Message": code}, status)

    def send(self, body: bytes, headers: dict[str, str] | None = None, status: int = 200) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serve(folder: Path) -> Iterator[Hub]:
    hub = Hub(folder)
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join(5)
