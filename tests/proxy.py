"""A TCP proxy for tests: between a client and a server it breaks, or freezes, the connection after so many bytes."""

import contextlib
import socket
import struct
import threading
from types import TracebackType
from typing import Literal, Self

Way = Literal["up", "down"]
CHUNK = 16 * 1024
RESET = struct.pack("ii", 1, 0)  # SO_LINGER with no time: close() sends RST, as a crash would


class Proxy:
    """Passes everything on until `cut_after_bytes` more bytes (up: requests, down: answers) are through, then breaks.

    `cut_after_bytes = n` counts from the moment it is set; None heals the line. Past the limit every open connection that
    moves is reset, and every new one too; with `stall` they stay open and nothing moves. With `cuts` the line heals by
    itself after so many breaks: what a client's retry sees.
    """

    def __init__(self, target: tuple[str, int], *, way: Way = "up", stall: bool = False) -> None:
        self.target, self.way, self.stall = target, way, stall
        self.cuts: int | None = None
        self.bytes: dict[Way, int] = {"up": 0, "down": 0}
        self.connections = 0
        self._limit: int | None = None  # a value of bytes[way]
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]

    @property
    def cut_after_bytes(self) -> int | None:
        return None if self._limit is None else max(0, self._limit - self.bytes[self.way])

    @cut_after_bytes.setter
    def cut_after_bytes(self, n: int | None) -> None:
        with self._lock:
            self._limit = None if n is None else self.bytes[self.way] + n

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # close() alone would not wake accept()
        self._listener.close()
        for end in list(self._open):
            self._reset(end)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        ends = [client]
        self._open.add(client)
        try:
            if self.cut_after_bytes == 0:
                self._break(ends)
                return
            server = socket.create_connection(self.target)
            self._open.add(server)
            ends.append(server)
            up = threading.Thread(target=self._pump, args=(client, server, "up", ends), daemon=True)
            up.start()
            self._pump(server, client, "down", ends)
            up.join()
        except OSError:
            pass
        finally:
            for end in ends:
                self._open.discard(end)
                end.close()

    def _pump(self, source: socket.socket, sink: socket.socket, way: Way, ends: list[socket.socket]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK):
                with self._lock:
                    left = self.cut_after_bytes if way == self.way else None
                    passed = data if left is None else data[:left]
                    self.bytes[way] += len(passed)
                sink.sendall(passed)
                if len(passed) < len(data):
                    self._break(ends)
                    return
            sink.shutdown(socket.SHUT_WR)  # one direction ended as it should: the other may still have something to say

    def _break(self, ends: list[socket.socket]) -> None:
        with self._lock:
            if self.cuts is not None:
                self.cuts -= 1
                if self.cuts <= 0:
                    self._limit = self.cuts = None
        if self.stall:
            self._closed.wait()
        for end in ends:
            self._reset(end)

    @staticmethod
    def _reset(end: socket.socket) -> None:
        with contextlib.suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            end.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads it, which closes it
