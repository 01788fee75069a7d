"""Which prefixes are computed once: found from the tokens, only where it pays, and every prompt keeps a token."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefill_cli.encoding import prefix
from prefill_cli.encoding.prefix import nothing_shared, shared_prefixes


def tokens(*parts) -> np.ndarray:
    return np.concatenate([np.atleast_1d(np.asarray(part, np.int32)) for part in parts])


def path(sharing, index: int) -> list[int]:
    """All tokens of a prefix, its parents' first."""
    if index < 0:
        return []
    node = sharing.prefixes[index]
    return path(sharing, node.parent) + node.input_ids.tolist()


def check(prompts, sharing) -> int:
    """That the plan is true; returns the tokens that are left to compute."""
    for i, node in enumerate(sharing.prefixes):
        assert node.parent < i
        assert node.start == len(path(sharing, node.parent))
        assert len(node.input_ids)
    for ids, index in zip(prompts, sharing.of_prompt, strict=True):
        shared = path(sharing, index)
        assert ids[: len(shared)].tolist() == shared
        assert len(shared) < len(ids), "the last token is the prompt's own"
    own = sum(len(ids) - len(path(sharing, index)) for ids, index in zip(prompts, sharing.of_prompt, strict=True))
    return own + sum(len(node.input_ids) for node in sharing.prefixes)


INSTRUCTION = np.arange(100, 221, dtype=np.int32)  # 121 tokens


def test_an_instruction_is_found_and_a_country_after_it():
    country = {c: np.full(30, 300 + c, np.int32) for c in range(3)}
    prompts = [tokens(INSTRUCTION, country[i % 3], 400 + i, 7) for i in range(60)]
    sharing = shared_prefixes(prompts)
    assert sorted((p.parent, p.start, len(p.input_ids)) for p in sharing.prefixes) == [
        (-1, 0, 121), (0, 121, 30), (0, 121, 30), (0, 121, 30),
    ]  # fmt: skip
    assert check(prompts, sharing) == 121 + 3 * 30 + 60 * 2


def test_too_little_is_left_alone(monkeypatch):
    prompts = [tokens(INSTRUCTION[:50], i) for i in range(5)]
    assert shared_prefixes(prompts).prefixes == ()  # 4 x 50 tokens saved
    assert len(shared_prefixes([*prompts, *(tokens(INSTRUCTION[:50], 5 + i) for i in range(3))]).prefixes) == 1  # 7 x 50
    monkeypatch.setattr(prefix, "MAX_TOKENS_KEPT", 49)
    assert shared_prefixes([tokens(INSTRUCTION[:50], i) for i in range(50)]).prefixes == ()


def test_a_prompt_that_ends_where_the_prefix_does_keeps_its_last_token():
    prompts = [INSTRUCTION, *(tokens(INSTRUCTION, i) for i in range(9))]
    sharing = shared_prefixes(prompts)
    assert [len(p.input_ids) for p in sharing.prefixes] == [121]
    assert sharing.of_prompt.tolist() == [-1] + [0] * 9
    check(prompts, sharing)


@pytest.mark.parametrize("prompts", [[], [tokens(1)], [tokens(1), tokens(2)]])
def test_few_prompts_share_nothing(prompts):
    sharing = shared_prefixes(prompts)
    assert sharing.prefixes == nothing_shared(len(prompts)).prefixes == ()
    assert sharing.of_prompt.tolist() == [-1] * len(prompts)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=25, unique_by=tuple))
def test_any_prompts_are_put_together_again_and_nothing_gets_more(lists):
    prompts = [np.array(ids, np.int32) for ids in lists]
    least, prefix.MIN_TOKENS_SAVED = prefix.MIN_TOKENS_SAVED, 3
    try:
        assert check(prompts, shared_prefixes(prompts)) <= sum(map(len, prompts))
    finally:
        prefix.MIN_TOKENS_SAVED = least


def test_order_does_not_matter_and_long_chains_of_prefixes_are_no_trap():
    chain = [np.arange(1, n + 1, dtype=np.int32) for n in range(1, 1500)]
    began = time.perf_counter()
    forward, backward = shared_prefixes(chain), shared_prefixes(chain[::-1])
    assert time.perf_counter() - began < 20
    assert check(chain, forward) == check(chain[::-1], backward)
