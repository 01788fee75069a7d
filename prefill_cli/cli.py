"""The commands: options → RunConfig → the job. Only this file and signals.py exit."""

import contextlib
import io
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from typer.core import TyperCommand, TyperGroup

from prefill_cli import __version__, console, metrics, options, signals, views
from prefill_cli.config import option, resolve, seconds, size_bytes
from prefill_cli.errors import Interrupted, ModelError, PrefillScoreError, UsageError
from prefill_cli.options import CONFIG_FILE, DEFAULTS, takes
from prefill_cli.places import place

ClickError: type[Any] = typer.BadParameter.__mro__[2]  # ClickException: click's own or Typer's copy of it, by version


class OneLineUsageErrors(TyperGroup):
    """A mistake on the command line is told in one line and a hint, as every other error is."""

    def main(self, *args: Any, **options: Any) -> Any:
        try:
            code = super().main(*args, **(options | {"standalone_mode": False}))
        except ClickError as error:
            context = getattr(error, "ctx", None)
            command = context.command_path if context else "prefill-score"
            console.print_error(f"{error.format_message().rstrip('.')}; see {command} --help")
            code = error.exit_code
        sys.exit(code or 0)


class SectionedHelp(TyperCommand):
    """Plain help with the options under the headings of their panels: Rich's frames would cost 0.1 s of start-up."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            kind = "Arguments" if param.param_type_name == "argument" else "Options"
            if record := param.get_help_record(ctx):
                # A default that is told in words comes in parentheses of its own.
                text = re.sub(r"\[default: \((.*)\)\]", r"[default: \1]", record[1])
                sections.setdefault(getattr(param, "rich_help_panel", None) or kind, []).append((record[0], text))
        for title in sorted(sections, key=lambda title: title == "Options"):  # what concerns the command itself comes last
            with formatter.section(title):
                formatter.write_dl(sections[title])


app = typer.Typer(
    cls=OneLineUsageErrors,
    rich_markup_mode=None,
    help="User prompts in Parquet → one prefill pass of a causal LM → the exact top-k items in Parquet.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
Text: TypeAlias = str | None
Number: TypeAlias = int | None
File: TypeAlias = Path | None
Switch: TypeAlias = bool | None
INPUTS = Annotated[list[str], typer.Argument(metavar="INPUT", help="Parquet files, folders or globs.")]
INPUTS_OR_NONE = Annotated[list[str] | None, typer.Argument(metavar="INPUT", help="Parquet files, folders or globs.")]
SAMPLE = Annotated[int | None, typer.Option("--rows", min=1, help="Read a sample of so many rows, not all up to 200,000.")]
TRIAL = Annotated[str, typer.Option("--probe", metavar="10s", help="How long the model is tried; 0: not at all.")]
PROBE = "10s"
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


@app.command(cls=SectionedHelp, short_help="Score prompts: the main job.")
@takes(
    *options.PROMPT, *options.LENGTH, *options.MODEL, *options.SCORE, *options.OUTPUT, "shard_rows", *options.ENCODING,
    *options.ENGINE, *options.UNATTENDED, *options.PERMISSION, *options.MESSAGES,
    inputs=INPUTS,
    dry_run=(Annotated[bool, typer.Option("--dry-run", help="Check everything, plan, and write nothing.")], False),
)  # fmt: skip
def run(config: Path | None, dry_run: bool, **given: Any) -> None:
    """Score the prompts of Parquet files against item embeddings and write each user's top-k list.

    Options come from this line, else from PREFILL_SCORE_* variables, else from prefill-score.toml
    (or the table tool.prefill-score of pyproject.toml), else from the defaults.

    The same command line takes up an interrupted run; where its result is there, it does nothing.

    Example: prefill-score run prompts.parquet -m ./model -i items.parquet -k 100 -o tonight
    """
    if dry_run:
        _plan(config, given, None, PROBE, dry_run=True)
    else:
        _run(config, given, "run", needs=("model", "items"))


@app.command(cls=SectionedHelp, short_help="Make vectors of texts: item files, users' vectors.")
@takes(
    *options.PROMPT, *options.LENGTH, *options.MODEL, "from_lm_head", "output", "embedding_column", "overwrite",
    "max_rejects", "shard_rows", *options.ENCODING, *options.ENGINE, *options.UNATTENDED, *options.PERMISSION,
    *options.MESSAGES,
    **options.OF_EMBED,
    inputs=INPUTS,
)  # fmt: skip
def embed(config: Path | None, **given: Any) -> None:
    """Make a vector of each text, as run does of prompts: an item file for run, or users' vectors for search.

    One file where --output ends in .parquet or .safetensors (ids beside it in .ids.parquet), else a
    folder of parts. What made the vectors stands in the files; run compares it with its own model.

    Example: prefill-score embed titles.parquet --id-column item_id --prompt-column title -m ./model
    -o title-vectors.parquet
    """
    _run(config, given, "embed", needs=("model",))


@app.command(cls=SectionedHelp, short_help="Tell what a run would compute, and how long.")
@takes(
    *options.PROMPT, *options.LENGTH, *options.MODEL, *options.SCORE, *options.OUTPUT, "shard_rows", *options.ENCODING,
    *options.UNATTENDED, *options.PERMISSION, *options.MESSAGES,
    inputs=(INPUTS_OR_NONE, None),
    rows=(SAMPLE, None),
    probe=(TRIAL, PROBE),
    **options.OF_SCALE,
)  # fmt: skip
def plan(config: Path | None, rows: int | None, probe: str, **given: Any) -> None:
    """Read and tokenise prompts and tell what a run would compute of them, in how much memory and time.

    The options are those of run; --items may be left out, and the search with it. A short probe
    encodes some of the batches on this device. No result is written. The run that follows says
    in its manifest how wrong the expected time was.

    With --nodes it tells hours, cost and requests of many more prompts on many workers, from the
    probe or from a run that is done (docs/scale.md).

    Example: prefill-score plan prompts.parquet -m ./model -i items.parquet

    Example: prefill-score plan --measured prompts.topk --nodes 1,8,64 --prompts 1M,100M
    """
    texts = {name: given.pop(name) for name in options.OF_SCALE}
    if texts["nodes"] is None:
        with exits(given["log_format"] or "text"):
            if others := [option(name) for name, text in texts.items() if text is not None]:
                raise UsageError(f"{others[0]} goes with --nodes N,N, the numbers of workers")
            if not given["inputs"]:
                raise UsageError("Missing argument 'INPUT...': name Parquet files, folders or globs")
        _plan(config, given, rows, probe, dry_run=False)
    else:
        _scale(config, given, texts, (rows, probe))


def _scale(config_file: Path | None, given: dict[str, Any], texts: dict[str, Any], trial: tuple[int | None, str]) -> None:
    """`plan --nodes`. trial: --rows and --probe."""
    with exits(given["log_format"] or "text"):
        output = texts["measured"]
        if bool(given["inputs"]) == bool(output):
            raise UsageError(
                "--nodes needs a worker's pace: from INPUT, by a probe, or from --measured OUTPUT; give one of them"
            )
        settings = resolve(given | {"inputs": given["inputs"] or []}, config_file, needs=() if output else ("model",))
        with exits(settings.log_format):
            console.listen(settings.log_format, settings.quiet, True)
            from prefill_cli.tools import scale as tool

            question, (rows, probe) = tool.ask(texts), trial
            if output:
                told = tool.scale_measured(question, output, given["shard_rows"])
            else:
                told = tool.scale_probed(question, settings, rows, _probe_sec(probe))
            views.print_scale(told, settings.json)


def _probe_sec(text: str) -> float:
    return 0.0 if text.strip() in ("0", "0s") else seconds(text, "--probe")


def _plan(config_file: Path | None, given: dict[str, Any], rows: int | None, probe: str, dry_run: bool) -> None:
    """What `plan` and `run --dry-run` share."""
    with exits(given["log_format"] or "text"):
        settings = resolve(given, config_file, needs=("model", "items") if dry_run else ("model",))
        with exits(settings.log_format):
            console.listen(settings.log_format, settings.quiet, True)
            probe_sec = _probe_sec(probe)
            from prefill_cli.tools import plan as tool

            told = tool.plan(settings, rows, probe_sec, dry_run)
            views.print_plan(told, settings.json)
            if dry_run and (error := tool.too_many_rejects(settings, told)):
                raise error


@app.command(cls=SectionedHelp, short_help="Search for users' vectors: the same without a model.")
@takes(
    "id_column", "vector_column", "user_ids", "keep_columns", *options.VECTOR, *options.SCORE, *options.OUTPUT, "shard_rows",
    "compile", *options.ENGINE, *options.UNATTENDED, *options.MESSAGES,
    inputs=Annotated[
        list[str], typer.Argument(metavar="VECTORS", help="Parquet files, folders or globs; or one .npy or .safetensors.")
    ],
)  # fmt: skip
def search(config: Path | None, **given: Any) -> None:
    """Search for saved users' vectors among item embeddings and write each user's top-k list, as run does.

    A .npy file holds a matrix [users, width], a .safetensors one the tensor "embeddings".

    Example: prefill-score search vectors.parquet -i items.parquet -k 100 -o tonight
    """
    _run(config, given, "search", needs=("items",))


def _run(config_file: Path | None, given: dict[str, Any], kind: str, needs: tuple[str, ...]) -> None:
    """What `run`, `embed` and `search` share: everything. kind: which of them."""
    suffix = ".vectors" if kind == "embed" else ".topk"
    report = metrics.Report(given["metrics_file"], given["output"], suffix)
    signals.last_words[:] = [report.fail]
    with report, exits(given["log_format"] or "text"):
        settings = resolve(given, config_file, needs=needs)
        with exits(settings.log_format):
            messages = console.listen(settings.log_format, settings.quiet, True)
            report.open(settings)
            if settings.time_limit:
                signals.end_after(seconds(settings.time_limit, "--time-limit"))
            from prefill_cli import pipeline
            from prefill_cli.engines import engine_of

            engine = engine_of(settings)
            with signals.as_heard(), console.Progress(messages, settings.quiet) as progress:
                totals = pipeline.run(settings, engine, progress, kind)
            views.print_summary(totals, settings.json)
            report.succeed(totals)


@app.command(cls=SectionedHelp, short_help="Publish what slices of a run (--shard-of) have done.")
def finish(
    output: Annotated[str, typer.Argument(metavar="OUTPUT", help="The result folder that the slices' --output names.")],
    max_rejects: Annotated[
        Text, typer.Option("--max-rejects", metavar="N|P%", help="Instead of the slices' own limit.")
    ] = None,
    json: Json = False,
) -> None:
    """Check that every shard of a run in slices is done, and publish the result.

    Options are those that the slices were started with.

    Example: prefill-score finish slices.topk
    """
    with exits():
        messages = console.listen()
        from prefill_cli import pipeline

        with console.Progress(messages) as progress:
            totals = pipeline.finish(place(output), progress, max_rejects)
        views.print_summary(totals, json)


@app.command(cls=SectionedHelp, short_help="See users' lists with titles.")
def show(
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", readable=False, help="The result folder of a run.")],
    user: Annotated[list[str] | None, typer.Option("--user", "-u", help="Show this user; can be given often.")] = None,
    users: Annotated[int, typer.Option("--users", "-n", min=1, help="Without --user: how many from the beginning.")] = 3,
    top: Annotated[int, typer.Option("--top", "-t", min=1, help="Items shown of each list.")] = 10,
    items: Annotated[
        File, typer.Option("--items", "-i", readable=False, help="Item file with titles.", show_default="the run's")
    ] = None,
    title_column: Annotated[Text, typer.Option("--title-column", help="Column with titles.", show_default="title")] = None,
    history_column: Annotated[
        Text,
        typer.Option(
            "--history-column", help="Input column with a user's history.", show_default="the run's exclude column"
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show what some users took and what a run lists for them.

    On a terminal bars say where a score stands between its list's last (no bar) and its best.

    Example: prefill-score show prompts.topk --user 100003
    """
    with exits():
        from prefill_cli.tools.show import UserQuery, read_lists

        query = UserQuery(output, tuple(user or ()), users, top, items, title_column, history_column)
        views.print_lists(read_lists(query), json)


@app.command(cls=SectionedHelp, short_help="Say how good lists are, and how two runs differ.")
def evaluate(
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", readable=False, help="The result folder of a run.")],
    truth: Annotated[
        Text, typer.Option("--truth", metavar="COLUMN", help="Column with the user's held-out item id or ids.")
    ] = None,
    truth_file: Annotated[
        Text,
        typer.Option(
            "--truth-file",
            metavar="FILE",
            help="Parquet with that column and the ids.",
            show_default="output, else the run's input",
        ),
    ] = None,
    top_k: Annotated[
        Text,
        typer.Option(
            "--top-k", "-k", metavar="K,K", help="Lists are judged by their first k.", show_default="1,5,10,20,50,100"
        ),
    ] = None,
    by: Annotated[
        Text, typer.Option("--by", metavar="COLUMN", help="The same for each value of a column beside --truth.")
    ] = None,
    history_column: Annotated[
        Text,
        typer.Option(
            "--history-column", help="Input column whose items are popular.", show_default="the run's exclude column"
        ),
    ] = None,
    against: Annotated[
        File, typer.Option("--against", metavar="OTHER", readable=False, help="Another result: how much do lists differ?")
    ] = None,
    rbo_p: Annotated[float, typer.Option("--rbo-p", help="Persistence of rank-biased overlap.")] = 0.9,
    bootstrap: Annotated[int, typer.Option("--bootstrap", min=0, help="Replicates for 95 % intervals; 0: none.")] = 1_000,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the replicates.")] = 0,
    json: Json = False,
) -> None:
    """Hold a run's lists to items that users took later, beside the list of the most popular items; or to another run.

    docs/evaluate.md defines every figure.

    Example: prefill-score evaluate prompts.topk --truth next_item
    """
    with exits():
        console.listen()
        if top_k is not None and not re.fullmatch(r"\d{1,9}(,\d{1,9})*", top_k):
            raise UsageError(f"--top-k must be numbers like 1,10,100, not {top_k!r}")
        from prefill_cli.tools.evaluate import Question, judge
        from prefill_cli.tools.judging.bootstrap import Bootstrap

        ks, replicates = tuple(map(int, top_k.split(","))) if top_k else (), Bootstrap(bootstrap, seed)
        asked = Question(output, truth, truth_file, ks, by, history_column, against, rbo_p, replicates)
        views.print_evaluated(judge(asked), json)


@app.command(cls=SectionedHelp, short_help="Write a page with plots about a result.")
def report(
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", readable=False, help="The result folder of a run.")],
    file: Annotated[
        File, typer.Option("--output", "-o", readable=False, help="The page.", show_default="<OUTPUT's name>.html")
    ] = None,
    against: Annotated[
        File, typer.Option("--against", metavar="OTHER", readable=False, help="Another result to compare with.")
    ] = None,
    items: Annotated[
        File, typer.Option("--items", "-i", readable=False, help="Item file with titles.", show_default="the run's")
    ] = None,
    title_column: Annotated[Text, typer.Option("--title-column", help="Column with titles.", show_default="title")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that is no report.")] = False,
    json: Json = False,
) -> None:
    """Write one HTML page about a result: lengths, throughput, time, scores, coverage, items, rejects.

    The page needs no network and no scripts. A report that is there already is replaced.

    Needs one more package: pip install 'prefill-score[report]'.

    Example: prefill-score report prompts.topk
    """
    with exits():
        console.listen()
        from prefill_cli.tools.report import ReportQuery, write_report

        query = ReportQuery(output, file, against, items, title_column, overwrite)
        views.print_report(write_report(query), json)


@app.command(cls=SectionedHelp, short_help="Say what a file or folder is, and what is wrong with it.")
def inspect(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH", readable=False, help="Models, item files, heads, inputs, results.")
    ],
    config: CONFIG_FILE = None,
    json: Json = False,
) -> None:
    """Say what each path is (model, items, prompts or result), what it holds, and what is wrong with it.

    Column names come from the configuration, as for run. Exits with the code that run would.

    Example: prefill-score inspect ./model items.parquet prompts.parquet
    """
    with exits():
        console.listen(quiet=True)
        from prefill_cli.tools.inspect import inspect_path

        settings = resolve({"inputs": [str(p) for p in paths]}, config, needs=())
        findings = [inspect_path(path, settings) for path in paths]
        views.print_findings(findings, json)
        raise typer.Exit(next((f.exit_code for f in findings if f.exit_code), 0))


@app.command(cls=SectionedHelp, short_help="See and prune the vectors kept between runs.")
def cache(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="The folder or URI that run --cache names.")],
    prune: Annotated[bool, typer.Option("--prune", help="Remove what the limits say and compact the rest.")] = False,
    older_than: Annotated[Text, typer.Option("--older-than", metavar="30d", help="Prune: not used for so long.")] = None,
    max_size: Annotated[
        Text, typer.Option("--max-size", metavar="50GB", help="Prune: those unused longest, until the rest fits.")
    ] = None,
    json: Json = False,
) -> None:
    """Show what a vector cache holds, how often it served and how long vectors were not used; or prune it.

    Example: prefill-score cache vectors --prune --older-than 30d --max-size 50GB
    """
    with exits():
        console.listen()
        if not prune and (older_than or max_size):
            raise UsageError("--older-than and --max-size go with --prune")
        age = None if older_than is None else seconds(older_than, "--older-than")
        size = None if max_size is None else size_bytes(max_size, "--max-size")
        from prefill_cli.tools import cache as tool

        pruned = tool.prune(place(folder), age, size) if prune else None
        views.print_cache(tool.describe(place(folder)), pruned, json)


Prompts = Annotated[
    list[str] | None, typer.Argument(metavar="[INPUT]", help="Parquet files with prompts.", show_default="made up")
]
Model = Annotated[Text, typer.Option("--model", "-m", help="Folder or hub name of a causal LM.")]
Dtype = Annotated[Text, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
Device = Annotated[Text, typer.Option("--device", help="auto, cpu, cuda, cuda:N or mps.")]
BatchTokens = Annotated[Text, typer.Option("--max-batch-tokens", help="Token budget of a forward pass.")]
Compile = Annotated[Switch, typer.Option("--compile/--no-compile", help="Compile the layers (where it is worth it).")]


@app.command(cls=SectionedHelp, short_help="Time this tool against what people use instead.")
def bench(
    inputs: Prompts = None,
    model: Model = None,
    dtype: Dtype = None,
    device: Device = None,
    max_batch_tokens: BatchTokens = None,
    compile: Compile = None,
    rows: Annotated[int, typer.Option("--rows", min=1, help="How many prompts from the beginning.")] = 256,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Passes of each way; the best one counts.")] = 3,
    peer: Annotated[
        list[str] | None,
        typer.Option("--peer", help="Also sentence-transformers, vllm, faiss or usearch; must be installed."),
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Search alone, without a model: among --items, or made-up ones.")
    ] = False,
    items: Annotated[File, typer.Option("--items", "-i", readable=False, help="Item embeddings.")] = None,
    size: Annotated[
        Text, typer.Option("--size", metavar="N,D", help="Made-up items and their width.", show_default="200000,576")
    ] = None,
    top_k: Annotated[Number, typer.Option("--top-k", "-k", help="Length of a list.")] = None,
    config: CONFIG_FILE = None,
    json: Json = False,
) -> None:
    """Encode prompts with this tool and with the plain Transformers loop, in one process, and compare.

    Prints a table on a terminal and one JSON line last. Columns and model come as for run.

    Example: prefill-score bench prompts.parquet -m ./model
    """
    given = {name: value for name, value in locals().items() if name in DEFAULTS and name not in ("inputs", "json")}
    with exits():
        console.listen()
        if search:
            if size and not re.fullmatch(r"[1-9]\d{0,8},[1-9]\d{0,4}", size):
                raise UsageError(f"--size must be the number of items and their width, like 200000,576, not {size!r}")
            settings = resolve(given | {"inputs": []}, config, needs=())
            from prefill_cli.tools.bench_search import bench_search_only

            made_up = tuple(map(int, size.split(","))) if size else ()
            views.print_search(bench_search_only(settings, made_up, rows, repeat, peer or ()), json)
            return
        settings = resolve(given | {"inputs": inputs or []}, config, needs=("model",))
        from prefill_cli.tools import bench as tool

        views.print_bench(tool.bench(settings, rows, repeat, peer or ()), json)


@app.command(cls=SectionedHelp, short_help="Hold the fast encoder to plain Transformers.")
def verify(
    inputs: Prompts = None,
    model: Model = None,
    dtype: Dtype = None,
    device: Device = None,
    max_batch_tokens: BatchTokens = None,
    compile: Compile = None,
    backend: Annotated[Text, typer.Option("--backend", help="What is held to it: transformers (ours) or vllm.")] = None,
    rows: Annotated[int, typer.Option("--rows", min=1, help="How many prompts from the beginning.")] = 32,
    config: CONFIG_FILE = None,
    json: Json = False,
) -> None:
    """Encode prompts with the fast encoder (or vLLM) and with plain Transformers one at a time, and show
    the differences.

    Exits with 5 where they are more than rounding. A run does the same with a few prompts at its start.

    Example: prefill-score verify prompts.parquet -m ./model
    """
    given = {name: value for name, value in locals().items() if name in DEFAULTS and name not in ("inputs", "json")}
    with exits():
        console.listen()
        settings = resolve(given | {"inputs": inputs or []}, config, needs=("model",))
        from prefill_cli.tools import verify as tool

        found = tool.verify(settings, rows)
        views.print_verified(found, json)
        raise typer.Exit(ModelError.exit_code if found["status"] == "different" else 0)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"prefill-score {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    if context.invoked_subcommand is None:
        console.say(context.get_help())
        raise typer.Exit(2)


@contextlib.contextmanager
def exits(log_format: str = "text") -> Iterator[None]:
    """Turn errors into one line on stderr and the exit code of their kind."""
    try:
        yield
    except (PrefillScoreError, Interrupted) as error:
        console.print_error(str(error), log_format)
        code = error.exit_code
    except KeyboardInterrupt:
        console.print_error(str(Interrupted(signal.SIGINT)), log_format)
        code = 128 + signal.SIGINT
    except BrokenPipeError:  # whoever read our stdout has left
        console.give_up_stdout()
        code = 128 + signal.SIGPIPE
    except typer.Exit:
        raise
    except MemoryError:
        console.print_error("the memory does not suffice; lower --shard-rows or --max-batch-tokens", log_format)
        code = PrefillScoreError.exit_code
    except (Exception, SystemExit) as error:  # SystemExit: nobody but this file ends the run
        code = PrefillScoreError.exit_code
        where = traceback.extract_tb(error.__traceback__)[-1]
        # The error's own words might quote a prompt, so only its kind and place are told.
        console.print_error(
            f"a bug in prefill-score: {type(error).__name__} in {Path(where.filename).name}:{where.lineno}; "
            "PREFILL_SCORE_DEBUG=1 shows the traceback", log_format,
        )  # fmt: skip
    else:
        return
    if os.environ.get("PREFILL_SCORE_DEBUG") == "1":
        traceback.print_exc()
    raise typer.Exit(code)


def main() -> None:
    """Entry point of `prefill-score`."""
    signals.listen()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # paths need not be text
    try:
        app()
    except SystemExit as end:
        signals.leave(end.code if isinstance(end.code, int) else 1)
