"""Runs of the command line that die where a test says, each in a fork of one process that has the libraries loaded.

Reads a JSON object a line on stdin: {"argv": [...], "step": name or null, "call": n, "when": "before" | "after"}, and
answers {"status": wait status, "calls": {step: how often}, "stderr": text, "seconds": from the last signal to the end,
"left": [processes that outlive it]} on stdout. The fork kills itself with SIGKILL at the n-th call of the step. With
"kill_after": seconds, the server kills it then, wherever it is. "signals": [[file, seconds, number], ...] sends a signal so
long after the file is there, or after the one before. "deeds": [[name, argument, ...], ...] of night_deeds.py come first.
{"together": [order, ...]} does some at once and answers with a list. Nothing in the product knows of this.
"""

import collections
import contextlib
import functools
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import night_deeds
import pyarrow.parquet as pq
import torch
import transformers.models.llama.modeling_llama  # noqa: F401
from transformers import AutoModel, AutoTokenizer  # noqa: F401

from prefill_cli import cli, outcome, pipeline, signals, summary  # noqa: F401
from prefill_cli.data import cache, disk, locks, prompts, staging, tokenization
from prefill_cli.encoding import choice, prefill  # noqa: F401
from prefill_cli.engines import local  # noqa: F401

STEPS = {
    "lock": (locks, "_acquire"),
    "begin": (staging.Staging, "begin"),
    "read": (prompts.ShardReader, "_piece"),
    "tokenise": (tokenization.PromptTokenizer, "__call__"),
    "look-up": (cache.VectorCache, "look_up"),
    "encode": (prefill.PrefillEncoder, "_vectors"),
    "search": (outcome, "search"),
    "write": (pq.ParquetWriter, "write_table"),
    "fsync": (os, "fsync"),
    "rename": (Path, "replace"),
    "receipt": (staging.Staging, "commit"),
    "cache append": (cache, "write_segment"),
    "cache uses": (cache.VectorCache, "close"),
    "manifest": (staging, "write_json"),
    "success marker": (Path, "touch"),
    "swap": (staging, "exchange"),
    "publish": (staging.Staging, "publish"),
    "two renames": (Path, "rename"),
    "discard": (staging.Staging, "discard"),
    "remove": (Path, "unlink"),
    "sync folder": (disk, "sync_folder"),
}


def die(step: str | None, call: int, when: str, calls: collections.Counter) -> None:
    """Wrap every step so that it counts, and so that the wanted one kills this process."""

    def wrapped(name, real):
        @functools.wraps(real)
        def counted(*args, **kwargs):
            calls[name] += 1
            this = calls[name]
            if name == step and this == call and when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*args, **kwargs)
            if name == step and this == call and when == "after":
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return counted

    for name, (owner, attribute) in STEPS.items():
        setattr(owner, attribute, wrapped(name, getattr(owner, attribute)))
    staging.sync_folder = cache.sync_folder = disk.sync_folder  # names that were imported before


def child(order: dict, folder: Path) -> None:
    os.setsid()  # by which its own children are found
    null = os.open(os.devnull, os.O_RDWR)
    errors = os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for target, number in ((null, 0), (null, 1), (errors, 2)):
        os.dup2(target, number)
    calls: collections.Counter = collections.Counter()
    if "deeds" in order:
        torch.set_num_threads(1)  # several of these run at once
        for name, *arguments in order["deeds"]:
            getattr(night_deeds, name)(*arguments)
    else:
        die(order.get("step"), order.get("call", 0), order.get("when", ""), calls)
    if order.get("without_exchange"):
        staging.exchange = lambda *_: False
    sys.argv = ["prefill-score", *order["argv"]]
    signals.leave = sys.exit  # what the server registered for its own end is not this process's to do
    code = 0
    try:
        cli.main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    (folder / "calls").write_text(json.dumps(calls))
    os._exit(code)


class Run:
    """A fork that does an order."""

    def __init__(self, order: dict, folder: Path) -> None:
        self._folder, self._since = folder, time.monotonic()
        self._signals = [tuple(signal) for signal in order.get("signals", [])]
        if "kill_after" in order:
            self._signals = [(None, order["kill_after"], signal.SIGKILL)]
        self._signal_pending = False
        folder.mkdir()
        self._pid = os.fork()
        if not self._pid:
            try:
                child(order, folder)
            finally:  # whatever happens, it is not a second server
                traceback.print_exc()
                os._exit(99)

    def answer(self) -> dict | None:
        """None while it runs."""
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if not pid:
            self._send()
            return None
        calls, stderr = self._folder / "calls", self._folder / "stderr"
        return {
            "status": os.waitstatus_to_exitcode(status),
            "calls": json.loads(calls.read_text()) if calls.exists() else {},
            "stderr": stderr.read_text() if stderr.exists() else "",  # killed before it had any
            "seconds": time.monotonic() - self._since,
            "left": self._left(),
        }

    def _send(self) -> None:
        if not self._signals:
            return
        file, seconds, number = self._signals[0]
        if not self._signal_pending:
            if file and not os.path.exists(file):
                return
            self._signal_pending, self._since = True, time.monotonic()
        if time.monotonic() - self._since >= seconds:
            self._signals.pop(0)
            self._signal_pending, self._since = False, time.monotonic()
            os.kill(self._pid, number)

    def _left(self) -> list[int]:
        """Living processes of its session, which are ended now."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
                if int(session) == self._pid and state not in "ZX":
                    found.append(int(stat.parent.name))
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return found


def main() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        with tempfile.TemporaryDirectory() as scratch:
            orders = order.get("together", [order])
            runs = [Run(one, Path(scratch) / str(i)) for i, one in enumerate(orders)]
            answers: list[dict | None] = [None] * len(runs)
            while None in answers:
                answers = [answer or run.answer() for answer, run in zip(answers, runs, strict=True)]
                time.sleep(0.002)
        print(json.dumps(answers if "together" in order else answers[0]), flush=True)


if __name__ == "__main__":
    main()
