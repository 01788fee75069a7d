"""The same for a result that is one file of vectors: parts are joined, and the file appears under its name at once.

    OUT.parquet                   id, vectors, kept columns; the manifest in the metadata
    OUT.safetensors               tensor "embeddings" [rows, d]; the manifest, and a digest of its ids' file
    OUT.ids.parquet               id and kept columns of a .safetensors, row by row
    OUT.rejects.parquet           only where there are any

Of the files the first is put in place last. A matrix that stands beside ids of another run says so by their digest.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from prefill_cli.data.disk import from_json, replacing, sync_folder, to_json, writing
from prefill_cli.data.manifest import FILE_KEY, Fingerprint, is_manifest
from prefill_cli.data.results import REJECTS_FOLDER, parquet_options
from prefill_cli.data.staging import Staging
from prefill_cli.errors import OutputError
from prefill_cli.matrices import IDS_DIGEST, IDS_FILE, ids_digest, metadata_of, safetensors_header
from prefill_cli.parquet import FAULTS, open_parquet
from prefill_cli.places import Place

SUFFIXES = (".parquet", ".safetensors")


def is_one_file(out: Place) -> bool:
    """Whether an output is to be one file of vectors, by its name."""
    return str(out).partition("?")[0].lower().endswith(SUFFIXES)


def manifest_in(file: Path) -> dict[str, Any] | None:
    """The manifest in a file of vectors that we made, or None."""
    stored: Any = None
    if file.is_file() and file.suffix.lower() == ".safetensors":
        stored = metadata_of(file).get(FILE_KEY, "").encode()
    elif file.is_file():
        try:
            stored = (open_parquet(file).schema_arrow.metadata or {}).get(FILE_KEY.encode())
        except FAULTS:
            return None
    found = from_json(stored) if stored else None
    return found if is_manifest(found) else None


class FileStaging(Staging):
    """The way from shards to a published file OUT; see Staging."""

    def totals(self) -> dict[str, Any]:
        found: dict[str, Any] = (manifest_in(self.out) or {})["totals"]
        return found

    def _published(self) -> Fingerprint | None:
        manifest = manifest_in(self.out)
        if manifest is None or (manifest["totals"]["rejects"] and not self._rejects.exists()):
            return None
        if self._is_matrix and not (self._ids.exists() and metadata_of(self.out).get(IDS_DIGEST) == ids_digest(self._ids)):
            return None
        found: Fingerprint = manifest["fingerprint"]
        return found

    def _check_ours(self) -> None:
        if self.out.is_dir():
            raise OutputError(f"{self.out}: there is a folder of that name; name another --output")
        for path in (self.out, self._rejects, *([self._ids] if self._is_matrix else [])):
            if path.exists() and not _is_ours(path):
                raise OutputError(f"{path}: no run of prefill-score made this file; move it away, or name another --output")

    def publish(self, manifest: dict[str, Any]) -> None:
        """Join the parts and put the file in place.

        Raises:
            OutputError: somebody removed or changed a part meanwhile; the disk is full. What is done is kept.
        """
        self._check_done(manifest)
        parts = sorted(self.result.glob("part-*.parquet"))
        rejects = sorted((self.result / REJECTS_FOLDER).glob("*.parquet"))
        metadata = {FILE_KEY: to_json(manifest).decode()}
        self._check_ours()
        if rejects:
            with self._putting(self._rejects) as file:
                _join(file, rejects, {FILE_KEY: ""})
        else:
            with writing(self._rejects):
                self._rejects.unlink(missing_ok=True)
        if self._is_matrix:
            self._write_matrix(parts, metadata)
        else:
            with self._putting(self.out) as file:
                _join(file, parts, metadata)
        sync_folder(self.out.parent)
        self.discard()

    def _write_matrix(self, parts: list[Path], metadata: dict[str, str]) -> None:
        schema = open_parquet(parts[0]).schema_arrow
        vectors = schema.names[1]
        with self._putting(self._ids) as file:
            _join(file, parts, {FILE_KEY: ""}, [name for name in schema.names if name != vectors])
        own = {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}
        metadata = own | metadata | {IDS_FILE: self._ids.name, IDS_DIGEST: ids_digest(self._ids)}
        rows = sum(open_parquet(part).metadata.num_rows for part in parts)
        with self._putting(self.out) as file:
            file.write(safetensors_header(rows, schema.field(vectors).type.list_size, metadata))
            for table in _tables(parts, [vectors]):
                for chunk in table[vectors].chunks:
                    file.write(chunk.flatten().to_numpy(zero_copy_only=False).tobytes())

    @contextmanager
    def _putting(self, path: Path) -> Iterator[IO[bytes]]:
        """A file that is written in the staging folder, whose leftovers go, and put under `path` when it is whole."""
        whole = self.result / "whole"
        with writing(whole):
            whole.mkdir(exist_ok=True)
        with replacing(whole / path.name) as file:
            yield file
        with writing(path):
            (whole / path.name).replace(path)

    @property
    def _is_matrix(self) -> bool:
        return self.out.suffix.lower() == ".safetensors"

    @property
    def _ids(self) -> Path:
        return self.out.with_suffix(".ids.parquet")

    @property
    def _rejects(self) -> Path:
        return self.out.with_suffix(".rejects.parquet")


def _is_ours(path: Path) -> bool:
    if manifest_in(path) is not None:
        return True
    try:
        return path.suffix == ".parquet" and FILE_KEY.encode() in (open_parquet(path).schema_arrow.metadata or {})
    except FAULTS:
        return False


def _join(file: IO[bytes], parts: list[Path], metadata: dict[str, str], columns: list[str] | None = None) -> None:
    """One Parquet file of several, row group by row group."""
    schema = open_parquet(parts[0]).schema_arrow
    schema = pa.schema([schema.field(name) for name in columns or schema.names], (schema.metadata or {}) | metadata)
    plain = [f.name for f in schema if pa.types.is_fixed_size_list(f.type) and pa.types.is_floating(f.type.value_type)]
    with pq.ParquetWriter(file, schema, **parquet_options(schema, plain)) as writer:
        for table in _tables(parts, schema.names):
            writer.write_table(table.replace_schema_metadata(schema.metadata), row_group_size=max(1, table.num_rows))


def _tables(parts: list[Path], columns: list[str]) -> Iterator[pa.Table]:
    for part in parts:
        parquet = open_parquet(part)
        for group in range(parquet.num_row_groups):
            yield parquet.read_row_group(group, columns)
