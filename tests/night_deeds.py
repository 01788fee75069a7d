"""What befalls a run of the night: patches that crash_server.py makes in the forked process before the command begins.

Each is a function with plain arguments; `mark` is a file that tells the server that the moment has come.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import random
import resource
import shutil
import time
from pathlib import Path

from prefill_cli import machine, outcome, worker
from prefill_cli.data import cache, locks, staging
from prefill_cli.data.prompts import ShardReader
from prefill_cli.encoding.prefill import PrefillEncoder
from prefill_cli.errors import OutputError

A_MINUTE = 60
LIBC = ctypes.CDLL(None, use_errno=True)
THIRD = 2  # the shard at which most of it happens: two are done, one is left


def in_python(mark):
    Path(mark).touch()
    time.sleep(A_MINUTE)


def in_c(mark):
    """A call that releases the GIL and that no signal interrupts."""
    Path(mark).touch()
    mutex = ctypes.create_string_buffer(256)
    LIBC.pthread_mutex_lock(mutex)
    LIBC.pthread_mutex_lock(mutex)


HOW = {"python": in_python, "c": in_c}
WHERE = {
    "reading": (ShardReader, "_piece"),
    "read": (worker.Worker, "read"),
    "encode": (worker.Worker, "encode"),
    "batch": (PrefillEncoder, "_vectors"),
    "finish": (worker.Worker, "finish"),
    "search": (outcome, "search"),
    "load": (worker, "load_base_model"),
    "planned": (worker.Worker, "__init__"),
    "publish": (staging.Staging, "publish"),
    "hash": (__import__("hashlib"), "file_digest"),
    "segment": (cache, "write_segment"),
}


def before(where, deed, call=1):
    """`deed` at the beginning of a call; `call` counts from the third shard on where it is about shards."""
    owner, name = WHERE[where]
    real, seen = getattr(owner, name), []
    encode = worker.Worker.encode
    begun = [where != "batch"]

    def wrapped(*args, **kwargs):
        if begun[0]:
            seen.append(1)
            if len(seen) == call:
                deed()
        return real(*args, **kwargs)

    def tell(self, read, on_batch):
        begun[0] |= read.shard.index == THIRD
        return encode(self, read, on_batch)

    setattr(owner, name, wrapped)
    if where == "batch":
        worker.Worker.encode = tell


def stuck(where, how, mark, call=1):
    before(where, lambda: HOW[how](mark), call)


def slow_batches(seconds):
    real = PrefillEncoder._vectors

    def slow(*args, **kwargs):
        time.sleep(seconds)
        return real(*args, **kwargs)

    PrefillEncoder._vectors = slow


def slow_search(seconds):
    before("search", lambda: time.sleep(seconds), 2)


def slow_finish(mark, call):
    """The lists of a shard take two seconds: its vectors are there when the signal comes."""

    def wait():
        Path(mark).touch()
        time.sleep(2)

    before("finish", wait, call)


def compiler(mark, place):
    """A compiler that starts another program and waits for it."""
    script = Path(place) / "compiler.sh"
    script.write_text(f"#!/bin/sh\nsleep {A_MINUTE} &\ntouch {mark}\nwait\n")
    script.chmod(0o755)
    os.environ["CXX"] = str(script)
    os.environ["XDG_CACHE_HOME"] = str(Path(place) / "kernels")


def compile_while_loading(mark, place):
    compiler(mark, place)
    before("load", lambda: machine.built(Path(machine.__file__).parent / "scoring" / "scan.cpp"))


def kernels_at(folder):
    os.environ["XDG_CACHE_HOME"] = folder


def homeless():
    """A user that the system does not know."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        os.environ.pop(name, None)

    def nobody():
        raise RuntimeError("Could not determine home directory.")

    Path.home = nobody


def files_of_at_most(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def segments_of_at_most(size):
    """The same for the cache alone."""
    real = cache.write_segment
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(*args):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            return real(*args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    cache.write_segment = limited


def no_powers():
    """Root without the capabilities that let it ignore permission bits."""
    header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert LIBC.capset(header, nothing) == 0 or os.getuid()


def no_flock():
    def refused(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    fcntl.flock = refused


def harm(where, what, path, call=1):
    """Somebody does something to a file or folder."""
    path = Path(path)

    def change():
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        with path.open("r+b") as file:  # in place
            file.write(raw)

    deeds = {
        "vanish": lambda: shutil.rmtree(path) if path.is_dir() else path.unlink(),
        "truncate": lambda: os.truncate(path, 0),
        "halve": lambda: os.truncate(path, path.stat().st_size // 2),
        "change": change,
        "put": lambda: path.write_text("another program's"),
    }
    before(where, deeds[what], call)


def fail(where, kind, call=1):
    def deed():
        raise {"RuntimeError": RuntimeError, "MemoryError": MemoryError, "SystemExit": SystemExit}[kind]("boom")

    before(where, deed, call)


def jumping_clock():
    """The wall clock jumps days back and forth; the steady one does not."""
    rng, real = random.Random(4), time.time
    time.time = lambda: real() + rng.uniform(-1e6, 1e6)

    class Jumping(cache.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls.fromtimestamp(time.time(), tz)

    cache.datetime = Jumping


def lock_storm(folder, rounds, seed):
    """Take the lock again and again without flock, beside others who do; now and then leave one as the dead do.

    Ends with 1 where two held it at once.
    """
    no_flock()
    rng, out, inside = random.Random(seed), Path(folder) / "out", Path(folder) / "inside"
    dead = json.dumps({"pid": 2**22 + 5, "host": os.uname().nodename})  # beyond the largest number of a process
    held = 0
    for _ in range(rounds):
        with contextlib.suppress(OutputError), locks.locked(out):
            try:
                os.close(os.open(inside, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                os._exit(1)
            held += 1
            time.sleep(rng.uniform(0, 0.002))
            inside.unlink()
            if rng.random() < 0.4:
                left = Path(folder) / f"left-{seed}"
                left.write_text(dead)
                left.replace(Path(folder) / ".out.lock")
        time.sleep(rng.uniform(0, 0.001))
    os._exit(0 if held else 3)
