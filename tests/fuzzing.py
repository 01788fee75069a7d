"""Damaged files of every kind that the program reads, and what it makes of them. `python fuzzing.py MODEL LOG FIRST STOP`.

A process of its own does the cases FIRST to STOP - 1, so that one that dies does not take the tests with it. LOG tells
what it is at: a line `case N …` before each, and `fault N …` behind one that breaks the contract: a refusal is a
PrefillScoreError of the right kind in one line that names the file, and a success gives the rows of the whole file
wherever checksums can tell.
"""

import faulthandler
import itertools
import json
import logging
import math
import os
import random
import re
import shutil
import signal
import struct
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from conftest import HIDDEN, WORDS, Watcher, random_prompts, write_items, write_prompts
from safetensors.torch import save_file

from prefill_cli import pipeline
from prefill_cli.config import RunConfig, resolve
from prefill_cli.data.disk import read_json, write_json
from prefill_cli.data.staging import Staging
from prefill_cli.encoding.loading import quiet_transformers
from prefill_cli.engines.local import run_shards
from prefill_cli.errors import PrefillScoreError
from prefill_cli.tools.inspect import inspect_path
from prefill_cli.tools.show import UserQuery, read_lists

ROWS, ITEMS, VARIANTS = 12, 40, 16
SLOWEST_SEC = 30
COUNTS = ("rows", "rows_out", "rejects", "reasons", "tokens", "part_rows", "empty_lists", "unknown_ids", "truncated_rows")


@dataclass(frozen=True)
class Target:
    """A file to damage and what reads it."""

    file: Path
    use: Callable[[], Any]
    codes: tuple[int, ...]  # of refusals
    exact: bool = True  # a success has to give what the whole file gives
    odd: bool = False  # strange as it is, and mostly left so


class HungError(BaseException):
    """No Exception, which a reader might take for its own."""


class Kinds:
    """One method a kind: a variant's number → the Target, fresh in `self.folder`."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = model
        self.out = folder / "out"

    # --- what is read ------------------------------------------------------------------------------------------------

    def prompts(self, variant: int) -> Target:
        r = random.Random(variant)
        texts = random_prompts(ROWS, variant, longest=8)
        what = ("prompts", "messages", "token_ids")[variant % 3]
        columns = {
            "user_id": [f"u{i}" for i in range(ROWS)] if variant % 2 else range(ROWS),
            "prompt": texts,
            "seen": [[f"i{j}" for j in range(i % 4)] for i in range(ROWS)],
            "only": [[f"i{j}" for j in range(20)] if i % 2 else None for i in range(ROWS)],
            "country": [("BR", "UK")[i % 2] for i in range(ROWS)],
            "tags": [[{"a": i, "b": "x"}] for i in range(ROWS)],
        }
        options: dict[str, Any] = {}
        if what == "messages":
            columns["messages"] = [[{"role": "user", "content": text}] for text in texts]
            options["messages_column"] = "messages"
        elif what == "token_ids":
            columns["ids"] = [[5 + i, 6, 7] for i in range(ROWS)]
            options["token_ids_column"] = "ids"
        file = self.folder / "in.parquet"
        checked = write_variant(file, pa.table({k: pa.array(v) for k, v in columns.items()}), r)
        options |= {"exclude_column": "seen", "candidates_column": "only", "keep_columns": ("country", "tags")}
        config = self.config(inputs=(str(file),), shard_rows=r.choice([5, 100]), **options)
        return Target(file, lambda: self.rows(config, "run"), (3, 7), checked)

    def vectors(self, variant: int) -> Target:
        r = random.Random(variant)
        kind = r.choice([pa.list_(pa.float32()), pa.list_(pa.float32(), HIDDEN), pa.list_(pa.float16())])
        table = pa.table({"user_id": pa.array(range(ROWS)), "embedding": pa.array(list(numbers(ROWS, variant))).cast(kind)})
        file = self.folder / "in.parquet"
        checked = write_variant(file, table, r)
        return Target(file, lambda: self.rows(self.config(inputs=(str(file),)), "search"), (3, 7), checked)

    def vector_matrix(self, variant: int) -> Target:
        file = self.folder / ("in.npy", "in.safetensors")[variant % 2]
        write_matrix(file, numbers(ROWS, variant))
        ids = self.folder / "ids.parquet"
        checked = write_variant(ids, pa.table({"user_id": [f"u{i}" for i in range(ROWS)]}), random.Random(variant))
        config = self.config(inputs=(str(file),), vector_column="embedding", user_ids=ids if variant % 3 else None)
        damaged = ids if variant % 3 == 1 else file
        return Target(damaged, lambda: self.rows(config, "search"), (3, 7), checked and damaged == ids)

    def items(self, variant: int) -> Target:
        r = random.Random(variant)
        table = pa.table({
            "item_id": [f"i{i}" for i in range(ITEMS)] if variant % 2 else range(ITEMS),
            "title": [f"title {i}" for i in range(ITEMS)],
            "embedding": pa.array(list(numbers(ITEMS, variant))).cast(pa.list_(r.choice([pa.float32(), pa.float16()]))),
            "bias": pa.array(range(ITEMS), pa.float32()),
        }).replace_schema_metadata({"prefill-score": '{"normalized": false}'})  # fmt: skip
        file = self.folder / "catalogue.parquet"
        checked = write_variant(file, table, r)
        config = self.config(items=file, item_bias_column="bias" if variant % 3 else None)
        return Target(file, lambda: self.rows(config, "search"), (4,) if checked else (4, 7), checked)

    def item_matrix(self, variant: int) -> Target:
        file = self.folder / ("catalogue.npy", "catalogue.safetensors")[variant % 2]
        write_matrix(file, numbers(ITEMS, variant))
        ids = self.folder / "ids.parquet"
        checked = write_variant(ids, pa.table({"item_id": [f"i{i}" for i in range(ITEMS)]}), random.Random(variant))
        config = self.config(items=file, item_ids=ids if variant % 3 else None)
        damaged = ids if variant % 3 == 1 else file
        return Target(damaged, lambda: self.rows(config, "search"), (4, 7), checked and damaged == ids)

    def head(self, variant: int) -> Target:
        kind = ("mlp", "user_tower")[variant % 2]
        sizes = (2 * HIDDEN, 8, 1) if kind == "mlp" else (HIDDEN, 8, HIDDEN)
        generator = torch.Generator().manual_seed(variant)
        tensors = {}
        for i, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
            tensors[f"layers.{i}.weight"] = torch.randn(outputs, inputs, generator=generator)
            tensors[f"layers.{i}.bias"] = torch.randn(outputs, generator=generator)
        file = self.folder / "head.safetensors"
        save_file(tensors, file, {"head": kind, "activation": "relu"})
        config = self.config(head=file, score="mlp" if kind == "mlp" else "dot")
        return Target(file, lambda: self.rows(config, "search"), (4, 7), exact=False)

    def lists(self, variant: int) -> Target:
        ids = [f"i{i}" for i in range(0, 30, 2)]
        file, checked = self.folder / "list", False
        if variant % 2:
            checked = write_variant(file, pa.table({"item_id": ids}), random.Random(variant))
        else:
            file.write_text("\n".join(ids), "utf-8-sig" if variant % 4 else "utf-8")
        config = self.config(**{("allow", "deny")[variant // 2 % 2]: file})
        return Target(file, lambda: self.rows(config, "search"), (4,), checked)

    def toml(self, variant: int) -> Target:
        file = self.folder / ("prefill-score.toml", "pyproject.toml")[variant % 2]
        lines = ['model = "m"', 'items = "i.parquet"', 'keep-columns = ["a", "b"]', "top-k = 50", "normalize = true",
                 'score = "cosine"', 'max-rejects = "1%"', 'dtype = "auto"']  # fmt: skip
        file.write_text("\n".join((["[tool.prefill-score]"] if variant % 2 else []) + lines))
        return Target(file, lambda: resolve({"inputs": ["x"]}, file, {}), (2,), exact=False)

    def model_folder(self, variant: int) -> Target:
        folder = self.folder / "model"
        shutil.copytree(self.model, folder)
        names = (
            "config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "model.safetensors",
            "model.safetensors.index.json",
        )
        weights = dict.fromkeys(tensor_names(folder / "model.safetensors"), "model.safetensors")
        (folder / names[4]).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weights}))
        config = self.config(model=str(folder), inputs=(str(self.prompt_file),))
        return Target(folder / names[variant % 5], lambda: self.all_counted(config, "run"), (2, 4, 5, 7), exact=False)

    def leftovers(self, variant: int) -> Target:
        config = self.config(shard_rows=5)
        copy_of(self.interrupted, self.out.parent / ".out.staging")
        names = ("run.json", "receipts/00000.json", "receipts/00001.json")
        file = Staging(self.out).folder / names[variant % 3]
        return Target(file, lambda: self.rows(config, "search"), (6,))

    def result(self, variant: int) -> Target:
        """Damage to what was published: the manifest, a part, the rejects."""
        copy_of(self.published, self.out)
        use = (lambda: self.rows(self.config(), "search"), self.shown, self.inspected)[variant % 3]
        names = ["_manifest.json"] if variant % 3 == 0 else ["_manifest.json", "part-00000.parquet"]
        return Target(self.out / names[variant // 3 % len(names)], use, (6, 3), exact=variant % 3 != 2)

    def shown_items(self, variant: int) -> Target:
        """Damage to the titles and histories that `show` looks up."""
        copy_of(self.published, self.out)
        r = random.Random(variant)
        items, inputs = self.folder / "titles.parquet", self.folder / "users.parquet"
        file = inputs if variant % 2 else items
        checked = write_variant(items, pa.table({"item_id": [f"i{i}" for i in range(ITEMS)], "title": ["t"] * ITEMS}), r)
        seen = pa.table({"user_id": range(ROWS), "seen": [[f"i{i}"] for i in range(ROWS)]})
        checked = write_variant(inputs, seen, r) if variant % 2 else checked
        made = self.out / "_manifest.json"
        stored = read_json(made) or {}
        stored["options"]["exclude_column"] = "seen"
        stored["inputs"]["files"] = [{"path": str(inputs)}]
        write_json(made, stored)
        query = UserQuery(self.out, (), 20, 5, items, "title", "seen")  # by name, or a footer may lose them unnoticed
        return Target(file, lambda: read_lists(query), (3, 4), checked)

    def odd_columns(self, variant: int) -> Target:
        """Columns of any type, whole: what is right for a column by chance is used, all else is refused or rejected."""
        r = random.Random(variant)
        role = r.choice(["prompts", "vectors", "items", "item_ids", "user_ids", "allow"])
        rows = ITEMS if role in ("items", "item_ids") else ROWS
        file = self.folder / "odd.parquet"
        columns = {
            "user_id": range(rows), "item_id": range(rows), "prompt": random_prompts(rows, longest=8),
            "embedding": list(numbers(rows, 1)), "extra": range(rows), "seen": [["i1"]] * rows,
        }  # fmt: skip
        odd = r.sample(sorted(columns), r.choice([1, 1, 2, 6]))
        table = pa.table({k: odd_array(r, rows) if k in odd else pa.array(v) for k, v in columns.items()})
        write_variant(file, table.select(["user_id"]) if role == "user_ids" else table, r)
        if role in ("item_ids", "user_ids"):
            write_matrix(self.folder / "m.npy", numbers(rows, 1))
        prompts = {"keep_columns": ("extra",), "exclude_column": "seen", "max_rejects": "100%"}
        kind, mode = r.choice(("messages_column", "token_ids_column", "prompt_column")), r.choice(("fail", "drop"))
        options, plan, codes = {
            "prompts": (prompts | {kind: "prompt"}, "run", (2, 3)),
            "vectors": (prompts, "search", (2, 3, 4)),  # 4: odd vectors that are all of one other width
            "items": ({"bad_items": mode, "item_bias_column": r.choice([None, "extra"])}, "search", (4,)),
            "item_ids": ({"items": self.folder / "m.npy", "item_ids": file}, "search", (4,)),
            "user_ids": ({"inputs": (str(self.folder / "m.npy"),), "user_ids": file}, "search", (2, 3)),
            "allow": ({"allow": file}, "search", (4,)),
        }[role]  # fmt: skip
        named = {"prompts": "inputs", "vectors": "inputs", "items": "items"}.get(role)
        options |= {named: (str(file),) if named == "inputs" else file} if named else {}
        if role == "user_ids":
            options |= {"vector_column": "embedding"}
        return Target(file, lambda: self.all_counted(self.config(**options), plan), (*codes, 7), exact=False, odd=True)

    def odd_matrix(self, variant: int) -> Target:
        r = random.Random(variant)
        shape = r.choice(
            [(ITEMS, HIDDEN), (ITEMS, HIDDEN), (ITEMS, HIDDEN), (), (3,), (0, HIDDEN), (3, 0), (2, 3, 4), (1, 1)]
        )
        kinds = ["<f4", ">f4", "<f2", ">f8", "g", "c8", "i8", "u2", "?", "O", "S3", "U2", "V4", "M8[s]", "f4,i4"]
        values = np.zeros(shape, r.choice(kinds), r.choice("CF"))
        if values.dtype.kind == "f" and values.size:
            values[...] = np.resize(numbers(ITEMS, variant), shape)
            values.flat[0] = r.choice([0, 1, np.nan, np.inf, 65504])
        file = self.folder / "odd.npy"
        if variant % 3 == 0:
            file = file.with_suffix(".safetensors")
            kind = r.choice([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
            names = [r.choice(["embeddings", "", "layers.0.weight", "ä"]), "other"]
            metadata = r.choice([None, {"prefill-score": r.choice(["{", "[]", "{}", '{"dims": []}'])}, {"head": "mlp"}])
            save_file({name: torch.ones(shape).to(kind) for name in names[: r.choice([1, 2])]}, file, metadata)
        else:
            np.save(file, values)
        options, codes = r.choice([
            ({"items": file}, (4,)), ({"inputs": (str(file),), "vector_column": "embedding"}, (3, 4)),
            ({"head": file, "score": r.choice(["mlp", "dot"])}, (4,)),
        ])  # fmt: skip
        return Target(file, lambda: self.all_counted(self.config(**options), "search"), (*codes, 7), exact=False, odd=True)

    # --- how it is read ------------------------------------------------------------------------------------------------

    def config(self, **options: Any) -> RunConfig:
        given = {"inputs": (str(self.inputs),), "items": self.catalogue, "model": str(self.model), "output": self.out,
                 "top_k": 5, "device": "cpu", "dtype": "float32"}  # fmt: skip
        return RunConfig(**(given | options))

    def rows(self, config: RunConfig, plan: Any) -> tuple[Any, ...]:
        """Counts and tables of a run."""
        totals = pipeline.run(config, run_shards, Watcher(), plan)
        rejects = self.out / "_rejects"
        tables = [pq.read_table(folder).to_pylist() for folder in (self.out, rejects) if folder.exists()]
        return [totals.get(name) for name in COUNTS], tables

    def all_counted(self, config: RunConfig, plan: Any) -> None:
        """That every row is in the result or in the rejects, and every score a number."""
        (rows, rows_out, rejected, *_), (lists, *rejects) = self.rows(config, plan)
        assert rows_out + rejected == rows
        assert (len(lists), len(rejects[0]) if rejects else 0) == (rows_out, rejected)
        assert all(math.isfinite(score) for row in lists for score in row["scores"])

    def shown(self) -> Any:
        return read_lists(UserQuery(self.out, (), 20, 5, None, None, None)), read_lists(
            UserQuery(self.out, ("3",), 1, 5, None, None, None)
        )

    def inspected(self) -> Any:
        return inspect_path(self.out, self.config())

    @cached_property
    def inputs(self) -> Path:
        file = self.folder.parent / "base" / "vectors.parquet"
        pq.write_table(pa.table({"user_id": range(ROWS), "embedding": list(numbers(ROWS, 1))}), file)
        return file

    @cached_property
    def prompt_file(self) -> Path:
        return write_prompts(self.folder.parent / "base" / "prompts.parquet", random_prompts(ROWS, longest=8))

    @cached_property
    def catalogue(self) -> Path:
        return write_items(self.folder.parent / "base" / "items.parquet", ITEMS)

    @cached_property
    def published(self) -> Path:
        pipeline.run(self.config(), run_shards, Watcher(), "search")
        return Path(self.out.rename(self.folder.parent / "base" / "published"))

    @cached_property
    def interrupted(self) -> Path:
        def engine(*arguments: Any) -> Any:
            done = run_shards(*arguments)
            yield next(done)
            yield next(done)
            raise KeyboardInterrupt

        try:
            pipeline.run(self.config(shard_rows=5), engine, Watcher(), "search")
        except KeyboardInterrupt:
            return Path(Staging(self.out).folder.rename(self.folder.parent / "base" / "interrupted"))
        raise AssertionError


KINDS = ("prompts", "vectors", "vector_matrix", "items", "item_matrix", "head", "lists", "toml", "model_folder", "leftovers",
         "result", "shown_items", "odd_columns", "odd_matrix")  # fmt: skip


def numbers(rows: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, HIDDEN), np.float32)


def write_matrix(file: Path, values: np.ndarray) -> None:
    if file.suffix == ".npy":
        np.save(file, values)
    else:
        save_file({"embeddings": torch.from_numpy(values)}, file, {"prefill-score": '{"normalized": false}'})


def write_variant(file: Path, table: pa.Table, r: random.Random) -> bool:
    """Any codec, dictionaries or none, either page version, a few or one row group; whether it has page checksums."""
    checked = r.random() < 0.7
    codec = r.choice(["none", "snappy", "zstd", "gzip", "lz4", "brotli"])
    pq.write_table(
        table, file, compression=codec, use_dictionary=r.random() < 0.5, data_page_version=r.choice(["1.0", "2.0"]),
        row_group_size=r.choice([5, 1000]), write_page_checksum=checked, store_schema=r.random() < 0.7,
    )  # fmt: skip
    return checked


def odd_array(r: random.Random, rows: int) -> pa.Array:
    """An array of any type that Parquet holds, with nulls or without."""
    raw = [r.choice([b"", b"a", b"w1 w2", b"\xff\xfe", "ä€😀".encode(), b"a\0b", b"i1", b"x" * 300]) for _ in range(rows)]
    whole = [r.choice([0, 1, -1, 5, 127, 2**31 - 1]) for _ in range(rows)]
    real = [r.choice([0.0, 1.5, -2.0, math.nan, math.inf, 1e300]) for _ in range(rows)]
    text = pa.array([b.decode(errors="ignore") for b in raw])
    broken = pa.array(raw).cast(pa.binary()).view(pa.string())
    wide = pa.array(real)
    simple = [
        pa.nulls(rows), pa.array([x > 0 for x in whole]), pa.array(whole), pa.array(whole, pa.int32()), wide,
        pa.array([x % 2**64 for x in whole], pa.uint64()), wide.cast(pa.float32()), wide.cast(pa.float16(), safe=False),
        text, text.cast(pa.large_string()), broken, pa.array(raw), pa.array(raw, pa.large_binary()),
        pa.array([b"abcd"] * rows, pa.binary(4)), text.dictionary_encode(), pa.array(whole, pa.int32()).cast(pa.date32()),
        pa.array(whole).dictionary_encode(), pa.array(whole, pa.duration("ms")),
        pa.array([x % 86_400 for x in whole], pa.time32("s")), pa.array(whole, pa.timestamp("us", "UTC")),
        pa.array(whole, pa.decimal128(20, 3)),
    ]  # fmt: skip
    array = r.choice(simple)
    if r.random() < 0.3:
        array = picked(array, [None if r.random() < 0.3 else i for i in range(rows)])
    shape = r.choice(["plain", "plain", "list", "wide", "fixed", "struct", "messages", "map", "deep", "empty"])
    counts = {
        "list": [r.randrange(3) for _ in range(rows)],
        "wide": [HIDDEN] * rows,
        "deep": [1] * rows,
        "empty": [0] * rows,
    }
    if shape in counts:
        places = [i for i, n in enumerate(counts[shape]) for _ in range(n)]
        offsets = pa.array(list(itertools.accumulate(counts[shape], initial=0)), pa.int32())
        array = pa.ListArray.from_arrays(offsets, picked(array, places))
        return pa.ListArray.from_arrays(pa.array(range(rows + 1), pa.int32()), array) if shape == "deep" else array
    if shape == "fixed":
        return pa.FixedSizeListArray.from_arrays(picked(array, [i for i in range(rows) for _ in range(2)]), 2)
    offsets = pa.array(range(rows + 1), pa.int32())
    if shape == "messages":
        return pa.ListArray.from_arrays(offsets, pa.StructArray.from_arrays([text, array], ["role", "content"]))
    if shape == "map":
        return pa.MapArray.from_arrays(offsets, text, array)
    return pa.StructArray.from_arrays([array], ["a"]) if shape == "struct" else array


def picked(array: pa.Array, places: list[int | None]) -> pa.Array:
    """What take() does, for every type."""
    null = pa.nulls(1, array.type)
    return pa.concat_arrays([array[:0], *(null if place is None else array.slice(place, 1) for place in places)])


def tensor_names(file: Path) -> list[str]:
    raw = file.read_bytes()
    return [name for name in json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")]) if name != "__metadata__"]


def copy_of(source: Path, target: Path) -> None:
    """With the times of the files, which a run looks at."""
    shutil.copytree(source, target, copy_function=shutil.copy2)


NUMBERS = (b"0", b"1", b"9", b"7e9", b"999999999999999999999", b"-1", b"1.5", b"null", b'"x"')
OTHER_WORDS = (b"null", b"{}", b"[]", b"0", b"true", "ä\0".encode(), b"\xff")


# --- damage ----------------------------------------------------------------------------------------------------------


def telling_part(raw: bytes) -> tuple[int, int]:
    """Where a byte means more than one number: a footer, a header, else all of it."""
    if raw[-4:] == b"PAR1":
        return max(4, len(raw) - 8 - struct.unpack("<I", raw[-8:-4])[0]), len(raw)
    if raw[:6] == b"\x93NUMPY":
        return 0, 128
    if raw[8:9] == b"{":
        return 0, 8 + int.from_bytes(raw[:8], "little")
    return 0, len(raw)


def damage(raw: bytes, r: random.Random) -> tuple[str, bytes]:
    """What was done, in words, and the bytes of the damaged file."""
    first, stop = telling_part(raw) if r.random() < 0.6 else (0, len(raw))
    at, size = r.randrange(first, stop), r.choice([1, 2, 4, 8, 64, 500])
    digits = [first + m.start() for m in re.finditer(rb"[0-9]", raw[first:stop])]
    words = [m.span() for m in re.finditer(rb"[A-Za-z_0-9.]+", raw[first:stop])]
    what = r.choice(
        ["flip", "flip", "flip", "flips", "cut", "append", "insert", "zero", "repeat", "remove", "digit", "word"]
    )
    end = len(raw) if what == "cut" else at if what in ("insert", "repeat") else min(len(raw), at + size)
    filling = {"zero": bytes(end - at), "insert": bytes(size), "repeat": raw[at : at + size]}.get(what, b"")
    if what == "append":
        at, end, filling = len(raw), len(raw), r.randbytes(size)
    elif what == "digit" and digits:
        at = r.choice(digits)
        end, filling = at + 1, r.choice(NUMBERS)
    elif what == "word" and words:
        at, end = (first + place for place in r.choice(words))
        filling = r.choice([*OTHER_WORDS, b"x" * (end - at)])
    elif what in ("flip", "flips"):
        data = bytearray(raw)
        for place in [at] + [r.randrange(first, stop) for _ in range(0 if what == "flip" else 7)]:
            data[place] = r.choice([data[place] ^ 1 << r.randrange(8), 0, 255, r.randrange(256)])
        return f"{what} at {at} of {len(raw)}", bytes(data)
    return f"{what} at {at} of {len(raw)}", raw[:at] + filling + raw[end:]


# --- the loop --------------------------------------------------------------------------------------------------------


class Fuzz:
    def __init__(self, model: Path) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="fuzz", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
        (self.place / "base").mkdir()
        self.kinds = Kinds(self.place / "case", model)
        self.whole: dict[tuple[str, int], Any] = {}
        self.outcomes: dict[str, dict[str, int]] = {kind: {} for kind in KINDS}

    def fresh(self, kind: str, variant: int) -> Target:
        shutil.rmtree(self.kinds.folder, ignore_errors=True)
        self.kinds.folder.mkdir()
        return getattr(self.kinds, kind)(variant)

    def case(self, number: int) -> tuple[str, Callable[[], str]]:
        """A case in words, and what does it: it returns what breaks the contract, or ''."""
        kind, r = KINDS[number % len(KINDS)], random.Random(number)
        variant = r.randrange(1 << 30 if kind.startswith("odd") else VARIANTS)
        target = self.fresh(kind, variant)
        if not target.odd and (kind, variant) not in self.whole:
            self.whole[kind, variant] = target.use()
            target = self.fresh(kind, variant)
        raw = target.file.read_bytes()
        done, damaged = ("whole", raw) if target.odd and r.random() < 0.8 else damage(raw, r)
        times = target.file.stat()
        target.file.write_bytes(damaged)
        os.utime(target.file, ns=(times.st_atime_ns, times.st_mtime_ns))
        return f"{kind} {variant} {target.file.name}: {done}", lambda: self.judge(kind, variant, target, damaged == raw)

    def judge(self, kind: str, variant: int, target: Target, unharmed: bool) -> str:
        outcome, fault = "success", ""
        try:
            found = target.use()
            if (target.exact or (unharmed and not target.odd)) and found != self.whole[kind, variant]:
                fault = f"success with other rows: {found} instead of {self.whole[kind, variant]}"
        except PrefillScoreError as error:
            outcome, message = f"exit {error.exit_code}", str(error)
            if error.exit_code not in target.codes:
                fault = f"{type(error).__name__}: {message}"
            elif not message or any(ord(c) < 32 for c in message) or len(message) > 700:
                fault = f"not one clear sentence: {message!r}"
            elif error.exit_code not in (2, 7) and not re.search(rf"{self.place}/|column '", message):
                fault = f"names no file: {message}"
            elif re.search(rf"({'|'.join(WORDS)}) ({'|'.join(WORDS)}) ", message):
                fault = f"tells a prompt: {message}"
        except HungError:
            outcome = fault = f"no end within {SLOWEST_SEC} s"
        except BaseException as error:
            trace = error.__traceback__
            places = []
            while trace:
                places.append(f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}")
                trace = trace.tb_next
            outcome, fault = "traceback", f"{type(error).__name__}: {str(error)[:300]!r} in {' '.join(places[-6:])}"
        counts = self.outcomes[kind]
        counts[outcome] = counts.get(outcome, 0) + 1
        return fault


def hung(*_: Any) -> None:
    raise HungError


def main(model: str, log: str, first: int, stop: int) -> None:
    logging.disable()
    quiet_transformers()
    os.environ["HF_HUB_OFFLINE"] = "1"
    signal.signal(signal.SIGALRM, hung)
    fuzz = Fuzz(Path(model))
    os.chdir(fuzz.place)
    with open(log, "a", buffering=1) as told:
        try:
            for number in range(first, stop):
                faulthandler.dump_traceback_later(2 * SLOWEST_SEC, exit=True)
                told.write(f"case {number} being made\n")
                what, judge = fuzz.case(number)
                told.write(f"case {number} {what}\n")
                signal.alarm(SLOWEST_SEC)
                fault = judge()
                signal.alarm(0)
                if fault:
                    told.write(f"fault {number} {what}: {fault!r}\n")
            told.write(f"done {json.dumps(fuzz.outcomes)}\n")
        finally:
            shutil.rmtree(fuzz.place)


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
