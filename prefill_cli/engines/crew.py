"""Several workers over the shards of a run, and what happens when one dies.

A crew is workers of one kind: processes of this machine (processes.py), or actors of a Ray cluster (ray.py). Whoever leads
hands out shards, hears what workers say, and replaces those that die. Nobody but the leader commits.
"""

import contextlib
import logging
import os
import pickle
import time
import traceback
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from prefill_cli.data.inputs import Shard
from prefill_cli.data.staging import Receipt
from prefill_cli.errors import InputError, PrefillScoreError
from prefill_cli.job import Job
from prefill_cli.pipeline import Progress
from prefill_cli.worker import Worker

log = logging.getLogger(__name__)
IN_HAND = 3  # shards of a worker at most: one is read, one is in the model, one is searched and written
DEATHS = 3  # of workers with the same shard in hand, after which it is given up
IDLE_DEATHS = 5  # one after another, of workers with nothing in hand
WAIT_SEC = 600.0  # for the first worker, or for another when none lives


@dataclass(frozen=True)
class Task:
    """A shard to be done, or to be given up for a reason."""

    shard: Shard
    give_up: str = ""

    def do(self, worker: Worker, on_batch: Any) -> Receipt:
        return worker.give_up(self.shard, self.give_up) if self.give_up else worker.do(self.shard, on_batch)


@dataclass(frozen=True)
class Ready:
    """A worker can take shards."""

    worker: int


@dataclass(frozen=True)
class Batch:
    """Part of a shard went through the model."""

    worker: int
    shard: Shard
    rows: int
    tokens: int


@dataclass(frozen=True)
class Said:
    """A message for whoever watches the run."""

    level: int
    text: str


@dataclass(frozen=True)
class Answer:
    """A shard is done, and its files are delivered."""

    worker: int
    shard: Shard
    receipt: Receipt


@dataclass(frozen=True)
class Failure:
    """An error that ends the run."""

    error: Exception


@dataclass(frozen=True)
class Death:
    """A worker is no more. why: in words, after "ended"."""

    worker: int
    why: str


Event = Ready | Batch | Said | Answer | Failure | Death


class Crew(Protocol):
    """Workers of one kind."""

    def hire(self) -> int:
        """Start another worker; returns its number. It says Ready, or dies."""
        ...

    def give(self, worker: int, task: Task) -> None: ...

    def dismiss(self, worker: int) -> None:
        """End a worker that has nothing in hand. Nothing more is heard of it."""
        ...

    def events(self) -> list[Event]:
        """What happened, as soon as something does; nothing after a second."""
        ...

    def close(self) -> None:
        """End all workers, whatever they do."""
        ...


@dataclass
class _Watched:
    """How far shards are, for a progress bar that does not go back when one is done again."""

    progress: Progress
    told: Counter[Shard] = field(default_factory=Counter)  # rows
    now: Counter[Shard] = field(default_factory=Counter)
    ended: set[Shard] = field(default_factory=set)

    def batch(self, event: Batch) -> None:
        if event.shard in self.ended:  # an actor's batches may be heard of after its answer, which told the rows
            self.progress.advance(0, event.tokens)
            return
        self.now[event.shard] += event.rows
        more = max(0, self.now[event.shard] - self.told[event.shard])
        self.told[event.shard] += more
        self.progress.advance(more, event.tokens if more else 0)

    def again(self, shard: Shard) -> None:
        del self.now[shard]

    def done(self, shard: Shard) -> None:
        self.ended.add(shard)
        self.progress.advance(shard.rows - self.told.pop(shard, 0), 0)


class _Leader:
    """Who has which shard in hand."""

    def __init__(self, crew: Crew, shards: Sequence[Shard], fewest: int, most: int, progress: Progress) -> None:
        self._crew, self._fewest, self._most = crew, fewest, most
        self._open = deque(Task(shard) for shard in shards)
        self._left = len(shards)  # that have no answer
        self._hired: set[int] = set()  # and not ready
        self._in_hand: dict[int, list[Task]] = {}  # of those that are ready
        self._deaths: Counter[Shard] = Counter()
        self._idle_deaths = 0
        self._heard = time.monotonic()  # of a worker that lives
        self._watched = _Watched(progress)
        self._said: set[str] = set()

    def answers(self) -> Iterator[tuple[Shard, Receipt]]:
        """Every shard with its receipt, as they come.

        Raises:
            PrefillScoreError: a worker met it; or workers end for no shard's fault, or do not come.
        """
        while self._left:
            self._hire()
            self._hand_out()
            failure = None
            for event in self._crew.events():
                if isinstance(event, Answer):
                    yield from self._answered(event)
                elif isinstance(event, Failure):
                    failure = failure or event.error
                else:
                    self._hear(event)
            if failure:
                raise failure
            self._check_alive()

    def _hire(self) -> None:
        """As many as there are shards to do, up to the most that are wanted."""
        while len(self._hired) + len(self._in_hand) < min(self._most, self._left):
            self._hired.add(self._crew.hire())

    def _hand_out(self) -> None:
        """Shards to those with the fewest in hand; more than one only while there are plenty for all."""
        for room in range(IN_HAND):
            for worker, tasks in list(self._in_hand.items()):
                if not self._open or len(self._open) < room * self._most:
                    break
                suspects = [self._deaths[task.shard] > 0 for task in (*tasks, self._open[0])]
                if len(tasks) <= room and not (tasks and any(suspects)):  # one that may have killed a worker is done alone
                    task = self._open.popleft()
                    tasks.append(task)
                    self._crew.give(worker, task)
        if not self._open:
            idle = [worker for worker, tasks in self._in_hand.items() if not tasks]
            spare = len(self._in_hand) - self._fewest  # the others stay, so that a shard of one that dies finds a model
            for worker in idle[: max(0, spare)]:
                del self._in_hand[worker]
                self._crew.dismiss(worker)

    def _answered(self, event: Answer) -> Iterator[tuple[Shard, Receipt]]:
        tasks = self._in_hand.get(event.worker, [])
        if not any(task.shard == event.shard for task in tasks):
            return  # of one that was taken for dead
        self._in_hand[event.worker] = [task for task in tasks if task.shard != event.shard]
        self._left -= 1
        self._idle_deaths, self._heard = 0, time.monotonic()
        self._watched.done(event.shard)
        yield event.shard, event.receipt

    def _hear(self, event: Ready | Batch | Said | Death) -> None:
        if isinstance(event, Said):
            if event.text not in self._said:  # every worker says what is so for all
                self._said.add(event.text)
                log.log(event.level, "%s", event.text)
        elif isinstance(event, Death):
            self._bury(event)
        else:
            self._heard = time.monotonic()
            if isinstance(event, Ready):
                self._hired.discard(event.worker)
                self._in_hand.setdefault(event.worker, [])
            else:
                self._watched.batch(event)

    def _bury(self, event: Death) -> None:
        self._hired.discard(event.worker)
        tasks = self._in_hand.pop(event.worker, [])
        self._idle_deaths += not tasks
        what = f"with shard {', '.join(str(task.shard.index) for task in tasks)} in hand" if tasks else "with nothing to do"
        log.warning("worker %d ended %s, %s; it is replaced", event.worker, event.why, what)
        for task in reversed(tasks):
            self._watched.again(task.shard)
            self._deaths[task.shard] += 1
            self._open.appendleft(self._next_try(task.shard, event.why))
        if self._idle_deaths >= IDLE_DEATHS:
            raise PrefillScoreError(f"{self._idle_deaths} workers one after another did nothing and ended {event.why}")

    def _next_try(self, shard: Shard, why: str) -> Task:
        deaths = self._deaths[shard]
        if deaths < DEATHS:
            return Task(shard)
        if deaths > DEATHS + 1:
            raise InputError(f"shard {shard.index} (rows from {shard.start} on) ends every worker that reads it ({why})")
        log.warning("shard %d ended %d workers and is given up: its rows are rejected", shard.index, deaths)
        return Task(shard, f"{deaths} workers ended with this row's shard in hand, the last {why}")

    def _check_alive(self) -> None:
        if self._in_hand:
            self._heard = time.monotonic()
        elif time.monotonic() - self._heard > WAIT_SEC:
            raise PrefillScoreError(
                f"no worker has come within {WAIT_SEC:.0f} s; what is done is kept, and the same command goes on with it"
            )


def portable(error: Exception) -> Exception:
    """An error as it can go to another process. Of one that nobody foresaw only the kind and the place: its words might
    quote a prompt.
    """
    if isinstance(error, PrefillScoreError | MemoryError):
        return type(error)(*error.args)
    if os.environ.get("PREFILL_SCORE_DEBUG") == "1":
        traceback.print_exception(error)
    where = traceback.extract_tb(error.__traceback__)[-1]
    return PrefillScoreError(
        f"a bug in prefill-score: {type(error).__name__} in {Path(where.filename).name}:{where.lineno} of a worker; "
        "PREFILL_SCORE_DEBUG=1 shows the traceback"
    )


def lead(crew: Crew, job: Job, shards: Sequence[Shard], progress: Progress) -> Generator[tuple[Shard, Receipt]]:
    """See pipeline.Engine."""
    fewest, most = job.config.worker_range
    with contextlib.closing(crew):
        yield from _Leader(crew, shards, fewest, most, progress).answers()


@dataclass(frozen=True)
class Luggage:
    """A job on its way to workers: a pickle, and the arrays that it holds, which are not copied where they can be shared."""

    pickled: bytes
    buffers: list[Any]


def pack(job: Job) -> Luggage:
    """Large arrays stay where they are until the luggage is written or sent."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(job, protocol=5, buffer_callback=buffers.append)
    return Luggage(pickled, [buffer.raw() for buffer in buffers])


def unpack(luggage: Luggage) -> Job:
    found: Job = pickle.loads(luggage.pickled, buffers=luggage.buffers)
    return found
