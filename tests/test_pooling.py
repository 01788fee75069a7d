"""Pooling by hand: which positions count, what is cut, what is normalised, what a model folder says of itself."""

import json

import numpy as np
import pytest
import torch

from prefill_cli.encoding.pooling import POOLINGS, finish, stored_pooling
from prefill_cli.errors import ModelError


def padded(lengths: list[int], width: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[B, T, width]: 100 b + position in real places, 9999 in padding."""
    hidden = torch.full((len(lengths), max(lengths), width), 9999.0)
    for b, length in enumerate(lengths):
        hidden[b, :length] = (100 * b + torch.arange(length))[:, None]
    return hidden.to(dtype)


@pytest.mark.parametrize("lengths", [[2, 5, 9], [9, 5, 2], [1, 40], [40, 1], [1]])
@pytest.mark.parametrize(
    ("pooling", "by_hand"),
    [("last", lambda length: length - 1), ("mean", lambda length: (length - 1) / 2), ("first", lambda length: 0)],
)
def test_pooling_counts_real_positions_only(pooling, by_hand, lengths):
    pooled = POOLINGS[pooling](padded(lengths), torch.tensor(lengths))
    expected = [[100 * b + by_hand(length)] * 3 for b, length in enumerate(lengths)]
    assert pooled.tolist() == expected


@pytest.mark.parametrize("padding", [torch.nan, torch.inf])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_what_stands_in_padding_never_reaches_a_vector(pooling, padding):
    hidden = padded([2, 5]).masked_fill(padded([2, 5]) == 9999.0, padding)
    assert POOLINGS[pooling](hidden, torch.tensor([2, 5])).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_mean_of_half_precision_states_is_taken_in_float32(dtype):
    hidden = torch.ones(1, 4096, 2, dtype=dtype)
    hidden[0, 0] = 257 if dtype == torch.float16 else 3
    pooled = POOLINGS["mean"](hidden, torch.tensor([4096]))
    assert pooled.dtype == torch.float32
    assert pooled[0, 0].item() == (4095 + hidden[0, 0, 0].item()) / 4096


@pytest.mark.parametrize("pooling", POOLINGS)
def test_pooled_vectors_are_float32(pooling):
    assert POOLINGS[pooling](padded([2], dtype=torch.bfloat16), torch.tensor([2])).dtype == torch.float32


def test_vectors_are_cut_before_they_are_normalised():
    pooled = torch.tensor([[3.0, 4.0, 100.0]])
    assert finish(pooled, 2, True).tolist() == [[pytest.approx(0.6), pytest.approx(0.8)]]
    assert finish(pooled, 2, False).tolist() == [[3.0, 4.0]]
    assert np.linalg.norm(finish(pooled, None, True)) == pytest.approx(1)


def test_a_vector_of_zero_length_stays_zero_when_normalised():
    assert finish(torch.zeros(1, 3), None, True).tolist() == [[0.0, 0.0, 0.0]]


def write_pooling(folder, stored):
    (folder / "1_Pooling").mkdir()
    text = stored if isinstance(stored, str) else json.dumps(stored)
    (folder / "1_Pooling" / "config.json").write_text(text)
    return folder


OLD = {"word_embedding_dimension": 32, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False,
       "pooling_mode_max_tokens": False, "pooling_mode_lasttoken": False, "include_prompt": True}  # fmt: skip


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (OLD | {"pooling_mode_lasttoken": True}, "last"),
        (OLD | {"pooling_mode_mean_tokens": True}, "mean"),
        (OLD | {"pooling_mode_cls_token": True}, "first"),
        ({"embedding_dimension": 32, "pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "mean", "include_prompt": True}, "mean"),
        ({"pooling_mode": "cls"}, "first"),
        ({"pooling_mode": ["lasttoken"]}, "last"),
        (OLD | {"pooling_mode": "mean", "pooling_mode_mean_tokens": True}, "mean"),
    ],
)
def test_a_stored_pooling_is_understood_in_its_old_and_new_layout(tmp_path, stored, expected):
    assert stored_pooling(write_pooling(tmp_path, stored)) == expected


@pytest.mark.parametrize(
    ("stored", "named"),
    [
        (OLD | {"pooling_mode_max_tokens": True}, "max_tokens"),
        (OLD | {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, r"mean_tokens|cls_token"),
        ({"pooling_mode": "weightedmean"}, "weightedmean"),
        ({"pooling_mode": ["mean", "max"]}, r"mean \+ max"),
        ({"pooling_mode": "lasttoken", "pooling_mode_mean_tokens": True}, r"lasttoken \+ mean_tokens"),
        ({"pooling_mode": {}}, "pooling"),
        (OLD, "none"),
        ({}, "none"),
        ("{broken", "not JSON"),
        ("[]", "not a JSON object"),
    ],
)
def test_a_stored_pooling_of_another_kind_is_an_error_that_names_it(tmp_path, stored, named):
    with pytest.raises(ModelError, match=named) as raised:
        stored_pooling(write_pooling(tmp_path, stored))
    assert "1_Pooling/config.json" in str(raised.value)


def test_a_folder_that_says_nothing_has_no_stored_pooling(tmp_path):
    assert stored_pooling(tmp_path) is None
