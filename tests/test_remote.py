"""Inputs, items, output and cache on a real S3 server: the same bytes, never a mix, nothing lost when the line breaks."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import PROJECT, Watcher, random_prompts, write_items, write_prompts
from proxy import Proxy
from pyarrow import fs
from s3_server import s3, s3_server  # noqa: F401

from prefill_cli import pipeline, storage, worker
from prefill_cli.data import drafts, remote_staging
from prefill_cli.data.disk import from_json
from prefill_cli.data.inputs import find_files
from prefill_cli.data.remote_staging import current_run, pointer_to
from prefill_cli.engines.local import run_shards
from prefill_cli.errors import InputError, ItemsError, OutputError, UsageError
from prefill_cli.places import Uri, beside, place
from prefill_cli.planning import plan_job
from prefill_cli.tools.cache import describe, prune


@pytest.fixture(autouse=True)
def _own_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home-cache"))
    storage._system.cache_clear()


@pytest.fixture
def bucket(s3):  # noqa: F811
    return Uri(s3)


def put(uri: Uri, content: bytes | Path) -> Uri:
    storage.write(uri, content if isinstance(content, bytes) else content.read_bytes())
    return uri


def published(out: Uri) -> dict[str, bytes]:
    """What a reader gets who follows the pointer, as the documents tell."""
    run = beside(out, "_runs", current_run(out))
    return {name: storage.read(beside(run, name)) for name in storage.listing(run) if name.endswith(".parquet")}


def parts(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.parquet")}


def stop_after(job, shards: int, **options: object) -> None:
    def engine(job, todo, progress):
        for number, done in enumerate(run_shards(job, todo, progress), 1):
            yield done
            if number == shards:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipeline.run(job.config(**options), engine, Watcher())


def command_line(job, out: Uri, *more: str) -> list[str]:
    return [sys.executable, "-m", "prefill_cli", "run", str(job.inputs), "-m", str(job.model), "-i", str(job.items),
            "-k", "5", "--device", "cpu", "--dtype", "float32", "--shard-rows", "1", "--quiet", "-o", out,
            *more]  # fmt: skip


ENVIRON = {"PYTHONPATH": str(PROJECT)}


def test_what_a_run_would_find_elsewhere_is_told_without_a_trace(job, bucket):
    out = Uri(f"{bucket}/out")

    def look(**options):
        before = {name: storage.read(beside(out, name)) for name in storage.listing(out)}
        config = job.config(**{"output": out, "shard_rows": 10} | options)
        planned, fingerprint = plan_job(config)
        try:
            return planned.staging.outlook(fingerprint, config.overwrite).state
        finally:
            assert {name: storage.read(beside(out, name)) for name in storage.listing(out)} == before

    assert look() == "new"
    stop_after(job, 2, output=out, shard_rows=10)
    assert look() == "resume"
    with pytest.raises(OutputError, match=r"holds leftovers of another run; different: top_k \(5, now 4\)"):
        look(top_k=4)
    assert look(top_k=4, overwrite=True) == "new"
    job.run(output=out, shard_rows=10)
    assert look() == "unchanged"
    with pytest.raises(OutputError, match="holds the result of another run"):
        look(top_k=4)
    assert look(top_k=4, overwrite=True) == "new"


# --- the same bytes ---------------------------------------------------------------------------------------------------


def test_everything_elsewhere_gives_the_bytes_of_everything_here(job, bucket, tmp_path):
    whole = pq.read_table(job.inputs)
    for name, start, rows in (("part-2", 0, 12), ("part-10", 12, 18)):
        pq.write_table(whole.slice(start, rows), tmp_path / "part.parquet")
        put(beside(bucket, "in", f"{name}.parquet"), tmp_path / "part.parquet")
    put(beside(bucket, "in", "_temporary", "half.parquet"), b"half")
    items = pq.read_table(job.items)
    for number in range(2):
        pq.write_table(items.slice(25 * number, 25), tmp_path / "items-part.parquet")
        put(beside(bucket, "items", f"{number}.parquet"), tmp_path / "items-part.parquet")
    far = {
        "inputs": (f"{bucket}/in",),
        "items": Uri(f"{bucket}/items"),
        "output": Uri(f"{bucket}/out/tonight"),
        "shard_rows": 7,
    }
    totals = job.run(**far, cache=Uri(f"{bucket}/vectors"))
    job.run(shard_rows=7)
    assert published(far["output"]) == parts(job.out)
    assert (totals["status"], totals["output"]) == ("done", far["output"])
    again = job.run(**far, cache=Uri(f"{bucket}/vectors"))
    assert again["status"] == "unchanged"
    assert {k: v for k, v in again.items() if k != "status"} == {k: v for k, v in totals.items() if k != "status"}
    other = job.run(**far | {"output": Uri(f"{bucket}/out/other")}, cache=Uri(f"{bucket}/vectors"))
    assert other["cached_rows"] == 30


def test_vectors_elsewhere_are_what_run_and_search_are_given_by_their_folders_name(job, bucket, tmp_path):
    names = pa.table({"user_id": [f"t{i}" for i in range(30)], "prompt": job.prompts})
    pq.write_table(names, tmp_path / "titles.parquet")
    items, users = Uri(f"{bucket}/items"), Uri(f"{bucket}/users")
    for inputs, output in ((tmp_path / "titles.parquet", items), (job.inputs, users)):
        config = job.config(inputs=(str(inputs),), items=None, output=output, shard_rows=7)
        pipeline.run(config, run_shards, Watcher(), "embed")
    table = pq.read_table(tmp_path / "titles.parquet")
    embed = job.config(inputs=(str(tmp_path / "titles.parquet"),), items=None, output=tmp_path / "items")
    pipeline.run(embed, run_shards, Watcher(), "embed")
    assert table["user_id"].to_pylist() == pq.read_table(tmp_path / "items")["user_id"].to_pylist()
    job.run(items=tmp_path / "items", item_id_column="user_id", strict_provenance=True)
    far = job.config(inputs=(users,), items=items, item_id_column="user_id", output=tmp_path / "far", strict_provenance=True)
    pipeline.run(far, run_shards, Watcher(), "search")
    assert parts(tmp_path / "far") == parts(job.out)


def test_the_manifest_and_rejects_name_the_places_elsewhere(job, bucket, tmp_path):
    uri = put(Uri(f"{bucket}/p.parquet"), write_prompts(tmp_path / "p.parquet", [*random_prompts(5), None]))
    items = put(Uri(f"{bucket}/items.parquet"), job.items)
    out = Uri(f"{bucket}/out")
    job.run(inputs=(uri,), items=items, output=out, max_rejects="1")
    run = beside(out, "_runs", current_run(out))
    manifest = from_json(storage.read(beside(run, "_manifest.json")))
    assert (manifest["options"]["items"], manifest["items"]["path"]) == (items, items)
    assert manifest["inputs"]["files"][0]["path"] == uri
    assert manifest["inputs"]["files"][0]["etag"]
    rejects = pq.read_table(pa.BufferReader(storage.read(beside(run, "_rejects", "part-00000.parquet"))))
    assert rejects["source_file"].to_pylist() == [uri]


def test_files_folders_and_globs_are_found_in_natural_order(bucket):
    for name in ("a/part-10.parquet", "a/part-2.parquet", "a/x=1/part-1.parquet", "a/notes.txt", "a/.hidden/p.parquet",
                 "b/part-1.pq"):  # fmt: skip
        put(Uri(f"{bucket}/{name}"), b"x")

    def names(*inputs):
        return [uri.removeprefix(bucket) for uri in find_files([f"{bucket}{text}" for text in inputs])]

    assert names("/a") == ["/a/part-2.parquet", "/a/part-10.parquet", "/a/x=1/part-1.parquet"]
    assert names("/a/*.parquet", "/a/part-2.parquet") == ["/a/part-2.parquet", "/a/part-10.parquet"]
    assert names("/a/**/*.parquet") == ["/a/part-2.parquet", "/a/part-10.parquet", "/a/x=1/part-1.parquet"]
    assert names("/[ab]", "/b/part-1.pq") == names("/a", "/b")
    assert names("/a/notes*") == ["/a/notes.txt"]
    for nothing in ("/c", "/c/*.parquet"):
        with pytest.raises(InputError, match="no such file"):
            names(nothing)


def test_an_endpoint_may_stand_in_the_uri(job, bucket, s3_server, monkeypatch):  # noqa: F811
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    query = f"?endpoint_override={s3_server.url}"
    uri = put(Uri(f"{bucket}/in/p.parquet{query}"), job.inputs)
    out = Uri(f"{bucket}/out{query}")
    assert job.run(inputs=(f"{bucket}/in{query}",), output=out)["rows_out"] == 30
    assert find_files([f"{bucket}/in/*.parquet{query}"]) == [uri]
    assert len(published(out)) == 1


# --- publication ------------------------------------------------------------------------------------------------------


def test_another_result_is_replaced_only_when_told_and_the_one_before_stays_for_its_readers(job, bucket):
    out, seen = Uri(f"{bucket}/out"), []
    for k in (5, 6, 7):
        if seen:
            with pytest.raises(
                OutputError, match=rf"holds the result of another run; different: top_k \({k - 1}, now {k}\)"
            ):
                job.run(output=out, top_k=k)
        job.run(output=out, top_k=k, overwrite=True)
        seen.append(current_run(out))
        run = beside(out, "_runs", seen[-1])
        assert sorted(name for name in storage.listing(run) if not name.endswith(".parquet")) == [
            "_SUCCESS",
            "_manifest.json",
        ]
        assert storage.read(beside(out, "_SUCCESS")) == pointer_to(seen[-1])
    assert {name.split("/")[0] for name in storage.listing(beside(out, "_runs"))} == set(seen[-2:])
    back = job.run(output=out, top_k=6, overwrite=True)
    assert current_run(out) == seen[1]
    assert back["status"] == "unchanged", "the one before is whole and only pointed to"


def test_a_reader_during_publication_never_sees_a_mix(job, bucket):
    out, faults, looks, over = Uri(f"{bucket}/out"), [], [0], threading.Event()
    job.run(output=out, top_k=1, shard_rows=6)

    def read() -> None:
        system, path = fs.FileSystem.from_uri(out)
        while not over.is_set():
            looks[0] += 1
            with system.open_input_file(f"{path}/_CURRENT") as file:
                run_id, check = file.read().decode().split()
            if pointer_to(run_id).decode().split()[1] != check:
                continue
            table = pq.read_table(f"{path}/_runs/{run_id}", filesystem=system)
            lengths = {len(ids) for ids in table["item_ids"].to_pylist()}
            if table.num_rows != 30 or len(lengths) != 1:
                faults.append((table.num_rows, lengths))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for k in range(2, 8):
            job.run(output=out, top_k=k, shard_rows=6, overwrite=True)
    finally:
        over.set()
        reader.join()
    assert looks[0] > 20
    assert not faults


def test_the_readers_recipe_of_the_documents_reads_the_current_run(job, bucket):
    text = (PROJECT / "docs" / "nightly.md").read_text()
    (recipe,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "def load_elsewhere(" in block)
    names: dict = {}
    exec(recipe, names)
    for k in (3, 4):
        job.run(output=Uri(f"{bucket}/out"), top_k=k, overwrite=True)
        job.run(output=job.out, top_k=k, overwrite=True)
        assert names["load_elsewhere"](f"{bucket}/out").equals(pq.read_table(job.out))


def test_a_folder_that_no_run_made_is_not_touched(job, bucket):
    precious = put(Uri(f"{bucket}/out/precious.txt"), b"mine")
    with pytest.raises(OutputError, match=r"holds precious\.txt, which no run of prefill-score made"):
        job.run(output=Uri(f"{bucket}/out"), overwrite=True)
    assert storage.listing(Uri(f"{bucket}/out")) == {"precious.txt": 4}
    storage.delete(precious)
    put(Uri(f"{bucket}/out/_CURRENT"), b"somebody else's\n")
    with pytest.raises(OutputError, match="not a pointer that prefill-score wrote"):
        job.run(output=Uri(f"{bucket}/out"), overwrite=True)


def test_a_pointer_that_is_met_while_it_is_replaced_is_looked_at_again(bucket, monkeypatch):
    looks = iter([pointer_to("0" * 16)[:20], pointer_to("1" * 16)])
    monkeypatch.setattr(storage, "read", lambda uri: next(looks))
    assert current_run(bucket) == "1" * 16


def test_a_part_that_somebody_removed_under_the_run_is_noticed_before_readers_are_pointed_to_it(job, bucket, monkeypatch):
    out = Uri(f"{bucket}/out")
    job.run(output=out, top_k=2)
    before = published(out)
    write = remote_staging.RemoteStaging._write_json

    def meddle(self, name, value):
        write(self, name, value)
        if name.startswith("_receipts/00002"):
            storage.delete(beside(self.result, "part-00001.parquet"))

    monkeypatch.setattr(remote_staging.RemoteStaging, "_write_json", meddle)
    with pytest.raises(OutputError, match=r"part-00001\.parquet: gone or changed under the run"):
        job.run(output=out, shard_rows=7, overwrite=True)
    assert published(out) == before
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", "unused")
    job.run(output=out, shard_rows=7, overwrite=True)
    job.run(shard_rows=7)
    assert published(out) == parts(job.out)


# --- killed and taken up ----------------------------------------------------------------------------------------------


def test_a_killed_run_is_taken_up_on_another_machine_with_the_same_bytes(job, bucket, tmp_path, s3_server):  # noqa: F811
    write_prompts(job.inputs, random_prompts(60))
    out = Uri(f"{bucket}/out")
    job.run(output=out, top_k=2)
    before = published(out)
    for wanted in (3, 25):
        process = subprocess.Popen(
            command_line(job, out, "--overwrite"), env=os.environ | ENVIRON, stdout=subprocess.DEVNULL
        )
        until = time.monotonic() + 60
        while len(re.findall("_receipts/", " ".join(s3_server.keys(bucket.removeprefix("s3://"))))) < wanted:
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert published(out) == before
    watcher = Watcher()
    pipeline.run(job.config(output=out, shard_rows=1, overwrite=True), run_shards, watcher)
    assert watcher.started[1] >= 25
    job.run(shard_rows=1)
    assert published(out) == parts(job.out)


def test_leftovers_of_another_run_are_in_the_way_unless_overwritten(job, bucket):
    out = Uri(f"{bucket}/out")
    stop_after(job, 2, output=out, shard_rows=7)
    with pytest.raises(OutputError, match=r"holds leftovers of another run; different: top_k \(5, now 3\)"):
        job.run(output=out, shard_rows=7, top_k=3)
    job.run(output=out, shard_rows=7, top_k=3, overwrite=True)
    assert {name.split("/")[0] for name in storage.listing(beside(out, "_runs"))} == {current_run(out)}


def test_a_run_that_fails_before_its_first_shard_leaves_nothing(job, bucket, monkeypatch):
    monkeypatch.setattr(worker, "load_base_model", None)
    with pytest.raises(TypeError):
        job.run(output=Uri(f"{bucket}/out"))
    assert storage.listing(Uri(f"{bucket}/out")) == {}


# --- the line -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [0, 2_000, 9_000, 30_000])
def test_a_connection_that_breaks_mid_upload_publishes_nothing_and_the_same_command_finishes(
    job, bucket, tmp_path, s3_server, monkeypatch, cut  # noqa: F811
):  # fmt: skip
    out = Uri(f"{bucket}/out")
    job.run(output=out, top_k=2)
    before = published(out)
    items = write_items(tmp_path / "many.parquet", 3_000)
    with Proxy(("127.0.0.1", s3_server.port)) as line:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{line.port}")
        storage._system.cache_clear()
        deliver = drafts.UploadedDrafts.deliver

        def break_then_deliver(self, shard):
            if shard.index == 1:
                line.cut_after_bytes = cut
            return deliver(self, shard)

        options = {"output": out, "shard_rows": 10, "items": items, "top_k": 1_000, "overwrite": True}
        with monkeypatch.context() as patch:
            patch.setattr(drafts.UploadedDrafts, "deliver", break_then_deliver)
            with pytest.raises(OutputError, match="cannot be reached, or the connection broke"):
                job.run(**options)
        line.cut_after_bytes = None
        assert published(out) == before
        watcher = Watcher()
        pipeline.run(job.config(**options), run_shards, watcher)
        assert watcher.started == (30, 10)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.url)
    storage._system.cache_clear()
    job.run(**options | {"output": job.out})
    assert published(out) == parts(job.out)


def test_a_pointer_that_cannot_be_written_leaves_the_old_one_and_the_same_command_only_points(
    job, bucket, s3_server, monkeypatch  # noqa: F811
):  # fmt: skip
    out = Uri(f"{bucket}/out")
    job.run(output=out, top_k=2)
    before = published(out)
    with Proxy(("127.0.0.1", s3_server.port)) as line:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{line.port}")
        storage._system.cache_clear()
        point = remote_staging.RemoteStaging._point

        def break_then_point(self, old):
            line.cuts, line.cut_after_bytes = storage.ATTEMPTS, 0  # every try of one request; then the line is well again
            point(self, old)

        with monkeypatch.context() as patch:
            patch.setattr(remote_staging.RemoteStaging, "_point", break_then_point)
            with pytest.raises(OutputError, match="cannot be reached, or the connection broke"):
                job.run(output=out, overwrite=True)
        assert line.cuts is None
        assert published(out) == before
        assert job.run(output=out, overwrite=True)["status"] == "unchanged", "it was whole"
        after = published(out)
    job.run()
    assert after == parts(job.out)


def test_parts_of_a_catalogue_that_have_one_name_in_several_folders_are_all_read(job, bucket, tmp_path):
    items = pq.read_table(job.items)
    for number in range(2):
        pq.write_table(items.slice(25 * number, 25), tmp_path / "part.parquet")
        put(beside(bucket, "items", f"day={number}", "part.parquet"), tmp_path / "part.parquet")
    job.run(items=Uri(f"{bucket}/items/*/part.parquet"), output=tmp_path / "far")
    job.run()
    assert parts(tmp_path / "far") == parts(job.out)


def test_a_fault_that_is_not_the_output_s_is_not_told_as_one(job, bucket, monkeypatch):
    def fail(*_):
        raise UnicodeDecodeError("utf-8", b"x", 0, 1, "odd")

    monkeypatch.setattr(worker, "load_base_model", fail)
    with pytest.raises(UnicodeDecodeError):
        job.run(output=Uri(f"{bucket}/out"))


def test_a_connection_that_breaks_once_is_healed_by_a_second_try(job, bucket, s3_server, monkeypatch):  # noqa: F811
    with Proxy(("127.0.0.1", s3_server.port)) as line:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{line.port}")
        storage._system.cache_clear()
        line.cuts = 1
        line.cut_after_bytes = 6_000
        job.run(output=Uri(f"{bucket}/out"), shard_rows=10)
        assert line.cuts is None, "there was a break"
    job.run(shard_rows=10)
    storage._system.cache_clear()
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.url)
    assert published(Uri(f"{bucket}/out")) == parts(job.out)


def test_what_is_not_there_denied_or_away_is_told_in_one_sentence(job, bucket, s3_server, monkeypatch):  # noqa: F811
    for options, kind, words in (
        ({"inputs": (f"{bucket}/none.parquet",)}, InputError, "no such file"),
        ({"inputs": ("s3://no-such-bucket/x.parquet",)}, InputError, "no such file"),
        ({"items": Uri(f"{bucket}/items.parquet")}, ItemsError, "no such file"),
        ({"output": Uri("s3://no-such-bucket/out")}, OutputError, "no such file, folder or bucket"),
        ({"cache": Uri("s3://no-such-bucket/c")}, OutputError, "no such file, folder or bucket"),
    ):
        with pytest.raises(kind, match=words):
            job.run(**options)
    put(Uri(f"{bucket}/bad.parquet"), b"PAR1 this is not Parquet PAR1")
    with pytest.raises(InputError, match=r"bad\.parquet: "):
        job.run(inputs=(f"{bucket}/bad.parquet",))
    with pytest.raises(ItemsError, match=rf"{bucket}/bad\.parquet: not readable as Parquet"):
        job.run(items=Uri(f"{bucket}/bad.parquet"))
    put(Uri(f"{bucket}/p.parquet"), job.inputs)
    s3_server.call("POST", "/moto-api/reset-auth", b"0")
    try:
        for options, kind in (
            ({"inputs": (f"{bucket}/p.parquet",)}, InputError),
            ({"output": Uri(f"{bucket}/o")}, OutputError),
        ):
            with pytest.raises(kind, match="access is denied; look at the credentials"):
                job.run(**options)
    finally:
        s3_server.call("POST", "/moto-api/reset-auth", b"inf")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    storage._system.cache_clear()
    began = time.monotonic()
    with pytest.raises(InputError, match="cannot be reached"):
        job.run(inputs=(f"{bucket}/p.parquet",))
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("harm", ["changed", "gone"])
def test_an_input_that_changes_under_the_run_ends_it(job, bucket, tmp_path, harm, monkeypatch):
    uri = put(Uri(f"{bucket}/p.parquet"), job.inputs)
    begin = remote_staging.RemoteStaging.begin

    def change(self, *args):
        if harm == "gone":
            storage.delete(uri)
        else:
            put(uri, write_prompts(tmp_path / "other.parquet", random_prompts(30, seed=5)))
        return begin(self, *args)

    monkeypatch.setattr(remote_staging.RemoteStaging, "begin", change)
    with pytest.raises(InputError, match=r"p\.parquet: (the file changed|no such file)"):
        job.run(inputs=(uri,), output=Uri(f"{bucket}/out"))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError("Unable to load libjvm"), "set JAVA_HOME, HADOOP_HOME and CLASSPATH"),
        (
            OSError("AWS Error SLOW_DOWN (HTTP status 503) during PutObject operation: x"),
            r"broke \(slow down\); try again later",
        ),
        (OSError("AWS Error UNKNOWN (HTTP status 403) during HeadObject operation: No response body."), "access is denied"),
        (FileNotFoundError("x"), "no such file, folder or bucket"),
        (pa.ArrowInvalid("first\nsecond"), "first$"),
    ],
)
def test_what_a_system_says_becomes_one_sentence(error, words):
    with pytest.raises(InputError, match=f"^hdfs://host/x: .*{words}"), storage.reaching("hdfs://host/x", InputError):
        raise error


def test_systems_without_a_client_or_a_network_are_made_without_asking_it():
    for uri, path in (
        ("gs://anonymous@bucket/a/b.parquet", "bucket/a/b.parquet"),
        ("abfs://cont@acct.dfs.core.windows.net/a/b.parquet", "cont/a/b.parquet"),
        ("hf://datasets/user/name/a.parquet", "datasets/user/name/a.parquet"),
    ):
        there = storage.remote(Uri(uri))
        assert there.path == path
        assert there.uri_of(path) == uri


def test_places_are_told_apart():
    assert place("a/b.parquet") == Path("a/b.parquet")
    assert place("file:///a%20b") == Path("/a b")
    assert isinstance(place("s3://bucket/key"), Uri)
    for scheme, words in (
        ("s3", "credentials do not belong"),
        ("S3", "credentials do not belong"),
        ("s3a", "is not one of"),
    ):
        with pytest.raises(UsageError, match=words) as told:
            place(f"{scheme}://AKIA123:secret@bucket/key")
        assert "secret" not in str(told.value)
        assert "AKIA" not in str(told.value)
    for text in ("http://host/x", "s3a://bucket/x"):
        with pytest.raises(UsageError, match="is not one of file, s3"):
            place(text)
    assert beside(Uri("s3://b/k/?region=x"), "a", "b") == "s3://b/k/a/b?region=x"


def test_an_output_in_its_own_input_is_refused(job, bucket):
    for out in (f"{bucket}/in", f"{bucket}/in/out", bucket):
        with pytest.raises(UsageError, match="--output"):
            job.run(inputs=(f"{bucket}/in",), output=Uri(out))


def test_a_matrix_elsewhere_and_a_metrics_file_elsewhere_are_refused(command, bucket, job):
    put(Uri(f"{bucket}/users.npy"), b"x")
    refused = command("search", f"{bucket}/users.npy", "-i", job.items, "-o", job.out)
    assert (refused.returncode, "fetch it first" in refused.stderr) == (2, True)
    refused = command("run", job.inputs, "-m", job.model, "-i", job.items, "--metrics-file", f"{bucket}/m.prom")
    assert refused.returncode == 2


# --- the cache --------------------------------------------------------------------------------------------------------


def test_a_cache_elsewhere_serves_other_machines_and_is_pruned_there(job, bucket, tmp_path, monkeypatch):
    cache = Uri(f"{bucket}/vectors")
    job.run(cache=cache, shard_rows=7)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another-machine"))
    totals = job.run(cache=cache, shard_rows=7, output=tmp_path / "two")
    assert totals["cached_rows"] == 30
    assert parts(job.out) == parts(tmp_path / "two")
    assert [(s["vectors"], s["segments"], s["hit_rate"]) for s in describe(cache)["spaces"]] == [(30, 5, 1.0)]
    assert prune(cache, None, None)["vectors"] == 30
    assert sum(name.endswith(".arrow") for name in storage.listing(cache)) == 1
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "third-machine"))
    assert job.run(cache=cache, shard_rows=7, output=tmp_path / "three")["cached_rows"] == 30
    prune(cache, None, 0)
    assert storage.listing(cache) == {}


def test_a_torn_segment_elsewhere_is_left_out_and_healed(job, bucket, tmp_path, caplog, monkeypatch):
    cache = Uri(f"{bucket}/vectors")
    job.run(cache=cache)
    name = next(name for name in storage.listing(cache) if name.endswith(".arrow"))
    put(beside(cache, *name.split("/")), storage.read(beside(cache, *name.split("/")))[:700])
    assert job.run(cache=cache, output=tmp_path / "two")["cached_rows"] == 0
    assert "left out of the cache" in caplog.text
    assert job.run(cache=cache, output=tmp_path / "three")["cached_rows"] == 30


def test_a_cache_that_cannot_be_written_any_more_costs_a_warning(job, bucket, monkeypatch, caplog):
    def refuse(*_):
        raise OSError("AWS Error ACCESS_DENIED during PutObject")

    monkeypatch.setattr(storage, "upload", refuse)
    put(Uri(f"{bucket}/vectors/x"), b"")
    real = storage.listing
    monkeypatch.setattr(storage, "listing", lambda folder: real(folder) | {"space.json": 1})
    assert job.run(cache=Uri(f"{bucket}/vectors"))["rows_out"] == 30
    assert "the cache stays as it is" in caplog.text
