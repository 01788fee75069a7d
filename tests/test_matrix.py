"""Vectors at rest: the same bits from memory, from a mapped file, and from a file that is read piece by piece."""

import numpy as np
import pytest
import torch
from conftest import HIDDEN
from safetensors.torch import save_file

from prefill_cli import matrices
from prefill_cli.errors import InputError, ItemsError
from prefill_cli.matrices import FileRows, open_matrix
from prefill_cli.scoring import matrix
from prefill_cli.scoring.matrix import Matrix


@pytest.fixture
def vectors():
    return np.random.default_rng(0).standard_normal((50, 6), dtype=np.float32)


@pytest.fixture
def no_room(monkeypatch):
    """An address space in which no file can be mapped."""

    def refuse(*_):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(matrices.np, "memmap", refuse)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_safetensors_of_any_float_are_read_where_they_lie(tmp_path, vectors, dtype, monkeypatch):
    tensor = torch.from_numpy(vectors).to(dtype)
    save_file({"other": torch.ones(3), "embeddings": tensor}, tmp_path / "m.safetensors", {"a": "b"})
    wanted = tensor.float().numpy()
    rows, metadata = open_matrix(tmp_path / "m.safetensors", "embeddings", ItemsError)
    assert metadata == {"a": "b"}
    assert np.array_equal(Matrix(rows, 6).block(0, 50), wanted)
    monkeypatch.setattr(matrices.np, "memmap", lambda *_: (_ for _ in ()).throw(MemoryError))
    rows, _ = open_matrix(tmp_path / "m.safetensors", "embeddings", ItemsError)
    assert isinstance(rows, FileRows)
    assert np.array_equal(Matrix(rows, 6).block(7, 20), wanted[7:20])
    some = np.array([49, 3, 4, 4, 0, 30, 5])
    assert np.array_equal(Matrix(rows, 6).take(some), wanted[some])


def test_cut_dropped_and_scaled_rows_have_the_same_bits_wherever_they_lie(tmp_path, vectors, no_room, monkeypatch):
    np.save(tmp_path / "m.npy", vectors.astype(np.float64))
    rows, _ = open_matrix(tmp_path / "m.npy", "embeddings", ItemsError)
    kept = np.array([0, 2, 3, 40, 49])
    lengths = np.linalg.norm(vectors[kept, :4].astype(np.float64), axis=1)
    streamed, held = (Matrix(source, 4, kept, lengths) for source in (rows, vectors))
    in_memory = held.in_memory()
    monkeypatch.setattr(matrix, "SHARE_OF_MEMORY", 0)
    assert streamed.in_memory() is streamed
    assert (streamed.resident, held.resident) == (None, None)
    assert in_memory.resident is not None
    whole = in_memory.block(0, 5)
    assert whole.dtype == np.float32
    for one in (streamed, held):
        assert one.block(0, 99).tobytes() == whole.tobytes()
        assert one.block(1, 3).tobytes() == whole[1:3].tobytes()
        assert one.take(np.array([4, 0, 0])).tobytes() == whole[[4, 0, 0]].tobytes()
        assert np.concatenate([block for _, block in one.blocks(2)]).tobytes() == whole.tobytes()


def test_a_file_that_becomes_shorter_is_told(tmp_path, vectors, no_room):
    np.save(tmp_path / "m.npy", vectors)
    rows, _ = open_matrix(tmp_path / "m.npy", "embeddings", InputError)
    with (tmp_path / "m.npy").open("r+b") as file:
        file.truncate(500)
    with pytest.raises(InputError, match="became shorter"):
        rows[0:50]


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f2", ">f8"])
def test_npy_of_any_byte_order_and_layout(tmp_path, vectors, dtype, order):
    np.save(tmp_path / "m.npy", np.array(vectors, dtype, order=order))
    rows, _ = open_matrix(tmp_path / "m.npy", "embeddings", ItemsError)
    wanted = vectors.astype(dtype).astype(np.float32)
    found = Matrix(rows, 6)
    assert np.array_equal(found.block(0, 50), wanted)
    assert found.block(0, 50).dtype == np.dtype("=f4")
    assert found.resident is None or found.resident.dtype.isnative


def test_a_file_shorter_than_its_header_says_is_told(tmp_path, vectors):
    np.save(tmp_path / "m.npy", vectors)
    whole = (tmp_path / "m.npy").read_bytes()
    (tmp_path / "m.npy").write_bytes(whole[:-1])
    with pytest.raises(ItemsError, match="the file has 1,327 bytes, but its header says 1,328"):
        open_matrix(tmp_path / "m.npy", "embeddings", ItemsError)


def test_an_npy_file_that_is_longer_than_its_header_says_is_refused(job, tmp_path):
    np.save(tmp_path / "v.npy", np.ones((9, HIDDEN), np.float32))
    raw = (tmp_path / "v.npy").read_bytes()
    (tmp_path / "v.npy").write_bytes(raw.replace(b"(9, ", b"(8, "))
    with pytest.raises(ItemsError, match=r"v\.npy: the file has 1,280 bytes, but its header says 1,152"):
        job.run(items=tmp_path / "v.npy")
