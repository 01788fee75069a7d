"""What a run was asked to do: one frozen dataclass, and how its values come together.

Order of sources: command-line option, PREFILL_SCORE_* variable, prefill-score.toml (or [tool.prefill-score] of a
pyproject.toml, or the file that --config names), default. Keys are the long option names; `top_k` and `top-k` are the
same key. A relative path in a file is relative to that file, so that a scheduler may start the command anywhere.
"""

import os
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from prefill_cli.errors import UsageError, nearest
from prefill_cli.places import Place, Uri, place

ENV_PREFIX = "PREFILL_SCORE_"
NOT_OPTIONS = frozenset({"PREFILL_SCORE_DEBUG"})  # a switch for developers, not a key
WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
CONFIG_NAMES = ("prefill-score.toml", "pyproject.toml")

# Fields with this metadata change speed, display or permission, never the answer: the fingerprint leaves them out.
NOT_IN_ANSWER = {"answer": False}
# Fields that came later: where they have their default, the fingerprint is what it was without them.
UNLESS_DEFAULT = {"answer": "unless default"}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Every option of `prefill-score run`, validated. Field names are the option names.

    Raises:
        UsageError: a value is out of range, or two options contradict each other.
    """

    inputs: tuple[str, ...] = field(metadata=NOT_IN_ANSWER)  # the files found there are in the fingerprint instead
    output: Place | None = field(default=None, metadata=NOT_IN_ANSWER)
    model: str = field(default="", metadata=NOT_IN_ANSWER)  # digests stand in the fingerprint for these three
    revision: str | None = field(default=None, metadata=NOT_IN_ANSWER)
    items: Place | None = field(default=None, metadata=NOT_IN_ANSWER)
    item_ids: Place | None = field(default=None, metadata=NOT_IN_ANSWER)
    item_id_column: str = "item_id"
    embedding_column: str = "embedding"
    top_k: int = 100

    id_column: str = "user_id"
    prompt_column: str = "prompt"
    messages_column: str | None = None
    token_ids_column: str | None = None
    vector_column: str | None = None  # of `search`: vectors instead of a prompt
    user_ids: Path | None = field(default=None, metadata=NOT_IN_ANSWER)
    keep_columns: tuple[str, ...] = ()

    prefix: str = ""
    generation_prompt: bool = True
    max_length: int | None = None  # tokens; None: the model's, or the tokenizer's if lower
    truncate: Literal["left", "right", "reject"] = "left"
    keep_head: int = 0  # tokens
    append_eos: bool = False
    plain_special_tokens: bool = False

    pooling: Literal["auto", "last", "mean", "first"] = "auto"
    dims: int | None = None
    normalize: bool = False
    from_lm_head: bool | None = None  # of `embed`: rows of the output (False: input) embeddings, no forward pass

    score: Literal["dot", "cosine", "mlp"] = "dot"
    head: Place | None = field(default=None, metadata=NOT_IN_ANSWER)  # a digest
    item_bias_column: str | None = None
    bad_items: Literal["fail", "drop"] = "fail"
    strict_provenance: bool = field(default=False, metadata=NOT_IN_ANSWER)
    exclude_column: str | None = None
    candidates_column: str | None = None
    allow: Place | None = field(default=None, metadata=NOT_IN_ANSWER)  # digests again
    deny: Place | None = field(default=None, metadata=NOT_IN_ANSWER)

    layout: Literal["nested", "long"] = "nested"
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_batch_tokens: int | None = field(default=None, metadata=NOT_IN_ANSWER)  # None: auto
    backend: Literal["transformers", "vllm"] = field(default="transformers", metadata=UNLESS_DEFAULT)
    encoder: Literal["auto", "plain"] = field(default="auto", metadata=NOT_IN_ANSWER)
    compile: bool | None = field(default=None, metadata=NOT_IN_ANSWER)  # None: where the work is worth it
    share: bool = field(default=True, metadata=NOT_IN_ANSWER)
    shard_rows: int = 16_384
    max_rejects: str = field(default="1%", metadata=NOT_IN_ANSWER)
    overwrite: bool = field(default=False, metadata=NOT_IN_ANSWER)
    cache: Place | None = field(default=None, metadata=NOT_IN_ANSWER)
    time_limit: str | None = field(default=None, metadata=NOT_IN_ANSWER)
    metrics_file: Path | None = field(default=None, metadata=NOT_IN_ANSWER)
    engine: Literal["local", "ray"] = field(default="local", metadata=NOT_IN_ANSWER)
    workers: str = field(default="1", metadata=NOT_IN_ANSWER)  # N, or MIN:MAX
    cpus_per_worker: int | None = field(default=None, metadata=NOT_IN_ANSWER)  # None: an equal share
    ray_address: str | None = field(default=None, metadata=NOT_IN_ANSWER)  # None: RAY_ADDRESS, else a Ray of its own
    shard_of: str | None = field(default=None, metadata=NOT_IN_ANSWER)  # I/N, from 0
    offline: bool = field(default=False, metadata=NOT_IN_ANSWER)
    trust_remote_code: bool = False
    json: bool = field(default=False, metadata=NOT_IN_ANSWER)
    quiet: bool = field(default=False, metadata=NOT_IN_ANSWER)
    log_format: Literal["text", "json"] = field(default="text", metadata=NOT_IN_ANSWER)

    def __post_init__(self) -> None:
        for name in ("top_k", "max_length", "dims", "max_batch_tokens", "shard_rows", "cpus_per_worker"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{option(name)} must be at least 1, not {value}")
        if self.keep_head < 0:
            raise UsageError(f"--keep-head must not be negative, but is {self.keep_head}")
        if self.keep_head and self.truncate != "left":
            raise UsageError(f"--keep-head needs --truncate left, not {self.truncate}: only then is the middle cut out")
        if self.messages_column and self.token_ids_column:
            raise UsageError("--messages-column and --token-ids-column exclude each other: a row has one prompt")
        ready_made = self.messages_column or self.token_ids_column
        if self.prefix and ready_made:
            raise UsageError(f"--prefix is joined to prompt text; column {ready_made!r} is not text")
        if self.append_eos and self.token_ids_column:
            raise UsageError("--append-eos with --token-ids-column: ready-made token ids are used as they are")
        if self.score == "mlp" and not self.head:
            raise UsageError("--score mlp needs --head FILE, the network that scores a user and an item")
        if self.time_limit is not None:
            seconds(self.time_limit, "--time-limit")
        self.allowed_rejects(0)
        self._check_engine()
        self._check_spelling()

    def _check_engine(self) -> None:
        fewest, most = self.worker_range
        if self.engine == "local" and fewest != most:
            raise UsageError(f"--workers {self.workers}: a range needs --engine ray; processes are a fixed number")
        if self.engine == "local" and self.ray_address:
            raise UsageError("--ray-address needs --engine ray")
        if self.engine == "local" and most == 1 and self.cpus_per_worker:
            raise UsageError("--cpus-per-worker needs --workers, more than one, or --engine ray")
        if most > 1 and ":" in self.device:
            raise UsageError(f"--workers {self.workers} takes one device each, so --device {self.device} is one too few")
        _ = self.slice

    def _check_spelling(self) -> None:
        if self.backend == "vllm" and self.encoder == "plain":
            raise UsageError("--encoder plain is Transformers' own pass; leave it out, or --backend vllm")
        if "" in self.inputs:
            raise UsageError("an input is empty text; name a file, a folder or a glob")
        if re.search("[\ud800-\udfff]", self.prefix):  # how Python shows bytes that are not text
            raise UsageError("--prefix is not UTF-8")
        if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", self.device):
            raise UsageError(f"--device must be auto, cpu, cuda, cuda:N or mps, not {self.device!r}")

    @property
    def worker_range(self) -> tuple[int, int]:
        """The fewest and the most workers.

        Raises:
            UsageError: --workers is neither N nor MIN:MAX.
        """
        match = re.fullmatch(r"(\d{1,5})(?::(\d{1,5}))?", self.workers.strip())
        fewest, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= fewest <= most:
            raise UsageError(f"--workers must be a number from 1 up, or a range like 2:16, not {self.workers!r}")
        return fewest, most

    @property
    def slice(self) -> tuple[int, int] | None:
        """I and N of --shard-of, None where all shards are meant.

        Raises:
            UsageError: it is no I/N with I from 0 to N - 1.
        """
        if self.shard_of is None:
            return None
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", self.shard_of.strip())
        if not match or not int(match[1]) < int(match[2]):
            raise UsageError(f"--shard-of must be I/N with I from 0 to N - 1, like 0/16, not {self.shard_of!r}")
        return int(match[1]), int(match[2])

    @property
    def slice_name(self) -> str:
        """Of locks and folders; empty where all shards are meant."""
        return "slice-{}-of-{}".format(*self.slice) if self.slice else ""

    @property
    def text_column(self) -> str:
        """The column that holds the prompt, in whichever of its forms."""
        return self.vector_column or self.messages_column or self.token_ids_column or self.prompt_column

    def without(self, *names: str) -> "RunConfig":
        """The same with these options as if nobody had given them."""
        defaults: dict[str, Any] = {f.name: f.default for f in fields(self) if f.name in names}
        return replace(self, **defaults)

    def allowed_rejects(self, rows: int) -> int:
        """How many of `rows` input rows may be rejected before nothing is published."""
        match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)(%?)", self.max_rejects.strip())
        if not match or (not match[2] and "." in match[1]) or (match[2] and float(match[1]) > 100):
            raise UsageError(f"--max-rejects must be a number of rows or a share like 2%, not {self.max_rejects!r}")
        return int(rows * Fraction(match[1]) / 100) if match[2] else int(match[1])

    def answer_options(self) -> dict[str, Any]:
        """The options that change the answer, as plain values; the files they name are digested elsewhere."""
        told = {f: getattr(self, f.name) for f in fields(self) if f.metadata.get("answer", True)}
        return {f.name: value for f, value in told.items() if f.metadata != UNLESS_DEFAULT or value != f.default}

    def as_dict(self) -> dict[str, Any]:
        """All options as JSON values, for the manifest."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: str(v) if isinstance(v, Path) else list(v) if isinstance(v, tuple) else v for k, v in values.items()}


def from_dict(values: Mapping[str, Any]) -> RunConfig:
    """The options that `as_dict` gave."""
    given = {name: value for name, value in values.items() if value is not None}
    return RunConfig(**{name: _convert(name, value, f"option {option(name)}") for name, value in given.items()})


def seconds(text: str, what: str) -> float:
    """A length of time like 90s, 45m, 3h30m or 30d.

    Raises:
        UsageError: it is none, or zero.
    """
    match = re.fullmatch(r"(?:(\d{1,6})d)?(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,6})s)?", text.strip().lower())
    found = sum(int(n or 0) * unit for n, unit in zip(match.groups(), (86_400, 3_600, 60, 1), strict=True)) if match else 0
    if not found:
        raise UsageError(f"{what} must be a length of time like 3h30m, 45m or 30d, not {text!r}")
    return float(found)


def size_bytes(text: str, what: str) -> int:
    """A size like 500MB, 50GB or 2GiB.

    Raises:
        UsageError: it is none.
    """
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*([kmgt]?)(i?)b", text.strip().lower())
    if not match:
        raise UsageError(f"{what} must be a size like 500MB or 50GB, not {text!r}")
    return int(Fraction(match[1]) * (1024 if match[3] else 1000) ** " kmgt".index(match[2] or " "))


def option(name: str) -> str:
    """The command-line spelling of a field: `top_k` → `--top-k`."""
    return "--" + name.replace("_", "-")


def resolve(
    given: Mapping[str, Any],
    config_file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    needs: tuple[str, ...] = ("model", "items"),
) -> RunConfig:
    """Options from every source, the strongest first, as one RunConfig.

    `given` holds what the command line said; a value of None means that it said nothing. `needs` names the options
    without which the command has no meaning.

    Raises:
        UsageError: unknown key, value of the wrong type, missing model or items, contradiction.
    """
    values = _from_file(config_file) | _from_environment(os.environ if environ is None else environ)
    values |= {k: _convert(k, v, f"option {option(k)}") for k, v in given.items() if v is not None}
    for name in needs:
        if not values.get(name):
            raise UsageError(f"no {option(name)}: give it on the command line or as {name!r} in {CONFIG_NAMES[0]}")
    return RunConfig(**values)


def _keys() -> dict[str, Any]:
    """Settable fields and their types; the inputs come from the command line alone."""
    hints = typing.get_type_hints(RunConfig)
    return {f.name: hints[f.name] for f in fields(RunConfig) if f.name != "inputs"}


def _from_file(config_file: Path | None) -> dict[str, Any]:
    path, table = _find_table(config_file)
    values = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in _keys():
            raise UsageError(f"{path}: unknown key {key!r}{nearest(name, _keys())}")
        if name in values:
            raise UsageError(f"{path}: key {key!r} stands there twice, with a dash and with an underscore")
        values[name] = _convert(name, value, f"{path}: key {key!r}", path.parent)
    return values


def _find_table(config_file: Path | None) -> tuple[Path, dict[str, Any]]:
    candidates = (config_file,) if config_file else tuple(map(Path, CONFIG_NAMES))
    for path in candidates:
        try:
            table = tomllib.loads(path.read_text("utf-8-sig"))  # editors on Windows write a byte-order mark
        except FileNotFoundError:
            if config_file:
                raise UsageError(f"--config {path}: no such file") from None
            continue
        except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"{path}: not readable as TOML: {error}") from None
        if path.name == "pyproject.toml":
            tools = table.get("tool", {})
            table = tools.get("prefill-score", {}) if isinstance(tools, dict) else tools
            if not isinstance(table, dict):
                raise UsageError(f"{path}: tool.prefill-score is not a table")
        if table or config_file:
            return path, table
    return Path(), {}


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for variable, value in environ.items():
        if variable.startswith(ENV_PREFIX) and variable not in NOT_OPTIONS:
            name = variable.removeprefix(ENV_PREFIX).lower()
            if name not in _keys():
                names = [ENV_PREFIX + key.upper() for key in _keys()]
                raise UsageError(f"unknown environment variable {variable}{nearest(variable, names)}")
            values[name] = _convert(name, value, f"environment variable {variable}")
    return values


def _convert(name: str, value: Any, where: str, base: Path | None = None) -> Any:
    """A value from any source, in the type of its field; `where` names the source in the error."""
    if name == "inputs":
        return tuple(value)
    if name == "max_batch_tokens" and value == "auto":
        return None
    if name in ("max_rejects", "workers") and type(value) is int:
        value = str(value)
    kind = _keys()[name]
    if isinstance(kind, types.UnionType):  # X | None: the field's own None is "not given"
        kind = next(a for a in typing.get_args(kind) if a is not type(None))
    if typing.get_origin(kind) is tuple:
        return _names(value, where)
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if value not in choices:
            raise UsageError(f"{where}: must be {', '.join(choices[:-1])} or {choices[-1]}, not {value!r}")
        return value
    value = _scalar(kind, value, where)
    if kind is Path:
        return _placed(name, value, where, base or Path())
    if name == "model" and base and (base / value).is_dir():  # a folder beside the file, else a hub name
        return str(base / value)
    return value


def _placed(name: str, value: Place, where: str, base: Path) -> Place:
    if not isinstance(value, Uri):
        return base / value.expanduser()
    if _keys()[name] != Place | None:
        raise UsageError(f"{where}: {value} is not a path on this machine")
    return value


def _names(value: Any, where: str) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) and value.strip() else value or ()
    if not isinstance(parts, list | tuple) or not all(isinstance(p, str) and p.strip() for p in parts):
        raise UsageError(f"{where}: expected column names, not {value!r}")
    return tuple(p.strip() for p in parts)


def _scalar(kind: type, value: Any, where: str) -> Any:
    """Text from a variable or the command line becomes a number or a yes/no; a TOML value has to be one already."""
    if isinstance(value, str) and kind is bool:
        value = WORDS.get(value.strip().lower(), value)
    elif isinstance(value, str) and kind is int and re.fullmatch(r"\s*[+-]?\d{1,18}\s*", value):
        value = int(value)
    elif isinstance(value, str) and kind is Path and value:
        value = place(value)
    if isinstance(value, str | Path) and "\0" in str(value):
        raise UsageError(f"{where}: holds a null byte")
    if not isinstance(value, Uri if isinstance(value, Uri) else kind) or (kind is int and isinstance(value, bool)):
        expected = {int: "a whole number", bool: "true or false", Path: "a path", str: "text"}[kind]
        raise UsageError(f"{where}: expected {expected}, not {value!r}")
    return value
