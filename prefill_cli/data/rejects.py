"""Rows that end in the rejects instead of the output: why, and how they are written."""

from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

Reason = Literal[
    "null_id",
    "null_prompt",
    "empty_prompt",
    "bad_text",
    "too_long",
    "bad_token_ids",
    "not_finite",
    "out_of_memory",
    "null_vector",
    "bad_vector",
    "worker_died",
]
COLUMNS = ("source_file", "source_row", "reason", "detail")


@dataclass(frozen=True)
class Reject:
    """Why a row is not in the output. `detail` never holds the prompt's text."""

    reason: Reason
    detail: str


def schema(id_column: str, id_type: pa.DataType) -> pa.Schema:
    text = pa.string()
    return pa.schema([(id_column, id_type), *zip(COLUMNS, (text, pa.int64(), text, text), strict=True)])
