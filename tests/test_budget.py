"""The token budget of a machine: its memory, its cgroup, its cache."""

import pytest
import torch

from prefill_cli import machine as machine_room
from prefill_cli.encoding import budget


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine of 64 GiB and a cache of 64 MiB, without a cgroup, whose encoder has two lanes."""
    meminfo, limit = tmp_path / "meminfo", tmp_path / "memory.max"
    meminfo.write_text(f"MemTotal: {80 << 20} kB\nMemAvailable: {64 << 20} kB\n")
    (tmp_path / "cache" / "index3").mkdir(parents=True)
    (tmp_path / "cache" / "index3" / "size").write_text("65536K\n")
    monkeypatch.setattr(machine_room, "MEMINFO", str(meminfo))
    monkeypatch.setattr(machine_room, "CGROUP_LIMITS", (str(limit),))
    monkeypatch.setattr(machine_room, "CACHES", str(tmp_path / "cache"))
    monkeypatch.setattr(budget, "threads", lambda: 2)
    return tmp_path


def test_the_states_of_all_lanes_fit_the_cache(machine):
    # 2 lanes x 12 x 576 x 2 bytes: 27 648 a token, 64 MiB hold 2 427 of them.
    assert budget.auto_batch_tokens(576, "bfloat16", "cpu") == 2_048
    assert budget.auto_batch_tokens(576, "float32", "cpu") == 1_024
    assert budget.auto_batch_tokens(8_192, "float32", "cpu") == 1_024, "a chunk at least"
    (machine / "cache" / "index3" / "size").write_text("far too much")
    assert budget.auto_batch_tokens(576, "bfloat16", "cpu") == 1_024, "32 MiB where the system does not tell"


def test_a_quarter_of_the_free_memory_is_the_limit_of_a_probe(machine):
    assert budget.affordable(576, "bfloat16", "cpu") == [1_024, 2_048, 4_096, 8_192]
    (machine / "memory.max").write_text("max\n")
    assert budget.affordable(576, "bfloat16", "cpu")[-1] == 8_192
    (machine / "memory.max").write_text(f"{512 << 20}\n")  # a container of 512 MiB
    assert budget.affordable(576, "bfloat16", "cpu") == [1_024, 2_048, 4_096]
    (machine / "meminfo").write_text("MemAvailable: 200000 kB\n")
    assert budget.affordable(576, "bfloat16", "cpu") == [1_024]


def test_a_system_that_tells_nothing_has_some_memory(machine, monkeypatch):
    monkeypatch.setattr(machine_room, "MEMINFO", str(machine / "nothing"))
    assert budget.affordable(576, "bfloat16", "cpu")[-1] == 8_192


def test_a_gpu_tells_its_free_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 << 30, 80 << 30))
    # 12 x 4096 x 2 bytes: 98 304 a token, 2 GiB hold 21 845 of them.
    assert budget.auto_batch_tokens(4_096, "bfloat16", "cuda:1") == 16_384
    assert budget.affordable(4_096, "bfloat16", "cuda") == [8_192, 16_384]
