"""What ran and what it gave: the manifest of a result, the fingerprint that says whether two runs are one.

The fingerprint is a flat mapping from names that users know to values; two runs whose fingerprints are equal give equal
results, and where they differ the names tell why.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import resource
import socket
import sys
from pathlib import Path
from typing import Any, TypeGuard

from prefill_cli import __version__
from prefill_cli.data.disk import read_json
from prefill_cli.data.inputs import InputPlan

FORMAT_VERSION = 1
MANIFEST, SUCCESS = "_manifest.json", "_SUCCESS"
FILE_KEY = "prefill-score-manifest"  # of a result that is one file: the same JSON, in its metadata
PACKAGES = ("torch", "transformers", "tokenizers", "pyarrow", "numpy")

Fingerprint = dict[str, Any]


def input_fingerprint(plan: InputPlan) -> str:
    """Digest of which files the input is, and of what they were when it was planned."""
    return digest(json.dumps([f.identity for f in plan.files], sort_keys=True).encode())


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def differences(old: Fingerprint, new: Fingerprint) -> str:
    """'top_k (10, now 5), inputs': the names whose values differ; digests are named without their values."""
    names = []
    for name in sorted(old.keys() | new.keys()):
        a, b = old.get(name), new.get(name)
        if a != b:
            digest = name.endswith("_sha256")
            names.append(name.removesuffix("_sha256") if digest else f"{name} ({_show(a)}, now {_show(b)})")
    return ", ".join(names)


def _show(value: Any) -> str:
    return "none" if value in (None, "", []) else str(value)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder that a run of ours made, or None."""
    manifest = read_json(folder / MANIFEST)
    return manifest if is_manifest(manifest) else None


def is_manifest(found: dict[str, Any] | None) -> TypeGuard[dict[str, Any]]:
    """Whether a JSON object is the manifest of a run of ours."""
    wanted = {"options", "fingerprint", "inputs", "model", "items", "totals"}
    return found is not None and found.keys() >= wanted and found.get("made_by") == "prefill-score"


def damage(folder: Path, manifest: dict[str, Any]) -> str:
    """What a published folder lacks of what its manifest says, '' where it is whole."""
    if not (folder / SUCCESS).exists():
        return f"there is no {SUCCESS} in it"
    for name, size in manifest.get("parts", {}).items():
        try:
            found = (folder / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if found != size:
            return f"{name} has {found} bytes, but {size} were written"
    return ""


def is_finished(folder: Path) -> bool:
    """Whether a folder is a whole result of ours."""
    manifest = read_manifest(folder)
    return manifest is not None and not damage(folder, manifest)


def describe_inputs(plan: InputPlan) -> dict[str, Any]:
    """Which files were read, for the manifest."""
    return {"rows": plan.rows, "files": [f.identity for f in plan.files]}


def versions() -> dict[str, str]:
    found = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {"prefill-score": __version__, "python": platform.python_version(), **found}


def peak_rss_bytes() -> int:
    """The most memory that this process held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def environment() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "command": sys.argv,
    }
