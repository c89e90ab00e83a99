"""A Hub on this machine, for the client as it is: huggingface_hub speaks HTTP with it as with the real one.

Only what pushes and pulls of models need. Files are sent inside the commit, or in Xet mode through hf_xet, whose
`local://` store takes the place of the server that chunks are uploaded to.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from hub.repositories import LARGE_SUFFIXES, Commit, ConflictError, Repository

TOKEN = "hf_local"
USER = "tester"


class Request(NamedTuple):
    """One request that was answered."""

    method: str
    path: str
    status: int


class Failure(NamedTuple):
    """An answer to be given instead, once, to a request like `POST */commit/*`."""

    pattern: str
    status: int


class RefusedError(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, code: str = "", message: str = "", commit: Commit | None = None):
        super().__init__(message)
        headers = {"X-Error-Code": code, "X-Error-Message": message}
        self.answer = Answer(status, json.dumps({"error": message}).encode(), headers | revision_header(commit))


@dataclass
class Answer:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    size_bytes: int | None = None  # of the body, where a HEAD must tell it without sending it


@dataclass
class LocalHub:
    """The state of a running Hub, to look at and to set.

    Args:
        root: Where Xet keeps its files.
        xet: Whether weights go through Xet.
        url: Where it listens.
        repositories: By name.
        requests: What was answered, in order.
        failures: What is to fail, each once.
    """

    root: Path
    xet: bool = False
    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    lock: Any = field(default_factory=threading.RLock)

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        commit = self.repositories[repo_id].find(revision)
        assert commit is not None
        return {name: file.content for name, file in commit.files.items() if name != ".gitattributes"}

    def titles(self, repo_id: str) -> list[str]:
        return [commit.title for commit in self.repositories[repo_id].commits.values()][1:]


def revision_header(commit: Commit | None) -> dict[str, str]:
    return {"X-Repo-Commit": commit.sha} if commit else {}


def as_json(value: object, status: int = 200, **headers: str) -> Answer:
    return Answer(status, json.dumps(value).encode(), headers)


class Handler(BaseHTTPRequestHandler):
    """Answers one request: the first of `ROUTES` whose method and path fit."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two packets, of which the second would wait for an answer
    hub: LocalHub

    def answer(self) -> None:
        path = urlsplit(self.path).path
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            with self.hub.lock:
                self.fail_if_told_to(path)
                answer = self.route(path)
        except RefusedError as error:
            answer = error.answer
        self.hub.requests.append(Request(self.command, path, answer.status))
        self.send_response(answer.status)
        size_bytes = len(answer.body) if answer.size_bytes is None else answer.size_bytes
        for name, value in {"Content-Length": str(size_bytes), **answer.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    do_GET = do_HEAD = do_POST = answer  # noqa: N815  (BaseHTTPRequestHandler wants these names)

    def log_message(self, *_: object) -> None:
        pass

    def fail_if_told_to(self, path: str) -> None:
        for failure in self.hub.failures:
            if fnmatch.fnmatch(f"{self.command} {path}", failure.pattern):
                self.hub.failures.remove(failure)
                raise RefusedError(failure.status, message="injected failure")

    def route(self, path: str) -> Answer:
        for methods, pattern, function in ROUTES:
            match = re.fullmatch(pattern, path)
            if match and self.command in methods:
                return function(self, **{name: unquote(value or "") for name, value in match.groupdict().items()})
        raise RefusedError(404, message=f"no route for {self.command} {path}")

    # ---- who and what

    @property
    def is_user(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def require_user(self) -> None:
        if not self.is_user:
            raise RefusedError(401, message="Invalid username or password.")

    def repository(self, name: str) -> Repository:
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and not self.is_user):
            raise RefusedError(404 if self.is_user else 401, "RepoNotFound", "Repository not found")
        return repository

    def commit_of(self, name: str, revision: str) -> Commit:
        commit = self.repository(name).find(revision or "main")
        if commit is None:
            raise RefusedError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit

    # ---- routes

    def create(self) -> Answer:
        self.require_user()
        wanted = json.loads(self.body)
        name = f"{wanted.get('organization') or USER}/{wanted['name']}"
        url = f"{self.hub.url}/{name}"
        if name in self.hub.repositories:
            return as_json({"error": "You already created this model repo", "url": url}, 409)
        repository = Repository(name, wanted.get("visibility") == "private" or wanted.get("private") is True)
        repository.add("main", "initial commit", "", {})
        self.hub.repositories[name] = repository
        return as_json({"url": url, "name": name, "id": name})

    def branch(self, repo: str, revision: str) -> Answer:
        self.require_user()
        branches = self.repository(repo).branches
        if revision in branches:
            return as_json({"error": "Reference already exists"}, 409)
        branches[revision] = branches["main"]
        return as_json({})

    def preupload(self, repo: str, revision: str) -> Answer:
        self.require_user()
        present = self.commit_of(repo, revision).files
        answers = []
        for path in [file["path"] for file in json.loads(self.body)["files"]]:
            large = self.hub.xet and PurePosixPath(path).suffix in LARGE_SUFFIXES
            known = {"oid": present[path].sha256 or present[path].oid} if path in present else {}
            answers.append({"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, **known})
        return as_json({"files": answers})

    def commit(self, repo: str, revision: str) -> Answer:
        self.require_user()
        self.commit_of(repo, revision)
        try:
            commit = self.repository(repo).apply(revision, self.body, self.hub.root)
        except ConflictError as error:
            raise RefusedError(412, message="A commit has happened since. Please refresh and try again.") from error
        url = f"{self.hub.url}/{repo}/commit/{commit.sha}"
        return as_json({"success": True, "commitOid": commit.sha, "commitUrl": url, "pullRequestUrl": None})

    def info(self, repo: str, revision: str) -> Answer:
        commit = self.commit_of(repo, revision)
        siblings = [{"rfilename": name} for name in commit.files]
        private = self.repository(repo).private
        return as_json({"id": repo, "sha": commit.sha, "private": private, "tags": [], "siblings": siblings})

    def tree(self, repo: str, revision: str, path: str) -> Answer:
        commit = self.commit_of(repo, revision)
        folder = f"{path.strip('/')}/" if path.strip("/") else ""
        entries = [file.to_dict(name) for name, file in sorted(commit.files.items()) if name.startswith(folder)]
        if folder and not entries:
            raise RefusedError(404, "EntryNotFound", f"{folder} does not exist", commit)
        return as_json(entries)

    def xet_token(self, repo: str, **_: str) -> Answer:
        self.repository(repo)
        if not self.hub.xet:
            raise RefusedError(404, message="Xet is not enabled here")
        url, expiration = f"local://{self.hub.root}", 2**31
        token = {"X-Xet-Cas-Url": url, "X-Xet-Access-Token": "xet", "X-Xet-Token-Expiration": str(expiration)}
        return as_json({"casUrl": url, "accessToken": "xet", "exp": expiration}, 200, **token)

    def resolve(self, repo: str, revision: str, path: str) -> Answer:
        commit = self.commit_of(repo, revision)
        file = commit.files.get(path)
        if file is None:
            raise RefusedError(404, "EntryNotFound", "Entry not found", commit)
        headers = {**revision_header(commit), "ETag": f'"{file.sha256 or file.oid}"'}
        if file.xet_hash:
            route = f"{self.hub.url}/api/models/{repo}/xet-read-token/{commit.sha}"
            headers |= {"X-Linked-Etag": f'"{file.sha256}"', "X-Linked-Size": str(file.size_bytes)}
            headers |= {"X-Xet-Hash": file.xet_hash, "X-Xet-Refresh-Route": route}
        return Answer(200, file.content, headers, file.size_bytes)

    def validate_yaml(self) -> Answer:
        return as_json({"errors": [], "warnings": []})

    def whoami(self) -> Answer:
        self.require_user()
        return as_json({"type": "user", "name": USER, "orgs": [], "auth": {"accessToken": {"role": "write"}}})


_REPOSITORY = r"/api/models/(?P<repo>[^/]+/[^/]+)"
ROUTES: list[tuple[set[str], str, Callable[..., Answer]]] = [
    ({"POST"}, r"/api/repos/create", Handler.create),
    ({"POST"}, r"/api/validate-yaml", Handler.validate_yaml),
    ({"GET"}, r"/api/whoami-v2", Handler.whoami),
    ({"POST"}, rf"{_REPOSITORY}/branch/(?P<revision>[^/]+)", Handler.branch),
    ({"POST"}, rf"{_REPOSITORY}/preupload/(?P<revision>[^/]+)", Handler.preupload),
    ({"POST"}, rf"{_REPOSITORY}/commit/(?P<revision>[^/]+)", Handler.commit),
    ({"GET"}, rf"{_REPOSITORY}(?:/revision/(?P<revision>[^/]+))?", Handler.info),
    ({"GET"}, rf"{_REPOSITORY}/tree/(?P<revision>[^/]+)(?P<path>/.*)?", Handler.tree),
    ({"GET"}, rf"{_REPOSITORY}/xet-(?P<kind>read|write)-token/(?P<revision>[^/]+)", Handler.xet_token),
    ({"GET", "HEAD"}, r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)", Handler.resolve),
]


@contextlib.contextmanager
def serving(root: Path, *, xet: bool = False) -> Iterator[LocalHub]:
    """Run a Hub on a free port of this machine for as long as the body runs."""
    hub = LocalHub(root, xet)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
