"""What this machine has: free memory, the size of its caches, a C++ compiler."""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from prefill_cli.errors import PrefillScoreError, first_line

log = logging.getLogger(__name__)
FLAGS = ("-std=c++20", "-O3", "-march=native", "-shared", "-fPIC", "-Wno-psabi")
CACHES = "/sys/devices/system/cpu/cpu0/cache"
MEMINFO = "/proc/meminfo"
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
UNKNOWN_CACHE = 32 << 20
UNKNOWN_MEMORY = 4 << 30
COMPILE_WITHIN_SEC = 300
# Files whose content is memory-mapped: the bytes that they must have, and whose error it is where they lose them.
MAPPED: dict[Path, tuple[int, type[PrefillScoreError]]] = {}
_compilers: set[subprocess.Popen[str]] = set()


def free_memory(device: str = "cpu") -> float:
    """Bytes that may still be taken: of the device, the system, the control group, the process's address space."""
    if device.startswith("cuda"):
        import torch

        return float(torch.cuda.mem_get_info(torch.device(device))[0])
    limits = [float(text) for path in CGROUP_LIMITS if (text := _read(path).strip()).isdigit()]
    limits += [1024 * float(line.split()[1]) for line in _read(MEMINFO).splitlines() if line.startswith("MemAvailable:")]
    addresses = resource.getrlimit(resource.RLIMIT_AS)[0]
    if addresses != resource.RLIM_INFINITY:
        in_use = _read("/proc/self/statm").split() or ["0"]
        limits.append(max(0.0, addresses - float(in_use[0]) * resource.getpagesize()))
    return min(limits, default=UNKNOWN_MEMORY)


@functools.cache
def threads() -> int:
    """Those that PyTorch computes with, as it was when this was first asked: a pool whose threads take one each makes one
    the number that every later thread of the process sees.
    """
    import torch

    return torch.get_num_threads()


def use_all_threads() -> None:
    """Let PyTorch compute with all of them in this thread, whatever a pool made of the number."""
    import torch

    torch.set_num_threads(threads())


def cache_bytes() -> float:
    """Of the largest cache of a core, as Linux tells it: `307200K`."""
    sizes = [_read(str(path)).strip() for path in Path(CACHES).glob("index*/size")]
    return max([1024.0 * int(size[:-1]) for size in sizes if size[:-1].isdigit() and size[-1] == "K"], default=UNKNOWN_CACHE)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def user_cache() -> Path:
    """Where things of this user and machine are kept that can be made again.

    Raises:
        RuntimeError: a user without a home.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prefill-score"


class Stopwatch:
    """Seconds since it was made, and how many of the process's threads were at work meanwhile, on average."""

    def __init__(self) -> None:
        self._began, self._work = time.perf_counter(), time.process_time()

    @property
    def sec(self) -> float:
        return time.perf_counter() - self._began

    @property
    def work_sec(self) -> float:
        """Of the processor, summed over its cores."""
        return time.process_time() - self._work


def process_sec() -> float:
    """Seconds since this process began, as Linux tells; 0 where nothing does."""
    try:
        began = int(_read("/proc/self/stat").rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    except (AttributeError, IndexError, OSError, ValueError):
        return 0.0


def resident_bytes() -> int:
    """Memory that this process holds now, as Linux tells; the most that it held elsewhere."""
    pages = _read("/proc/self/statm").split()
    if len(pages) > 1:
        return int(pages[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def built(source: Path) -> ctypes.CDLL | None:
    """The library of a C++ source, built by this machine's compiler (CXX, else g++) at first use and kept in the user's
    cache folder. None, with a warning, where it cannot be built.
    """
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    try:
        return ctypes.CDLL(str(library_path(source, compiler)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: a user without a home
        said = getattr(error, "stderr", None) or str(error)
        log.warning(
            "no %s is compiled, which makes the run slower: %s: %s", source.name, compiler[0], first_line(ValueError(said))
        )
        return None


def library_path(source: Path, compiler: list[str]) -> Path:
    """The library's path; it is built where the cache has none of this source, PyTorch, compiler and processor."""
    import torch

    torch_libraries = Path(torch.__file__).parent / "lib"
    processor = [line for line in _read("/proc/cpuinfo").splitlines() if line.startswith(("flags", "model name"))][:2]
    made_of = (source.read_text(), torch.__version__, str(torch_libraries), *compiler, *FLAGS, *processor)
    digest = hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:16]
    folder = user_cache()
    library = folder / f"{source.stem}-{digest}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:  # complete before it has its name: others may build too
            fresh = Path(scratch) / library.name
            link = (f"-L{torch_libraries}", "-ltorch_cpu", f"-Wl,-rpath,{torch_libraries}")
            command = [*compiler, *FLAGS, str(source), "-o", str(fresh), *link]
            _compile(command)
            fresh.replace(library)
    return library


def _compile(command: list[str]) -> None:
    """Run a compiler; nothing of it outlives this call, nor end_children."""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, process_group=0
    ) as process:
        _compilers.add(process)
        try:
            _, said = process.communicate(timeout=COMPILE_WITHIN_SEC)
        finally:
            _end(process)
            _compilers.discard(process)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, stderr=said)


def end_children() -> None:
    """End the compilers that run, before the process ends without waiting for them."""
    for process in tuple(_compilers):
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(OSError):  # the whole group: a compiler starts others
        os.killpg(process.pid, signal.SIGKILL)


def shortened() -> tuple[str, int]:
    """The mapped file that lost bytes, in words, and the exit code of whoever must act. Of use after SIGBUS alone."""
    for path, (size, kind) in tuple(MAPPED.items()):
        try:
            found = path.stat().st_size
        except OSError:
            found = -1
        if found < size:
            return f"{path}: the file became shorter while the run was using it; start the run again", kind.exit_code
    return "a memory-mapped file became shorter, or the memory is faulty", 128 + signal.SIGBUS
