"""How long a plan said that a run will take, kept until the run can say how wrong that was.

A small file in the user's cache folder, named by a digest of the run's fingerprint and of what decides its pace. Nothing
depends on it: one that is absent, damaged or cannot be written is as good as none.
"""

import json
import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prefill_cli.data.disk import read_json, write_json
from prefill_cli.data.manifest import Fingerprint, digest
from prefill_cli.errors import OutputError
from prefill_cli.machine import user_cache

log = logging.getLogger(__name__)
FOLDER = "expected"
MOST_FILES = 200
FIGURES = ("wall_sec", "encode_sec")


def keep(fingerprint: Fingerprint, pace: dict[str, Any], seconds: dict[str, float]) -> None:
    """Leave `seconds` (of FIGURES) for the run of that fingerprint, and drop the oldest such files beyond MOST_FILES."""
    made_at = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        path = _path(fingerprint, pace)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {name: seconds[name] for name in FIGURES} | {"made_at": made_at})
        by_age = sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
        for old in by_age[:-MOST_FILES]:
            old.unlink(missing_ok=True)
    except (OSError, RuntimeError, OutputError) as error:
        log.debug("the expected time is not kept: %s", error)


def find(fingerprint: Fingerprint, pace: dict[str, Any]) -> dict[str, Any] | None:
    """What was kept: FIGURES and `made_at`; None where nothing of use is there."""
    try:
        found = read_json(_path(fingerprint, pace))
    except (OSError, RuntimeError) as error:
        log.debug("no expected time is looked for: %s", error)
        return None
    if found is None or found.keys() != {*FIGURES, "made_at"}:
        return None
    fit = all(isinstance(found[name], int | float) and 0 <= found[name] < 1e12 for name in FIGURES)
    return found if fit and found["wall_sec"] else None


def _path(fingerprint: Fingerprint, pace: dict[str, Any]) -> Path:
    name = digest(json.dumps([fingerprint, pace], sort_keys=True).encode())[:32]
    return user_cache() / FOLDER / f"{name}.json"
