"""attention.cpp: built with the machine's own compiler at first use, kept in the user's cache folder, called by ctypes."""

import ctypes
import hashlib
import logging
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from prefill_cli.errors import first_line

log = logging.getLogger(__name__)
SOURCE = Path(__file__).with_name("attention.cpp")
FLAGS = ("-std=c++20", "-O3", "-march=native", "-shared", "-fPIC")
POINTER, NUMBER = ctypes.c_void_p, ctypes.c_int64
Kernel = Callable[..., None]


def load_kernel() -> Kernel | None:
    """`attend` of attention.cpp, or None where this machine has no use for it or no compiler (CXX, else g++)."""
    if not torch.cpu._is_amx_tile_supported():
        return None
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    try:
        library = ctypes.CDLL(str(_built(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        log.warning("attention is not compiled, which makes it slower: %s: %s", compiler[0], first_line(ValueError(said)))
        return None
    attend: Kernel = library.attend
    attend.restype = None  # type: ignore[attr-defined]
    attend.argtypes = [*[POINTER] * 4, *[NUMBER] * 3, POINTER, *[NUMBER] * 4, ctypes.c_float, *[NUMBER] * 2]  # type: ignore[attr-defined]
    return attend


def _built(compiler: list[str]) -> Path:
    """The library's path; it is built where the cache has none of this source, PyTorch, compiler and processor."""
    torch_libraries = Path(torch.__file__).parent / "lib"
    processor = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "model name"))
    ][:2]
    made_of = (SOURCE.read_text(), torch.__version__, str(torch_libraries), *compiler, *FLAGS, *processor)
    digest = hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prefill-score"
    library = folder / f"attention-{digest}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:  # complete before it has its name: others may build too
            fresh = Path(scratch) / library.name
            link = (f"-L{torch_libraries}", "-ltorch_cpu", f"-Wl,-rpath,{torch_libraries}")
            command = [*compiler, *FLAGS, str(SOURCE), "-o", str(fresh), *link]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
            fresh.replace(library)
    return library
