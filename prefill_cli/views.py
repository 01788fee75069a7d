"""What the commands found, as a person wants to see it on a terminal; one JSON object elsewhere."""

import json
import sys
from typing import Any

from prefill_cli.console import CONTROL, give, on_terminal

BAR_COLUMNS, BARS_FROM_COLUMNS = 10, 60  # how long a full bar is, and how wide a terminal must be for any
SUMMARY = (  # what a person wants to see first, and how
    ("status", "{}"), ("output", "{}"), ("rows", "{:,}"), ("rows_out", "{:,}"), ("rejects", "{:,}"), ("tokens", "{:,}"),
    ("truncated_rows", "{:,}"), ("control_token_rows", "{:,}"), ("empty_lists", "{:,}"), ("unknown_ids", "{:,}"),
    ("cached_rows", "{:,}"), ("shards", "{:,}"), ("slice", "{}"), ("missing_shards", "{:,}"), ("batches", "{:,}"),
    ("encoder", "{}"), ("start_sec", "{:.2f}"), ("encode_sec", "{:.2f}"), ("search_sec", "{:.2f}"), ("wall_sec", "{:.2f}"),
    ("tokens_per_sec", "{:,.0f}"), ("device", "{}"), ("dtype", "{}"),
)  # fmt: skip
ALWAYS_SHOWN = {"status", "output", "rows", "rows_out", "rejects", "tokens", "device", "dtype"}


def print_summary(totals: dict[str, Any], as_json: bool) -> None:
    """The end of a run on stdout: a table on a terminal, one JSON object otherwise."""
    if as_json or not on_terminal(sys.stdout):
        give(json.dumps(totals, ensure_ascii=False))
        return
    shown = {name: form.format(totals[name]) for name, form in SUMMARY if totals.get(name) or name in ALWAYS_SHOWN}
    if totals["rejects"]:
        shown["rejects"] += f" ({', '.join(f'{count:,} {reason}' for reason, count in totals['reject_reasons'].items())})"
    print_table(list(shown.items()))


def print_table(rows: list[tuple[str, str]]) -> None:
    """Names and values, aligned."""
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value, end_section=False)
    rich_console().print(table)


def rich_console() -> Any:
    """Rich on stdout, without guesses at colours and markup, and with a broken pipe left to whoever called."""
    from rich.console import Console

    class Stdout(Console):
        def on_broken_pipe(self) -> None:
            raise  # noqa: PLE0704  (called where the BrokenPipeError is being handled)

    return Stdout(highlight=False, markup=False)


def print_lists(users: list[dict[str, Any]], as_json: bool) -> None:
    """What `show` found: a user's history and list. On a terminal that has room, with bars.

    A bar says where a score stands between the list's last one (empty) and its best (full), whatever their signs.
    """
    if as_json:
        give(json.dumps(users, ensure_ascii=False, default=str))
        return
    from rich.table import Table

    out = rich_console()
    bars = on_terminal(sys.stdout) and out.width >= BARS_FROM_COLUMNS
    for user in users:
        out.print(f"{user['id_column']} {user['id']}", style="bold")
        if user["history"] is not None:
            seen = ", ".join(user["history"][-8:]) or "nothing"
            more = len(user["history"]) - 8
            out.print(CONTROL.sub(" ", f"history: {f'… {more} earlier, ' if more > 0 else ''}{seen}"))
        table = Table(box=None, pad_edge=False)
        table.add_column("rank", justify="right", style="dim" if bars else None)
        table.add_column("score", justify="right")
        if bars:
            table.add_column(style="cyan", no_wrap=True)
        columns = list(user["items"][0])[2:] if user["items"] else []
        for name in columns:
            table.add_column(name, overflow="fold")
        for item in user["items"]:
            texts = (CONTROL.sub(" ", "" if item[name] is None else str(item[name])) for name in columns)
            span = user["items"][0]["score"] - user["least_score"]
            full = (item["score"] - user["least_score"]) / span if span else 1.0
            drawn = (bar(full, out.options.ascii_only),) if bars else ()
            table.add_row(str(item["rank"]), f"{item['score']:.4f}", *drawn, *texts)
        out.print(table if user["items"] else "an empty list")
        out.print()


def bar(full: float, ascii_only: bool) -> str:
    """A bar, from empty at 0 to BAR_COLUMNS at 1; in eighths of a column where there are characters for them."""
    if ascii_only:
        return "#" * round(full * BAR_COLUMNS)
    whole, eighths = divmod(round(full * BAR_COLUMNS * 8), 8)
    return "█" * whole + " ▏▎▍▌▋▊▉"[eighths].strip()


def print_report(written: dict[str, Any], as_json: bool) -> None:
    """Where `report` wrote its page."""
    if as_json or not on_terminal(sys.stdout):
        give(json.dumps(written, ensure_ascii=False))
        return
    print_table([("report", written["report"]), ("size", f"{written['bytes'] / 1e3:,.0f} kB")])


def print_findings(findings: list[Any], as_json: bool) -> None:
    """What `inspect` found: facts and the problem, path by path."""
    if as_json:
        give(json.dumps([vars(f) for f in findings], ensure_ascii=False, default=str))
        return
    for finding in findings:
        problem = [("problem", finding.problem)] if finding.problem else []
        print_table([(str(finding.path), finding.kind), *((k, str(v)) for k, v in finding.facts.items()), *problem])
        give("")


def print_cache(described: dict[str, Any], pruned: dict[str, Any] | None, as_json: bool) -> None:
    """What `cache` found and did: a table for each way of making vectors."""
    if as_json:
        give(json.dumps(described | {"pruned": pruned}, ensure_ascii=False))
        return
    if pruned:
        give(f"pruned: {pruned['vectors_before']:,} vectors before, {pruned['vectors']:,} now\n")
    print_table(
        [
            ("cache", described["cache"]),
            ("vectors", f"{described['vectors']:,}"),
            ("size", f"{described['bytes'] / 1e6:,.1f} MB, {described['free_bytes'] / 1e9:,.1f} GB are free"),
        ]
    )
    for space in described["spaces"]:
        rate, days, segments = space["hit_rate"], space["days_since_use"], space["segments"]
        made_by = (f"{name} {_short(value)}" for name, value in space["made_by"].items() if value)
        rows = [
            ("\nspace", f"\n{space['space']}"),
            ("made by", ", ".join(made_by)),
            ("vectors", f"{space['vectors']:,}, {space['width']} wide, in {segments:,} segment{'s' * (segments != 1)}"),
            ("size", f"{space['bytes'] / 1e6:,.1f} MB"),
            (
                "hit rate",
                "no run has used it since it was made or pruned" if rate is None else f"{rate:.1%} in the last runs",
            ),
        ]
        if days:
            span = f"{days['least']:,.1f} to {days['most']:,.1f} days ago"
            rows.append(("last used", f"{span}, half of them within {days['median']:,.1f}"))
        rows += [("left out", f"{name}: {why}") for name, why in space["left_out"].items()]
        if space["torn_files"]:
            rows.append(("torn files", f"{space['torn_files']:,}; --prune removes them"))
        print_table(rows)


def _short(value: Any) -> str:
    """A digest as its beginning, anything else as it is."""
    text = str(value)
    return text[:12] if len(text) == 64 else text


def print_plan(told: dict[str, Any], as_json: bool) -> None:
    """What `plan` found: a table and a histogram on a terminal, one JSON object otherwise."""
    if as_json or not on_terminal(sys.stdout):
        give(json.dumps(told, ensure_ascii=False))
        return
    print_table([(name.replace("_", " "), text) for name, text in _plan_rows(told).items() if text])
    if told.get("tokens"):
        give("\ntokens of a prompt")
        print_bars({f"to {int(bound):,}": rows for bound, rows in told["lengths"]["histogram"].items()})


def _plan_rows(told: dict[str, Any]) -> dict[str, str]:
    rows, files = told["rows"], told["files"]
    state = {"resume": f"resume: {told.get('done_shards', 0):,} of {told['shards']:,} shards are done"}
    first = {
        "status": " ".join(filter(None, (state.get(told["status"], told["status"]), told.get("why")))),
        "output": told["output"] or "",
        "rows": f"{rows:,} in {files:,} file{'s' * (files != 1)}, {told['shards']:,} shard{'s' * (told['shards'] != 1)}",
    }
    if "tokens" not in told:
        return first
    sampled, error = told["sampled_rows"], told["sampling_error"]
    within = "" if error is None else f", tokens within {error:.1%}"
    quantiles, reasons = told["lengths"]["quantiles"], told["reject_reasons"]
    memory, bytes_of, cut = told["memory"], told["memory"]["parts"], told["truncated_rows"]
    return first | {
        "read": "all rows" if sampled == rows else f"a sample of {sampled:,} rows; counts are for all{within}",
        "rejects": f"{told['rejects']:,}" + "".join(f", {count:,} {reason}" for reason, count in reasons.items()),
        "tokens": f"{told['tokens']:,}, {told['lengths']['mean']:,.0f} a prompt",
        "quantiles": ", ".join(f"{float(q):.0%} {length:,}" for q, length in quantiles.items()),
        "truncated rows": f"{cut:,} ({cut / rows:.1%}), of more than {told['max_length']:,} tokens" if cut else "",
        "control token rows": f"{told['control_token_rows']:,}" if told["control_token_rows"] else "",
        "copies": f"{told['copies']:,} rows are as one before, {told['copies_in_shards']:,} in the same shard",
        "saved": f"{told['copied_tokens']:,} tokens of copies, {told['prefix_tokens_saved']:,} of shared prefixes",
        "cached rows": f"{told['cached_rows']:,}" if told["cached_rows"] else "",
        "to compute": f"{told['tokens_to_compute']:,} tokens, {told['computed_tokens']:,} with what fills batches up",
        "batches": f"{told['batches']:,} of at most {told['max_batch_tokens']:,} tokens, {told['encoder']}"
        f"{', compiled' if told['compiled'] else ''}",
        "on": f"{told['device']}, {told['dtype']}",
        "memory": f"{memory['bytes'] / 1e9:.2f} GB"
        + (f" and {memory['device_bytes'] / 1e9:.2f} GB of the device" if memory["device_bytes"] else "")
        + f" ({', '.join(f'{name} {size / 1e9:.2f}' for name, size in bytes_of.items())})".replace("_", " "),
        **_expected_rows(told["expected"]),
    }


def _expected_rows(expected: dict[str, Any] | None) -> dict[str, str]:
    if expected is None:
        return {"expected time": "not probed"}
    stages = ", ".join(
        f"{name} {expected[f'{name}_sec']:,.1f}" for name in ("plan", "start", "read", "encode", "search", "write")
    )
    probe = expected["probe"]
    spread = "" if probe["spread"] is None else f", which differ by {probe['spread']:.0%} from their like"
    return {
        "expected time": f"{expected['wall_sec']:,.1f} s ({stages})",
        "probe": f"{probe['sec']:.1f} s, {probe['batches']:,} batches{spread}",
    }


SMALL_SHARD_ROWS = 256  # shards of fewer rows tell too slow a pace: of 32 rows 1.31 times what 250 took (docs/scale.md)
SCALE_COLUMNS = ("prompts", "workers", "shards", "hours", "95 %", "busy", "idle", "cost", "requests", "advised")


def print_scale(told: dict[str, Any], as_json: bool) -> None:
    """What `plan --nodes` found: a table, what it stands on and what follows, on a terminal; one JSON object otherwise."""
    if as_json or not on_terminal(sys.stdout):
        give(json.dumps(told, ensure_ascii=False))
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in SCALE_COLUMNS:
        table.add_column(name, justify="right")
    for row in told["forecasts"]:
        off = max(1 - row["hours_low"] / row["hours"], row["hours_high"] / row["hours"] - 1)
        table.add_row(
            _spelled(row["prompts"]), f"{row['workers']:,}", _spelled(row["shards"]), _short_number(row["hours"]),
            f"±{off:.1%}", f"{row['efficiency']:.0%}", f"{row['idle']:.0%}", _short_number(row["cost"]),
            _spelled(row["requests"]["total"]), f"{row['advised_shard_rows']:,}",
        )  # fmt: skip
    rich_console().print(table)
    worker = told["worker"]
    give(f"\na worker: {worker['device']}, {worker['dtype']}, {worker['threads']} threads, as in {worker['as']}")
    figures = told["figures"].items()
    print_table([(name.replace("_", " "), f"{_short_number(f['value'])}, {f['from']}") for name, f in figures])
    if notes := _scale_notes(told):
        give("\n" + "\n".join(notes))


def _scale_notes(told: dict[str, Any]) -> list[str]:
    """What somebody should know who plans with these figures."""
    notes, size = [], told["shard_rows"]
    if (measured := told["worker"]["shard_rows"]) < min(SMALL_SHARD_ROWS, size / 2):
        notes.append(
            f"measured in shards of {measured} rows: larger ones share more and fill batches better, so this is too slow; "
            "measure with the --shard-rows that the run will have"
        )
    for row in told["forecasts"]:
        where = f"{_spelled(row['prompts'])} prompts on {row['workers']:,} workers"
        if (advised := row["advised_shard_rows"]) != size:
            tried = {found["shard_rows"]: found for found in row["shard_sizes"]}
            was, now = tried[size], tried[advised]
            notes.append(
                f"{where}: --shard-rows {advised} takes {_short_number(now['hours'])} h for {_short_number(was['hours'])} h "
                f"with {size}; workers are idle at the end {now['idle']:.0%} of their time for {was['idle']:.0%}"
            )
        if row["given_up_shards"] > 0:
            notes.append(f"{where}: {row['given_up_shards']:.2g} shards would be given up after three deaths each")
    if (times := max(row["times_read"] for row in told["forecasts"])) > 1.5:
        notes.append(f"each row is decoded up to {times:.1f} times: write the input in row groups no larger than a shard")
    return notes


def _spelled(count: int) -> str:
    """A count as --prompts takes it, rounded to three digits."""
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= unit:
            return f"{_short_number(count / unit)}{letter}"
    return str(count)


def _short_number(value: float | None) -> str:
    """Three digits that count."""
    if value is None:
        return "none"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def print_bars(counts: dict[str, int]) -> None:
    """A histogram, as wide as the terminal; plain characters where it has no others."""
    out = rich_console()
    block = "█" if (out.encoding or "").lower().startswith("utf") else "#"
    label = max(map(len, counts), default=0)
    number = max((len(f"{count:,}") for count in counts.values()), default=0)
    room = max(8, out.width - label - number - 4)
    most = max(counts.values(), default=0) or 1
    for name, count in counts.items():
        bar = block * (-(-count * room // most) if count else 0)
        give(f"{name:>{label}}  {count:>{number},}  {bar}")


def print_bench(measured: dict[str, Any], as_json: bool) -> None:
    """A table on a terminal, then one JSON line."""
    if on_terminal(sys.stdout) and not as_json:
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        table.add_column("")
        for name in ("seconds", "tokens/s", "cells per token", "takes"):
            table.add_column(name, justify="right")
        for name, way in measured["ways"].items():
            padding = "" if way["padding"] is None else f"{way['padding']:.2f}"
            table.add_row(name, f"{way['sec']:.3f}", f"{way['tokens_per_sec']:,}", padding, f"{way['ratio']:.2f}x")
        decoding = measured["decoding"]
        table.add_row(f"generating {decoding['ids']} ids", "", "", "", f"{decoding['ratio']:,.0f}x")
        rich_console().print(table)
        _print_search(measured["search"])
        stages = (f"{name.replace('_', ' ')} {sec:,.2f} s" for name, sec in measured["stages"].items())
        facts = {
            "prompts": f"{measured['rows']:,} of {measured['tokens']:,} tokens",
            "encoder": f"{measured['encoder']}{', compiled' if measured['compiled'] else ''}",
            "on": f"{measured['device']}, {measured['dtype']}, {measured['threads']} threads",
            "stages": ", ".join(stages),
            "unique tokens": f"{measured['unique_tokens']:.0%}",
            "products' rate": f"{measured['mfu']:.0%} of {measured['product_flops_per_sec'] / 1e12:.2f} TFLOP/s",
            "peak memory": f"{measured['peak_rss_bytes'] / 1e6:,.0f} MB",
        }
        print_table(list(facts.items()))
    give(json.dumps(measured, ensure_ascii=False))


def print_search(searched: dict[str, Any], as_json: bool) -> None:
    """A table on a terminal, then one JSON line."""
    if on_terminal(sys.stdout) and not as_json:
        _print_search(searched)
    give(json.dumps(searched, ensure_ascii=False))


def _print_search(searched: dict[str, Any]) -> None:
    from rich.table import Table

    sizes = f"{searched['items']:,} items, {searched['width']} wide, for {searched['queries']:,} queries"
    give(f"\nTop {searched['k']} of {sizes}\n")
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in ("seconds", "queries/s", "same items", "takes"):
        table.add_column(name, justify="right")
    for name, way in searched["ways"].items():
        table.add_row(name, f"{way['sec']:.3f}", f"{way['queries_per_sec']:,}", f"{way['same']:.2%}", f"{way['ratio']:.2f}x")
    rich_console().print(table)
    give("")


def print_verified(found: dict[str, Any], as_json: bool) -> None:
    """What `verify` found: a table on a terminal, one JSON object otherwise."""
    if as_json or not on_terminal(sys.stdout):
        give(json.dumps(found, ensure_ascii=False))
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("tokens", "1 - cosine", "largest difference"):
        table.add_column(name, justify="right")
    for prompt in found["prompts"]:
        table.add_row(f"{prompt['tokens']:,}", f"{1 - prompt['cosine']:.1e}", f"{prompt['largest_difference']:.1e}")
    rich_console().print(table)
    print_table(
        [(name, str(found[name])) for name in ("status", "why", "model_type", "device", "dtype", "tolerance") if found[name]]
    )


def print_evaluated(found: dict[str, Any], as_json: bool) -> None:
    """What `evaluate` found: tables on a terminal, one JSON object otherwise."""
    if as_json or not on_terminal(sys.stdout):
        give(json.dumps(found, ensure_ascii=False, default=str))
        return
    truth, against = found["truth"], found["against"]
    facts = {
        "output": found["output"],
        "lists": f"{found['lists']:,} ({found['empty_lists']:,} empty) of {found['items']:,} items",
    }
    if truth:
        counts = ("without_list", "without_truth", "not_in_run", "unknown")
        left = [f"{truth[name]:,} {name.replace('_', ' ')}" for name in counts if truth[name]]
        facts["truth"] = f"{truth['column']} in {truth['source']}: " + ", ".join([f"{truth['users']:,} users", *left])
    print_table(list(facts.items()))
    _print_figures("", found)
    for segment in found["segments"] or ():
        users = "" if segment["users"] is None else f", {segment['users']:,} users"
        _print_figures(f"{found['by']} {segment['value']}{users}", segment)
    if against:
        _print_against(against)


def _print_figures(title: str, found: dict[str, Any]) -> None:
    """Metrics with half the width of their intervals, then the catalogue's figures; the baseline's stand below each."""
    from rich.table import Table

    ways = [("", found)] + ([("baseline", found["popularity_baseline"])] if found["popularity_baseline"] else [])
    for kind in ("metrics", "catalogue"):
        if not found[kind]:
            continue
        table = Table(box=None, pad_edge=False)
        table.add_column(title, no_wrap=True)
        for k in next(iter(found[kind].values())):
            table.add_column(f"@{k}", justify="right")
        for name in found[kind]:
            for way, figures in ways:
                if figures[kind]:
                    shown = figures[kind][name].values()
                    table.add_row(name.replace("_", " ") if not way else f"  {way}", *map(_figure, shown))
        give("")
        rich_console().print(table)


def _figure(value: Any) -> str:
    if value is None:
        return "-"
    if not isinstance(value, dict):
        return f"{value:.4f}"
    half = f" ±{(value['high'] - value['low']) / 2:.4f}" if "low" in value else ""
    return f"{value['mean']:.4f}{half}"


def _print_against(against: dict[str, Any]) -> None:
    from rich.table import Table

    give("")
    only = f"{against['only_in_output']:,} only in the first, {against['only_in_other']:,} only in the other"
    rows = [("against", against["other"]), ("users", f"{against['users']:,} in both, {only}")]
    if against["users"]:
        rows += [("unchanged", f"{against['unchanged']:.2%}"), (f"rbo, p = {against['rbo_p']}", f"{against['rbo']:.4f}")]
    print_table(rows)
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for k in against["overlap"]:
        table.add_column(f"@{k}", justify="right")
    for name in ("overlap", "jaccard"):
        table.add_row(name, *map(_figure, against[name].values()))
    for name, values in (against["difference"] or {}).items():
        table.add_row(f"{name.replace('_', ' ')}, change", *map(_figure, values.values()))
    give("")
    rich_console().print(table)
