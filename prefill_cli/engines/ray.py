"""Actors of a Ray cluster: a crew (crew.py). Needs the extra `ray`.

One actor takes one GPU, or --cpus-per-worker cores. The job goes into Ray's object store once, so the catalogue is held once
a node. Inputs, model and output have to be where every node sees them under the same name, or are URIs.

Actors, not Ray Data's pool of them: that tries a task whose actor died again without end and on the same actor, so that a
prompt that kills workers would never be given up (LOG.md has what was measured).
"""

import contextlib
import importlib.metadata
import itertools
import logging
import os
import signal
import socket
import threading
import warnings
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prefill_cli import machine
from prefill_cli.data.inputs import Shard
from prefill_cli.data.staging import Receipt
from prefill_cli.engines import crew
from prefill_cli.errors import OutputError, PrefillScoreError, UsageError, first_line
from prefill_cli.job import Job
from prefill_cli.pipeline import Progress
from prefill_cli.worker import Worker

log = logging.getLogger(__name__)
SAME_EVERYWHERE = ("prefill-score", "torch", "transformers", "numpy", "pyarrow")
KNOCK_SEC = 10.0
OUR_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)


def load_package() -> Any:
    """Ray's module.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import ray
    except ImportError:
        raise UsageError("--engine ray needs a package that is not installed: pip install 'prefill-score[ray]'") from None
    return ray


def run_shards(job: Job, shards: Sequence[Shard], progress: Progress) -> Generator[tuple[Shard, Receipt]]:
    """Do `shards` in --workers actors; see pipeline.Engine.

    Raises:
        UsageError: there is no such cluster.
    """
    if not shards:
        return
    # A thread of Ray's prints what befalls nodes to stdout, which is the result's. What matters of it we say ourselves.
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        connect(job.config.ray_address)
        try:
            yield from crew.lead(Actors(job), job, shards, progress)
        finally:
            load_package().shutdown()


def connect(address: str | None) -> None:
    """Join the cluster at `address` or RAY_ADDRESS, else start a Ray of our own on this machine.

    Raises:
        UsageError: nothing answers there.
    """
    ray = load_package()
    handlers = {number: signal.getsignal(number) for number in OUR_SIGNALS}
    quiet = {"log_to_driver": False, "configure_logging": True, "logging_level": logging.ERROR}
    where = address or os.environ.get("RAY_ADDRESS")
    try:
        if where and where != "local":
            _knock(where)
            ray.init(address=where, **quiet)
        else:
            ray.init(address="local", include_dashboard=False, **quiet)
    except Exception as error:  # of many kinds, most of them RuntimeError or ConnectionError
        what = f"--ray-address {where}: no Ray cluster answers there" if where else "--engine ray: Ray does not start here"
        raise UsageError(f"{what}: {first_line(error)}") from None
    finally:
        for number, handler in handlers.items():  # Ray takes SIGTERM for itself
            signal.signal(number, handler)


def _knock(address: str) -> None:
    """Whether anybody listens at host:port, which Ray itself would try for minutes.

    Raises:
        OSError.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), KNOCK_SEC).close()


@dataclass
class _Actor:
    """A worker as the leader sees it."""

    handle: Any
    waiting: dict[Any, crew.Task | None] = field(default_factory=dict)  # reference → what it answers; None: that it is ready
    asked: Any = None  # reference of the question how far it is


class Actors:
    """See crew.Crew."""

    def __init__(self, job: Job) -> None:
        self._ray = ray = load_package()
        packed = crew.pack(job)
        buffers = [np.frombuffer(buffer, np.uint8) for buffer in packed.buffers]
        self._luggage = ray.put((_preface(job), packed.pickled, buffers))
        self._numbers = itertools.count(1)
        self._workers: dict[int, _Actor] = {}
        self._resources = _resources(job)
        self._remote = ray.remote(_RayWorker)
        log.info("workers take %s each; the cluster has %s", _told(self._resources), _told(ray.cluster_resources()))

    def hire(self) -> int:
        number = next(self._numbers)
        handle = self._remote.options(
            **self._resources, max_restarts=0, max_task_retries=0, max_concurrency=crew.IN_HAND + 1
        ).remote(self._luggage, number)
        self._workers[number] = _Actor(handle, {handle.ready.remote(): None})
        return number

    def give(self, worker: int, task: crew.Task) -> None:
        actor = self._workers[worker]
        actor.waiting[actor.handle.do.remote(task)] = task

    def dismiss(self, worker: int) -> None:
        actor = self._workers.pop(worker)
        actor.handle.end.remote()

    def events(self) -> list[crew.Event]:
        references = {reference: number for number, actor in self._workers.items() for reference in actor.waiting}
        if not references:
            return []
        ready, _ = self._ray.wait(list(references), num_returns=1, timeout=1.0)
        if ready:  # and whatever else is there by now
            ready, _ = self._ray.wait(list(references), num_returns=len(references), timeout=0)
        found: list[crew.Event] = []
        for reference in ready:
            if references[reference] in self._workers:
                found += self._heard(references[reference], reference)
        return found + self._how_far()

    def _heard(self, number: int, reference: Any) -> list[crew.Event]:
        actor = self._workers[number]
        task = actor.waiting.pop(reference)
        try:
            said, answer = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:  # nothing of ours raises, so it did not come so far
            return [crew.Failure(PrefillScoreError(f"a worker cannot do anything: {first_line(error)}"))]
        except self._ray.exceptions.RayError as error:
            self._ray.kill(actor.handle)  # which may be cut off only
            del self._workers[number]
            return [crew.Death(number, f"by its process or node: {first_line(error)}")]
        if isinstance(answer, Exception):
            return [*said, crew.Failure(answer)]
        return [*said, crew.Ready(number) if task is None else crew.Answer(number, task.shard, answer)]

    def _how_far(self) -> list[crew.Event]:
        """Batches since the last question, of the workers that have answered it."""
        found: list[crew.Event] = []
        for actor in self._workers.values():
            if None in actor.waiting.values():  # it is not ready
                continue
            if actor.asked is None:
                actor.asked = actor.handle.batches.remote()
            elif self._ray.wait([actor.asked], timeout=0)[0]:
                with contextlib.suppress(self._ray.exceptions.RayError):  # a death is told by its tasks
                    found += self._ray.get(actor.asked)
                actor.asked = None
        return found

    def close(self) -> None:
        for actor in self._workers.values():
            if actor.waiting:
                self._ray.kill(actor.handle)
        last = [actor.handle.end.remote() for actor in self._workers.values() if not actor.waiting]
        self._ray.wait(last, num_returns=len(last), timeout=5.0) if last else None
        self._workers.clear()


def _resources(job: Job) -> dict[str, Any]:
    """What an actor takes: cores and a GPU. A whole node's share, unless --cpus-per-worker says less.

    Raises:
        UsageError: no node has that.
    """
    ray = load_package()
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = 1 if job.device.startswith("cuda") else 0
    able = [node for node in nodes if node.get("GPU", 0) >= gpus]
    if not able:
        raise UsageError("--device cuda: no node of the Ray cluster has a GPU")
    shares = [int(node.get("CPU", 0) // (node["GPU"] if gpus else 1)) for node in able]
    cpus = job.config.cpus_per_worker or max(1, min(share for share in shares if share) if any(shares) else 1)
    if all(node.get("CPU", 0) < cpus for node in able):
        raise UsageError(f"--cpus-per-worker {cpus}: no node of the Ray cluster has so many")
    return {"num_cpus": cpus, "num_gpus": gpus}


def _told(resources: dict[str, Any]) -> str:
    named = {"CPU": "num_cpus", "GPU": "num_gpus"}
    found = {name: resources.get(name) or resources.get(option) for name, option in named.items()}
    return " and ".join(f"{value:g} {name}" for name, value in found.items() if value) or "nothing"


@dataclass(frozen=True)
class _Preface:
    """What a worker looks at before it opens its luggage."""

    versions: dict[str, str]
    model: str | None  # folder whose own code is to be imported before a job can be unpacked (--trust-remote-code)


def _preface(job: Job) -> _Preface:
    own_code = job.folder is not None and job.config.trust_remote_code
    return _Preface(_versions(), str(job.folder.path) if job.folder and own_code else None)


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in SAME_EVERYWHERE}


class _RayWorker:
    """An actor. Each method answers with messages and a result, which is an error where there was one."""

    def __init__(self, luggage: tuple[_Preface, bytes, list[Any]], number: int) -> None:
        self._number, self._said = number, list[crew.Event]()
        self._batches: list[crew.Event] = []
        self._speaking = threading.Lock()
        self._error: Exception | None = None
        self._worker: Worker | None = None
        logging.getLogger("prefill_cli").addHandler(_Listener(self._said))
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # it is the node's, and only read
        try:
            self._worker = _begin(*luggage, number)
        except Exception as error:
            self._error = crew.portable(error)

    def ready(self) -> tuple[list[crew.Event], Any]:
        return self._answer(self._error)

    def do(self, task: crew.Task) -> tuple[list[crew.Event], Any]:
        def on_batch(rows: int, tokens: int) -> None:
            with self._speaking:
                self._batches.append(crew.Batch(self._number, task.shard, rows, tokens))

        assert self._worker
        try:
            return self._answer(task.do(self._worker, on_batch))
        except Exception as error:
            return self._answer(crew.portable(error))

    def batches(self) -> list[crew.Event]:
        """Those since the last question."""
        with self._speaking:
            found, self._batches = self._batches, []
        return found

    def end(self) -> None:
        assert self._worker
        self._worker.close()

    def _answer(self, result: Any) -> tuple[list[crew.Event], Any]:
        with self._speaking:
            said, self._said[:] = list(self._said), []
        return said, result


class _Listener(logging.Handler):
    """Keeps messages for whoever leads."""

    def __init__(self, said: list[crew.Event]) -> None:
        super().__init__(logging.WARNING)
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(crew.Said(record.levelno, record.getMessage()))


def _begin(preface: _Preface, pickled: bytes, buffers: list[Any], number: int) -> Worker:
    """Raises UsageError: another set of packages than where the run is led; OutputError: the output is not seen here."""
    here, there = _versions(), preface.versions
    if differing := [f"{name} {here[name]}, not {there[name]}" for name in there if here[name] != there[name]]:
        raise UsageError(f"{socket.gethostname()} has other packages than the command's machine: {', '.join(differing)}")
    if preface.model:
        from transformers import AutoConfig

        AutoConfig.from_pretrained(preface.model, local_files_only=True, trust_remote_code=True)
    import torch

    cpus = int(load_package().get_runtime_context().get_assigned_resources().get("CPU", 1))
    torch.set_num_threads(max(1, cpus))
    machine.threads()  # before any pool says otherwise
    job = crew.unpack(crew.Luggage(pickled, buffers))
    drafts = job.staging.drafts
    if hasattr(drafts, "folder") and not drafts.folder.is_dir():
        raise OutputError(
            f"{drafts.folder.parent}: {socket.gethostname()} does not see this folder; --output must be where every node of "
            "the cluster sees it, or on an object store"
        )
    return Worker(job, f"{socket.gethostname()}:{number}")
