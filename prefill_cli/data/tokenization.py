"""Prompts → token ids: the special tokens that the tokenizer defines, once, and never more tokens than allowed.

A row is specials-before + content + specials-after. Only content is cut. For chat messages the template's output is the
content and nothing is added, but a BOS that the template wrote stays when the left side is cut. Ready-made ids are used
as they are. Text is encoded in batches bounded by rows and characters, since the Rust side keeps some hundred bytes a
token meanwhile.
"""

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from prefill_cli.arrow import invalid_text
from prefill_cli.config import RunConfig
from prefill_cli.data.rejects import Reject
from prefill_cli.errors import ModelError, UsageError, first_line

Ids = npt.NDArray[np.int32]
TOKENIZER_ROWS, TOKENIZER_CHARS = 1_024, 1 << 20
SANE_LENGTH = 10**9  # a stored limit above this is Transformers' way of saying "none" (1e30)
MARK = "\ue000"  # private use: stands for control-token text while a chat template is rendered


@dataclass
class Tokenized:
    """Rows of a piece. `input_ids[i]` is None where `rejects` says why."""

    input_ids: list[Ids | None]
    rejects: dict[int, Reject] = field(default_factory=dict)
    truncated_rows: int = 0
    control_token_rows: int = 0


def load_tokenizer(folder: str, config: RunConfig) -> Any:
    """The fast tokenizer of a local model folder.

    Raises:
        ModelError: there is none, or it cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, use_fast=True, local_files_only=True, trust_remote_code=config.trust_remote_code
        )
    except Exception as error:  # Transformers raises many kinds here, all of which mean the same to the user
        raise ModelError(f"{folder}: the tokenizer cannot be loaded: {first_line(error)}") from None
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ModelError(f"{folder}: {type(tokenizer).__name__} is not a fast tokenizer; the folder needs a tokenizer.json")
    return tokenizer


class PromptTokenizer:
    """Turns a column of prompts, messages or token ids into token ids.

    `positions` is what the model can attend to (None: no limit), `vocabulary` its number of embedding rows.

    Raises:
        UsageError: a length limit that the model or its special tokens do not allow.
        ModelError: no chat template, no EOS token, a tokenizer that does not fit the model.
    """

    def __init__(self, tokenizer: Any, config: RunConfig, positions: int | None, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._vocabulary = vocabulary
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_padding()  # a tokenizer.json may carry both, and they would act before our own rules
        self._backend.no_truncation()
        self._eos: int | None = tokenizer.eos_token_id
        controls = sorted((t.content for t in tokenizer.added_tokens_decoder.values() if t.special), key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, controls))) if controls else None  # the longest wins
        not_text = config.messages_column or config.token_ids_column
        self._before, self._after = ([], []) if not_text else self._probe_specials()
        self.limit = self._length_limit(positions)
        if config.append_eos and self._eos is None:
            raise ModelError("--append-eos: the tokenizer defines no EOS token")
        if config.messages_column and not tokenizer.chat_template:
            raise ModelError("--messages-column: the model's folder has no chat template")

    def __call__(self, column: pa.Array) -> Tokenized:
        """Token ids of each row of a column; rows that have none are rejected with a reason."""
        if self._config.token_ids_column:
            return self._ready_made(column)
        return self._chat(column) if self._config.messages_column else self._text(column)

    @property
    def specials(self) -> tuple[list[int], list[int]]:
        """Ids that stand before and after every text. A chat template writes its own."""
        return self._before, self._after

    def describe(self, text: str) -> list[tuple[int, str]]:
        """(id, token) pairs of a text, special tokens included."""
        ids = self._fit(self._encode([text])[0], Tokenized([]))
        numbers = [] if isinstance(ids, Reject) else ids.tolist()
        return list(zip(numbers, self._tokenizer.convert_ids_to_tokens(numbers), strict=True))

    # --- the three kinds of column ---------------------------------------------------------------------------------

    def _text(self, column: pa.Array) -> Tokenized:
        result = Tokenized([None] * len(column))
        result.rejects |= {i: Reject("bad_text", "the prompt is not UTF-8") for i in invalid_text(column)}
        if result.rejects:
            bad = pa.array([i in result.rejects for i in range(len(column))])
            column = pc.if_else(bad, pa.scalar("", column.type), column)
        texts: list[str | None] = column.to_pylist()
        good = [i for i, text in enumerate(texts) if i not in result.rejects and not _judge(i, text, result)]
        prompts = [texts[i] or "" for i in good]
        encoded = self._encode([self._config.prefix + p for p in prompts], plain=self._config.plain_special_tokens)
        for i, prompt, content in zip(good, prompts, encoded, strict=True):
            result.control_token_rows += self._spells_control_token(prompt)  # the prefix is the operator's own word
            self._place(i, content, result)
        return self._checked(result)

    def _chat(self, column: pa.Array) -> Tokenized:
        result = Tokenized([None] * len(column))
        good, rendered = [], []
        for i, cell in enumerate(column):
            try:
                messages = cell.as_py()
            except UnicodeDecodeError:
                result.rejects[i] = Reject("bad_text", "a message is not UTF-8")
                continue
            contents = None if messages is None else [m and m["content"] for m in messages]
            text = None if contents is None or None in contents else "".join(contents)
            if _judge(i, text, result):
                continue
            result.control_token_rows += any(map(self._spells_control_token, contents or ()))
            try:
                rendered.append(self._render(messages))
                good.append(i)
            except Exception as error:  # a template may raise anything; its words may quote the prompt
                result.rejects[i] = Reject("bad_text", f"the chat template refused the messages ({type(error).__name__})")
        for i, content in zip(good, self._encode_marked(rendered), strict=True):
            self._place(i, content, result)
        return self._checked(result)

    def _ready_made(self, column: pa.Array) -> Tokenized:
        result = Tokenized([None] * len(column))
        if pa.types.is_integer(column.type):  # one token a row
            offsets = pa.array(np.arange(len(column) + 1))
            column = pa.LargeListArray.from_arrays(offsets, column.fill_null(0), mask=column.is_null())
        for i, cell in enumerate(column):
            if not cell.is_valid:
                result.rejects[i] = Reject("null_prompt", "")
            elif len(cell.values) == 0:
                result.rejects[i] = Reject("empty_prompt", "")
            elif cell.values.null_count:
                result.rejects[i] = Reject("bad_token_ids", "a token id is null")
            else:
                ids = cell.values.to_numpy(zero_copy_only=False)
                low, high = int(ids.min()), int(ids.max())
                if low < 0 or high >= self._vocabulary:
                    wrong = low if low < 0 else high
                    result.rejects[i] = Reject("bad_token_ids", f"id {wrong} is outside 0 to {self._vocabulary - 1}")
                else:
                    self._place(i, ids.astype(np.int32), result)
        return result

    # --- text to ids -----------------------------------------------------------------------------------------------

    def _encode(self, texts: Sequence[str], plain: bool = False) -> list[Ids]:
        """Content ids of each text; with `plain`, control-token text is text like any other."""
        encoded: list[Ids] = []
        self._backend.encode_special_tokens = plain
        try:
            for batch in _bounded(texts):
                encodings = self._backend.encode_batch_fast(batch, add_special_tokens=False)
                encoded += [np.array(e.ids, np.int32) for e in encodings]
        except Exception as error:  # its words may quote the prompt
            raise ModelError(
                f"the tokenizer fails on a text ({type(error).__name__}); has it a token for what it does not know?"
            ) from None
        finally:
            self._backend.encode_special_tokens = False
        return encoded

    def _render(self, messages: list[dict[str, str]]) -> str:
        """The template's text. With --plain-special-tokens, MARKs stand around what users wrote as control tokens."""
        if self._config.plain_special_tokens and self._control_pattern:
            mark = functools.partial(self._control_pattern.sub, lambda match: MARK + match[0] + MARK)
            # A MARK that a user typed would turn the pieces around; it has no meaning as text.
            messages = [m | {"content": mark(m["content"].replace(MARK, "\ufffd"))} for m in messages]
        text: str = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=self._config.generation_prompt
        )
        return text

    def _encode_marked(self, texts: list[str]) -> list[Ids]:
        """Ids of rendered templates, where every second piece between MARKs is plain text."""
        if not (self._config.plain_special_tokens and self._control_pattern):
            return self._encode(texts)
        parts = [text.split(MARK) for text in texts]
        controlled = iter(self._encode([p for pieces in parts for p in pieces[0::2]]))
        plain = iter(self._encode([p for pieces in parts for p in pieces[1::2]], plain=True))
        return [np.concatenate([next(plain if n % 2 else controlled) for n in range(len(pieces))]) for pieces in parts]

    def _spells_control_token(self, text: str) -> bool:
        return bool(self._control_pattern and self._control_pattern.search(text))

    def _probe_specials(self) -> tuple[list[int], list[int]]:
        """What the tokenizer's own post-processor puts before and after a single text."""
        text = "a"
        if not self._knows(text):  # without a token there would be no telling before from after
            text = next(filter(self._knows, self._backend.get_vocab(with_added_tokens=False)), "")
        if not text:
            raise ModelError("the tokenizer makes no token of any text")
        encoding = self._backend.encode(text, add_special_tokens=True)
        content = self._backend.encode(text, add_special_tokens=False).ids
        before = next((i for i, special in enumerate(encoding.special_tokens_mask) if not special), 0)
        after = before + len(content)
        if encoding.ids[before:after] != content:
            raise ModelError("the tokenizer's post-processor does more than add special tokens around a text")
        return encoding.ids[:before], encoding.ids[after:]

    def _knows(self, text: str) -> bool:
        """Whether the tokenizer makes a token of a text."""
        try:
            return bool(self._backend.encode(text, add_special_tokens=False).ids)
        except Exception:  # a word-level vocabulary without an unknown token
            return False

    # --- lengths ---------------------------------------------------------------------------------------------------

    def _length_limit(self, positions: int | None) -> int | None:
        """Tokens a row may have, special tokens included; None where nothing sets a limit."""
        config = self._config
        stored = self._tokenizer.model_max_length
        sane = stored if isinstance(stored, int | float) and 0 < stored < SANE_LENGTH else None
        known = [int(n) for n in (positions, sane) if n]
        limit = min(known) if known else None
        if config.max_length is not None:
            if positions and config.max_length > positions:
                raise UsageError(f"--max-length {config.max_length} is above the model's {positions} positions")
            limit = config.max_length
        if limit is not None:
            template_bos = config.messages_column is not None and self._tokenizer.bos_token_id is not None
            specials = len(self._before) + len(self._after) + self._eos_room() + template_bos
            if limit <= specials:
                raise UsageError(f"--max-length {limit} leaves no room for text: {specials} of it are special tokens")
            if config.keep_head >= limit - specials:
                raise UsageError(
                    f"--keep-head {config.keep_head} must be below the {limit - specials} tokens that --max-length "
                    f"{limit} leaves for text"
                )
        return limit

    def _eos_room(self) -> int:
        return int(self._config.append_eos and self._after[-1:] != [self._eos])

    def _place(self, i: int, content: Ids, result: Tokenized) -> None:
        fitted = self._fit(content, result)
        if isinstance(fitted, Reject):
            result.rejects[i] = fitted
        else:
            result.input_ids[i] = fitted

    def _fit(self, content: Ids, result: Tokenized) -> Ids | Reject:
        """The row's final ids: content cut to the limit, special tokens around it."""
        config, before, after = self._config, self._before, self._after
        if config.messages_column and len(content) and content[0] == self._tokenizer.bos_token_id:
            before, content = [int(content[0])], content[1:]
        needs_eos = config.append_eos and (after or content[-1:].tolist())[-1:] != [self._eos]
        length = len(before) + len(content) + len(after) + needs_eos
        if length == len(before) + len(after) + needs_eos and not (config.messages_column and before):
            return Reject("empty_prompt", "the tokenizer makes no token of it")
        if self.limit is not None and length > self.limit:
            if config.truncate == "reject":
                return Reject("too_long", f"{length} tokens, the limit is {self.limit}")
            result.truncated_rows += 1
            content = self._cut(content, self.limit - len(before) - len(after) - needs_eos)
            # Right truncation may have cut an EOS that ended the content.
            needs_eos = config.append_eos and (after or content[-1:].tolist())[-1:] != [self._eos]
            content = self._cut(content, self.limit - len(before) - len(after) - needs_eos)
        return np.array([*before, *content, *after, *([self._eos] if needs_eos else [])], np.int32)

    def _cut(self, content: Ids, room: int) -> Ids:
        if len(content) <= room:
            return content
        if self._config.truncate == "right":
            return content[:room]
        head = self._config.keep_head
        return np.concatenate([content[:head], content[len(content) - (room - head) :]])

    def _checked(self, result: Tokenized) -> Tokenized:
        """Ids that the model has no embedding for mean that tokenizer and model do not belong together."""
        highest = max((int(ids.max()) for ids in result.input_ids if ids is not None), default=0)
        if highest >= self._vocabulary:
            raise ModelError(
                f"the tokenizer gives id {highest}, but the model has embeddings for {self._vocabulary} tokens; "
                "were tokens added without resizing the model?"
            )
        return result


def _bounded(texts: Sequence[str]) -> Iterator[list[str]]:
    """Consecutive texts in batches of at most TOKENIZER_ROWS, and TOKENIZER_CHARS unless one alone has more."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        if batch and (len(batch) == TOKENIZER_ROWS or characters + len(text) > TOKENIZER_CHARS):
            yield batch
            batch, characters = [], 0
        batch.append(text)
        characters += len(text)
    if batch:
        yield batch


def _judge(i: int, text: str | None, result: Tokenized) -> bool:
    """Whether row i has no prompt at all; the prefix and special tokens do not count as one."""
    if text is None:
        result.rejects[i] = Reject("null_prompt", "")
    elif not text.strip():
        result.rejects[i] = Reject("empty_prompt", "")
    return i in result.rejects
