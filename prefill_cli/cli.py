"""The commands: options → RunConfig → the job. The only file that exits."""

import atexit
import contextlib
import ctypes
import io
import os
import re
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, TypeAlias, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from prefill_cli import __version__, console, machine, metrics
from prefill_cli.config import RunConfig, option, resolve, seconds, size_bytes
from prefill_cli.errors import Interrupted, ModelError, PrefillScoreError, TimeLimitError, UsageError
from prefill_cli.places import Place, place

STOP_WITHIN_SEC, LAST_WORDS_SEC = 9.0, 0.7  # from the first signal on; for last_words, where that was not enough
EXIT_CODES: dict[int, int] = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGALRM: TimeLimitError().exit_code}
last_words: list[Callable[[int], None]] = []  # who wants to know the exit code of a process that does not end by itself
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
PLACES = {name for name, kind in get_type_hints(RunConfig).items() if kind in (Place | None, Path | None)}
DEFAULTS = {f.name: f.default for f in fields(RunConfig)}
SHOWN_DEFAULTS = {
    "output": "<input stem>.topk",
    "max_length": "the model's",
    "max_batch_tokens": "auto",
    "prefix": "",
    "vector_column": "embedding",
}
IN, TOKENS, VECTORS, SCORES, OUT, RUN = (
    "Input", "Tokens", "Vectors", "Items and scores", "Output", "How it runs",
)  # fmt: skip


def opt(name: str, text: str, panel: str, *flags: str, metavar: str | None = None) -> Any:
    """An option of `run`. Its default is None here: what applies is decided in config.resolve, and shown from there."""
    default = SHOWN_DEFAULTS.get(name, DEFAULTS[name])
    metavar = metavar or ("<path>" if name in PLACES else None)
    shown = False if default in (None, False, True, "", (), RunConfig) else str(default)
    return typer.Option(
        *flags or (option(name),), help=text, rich_help_panel=panel, metavar=metavar, show_default=shown, readable=False
    )  # what is wrong with a path is told by whoever opens it


def switch(name: str, text: str, panel: str) -> Any:
    """A yes/no option of `run` that can be said either way, so that the line can overrule a file."""
    return opt(name, text, panel, f"{option(name)}/--no-{name.replace('_', '-')}")


Text: TypeAlias = str | None
Number: TypeAlias = int | None
File: TypeAlias = Path | None
Where: TypeAlias = str | None  # a path, or a URI of another system
Switch: TypeAlias = bool | None
ConfigFile = Annotated[
    File, typer.Option("--config", help="Read options from this TOML file.", show_default="./prefill-score.toml")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


# Options that several commands have.
IdColumnOption = Annotated[Text, opt("id_column", "Column with the user ids.", IN)]
KeepColumnsOption = Annotated[Text, opt("keep_columns", "Input columns carried into the output.", IN, metavar="A,B")]
DimsOption = Annotated[Number, opt("dims", "Cut vectors to the first D dimensions, on both sides.", VECTORS)]
NormalizeOption = Annotated[Switch, switch("normalize", "Scale vectors to length 1, on both sides, after --dims.", VECTORS)]
DeviceOption = Annotated[Text, opt("device", "auto: CUDA, else MPS, else CPU.", VECTORS, metavar="auto|cpu|cuda[:N]|mps")]
ItemsOption = Annotated[
    Where,
    opt(
        "items",
        "Item embeddings: .parquet (file, folder, glob), .safetensors or .npy.",
        SCORES,
        "-i",
        "--items",
    ),
]
ItemIdsOption = Annotated[Where, opt("item_ids", "Parquet file with the ids of a .safetensors or .npy.", SCORES)]
ItemIdColumnOption = Annotated[Text, opt("item_id_column", "Column with the item ids.", SCORES)]
EmbeddingColumnOption = Annotated[Text, opt("embedding_column", "Column with the embeddings.", SCORES)]
ItemBiasColumnOption = Annotated[Text, opt("item_bias_column", "Column with a number added to the item's score.", SCORES)]
TopKOption = Annotated[Number, opt("top_k", "Length of a list.", SCORES, "-k", "--top-k")]
ScoreOption = Annotated[Text, opt("score", "How a user and an item are scored.", SCORES, metavar="dot|cosine|mlp")]
HeadOption = Annotated[
    Where,
    opt("head", "A .safetensors network: mlp scores pairs, user_tower changes users' vectors.", SCORES),
]
BadItemsOption = Annotated[
    Text, opt("bad_items", "Null, ragged, not finite or (cosine) zero embeddings.", SCORES, metavar="fail|drop")
]
StrictProvenanceOption = Annotated[
    Switch, switch("strict_provenance", "Refuse items that another model made, instead of warning.", SCORES)
]
ExcludeColumnOption = Annotated[
    Text, opt("exclude_column", "Column with the item ids that this user must not get (seen items).", SCORES)
]
CandidatesColumnOption = Annotated[
    Text, opt("candidates_column", "Column with the only item ids that this user may get; null: all.", SCORES)
]
AllowOption = Annotated[Where, opt("allow", "Only these items for anybody: Parquet, or text with an id a line.", SCORES)]
DenyOption = Annotated[Where, opt("deny", "Never these items for anybody.", SCORES)]
OutputOption = Annotated[Where, opt("output", "The result folder.", OUT, "-o", "--output")]
OverwriteOption = Annotated[
    Switch, switch("overwrite", "Replace another run's result or leftovers, once the new result is whole.", OUT)
]
LayoutOption = Annotated[
    Text, opt("layout", "A row a user with two lists, or a row a (user, rank).", OUT, metavar="nested|long")
]
MaxRejectsOption = Annotated[
    Text, opt("max_rejects", "More rejected rows than this: nothing is published.", OUT, metavar="N|P%")
]
ShardRowsOption = Annotated[
    Number, opt("shard_rows", "Rows that are read, sorted by length, scored and committed together.", RUN)
]
CompileOption = Annotated[Switch, switch("compile", "Compile kernels (where the work is worth it).", RUN)]
JsonOption = Annotated[Switch, switch("json", "Print the summary as one JSON object, on a terminal too.", RUN)]
TimeLimitOption = Annotated[Text, opt("time_limit", "Stop after so long; the same command goes on.", RUN, metavar="3h30m")]
MetricsFileOption = Annotated[Where, opt("metrics_file", "Write the run's figures there in Prometheus' text format.", RUN)]
QuietOption = Annotated[Switch, switch("quiet", "Warnings and errors only on stderr.", RUN)]
LogFormatOption = Annotated[Text, opt("log_format", "Of the messages on stderr.", RUN, metavar="text|json")]


@app.command(cls=SectionedHelp, short_help="Score prompts: the main job.")
def run(
    inputs: Annotated[list[str], typer.Argument(metavar="INPUT", help="Parquet files, folders or globs.")],
    id_column: IdColumnOption = None,
    prompt_column: Annotated[Text, opt("prompt_column", "Column with the prompts' text.", IN)] = None,
    messages_column: Annotated[
        Text, opt("messages_column", "Chat messages instead of a prompt, put through the model's chat template.", IN)
    ] = None,
    token_ids_column: Annotated[Text, opt("token_ids_column", "Ready-made token ids instead of a prompt.", IN)] = None,
    keep_columns: KeepColumnsOption = None,
    prefix: Annotated[Text, opt("prefix", "Text joined before every prompt.", IN)] = None,
    generation_prompt: Annotated[
        Switch, switch("generation_prompt", "Messages: end with the template's opening of the answer (on).", IN)
    ] = None,
    max_length: Annotated[Number, opt("max_length", "Token limit of a prompt, special tokens included.", TOKENS)] = None,
    truncate: Annotated[
        Text, opt("truncate", "Longer prompts: cut left, cut right, or reject.", TOKENS, metavar="left|right|reject")
    ] = None,
    keep_head: Annotated[
        Number, opt("keep_head", "When cutting left, the first N tokens of the text (the instruction) stay.", TOKENS)
    ] = None,
    append_eos: Annotated[Switch, switch("append_eos", "End every prompt with EOS, unless it does already.", TOKENS)] = None,
    plain_special_tokens: Annotated[
        Switch, switch("plain_special_tokens", "Text that spells a control token is encoded as text.", TOKENS)
    ] = None,
    model: Annotated[Text, opt("model", "Folder or hub name of a causal LM.", VECTORS, "-m", "--model")] = None,
    revision: Annotated[Text, opt("revision", "Revision of a hub model.", VECTORS)] = None,
    pooling: Annotated[
        Text, opt("pooling", "auto: what the model folder says, else last.", VECTORS, metavar="auto|last|mean|first")
    ] = None,
    dims: DimsOption = None,
    normalize: NormalizeOption = None,
    device: DeviceOption = None,
    dtype: Annotated[
        Text,
        opt("dtype", "auto: bfloat16 where the hardware has it.", VECTORS, metavar="auto|float32|bfloat16|float16"),
    ] = None,
    items: ItemsOption = None,
    item_ids: ItemIdsOption = None,
    item_id_column: ItemIdColumnOption = None,
    embedding_column: EmbeddingColumnOption = None,
    item_bias_column: ItemBiasColumnOption = None,
    top_k: TopKOption = None,
    score: ScoreOption = None,
    head: HeadOption = None,
    bad_items: BadItemsOption = None,
    strict_provenance: StrictProvenanceOption = None,
    exclude_column: ExcludeColumnOption = None,
    candidates_column: CandidatesColumnOption = None,
    allow: AllowOption = None,
    deny: DenyOption = None,
    output: OutputOption = None,
    overwrite: OverwriteOption = None,
    layout: LayoutOption = None,
    max_rejects: MaxRejectsOption = None,
    shard_rows: ShardRowsOption = None,
    max_batch_tokens: Annotated[
        Text, opt("max_batch_tokens", "Token budget of a forward pass.", RUN, metavar="N|auto")
    ] = None,
    encoder: Annotated[
        Text, opt("encoder", "plain: Transformers' own pass over padded batches, slower.", RUN, metavar="auto|plain")
    ] = None,
    compile: CompileOption = None,
    share: Annotated[Switch, switch("share", "Encode equal prompts and shared prefixes once (on).", RUN)] = None,
    cache: Annotated[Where, opt("cache", "Folder of users' vectors that are kept between runs.", RUN)] = None,
    time_limit: TimeLimitOption = None,
    metrics_file: MetricsFileOption = None,
    offline: Annotated[Switch, switch("offline", "Never ask the network.", RUN)] = None,
    trust_remote_code: Annotated[
        Switch, switch("trust_remote_code", "Run Python code from the model's folder.", RUN)
    ] = None,
    json: JsonOption = None,
    quiet: QuietOption = None,
    log_format: LogFormatOption = None,
    config: ConfigFile = None,
) -> None:
    """Score the prompts of Parquet files against item embeddings and write each user's top-k list.

    Options come from this line, else from PREFILL_SCORE_* variables, else from prefill-score.toml
    (or the table tool.prefill-score of pyproject.toml), else from the defaults.

    The same command line takes up an interrupted run; where its result is there, it does nothing.

    Example: prefill-score run prompts.parquet -m ./model -i items.parquet -k 100 -o tonight
    """
    _score(dict(locals()), with_model=True)


def _score(given: dict[str, Any], with_model: bool) -> None:
    """What `run` and `search` share: everything."""
    config_file = given.pop("config")
    report = metrics.Report(given["metrics_file"], given["output"])
    last_words[:] = [report.fail]
    with report, exits(given["log_format"] or "text"):
        settings = resolve(given, config_file, needs=("model", "items") if with_model else ("items",))
        with exits(settings.log_format):
            messages = console.listen(settings.log_format, settings.quiet, True)
            report.open(settings)
            if settings.time_limit:
                signal.setitimer(signal.ITIMER_REAL, seconds(settings.time_limit, "--time-limit"))
            from prefill_cli import pipeline
            from prefill_cli.engines.local import run_shards

            plan = pipeline.plan_job if with_model else pipeline.plan_search
            with console.Progress(messages, settings.quiet) as progress:
                totals = pipeline.run(settings, run_shards, progress, plan)
            console.print_summary(totals, settings.json)
            report.succeed(totals)


@app.command(cls=SectionedHelp, short_help="Search for users' vectors: the same without a model.")
def search(
    inputs: Annotated[
        list[str], typer.Argument(metavar="VECTORS", help="Parquet files, folders or globs; or one .npy or .safetensors.")
    ],
    id_column: IdColumnOption = None,
    vector_column: Annotated[Text, opt("vector_column", "Column with the users' vectors.", IN)] = None,
    user_ids: Annotated[Where, opt("user_ids", "Parquet file with the ids of a .npy or .safetensors.", IN)] = None,
    keep_columns: KeepColumnsOption = None,
    dims: DimsOption = None,
    normalize: NormalizeOption = None,
    device: DeviceOption = None,
    items: ItemsOption = None,
    item_ids: ItemIdsOption = None,
    item_id_column: ItemIdColumnOption = None,
    embedding_column: EmbeddingColumnOption = None,
    item_bias_column: ItemBiasColumnOption = None,
    top_k: TopKOption = None,
    score: ScoreOption = None,
    head: HeadOption = None,
    bad_items: BadItemsOption = None,
    strict_provenance: StrictProvenanceOption = None,
    exclude_column: ExcludeColumnOption = None,
    candidates_column: CandidatesColumnOption = None,
    allow: AllowOption = None,
    deny: DenyOption = None,
    output: OutputOption = None,
    overwrite: OverwriteOption = None,
    layout: LayoutOption = None,
    max_rejects: MaxRejectsOption = None,
    shard_rows: ShardRowsOption = None,
    compile: CompileOption = None,
    time_limit: TimeLimitOption = None,
    metrics_file: MetricsFileOption = None,
    json: JsonOption = None,
    quiet: QuietOption = None,
    log_format: LogFormatOption = None,
    config: ConfigFile = None,
) -> None:
    """Search for saved users' vectors among item embeddings and write each user's top-k list, as run does.

    A .npy file holds a matrix [users, width], a .safetensors one the tensor "embeddings".

    Example: prefill-score search vectors.parquet -i items.parquet -k 100 -o tonight
    """
    _score(dict(locals()), with_model=False)


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

    Example: prefill-score show prompts.topk --user 100003
    """
    with exits():
        from prefill_cli.tools.show import UserQuery, read_lists

        query = UserQuery(output, tuple(user or ()), users, top, items, title_column, history_column)
        console.print_lists(read_lists(query), json)


@app.command(cls=SectionedHelp, short_help="Say what a file or folder is, and what is wrong with it.")
def inspect(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH", readable=False, help="Models, item files, heads, inputs, results.")
    ],
    config: ConfigFile = None,
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
        console.print_findings(findings, json)
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
        console.print_cache(tool.describe(place(folder)), pruned, json)


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
    config: ConfigFile = None,
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
            console.print_search(bench_search_only(settings, made_up, rows, repeat, peer or ()), json)
            return
        settings = resolve(given | {"inputs": inputs or []}, config, needs=("model",))
        from prefill_cli.tools import bench as tool

        console.print_bench(tool.bench(settings, rows, repeat, peer or ()), json)


@app.command(cls=SectionedHelp, short_help="Hold the fast encoder to plain Transformers.")
def verify(
    inputs: Prompts = None,
    model: Model = None,
    dtype: Dtype = None,
    device: Device = None,
    max_batch_tokens: BatchTokens = None,
    compile: Compile = None,
    rows: Annotated[int, typer.Option("--rows", min=1, help="How many prompts from the beginning.")] = 32,
    config: ConfigFile = None,
    json: Json = False,
) -> None:
    """Encode prompts with the fast encoder and with plain Transformers one at a time, and show the differences.

    Exits with 5 where they are more than rounding. A run does the same with a few prompts at its start.

    Example: prefill-score verify prompts.parquet -m ./model
    """
    given = {name: value for name, value in locals().items() if name in DEFAULTS and name not in ("inputs", "json")}
    with exits():
        console.listen()
        settings = resolve(given | {"inputs": inputs or []}, config, needs=("model",))
        from prefill_cli.tools import verify as tool

        found = tool.verify(settings, rows)
        console.print_verified(found, json)
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


def _stop(signum: int, _: FrameType | None) -> None:
    raise TimeLimitError if signum == signal.SIGALRM else Interrupted(signum)


def _stop_once(signum: int, frame: FrameType | None) -> None:
    """The first signal ends the run in order. Of the next ones, which find that under way, _end_in_time hears."""
    for number in EXIT_CODES:
        signal.signal(number, _stopping)
    _stop(signum, frame)


def _stopping(*_: object) -> None:
    pass


def _end_in_time(wake: int) -> None:
    """End the process where a signal alone does not: a batch may take long. Nothing is lost that SIGKILL would not lose."""
    code, until = None, float("inf")
    while (left := until - time.monotonic()) > 0:
        if not select.select([wake], [], [], min(left, threading.TIMEOUT_MAX))[0]:
            continue
        if (heard := EXIT_CODES.get(os.read(wake, 1)[0])) is None:  # a signal that a library asked to hear of
            continue
        if code is not None:  # a second one waits for nothing
            break
        code, until = heard, time.monotonic() + STOP_WITHIN_SEC
    _end_now("stopped before the current batch ended; the same command goes on with the shards that are done", code or 1)


def _end_now(message: str, code: int) -> None:
    console.last_words(message)
    for tell in last_words:
        telling = threading.Thread(target=tell, args=(code,), daemon=True)
        telling.start()
        telling.join(LAST_WORDS_SEC)  # a disk that hangs must not keep the process
    machine.end_children()  # last, or whoever waits for them would say that they failed
    os._exit(code)


def _bus_error(_: int) -> None:
    """A mapped file became shorter under the hands of whoever reads it."""
    _end_now(*machine.shortened())


# For C, because Python's own handlers run after the access that fails, which therefore fails for ever.
BUS_ERROR = ctypes.CFUNCTYPE(None, ctypes.c_int)(_bus_error)


def main() -> None:
    """Entry point of `prefill-score`."""
    for signum in EXIT_CODES:
        signal.signal(signum, _stop_once)
    ctypes.CDLL(None).signal(signal.SIGBUS, BUS_ERROR)
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # a closed stdin, stdout or stderr: without this, a
        pass  # file of the result would take its number, and get what a library prints
    os.close(descriptor)
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    threading.Thread(target=_end_in_time, args=(wake,), daemon=True).start()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # paths need not be text
    try:
        app()
    except SystemExit as end:
        _leave(end.code if isinstance(end.code, int) else 1)


def _leave(code: int) -> None:
    """End the process when all is in order. Python's own way would take PyTorch apart first, which is most of a second, and
    wait for threads that hang.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # there may be none, or nobody who reads it
            stream.flush()
    os._exit(code)
