"""Runs of the command line that die where a test says, each in a fork of one process that has the libraries loaded.

Reads a JSON object a line on stdin: {"argv": [...], "step": name or null, "call": n, "when": "before" | "after"}, and
answers {"status": wait status, "calls": {step: how often}} on stdout. The fork kills itself with SIGKILL at the n-th call
of the step. With "kill_after": seconds, the server kills it then, wherever it is. Nothing in the product knows of this.
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
from pathlib import Path

import pyarrow.parquet as pq
import torch  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401
from transformers import AutoModel, AutoTokenizer  # noqa: F401

from prefill_cli import cli, pipeline, summary  # noqa: F401
from prefill_cli.data import cache, disk, prompts, staging, tokenization
from prefill_cli.encoding import choice, prefill  # noqa: F401
from prefill_cli.engines import local  # noqa: F401

STEPS = {
    "lock": (staging, "_acquire"),
    "begin": (staging.Staging, "begin"),
    "read": (prompts.ShardReader, "_piece"),
    "tokenise": (tokenization.PromptTokenizer, "__call__"),
    "look-up": (cache.VectorCache, "look_up"),
    "encode": (prefill.PrefillEncoder, "_vectors"),
    "search": (pipeline, "search"),
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


def child(order: dict, report: str) -> None:
    calls: collections.Counter = collections.Counter()
    die(order.get("step"), order.get("call", 0), order.get("when", ""), calls)
    if order.get("without_exchange"):
        staging.exchange = lambda *_: False
    null = os.open(os.devnull, os.O_RDWR)
    errors = os.open(order.get("stderr", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for target, number in ((null, 0), (null, 1), (errors, 2)):
        os.dup2(target, number)
    sys.argv = ["prefill-score", *order["argv"]]
    code = 0
    try:
        cli.main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    Path(report).write_text(json.dumps(calls))
    os._exit(code)


def main() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        with tempfile.TemporaryDirectory() as scratch:
            report = os.path.join(scratch, "calls")
            if not (pid := os.fork()):
                child(order, report)
            if "kill_after" in order:
                time.sleep(order["kill_after"])
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            calls = json.loads(Path(report).read_text()) if os.path.exists(report) else {}
        print(json.dumps({"status": os.waitstatus_to_exitcode(status), "calls": calls}), flush=True)


if __name__ == "__main__":
    main()
