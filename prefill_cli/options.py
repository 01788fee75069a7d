"""The options that become a RunConfig, each told once, and the groups of them that commands take."""

from collections.abc import Callable
from dataclasses import fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from prefill_cli.config import RunConfig, option
from prefill_cli.places import Place

DEFAULTS = {f.name: f.default for f in fields(RunConfig)}
SHOWN_DEFAULTS: dict[str, Any] = {
    "output": "<input stem>.topk",
    "max_length": "the model's",
    "max_batch_tokens": "auto",
    "prefix": "",
    "vector_column": "embedding",
}
HINTS = get_type_hints(RunConfig)
PLACES = {name for name, kind in HINTS.items() if kind in (Place | None, Path | None)}
IN, TOKENS, VECTORS, SCORES, OUT, RUN = (
    "Input", "Tokens", "Vectors", "Items and scores", "Output", "How it runs",
)  # fmt: skip


def opt(name: str, text: str, panel: str, *flags: str, metavar: str | None = None, shown: str | None = None) -> Any:
    """An option of `run`. Its default is None here: what applies is decided in config.resolve, and shown from there.

    A path may be a URI of another system, and what is wrong with it is told by whoever opens it; so it is text here.
    """
    default = shown or SHOWN_DEFAULTS.get(name, DEFAULTS[name])
    kind = HINTS[name]
    given = bool if kind in (bool, bool | None) else int if kind in (int, int | None) and name != "max_batch_tokens" else str
    if given is bool and not flags:  # said either way, so that the line can overrule a file
        flags = (f"{option(name)}/--no-{name.replace('_', '-')}",)
    return Annotated[
        given | None,
        typer.Option(
            *(flags or (option(name),)),
            help=text,
            rich_help_panel=panel,
            metavar=metavar or ("<path>" if name in PLACES else None),
            show_default=False if default in (None, False, True, "", (), RunConfig) else str(default),
        ),
    ]


OPTIONS: dict[str, Any] = {
    "id_column": opt("id_column", "Column with the user ids.", IN),
    "prompt_column": opt("prompt_column", "Column with the prompts' text.", IN),
    "messages_column": opt(
        "messages_column", "Chat messages instead of a prompt, put through the model's chat template.", IN
    ),
    "token_ids_column": opt("token_ids_column", "Ready-made token ids instead of a prompt.", IN),
    "vector_column": opt("vector_column", "Column with the users' vectors.", IN),
    "user_ids": opt("user_ids", "Parquet file with the ids of a .npy or .safetensors.", IN),
    "keep_columns": opt("keep_columns", "Input columns carried into the output.", IN, metavar="A,B"),
    "prefix": opt("prefix", "Text joined before every prompt.", IN),
    "generation_prompt": opt("generation_prompt", "Messages: end with the template's opening of the answer (on).", IN),
    "max_length": opt("max_length", "Token limit of a prompt, special tokens included.", TOKENS),
    "truncate": opt("truncate", "Longer prompts: cut left, cut right, or reject.", TOKENS, metavar="left|right|reject"),
    "keep_head": opt("keep_head", "When cutting left, the first N tokens of the text (the instruction) stay.", TOKENS),
    "append_eos": opt("append_eos", "End every prompt with EOS, unless it does already.", TOKENS),
    "plain_special_tokens": opt("plain_special_tokens", "Text that spells a control token is encoded as text.", TOKENS),
    "model": opt("model", "Folder or hub name of a causal LM.", VECTORS, "-m", "--model"),
    "revision": opt("revision", "Revision of a hub model.", VECTORS),
    "pooling": opt("pooling", "auto: what the model folder says, else last.", VECTORS, metavar="auto|last|mean|first"),
    "dims": opt("dims", "Cut vectors to the first D dimensions, on both sides.", VECTORS),
    "normalize": opt("normalize", "Scale vectors to length 1, on both sides, after --dims.", VECTORS),
    "from_lm_head": opt(
        "from_lm_head", "No forward pass: rows of the output (input) embeddings, the mean over an item's tokens.", VECTORS,
        "--from-lm-head/--from-input-embeddings",
    ),
    "device": opt("device", "auto: CUDA, else MPS, else CPU.", VECTORS, metavar="auto|cpu|cuda[:N]|mps"),
    "dtype": opt("dtype", "auto: bfloat16 where the hardware has it.", VECTORS, metavar="auto|float32|bfloat16|float16"),
    "items": opt("items", "Item embeddings: .parquet (file, folder, glob), .safetensors or .npy.", SCORES, "-i", "--items"),
    "item_ids": opt("item_ids", "Parquet file with the ids of a .safetensors or .npy.", SCORES),
    "item_id_column": opt("item_id_column", "Column with the item ids.", SCORES),
    "embedding_column": opt("embedding_column", "Column with the embeddings.", SCORES),
    "item_bias_column": opt("item_bias_column", "Column with a number added to the item's score.", SCORES),
    "top_k": opt("top_k", "Length of a list.", SCORES, "-k", "--top-k"),
    "score": opt("score", "How a user and an item are scored.", SCORES, metavar="dot|cosine|mlp"),
    "head": opt("head", "A .safetensors network: mlp scores pairs, user_tower changes users' vectors.", SCORES),
    "bad_items": opt("bad_items", "Null, ragged, not finite or (cosine) zero embeddings.", SCORES, metavar="fail|drop"),
    "strict_provenance": opt("strict_provenance", "Refuse items that another model made, instead of warning.", SCORES),
    "exclude_column": opt("exclude_column", "Column with the item ids that this user must not get (seen items).", SCORES),
    "candidates_column": opt(
        "candidates_column", "Column with the only item ids that this user may get; null: all.", SCORES
    ),
    "allow": opt("allow", "Only these items for anybody: Parquet, or text with an id a line.", SCORES),
    "deny": opt("deny", "Never these items for anybody.", SCORES),
    "output": opt("output", "The result folder.", OUT, "-o", "--output"),
    "overwrite": opt("overwrite", "Replace another run's result or leftovers, once the new result is whole.", OUT),
    "layout": opt("layout", "A row a user with two lists, or a row a (user, rank).", OUT, metavar="nested|long"),
    "max_rejects": opt("max_rejects", "More rejected rows than this: nothing is published.", OUT, metavar="N|P%"),
    "shard_rows": opt("shard_rows", "Rows that are read, sorted by length, scored and committed together.", RUN),
    "max_batch_tokens": opt("max_batch_tokens", "Token budget of a forward pass.", RUN, metavar="N|auto"),
    "backend": opt("backend", "Who runs the model.", VECTORS, metavar="transformers|vllm"),
    "encoder": opt(
        "encoder", "plain: Transformers' own pass over padded batches, slower.", RUN, metavar="auto|plain"
    ),
    "compile": opt("compile", "Compile kernels (where the work is worth it).", RUN),
    "share": opt("share", "Encode equal prompts and shared prefixes once (on).", RUN),
    "cache": opt("cache", "Folder of users' vectors that are kept between runs.", RUN),
    "time_limit": opt("time_limit", "Stop after so long; the same command goes on.", RUN, metavar="3h30m"),
    "metrics_file": opt("metrics_file", "Write the run's figures there in Prometheus' text format.", RUN),
    "engine": opt("engine", "Who runs the shards: this machine, or a Ray cluster.", RUN, metavar="local|ray"),
    "workers": opt("workers", "Processes, one a GPU; with --engine ray a range too.", RUN, metavar="N|MIN:MAX"),
    "cpus_per_worker": opt("cpus_per_worker", "Cores of each worker.", RUN),
    "ray_address": opt("ray_address", "The cluster of --engine ray.", RUN, metavar="HOST:PORT"),
    "shard_of": opt("shard_of", "Do every N-th shard from the I-th (from 0) on; `finish` publishes.", RUN, metavar="I/N"),
    "offline": opt("offline", "Never ask the network.", RUN),
    "trust_remote_code": opt("trust_remote_code", "Run Python code from the model's folder.", RUN),
    "json": opt("json", "Print the summary as one JSON object, on a terminal too.", RUN),
    "quiet": opt("quiet", "Warnings and errors only on stderr.", RUN),
    "log_format": opt("log_format", "Of the messages on stderr.", RUN, metavar="text|json"),
}  # fmt: skip
PROMPT = ("id_column", "prompt_column", "messages_column", "token_ids_column", "keep_columns", "prefix", "generation_prompt")
LENGTH = ("max_length", "truncate", "keep_head", "append_eos", "plain_special_tokens")
VECTOR = ("dims", "normalize", "device")
MODEL = ("model", "revision", "pooling", *VECTOR, "dtype")
SCORE = (
    "items", "item_ids", "item_id_column", "embedding_column", "item_bias_column", "top_k", "score", "head", "bad_items",
    "strict_provenance", "exclude_column", "candidates_column", "allow", "deny",
)  # fmt: skip
OUTPUT = ("output", "overwrite", "layout", "max_rejects")
ENCODING = ("backend", "max_batch_tokens", "encoder", "compile", "share", "cache")
UNATTENDED = ("time_limit", "metrics_file")
ENGINE = ("engine", "workers", "cpus_per_worker", "ray_address", "shard_of")
PERMISSION = ("offline", "trust_remote_code")
MESSAGES = ("json", "quiet", "log_format")
OF_EMBED = {  # told in other words there
    "id_column": opt("id_column", "Column with the ids.", IN),
    "embedding_column": opt("embedding_column", "Column that the vectors get.", OUT),
    "output": opt(
        "output", "A .parquet or .safetensors file, else a folder of parts.", OUT, "-o", "--output",
        shown="<input stem>.vectors",
    ),
    "cache": opt("cache", "Folder of vectors that are kept between runs.", RUN),
}  # fmt: skip
SCALE = "On many workers"


def _scale(
    text: str, flag: str, metavar: str, shown: str | bool = False, kind: Any = str, least: int | None = None
) -> tuple[Any, None]:
    """An option of `plan --nodes`; what applies where it is not given is decided in tools/scale.py."""
    told = typer.Option(flag, metavar=metavar, help=text, rich_help_panel=SCALE, show_default=shown, min=least)
    return Annotated[kind | None, told], None


OF_SCALE = {
    "nodes": _scale("Simulate so many workers.", "--nodes", "N,N"),
    "prompts": _scale("How many prompts.", "--prompts", "N,N", "1M,100M,1B"),
    "measured": _scale("A finished run's folder, whose pace is a worker's. Without it: INPUT and a probe.", "--measured",
                       "OUTPUT", kind=Path),
    "failures": _scale("Mean time between the deaths of a worker; 0: none.", "--failures", "1000h", "1000h"),
    "launch": _scale("Until a worker, or one in a dead one's place, can load its model.", "--launch", "10s", "10s"),
    "cost": _scale("What an hour of a worker costs.", "--cost", "PRICE", "1"),
    "cores": _scale("Cores of a worker, where the measured one had another number.", "--cores", "N", kind=int,
                    least=1),
}  # fmt: skip
CONFIG_FILE = Annotated[
    Path | None, typer.Option("--config", help="Read options from this TOML file.", show_default="./prefill-score.toml")
]


def takes(*names: str, **others: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command that is written as f(inputs, config, **given) have the options `names` of `run`, and `others`.

    others: annotated types, or pairs of one and its default, by name. They come first and `config` last; one that is among
    `names` is told in their place.
    """
    own = {name: pair if isinstance(pair, tuple) else (pair, Parameter.empty) for name, pair in others.items()}
    arguments = {name: pair for name, pair in own.items() if name not in names}
    arguments |= {name: (others.get(name, OPTIONS[name]), None) for name in names} | {"config": (CONFIG_FILE, None)}

    def tell(function: Callable[..., None]) -> Callable[..., None]:
        told: Any = function
        told.__annotations__ = {name: kind for name, (kind, _) in arguments.items()}
        told.__signature__ = Signature(
            [Parameter(n, Parameter.KEYWORD_ONLY, default=default, annotation=a) for n, (a, default) in arguments.items()]
        )
        return function

    return tell
