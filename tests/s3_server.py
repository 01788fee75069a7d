"""A real S3 server on a port of this machine (moto's, in a process of its own), and a bucket per test."""

import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

# moto's botocore wants python-dateutil < 3; where the tests' own environment has a newer one the server can run in another.
SERVER_PYTHON = os.environ.get("MOTO_PYTHON", sys.executable)
NO_ACCOUNT = os.devnull
# For every process that a test starts. No file of the developer's and no metadata service of a cloud machine has a say.
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",  # moto takes any
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": NO_ACCOUNT,
    "AWS_SHARED_CREDENTIALS_FILE": NO_ACCOUNT,
    "NO_PROXY": "127.0.0.1",
    "no_proxy": "127.0.0.1",
}
STRANGERS = ("AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT_URL_S3", "AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE")


class S3Server:
    """Where it listens, and its buckets by plain HTTP: no client library in between. log: where it writes every request."""

    def __init__(self, port: int, log: Path) -> None:
        self.port, self.url, self._log = port, f"http://127.0.0.1:{port}", log

    def requests(self, bucket: str) -> list[tuple[str, str]]:
        """Method and path of every request about a bucket so far, but for those of this class."""
        mark = f"/moto-api/?mark={time.time_ns()}"  # answered after what came before it
        self.call("GET", mark)
        while mark not in (text := self._log.read_text()):
            time.sleep(0.01)
        found = re.findall(rf'"(?:\x1b\[[\d;]*m)*([A-Z]+) (/{re.escape(bucket)}\b\S*) HTTP', text)
        return [(method, path) for method, path in found if (method, path) != ("PUT", f"/{bucket}")]

    def call(self, method: str, path: str, data: bytes | None = None) -> bytes:
        with urllib.request.urlopen(
            urllib.request.Request(self.url + path, data, {"Content-Type": "application/octet-stream"}, method=method),
            timeout=10,
        ) as answer:
            return bytes(answer.read())

    def keys(self, bucket: str) -> list[str]:
        return re.findall(r"<Key>(.*?)</Key>", self.call("GET", f"/{bucket}?list-type=2").decode())

    def uploads(self, bucket: str) -> list[str]:
        """The keys of multipart uploads begun and neither completed nor aborted."""
        return re.findall(r"<Key>(.*?)</Key>", self.call("GET", f"/{bucket}?uploads").decode())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    log = tmp_path_factory.mktemp("s3") / "log"
    server = S3Server(free_port(), log)
    with pytest.MonkeyPatch.context() as patch, log.open("w") as said:
        for name in STRANGERS:
            patch.delenv(name, raising=False)
        for name, value in (ENVIRONMENT | {"AWS_ENDPOINT_URL": server.url}).items():
            patch.setenv(name, value)
        command = [SERVER_PYTHON, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(server.port)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said)
        try:
            deadline = time.monotonic() + 60
            while True:
                try:
                    server.call("GET", "/moto-api/")
                    break
                except urllib.error.URLError:
                    if process.poll() is not None or time.monotonic() > deadline:
                        pytest.fail(f"moto's server did not start: {' '.join(command)} (exit {process.poll()})")
                    time.sleep(0.05)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture
def s3(s3_server: S3Server, request: pytest.FixtureRequest) -> Iterator[str]:
    """The base URI of an empty bucket: s3://NAME."""
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")[:50].strip("-") + f"-{time.time_ns() % 10**8}"
    s3_server.call("PUT", f"/{name}")
    yield f"s3://{name}"
