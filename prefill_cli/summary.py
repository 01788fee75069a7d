"""What a run did: totals over the shards, and the manifest that keeps them with everything that led to them."""

from collections import Counter
from typing import Any

from prefill_cli.data import manifest
from prefill_cli.data.staging import Receipt
from prefill_cli.encoding.loading import ModelFolder
from prefill_cli.errors import PrefillScoreError
from prefill_cli.job import Job

SUMMED = (  # over the shards
    "rows", "rows_out", "rejects", "tokens", "computed_tokens", "truncated_rows", "control_token_rows", "retried_rows",
    "cached_rows", "empty_lists", "unknown_ids", "batches", "part_rows", "start_sec", "read_sec", "cache_sec", "encode_sec",
    "search_sec", "write_sec",
)  # fmt: skip

OF_A_WORKER = ("rows", "tokens", "computed_tokens", "start_sec", "read_sec", "encode_sec", "search_sec", "write_sec")


def totals_of(job: Job, receipts: list[Receipt], wall_sec: float) -> dict[str, Any]:
    """The summary: sums over the shards, whichever run did them."""
    reasons: Counter[str] = sum((Counter(receipt["reasons"]) for receipt in receipts), Counter())
    sums = {name: sum(receipt.get(name, 0) for receipt in receipts) for name in SUMMED}  # an older version told less
    rows = sum(shard.rows for shard in job.own_shards)
    if sums["rows"] != rows or sums["rows"] != sums["rows_out"] + sums["rejects"]:
        raise PrefillScoreError(f"rows are unaccounted for: {rows} in, {sums['rows_out']} out, {sums['rejects']} rejected")
    return {
        "status": "done",
        "output": str(job.staging.out),
        **sums,
        "reject_reasons": dict(reasons.most_common()),
        "unknown_ids": sums["unknown_ids"] + (job.scoring.unknown_ids if job.scoring else 0),
        "dropped_items": job.scoring.items.dropped if job.scoring else 0,
        "shards": len(receipts),
        "wall_sec": wall_sec,
        "tokens_per_sec": sums["tokens"] / sums["encode_sec"] if sums["encode_sec"] else 0.0,
        "peak_rss_bytes": max([manifest.peak_rss_bytes(), *(receipt.get("peak_rss_bytes", 0) for receipt in receipts)]),
        "encoder": ", ".join(sorted({receipt.get("encoder", "plain") for receipt in receipts if receipt["batches"]}))
        or ("cached" if sums["cached_rows"] else job.encoder),
        "max_batch_tokens": receipts[0].get("max_batch_tokens", job.max_batch_tokens) if receipts else job.max_batch_tokens,
        "device": job.device,
        "dtype": job.dtype,
    }


def manifest_of(
    job: Job,
    fingerprint: manifest.Fingerprint,
    receipts: list[Receipt],
    totals: dict[str, Any],
    expectation: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """receipts: of all shards, in order. expectation: what a plan said of this run."""
    folder = job.folder
    lengths: Counter[int] = Counter()
    for receipt in receipts:
        lengths.update({int(bound): rows for bound, rows in receipt.get("lengths", {}).items()})
    return {
        "made_by": "prefill-score",
        "format_version": manifest.FORMAT_VERSION,
        "options": job.config.as_dict(),
        "fingerprint": fingerprint,
        "versions": manifest.versions() | job.backend_version,
        "inputs": manifest.describe_inputs(job.plan),
        "model": {
            **(_model(folder, job.config.revision) if folder else {"name": None, "hidden_size": job.user_width}),
            **job.choices,
            "max_batch_tokens": totals["max_batch_tokens"],
        },
        "tokens": {
            "max_length": job.tokenize.limit,
            "before": job.tokenize.specials[0],
            "after": job.tokenize.specials[1],
        },
        "items": _items(job),
        "environment": manifest.environment(),
        "totals": totals,
        "lengths": {str(bound): lengths[bound] for bound in sorted(lengths)},
        "shards": {name: [receipt.get(name, 0) for receipt in receipts] for name in (*SUMMED, "threads")},
        **_workers(receipts),
        **({"expected": expectation | {"error": totals["wall_sec"] / expectation["wall_sec"] - 1}} if expectation else {}),
    }


def _workers(receipts: list[Receipt]) -> dict[str, Any]:
    """What each of several workers did, in the order of their first shards."""
    found: dict[str, dict[str, Any]] = {}
    for receipt in (receipt for receipt in receipts if receipt.get("worker")):
        nothing = {"worker": receipt["worker"], "shards": 0, **dict.fromkeys(OF_A_WORKER, 0)}
        row = found.setdefault(receipt["worker"], nothing)
        row["shards"] += 1
        row |= {name: row[name] + receipt[name] for name in OF_A_WORKER}
        row["peak_rss_bytes"] = max(row.get("peak_rss_bytes", 0), receipt["peak_rss_bytes"])
    return {"workers": list(found.values())} if found else {}


def _items(job: Job) -> dict[str, Any] | None:
    if job.scoring is None:
        return None
    items = job.scoring.items
    return {"path": str(job.config.items), "items": len(items), "width": items.width, "sha256": items.sha256}


def _model(folder: ModelFolder, revision: str | None) -> dict[str, Any]:
    return {
        "name": folder.name,
        "revision": revision,
        "architecture": type(folder.config).__name__,
        "hidden_size": folder.hidden_size,
        "pooling": folder.pooling,
        "weights_sha256": folder.weights_sha256,
    }
