"""Several processes on this machine, one a GPU or a share of the cores: a crew (crew.py).

They are started anew (spawn), share the catalogue's memory, and talk over a pipe each. A process whose pipe closes ends at
once, so none outlives the one that leads, however that ends.
"""

import contextlib
import itertools
import logging
import mmap
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from prefill_cli import machine, storage
from prefill_cli.data.inputs import Shard
from prefill_cli.data.staging import Receipt
from prefill_cli.engines import crew
from prefill_cli.errors import UsageError
from prefill_cli.job import Job
from prefill_cli.pipeline import Progress
from prefill_cli.worker import Worker

CLOSE_WITHIN_SEC = 5.0  # of the pipe, until a process that still lives is killed
ALIGNED = 64


@dataclass(frozen=True)
class Seat:
    """Where a process works: its device, and the cores that it and nobody else of the crew uses."""

    device: str
    cores: tuple[int, ...]


def run_shards(job: Job, shards: Sequence[Shard], progress: Progress) -> Generator[tuple[Shard, Receipt]]:
    """Do `shards` in --workers processes; see pipeline.Engine.

    Raises:
        UsageError: more workers than GPUs.
    """
    if not shards:
        return
    yield from crew.lead(Processes(job, seats_of(job)), job, shards, progress)


def seats_of(job: Job) -> list[Seat]:
    """One for each of --workers."""
    workers = job.config.worker_range[1]
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    share = job.config.cpus_per_worker or max(1, len(cores) // workers)
    mine = [tuple(cores[(i * share + j) % len(cores)] for j in range(min(share, len(cores)))) for i in range(workers)]
    if job.device != "cuda":
        if job.device != "cpu" and workers > 1:
            raise UsageError(f"--workers {workers}: this machine has one {job.device} device")
        return [Seat(job.device, own) for own in mine]
    import torch

    if workers > (there := torch.cuda.device_count()):
        raise UsageError(f"--workers {workers}: this machine has {there} GPUs, and each worker takes one")
    return [Seat(f"cuda:{i}", own) for i, own in enumerate(mine)]


@dataclass
class _Process:
    """A worker as the leader sees it."""

    process: BaseProcess
    pipe: Connection
    seat: Seat


class Processes:
    """See crew.Crew."""

    def __init__(self, job: Job, seats: list[Seat]) -> None:
        self._luggage = _write(crew.pack(job), storage.scratch())
        self._context = multiprocessing.get_context("spawn")
        self._seats = seats
        self._numbers = itertools.count(1)
        self._workers: dict[int, _Process] = {}

    def hire(self) -> int:
        number = next(self._numbers)
        taken = [worker.seat for worker in self._workers.values()]
        seat = next(seat for seat in self._seats if taken.count(seat) < self._seats.count(seat))
        ours, theirs = self._context.Pipe()
        arguments = (theirs, self._luggage, seat, number, str(storage.scratch()))
        process = self._context.Process(target=_work, args=arguments, name=f"worker-{number}", daemon=True)
        process.start()
        theirs.close()  # so that its end is heard
        self._workers[number] = _Process(process, ours, seat)
        return number

    def give(self, worker: int, task: crew.Task) -> None:
        with contextlib.suppress(OSError):  # it died, which `events` tells
            self._workers[worker].pipe.send(task)

    def dismiss(self, worker: int) -> None:
        gone = self._workers.pop(worker)
        with contextlib.suppress(OSError):
            gone.pipe.send(None)  # it says in the cache what it used, and ends
        gone.process.join(CLOSE_WITHIN_SEC)
        _end(gone)

    def events(self) -> list[crew.Event]:
        pipes: dict[Any, int] = {worker.pipe: number for number, worker in self._workers.items()}
        found: list[crew.Event] = []
        for pipe in wait(list(pipes), 1.0):
            assert isinstance(pipe, Connection)
            try:
                found.append(pipe.recv())
            except (EOFError, OSError):
                gone = self._workers.pop(pipes[pipe])
                gone.process.join(CLOSE_WITHIN_SEC)
                found.append(crew.Death(pipes[pipe], _how(gone.process.exitcode)))
                _end(gone)
        return found

    def close(self) -> None:
        for worker in self._workers.values():
            with contextlib.suppress(OSError):
                worker.pipe.send(None)
        for worker in self._workers.values():
            worker.process.join(CLOSE_WITHIN_SEC)
            _end(worker)
        self._workers.clear()
        self._luggage.path.unlink(missing_ok=True)


def _end(worker: _Process) -> None:
    worker.pipe.close()
    if worker.process.is_alive():
        worker.process.kill()
    worker.process.join()


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        memory = "; the system may have run out of memory" if -code == signal.SIGKILL else ""
        return f"by {name}{memory}"
    return f"with exit code {code}"


@dataclass(frozen=True)
class _Luggage:
    """A packed job in a file, for processes that map it."""

    path: Path
    ends: tuple[int, ...]  # of the pickle and of each buffer; each begins at a multiple of ALIGNED


def _write(luggage: crew.Luggage, folder: Path) -> _Luggage:
    ends = []
    with tempfile.NamedTemporaryFile(dir=folder, prefix="job-", delete=False) as file:
        for piece in (luggage.pickled, *luggage.buffers):
            file.write(b"\0" * (-file.tell() % ALIGNED))
            file.write(piece)
            ends.append(file.tell())
        return _Luggage(Path(file.name), tuple(ends))


def _read(luggage: _Luggage) -> Job:
    with luggage.path.open("rb") as file:
        whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))  # PyTorch wants arrays that it may write to
    starts = [0, *(end + -end % ALIGNED for end in luggage.ends[:-1])]
    pickled, *buffers = (whole[start:end] for start, end in zip(starts, luggage.ends, strict=True))
    return crew.unpack(crew.Luggage(pickled, buffers))  # type: ignore[arg-type]


class _Speaker(logging.Handler):
    """Messages for the leader, who prints them."""

    def __init__(self, tell: Any) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(crew.Said(record.levelno, record.getMessage()))


def _work(pipe: Connection, luggage: _Luggage, seat: Seat, number: int, scratch: str) -> None:
    """The life of a process: shards come over the pipe, several are under way at once, and answers go back."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the leader decides
    os.dup2(2, 1)  # stdout is the result's
    tempfile.tempdir = scratch  # which the leader removes
    speaking = threading.Lock()

    def tell(event: crew.Event) -> None:
        with speaking:
            try:
                pipe.send(event)
            except OSError:  # nobody listens any more
                os._exit(1)

    logging.getLogger("prefill_cli").addHandler(_Speaker(tell))
    try:
        worker = _begin(luggage, seat, number)
    except Exception as error:
        tell(crew.Failure(crew.portable(error)))
        _listen(pipe)
        return
    tell(crew.Ready(number))

    def do(task: crew.Task) -> None:
        def on_batch(rows: int, tokens: int) -> None:
            tell(crew.Batch(number, task.shard, rows, tokens))

        try:
            tell(crew.Answer(number, task.shard, task.do(worker, on_batch)))
        except Exception as error:
            tell(crew.Failure(crew.portable(error)))

    threads = ThreadPoolExecutor(crew.IN_HAND)
    under_way: list[Future[None]] = []
    while task := _listen(pipe):
        under_way = [*(future for future in under_way if not future.done()), threads.submit(do, task)]
    if all(future.done() for future in under_way):  # else the run ended in between
        worker.close()
    os._exit(0)  # PyTorch would take most of a second to go in order


def _begin(luggage: _Luggage, seat: Seat, number: int) -> Worker:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, seat.cores)
    import torch

    torch.set_num_threads(len(seat.cores))
    machine.threads()  # before any pool says otherwise
    job = _read(luggage)
    return Worker(replace(job, device=seat.device), f"{os.uname().nodename}:{number}")


def _listen(pipe: Connection) -> crew.Task | None:
    """The next shard; None when there is none. Where the leader is gone, this process ends."""
    try:
        found: crew.Task | None = pipe.recv()
    except (EOFError, OSError):
        os._exit(1)
    return found
