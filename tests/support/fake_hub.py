"""A Hugging Face hub with one repository, on a port of this machine."""

import hashlib
import json
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REPO_ID = "someone/small-model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def fake_hub(files: Mapping[str, bytes]) -> Generator[str]:
    """Serves `files` as `REPO_ID`; yields the endpoint's URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(has_body=True)

        def do_HEAD(self) -> None:
            self._answer(has_body=False)

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _answer(self, has_body: bool) -> None:
            path = self.path.partition("?")[0]
            name = path.removeprefix(f"/{REPO_ID}/resolve/{COMMIT}/")
            if path.startswith(f"/api/models/{REPO_ID}/tree/"):
                self._send(_json(_tree(files)), {}, has_body)
            elif path.startswith(f"/api/models/{REPO_ID}"):
                siblings = [{"rfilename": name} for name in files]
                about = {"id": REPO_ID, "sha": COMMIT, "siblings": siblings}
                self._send(_json(about), {}, has_body)
            elif name in files:
                content = files[name]
                headers = {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": COMMIT}
                self._send(content, headers, has_body)
            else:
                self._send(b"{}", {"X-Error-Code": "RepoNotFound"}, has_body, status=404)

        def _send(
            self, content: bytes, headers: Mapping[str, str], has_body: bool, status: int = 200
        ) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            for key, value in headers.items():
                self.send_header(key, value)
            self.end_headers()
            if has_body:
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _tree(files: Mapping[str, bytes]) -> list[dict[str, object]]:
    return [
        {"type": "file", "path": name, "size": len(content), "oid": _digest(content)}
        for name, content in files.items()
    ]


def _digest(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


def _json(value: object) -> bytes:
    return json.dumps(value).encode()
