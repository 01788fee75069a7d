"""Prompts, messages and ready-made ids → the ids that the model reads: special tokens once, never more than the limit.

The tiny tokenizer of conftest.py has one token a word: w0 is 5, w1 is 6, …; <unk> is 0, <s> 1, </s> 2, <|user|> 3,
<|assistant|> 4.
"""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import WORDS, make_tokenizer, random_prompts, save_llama, write_prompts
from test_prompts import BAD, GOOD, broken_text
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from prefill_cli.config import RunConfig
from prefill_cli.data.tokenization import PromptTokenizer, load_tokenizer
from prefill_cli.errors import ModelError, UsageError

UNK, BOS, EOS, USER, ASSISTANT = range(5)
VOCABULARY = 65
SECRET = "w59 SECRET-123"


def words(*numbers):
    return " ".join(f"w{n}" for n in numbers)


def ids(*numbers):
    return [n + 5 for n in numbers]


def tokenizer_of(*, positions=None, vocabulary=VOCABULARY, tokenizer=None, **options):
    special = {name: options.pop(name) for name in ("bos", "eos", "template") if name in options}
    return PromptTokenizer(tokenizer or make_tokenizer(**special), RunConfig(inputs=(), **options), positions, vocabulary)


def tokenize(column, **options):
    if not isinstance(column, pa.Array):
        column = pa.array(column, pa.string())
    result = tokenizer_of(**options)(column)
    assert len(result.input_ids) == len(column)
    assert all((row is None) == (i in result.rejects) for i, row in enumerate(result.input_ids))
    assert all(row is None or row.dtype == np.int32 for row in result.input_ids)
    return result


def lists(result):
    return [None if row is None else row.tolist() for row in result.input_ids]


def reasons(result):
    return {i: reject.reason for i, reject in sorted(result.rejects.items())}


# --- text ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "before", "after"),
    [
        ({}, [BOS], []),
        ({"bos": False}, [], []),
        ({"eos": True}, [BOS], [EOS]),
        ({"bos": False, "eos": True}, [], [EOS]),
        ({"append_eos": True}, [BOS], [EOS]),
        ({"bos": False, "append_eos": True}, [], [EOS]),
        ({"eos": True, "append_eos": True}, [BOS], [EOS]),
    ],
)
def test_a_prompt_gets_what_the_tokenizer_adds_once_and_an_eos_where_asked(options, before, after):
    assert lists(tokenize([words(0, 1), words(2)], **options)) == [before + ids(0, 1) + after, before + ids(2) + after]


def test_ids_equal_those_of_the_tokenizer_itself():
    tokenizer = make_tokenizer(eos=True)
    prompts = random_prompts(50)
    assert lists(tokenize(prompts, tokenizer=make_tokenizer(eos=True))) == tokenizer(prompts)["input_ids"]


def test_an_eos_that_ends_the_text_is_not_repeated():
    result = tokenize(["w0 </s>", "w0 </s> w1"], append_eos=True)
    assert lists(result) == [[BOS, 5, EOS], [BOS, 5, EOS, 6, EOS]]


def test_append_eos_without_an_eos_token_is_a_model_error():
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ModelError, match="defines no EOS token"):
        tokenizer_of(tokenizer=tokenizer, append_eos=True)


def test_a_vocabulary_without_the_letter_a_keeps_bos_before_and_eos_after():
    tokenizer = Tokenizer(models.BPE({"<s>": 0, "</s>": 1, "C": 2, "G": 3}, []))
    pair = [("<s>", 0), ("</s>", 1)]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=pair)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    result = tokenize(["CGG", "xyz"], tokenizer=fast, vocabulary=4)
    assert lists(result) == [[0, 2, 3, 3, 1], None]
    assert reasons(result) == {1: "empty_prompt"}


def test_a_word_level_vocabulary_without_an_unknown_token_is_a_model_error_and_quotes_nothing():
    tokenizer = Tokenizer(models.WordLevel({"x": 0, "y": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert lists(tokenize(["x y x"], tokenizer=fast)) == [[0, 1, 0]]
    with pytest.raises(ModelError, match="fails on a text") as error:
        tokenize([SECRET], tokenizer=fast)
    assert "SECRET" not in str(error.value)


def test_padding_and_truncation_of_a_tokenizer_json_do_not_act(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.enable_padding(length=30, pad_id=0)
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    assert saved["padding"]
    assert saved["truncation"]
    loaded = load_tokenizer(str(tmp_path), RunConfig(inputs=()))
    long = words(*range(20))
    assert lists(tokenize([words(0), long], tokenizer=loaded)) == [[BOS, 5], [BOS, *ids(*range(20))]]


def test_no_pad_token_is_needed_and_none_is_added():
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    assert tokenizer.pad_token is None
    rows = [words(0), words(*range(4)), words(*range(9))]
    assert lists(tokenize(rows, tokenizer=tokenizer)) == [[BOS, *ids(*range(n))] for n in (1, 4, 9)]
    assert len(tokenizer) == VOCABULARY


def test_prefix_is_joined_as_text():
    assert lists(tokenize(["0 w1", "w2"], prefix="w3 w1")) == [[BOS, *ids(3, 10, 1)], [BOS, *ids(3), UNK]]


@pytest.mark.parametrize("prefix", ["", "w9 "])
def test_null_empty_and_blank_prompts_are_rejected_before_the_prefix(prefix):
    result = tokenize([None, "", "   ", "\n\t", "\u3000\xa0", "\u200b", "w1"], prefix=prefix)
    head = ids(9) if prefix else []
    assert reasons(result) == {0: "null_prompt", **dict.fromkeys(range(1, 5), "empty_prompt")}
    assert lists(result)[5:] == [[BOS, *head, UNK], [BOS, *head, 6]]  # a zero-width space is no white space


def test_a_row_does_not_depend_on_its_neighbours():
    rows = [None, "", words(0, 1), "  ", words(*range(60)), "\u200b", words(5), "é <s> </s>"]
    together = tokenize(rows, max_length=10)
    for i, row in enumerate(rows):
        alone = tokenize([row], max_length=10)
        assert lists(alone) == lists(together)[i : i + 1]
        assert reasons(alone).get(0) == reasons(together).get(i)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()], ids=str)
def test_bytes_that_are_not_utf8_reject_their_row_alone(kind):
    result = tokenize(broken_text([b"w1", BAD, b"\xff\xfe", b"w2"], kind))
    assert lists(result) == [[BOS, 6], None, None, [BOS, 7]]
    assert reasons(result) == {1: "bad_text", 2: "bad_text"}


def test_a_column_of_nulls_without_a_type_is_all_null_prompts():
    for options in ({}, {"messages_column": "c"}, {"token_ids_column": "c"}):
        assert reasons(tokenize(pa.nulls(2), **options)) == {0: "null_prompt", 1: "null_prompt"}
        assert lists(tokenize(pa.nulls(0), **options)) == []


def test_more_rows_than_the_tokenizer_takes_at_once_stay_in_order():
    rows = [words(n % 60) for n in range(2_500)]
    assert lists(tokenize(rows)) == [[BOS, *ids(n % 60)] for n in range(2_500)]


# --- limits --------------------------------------------------------------------------------------------------------

LONG = list(range(40))


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, LONG[-9:]),
        ({"truncate": "left"}, LONG[-9:]),
        ({"truncate": "right"}, LONG[:9]),
        ({"keep_head": 3}, LONG[:3] + LONG[-6:]),
        ({"keep_head": 8}, LONG[:8] + LONG[-1:]),
    ],
)
def test_long_prompts_are_cut_where_asked_and_counted(options, kept):
    result = tokenize([words(*LONG), words(1)], max_length=10, **options)
    assert lists(result) == [[BOS, *ids(*kept)], [BOS, 6]]
    assert result.truncated_rows == 1


@pytest.mark.parametrize("truncate", ["left", "right"])
def test_special_tokens_stay_when_text_is_cut(truncate):
    for options in ({"eos": True}, {"append_eos": True}):
        (row,) = lists(tokenize([words(*LONG)], max_length=10, truncate=truncate, **options))
        assert row == [BOS, *(ids(*LONG[-8:]) if truncate == "left" else ids(*LONG[:8])), EOS]


def test_an_eos_that_ended_the_text_is_there_after_the_right_end_was_cut():
    options = {"max_length": 5, "append_eos": True}
    assert lists(tokenize(["w0 w1 w2 w3 w4 </s>"], truncate="right", **options)) == [[BOS, *ids(0, 1, 2), EOS]]
    assert lists(tokenize(["w0 w1 w2 w3 w4 </s>"], truncate="left", **options)) == [[BOS, *ids(2, 3, 4), EOS]]


def test_one_long_prompt_among_a_hundred_is_rejected_with_its_length_where_asked():
    rows = [words(n % 60) for n in range(100)]
    rows[57] = words(*LONG)
    result = tokenize(rows, max_length=10, truncate="reject")
    assert reasons(result) == {57: "too_long"}
    assert result.rejects[57].detail == "41 tokens, the limit is 10"
    assert (result.truncated_rows, sum(row is not None for row in result.input_ids)) == (0, 99)


@pytest.mark.parametrize("truncate", ["left", "right", "reject"])
@pytest.mark.parametrize("length", [31, 32, 33])
def test_rows_at_the_limit_are_whole_and_one_more_token_is_too_long(truncate, length):
    result = tokenize([words(*range(length - 2))], eos=True, max_length=32, truncate=truncate)
    if length <= 32:
        assert lists(result) == [[BOS, *ids(*range(length - 2)), EOS]]
    elif truncate == "reject":
        assert reasons(result) == {0: "too_long"}
    else:
        assert len(result.input_ids[0]) == 32
    assert result.truncated_rows == (length == 33 and truncate != "reject")


@pytest.mark.parametrize("max_length", [1, 2])
def test_a_limit_that_leaves_no_room_for_text_is_a_usage_error(max_length):
    with pytest.raises(UsageError, match=f"--max-length {max_length} leaves no room for text: 2 of it are special tokens"):
        tokenizer_of(eos=True, max_length=max_length)
    assert lists(tokenize([words(*LONG)], eos=True, max_length=3)) == [[BOS, *ids(39), EOS]]
    assert lists(tokenize([words(*LONG)], bos=False, max_length=1)) == [ids(39)]


def test_keep_head_that_leaves_no_room_for_the_newest_is_a_usage_error():
    with pytest.raises(UsageError, match="--keep-head 9 must be below the 9 tokens"):
        tokenizer_of(max_length=10, keep_head=9)
    with pytest.raises(UsageError, match="--keep-head 15 must be below the 15 tokens"):
        tokenizer_of(positions=16, keep_head=15)


@pytest.mark.parametrize(
    ("stored", "positions", "max_length", "limit"),
    [
        (int(1e30), None, None, None),
        (1e30, 64, None, 64),
        (20, 64, None, 20),
        (100, 64, None, 64),
        (20, None, None, 20),
        (20, 64, 50, 50),
        (int(1e30), None, 1_000_000, 1_000_000),
        (int(1e30), 64, 64, 64),
        (10**6, 10**7, None, 10**6),
    ],
)
def test_the_limit_is_the_users_or_the_least_of_model_and_sane_tokenizer(stored, positions, max_length, limit):
    tokenizer = make_tokenizer()
    tokenizer.model_max_length = stored
    assert tokenizer_of(tokenizer=tokenizer, positions=positions, max_length=max_length).limit == limit
    (row,) = tokenize([words(*LONG * 3)], tokenizer=tokenizer, positions=positions, max_length=max_length).input_ids
    assert len(row) == min(limit or 121, 121)


@pytest.mark.parametrize("options", [{}, {"token_ids_column": "c"}, {"messages_column": "c"}])
def test_a_limit_above_the_models_positions_is_a_usage_error_that_names_both(options):
    with pytest.raises(UsageError, match="--max-length 65 is above the model's 64 positions"):
        tokenizer_of(positions=64, max_length=65, **options)


def test_a_prompt_of_more_tokens_than_learned_positions_is_cut_and_the_rest_scored(job, gpt2, tmp_path):
    inputs = write_prompts(
        tmp_path / "long.parquet", [words(0), words(*range(16)), words(*range(17)), words(*LONG), words(1)]
    )
    totals = job.run(inputs=(str(inputs),), model=str(gpt2))
    cut = write_prompts(
        tmp_path / "cut.parquet", [words(0), words(*range(16)), words(*range(1, 17)), words(*LONG[-16:]), words(1)]
    )
    job.run(inputs=(str(cut),), model=str(gpt2), output=tmp_path / "cut")
    assert (totals["rows_out"], totals["truncated_rows"]) == (5, 2)
    assert pq.read_table(job.out).equals(pq.read_table(tmp_path / "cut"))


# --- control tokens in text ----------------------------------------------------------------------------------------

CONTROLS = ["w1 w2", "w1 </s> w2", "w1<|user|>", "w3 <unk>", "w4 < s >"]


def test_rows_that_spell_a_control_token_are_counted_and_become_it():
    result = tokenize(CONTROLS)
    assert result.control_token_rows == 3
    assert lists(result)[:4] == [[BOS, 6, 7], [BOS, 6, EOS, 7], [BOS, 6, USER], [BOS, 8, UNK]]


@pytest.mark.parametrize("kind", ["text", "messages"])
def test_plain_special_tokens_keeps_control_tokens_out_of_the_text(kind):
    column = pa.array(CONTROLS) if kind == "text" else pa.array([chat(text) for text in CONTROLS])
    options = {"plain_special_tokens": True, **({} if kind == "text" else {"messages_column": "c"})}
    result = tokenize(column, **options)
    assert result.control_token_rows == 3
    for row in lists(result):
        body = row[1:] if kind == "text" else row[2:-1]
        assert not {BOS, EOS, USER, ASSISTANT} & set(body)
        assert row[0] == BOS
    if kind == "messages":
        assert all(row[:2] == [BOS, USER] and row[-1] == ASSISTANT for row in lists(result))
        assert lists(result)[0] == [BOS, USER, 6, 7, ASSISTANT]


def test_the_switch_for_one_tokenizer_does_not_stay_on_for_the_next():
    shared = make_tokenizer()
    tokenize(CONTROLS, tokenizer=shared, plain_special_tokens=True)
    assert lists(tokenize(["w1 </s>"], tokenizer=shared)) == [[BOS, 6, EOS]]


def test_a_control_token_in_the_prefix_is_no_fault_of_the_prompts():
    result = tokenize(["w1", "w2 </s>"], prefix="<|user|> ")
    assert lists(result) == [[BOS, USER, 6], [BOS, USER, 7, EOS]]
    assert result.control_token_rows == 1


def test_a_private_use_character_in_a_message_does_not_turn_text_into_control_tokens():
    column = pa.array([chat("w1 \ue000 </s> \ue000 <|user|>\ue000")])
    (row,) = lists(tokenize(column, messages_column="c", plain_special_tokens=True))
    assert (row[:2], row[-1]) == ([BOS, USER], ASSISTANT)
    assert not {BOS, EOS, USER, ASSISTANT} & set(row[2:-1])


# --- messages ------------------------------------------------------------------------------------------------------


def chat(*contents, roles=("user", "assistant")):
    return [{"role": roles[i % len(roles)], "content": content} for i, content in enumerate(contents)]


def test_messages_go_through_the_template_and_nothing_is_added():
    column = pa.array([chat("w1 w2"), chat("w1", "w2", "w3")])
    with_opening = [[BOS, USER, 6, 7, ASSISTANT], [BOS, USER, 6, ASSISTANT, 7, USER, 8, ASSISTANT]]
    for name in ("chat", "prompt"):
        result = tokenize(column, messages_column=name, eos=True)
        assert lists(result) == with_opening
        without = tokenize(column, messages_column=name, eos=True, generation_prompt=False)
        assert lists(without) == [row[:-1] for row in with_opening]


def test_messages_equal_what_transformers_makes_of_them():
    rows = [chat(*row) for row in (["w1 w2"], ["w3", "w4 <unk> w5", "w6"], ["w7 é"])]
    expected = [make_tokenizer().apply_chat_template(r, add_generation_prompt=True, return_dict=False) for r in rows]
    assert lists(tokenize(pa.array(rows), messages_column="c")) == expected


def test_append_eos_ends_messages_once():
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'last' %}{{ eos_token }}{% endif %}"
    )
    options = {"messages_column": "c", "append_eos": True, "template": template + "{% endfor %}"}
    column = pa.array([chat("w1", roles=("user",)), chat("w1", roles=("last",))])
    assert lists(tokenize(column, **options)) == [[BOS, 6, EOS], [BOS, 6, EOS]]


def test_a_bos_that_the_template_wrote_stays_when_the_left_is_cut():
    column = pa.array([chat(words(*LONG))])
    assert lists(tokenize(column, messages_column="c", max_length=5)) == [[BOS, *ids(37, 38, 39), ASSISTANT]]
    result = tokenize(column, messages_column="c", max_length=6, keep_head=2)
    assert lists(result) == [[BOS, USER, *ids(0, 38, 39), ASSISTANT]]
    assert result.truncated_rows == 1


def test_the_bos_of_a_template_counts_among_what_a_limit_has_to_leave_room_for():
    with pytest.raises(UsageError, match="--max-length 1 leaves no room"):
        tokenizer_of(messages_column="c", max_length=1)
    with pytest.raises(UsageError, match="--keep-head 4 must be below the 4 tokens"):
        tokenizer_of(messages_column="c", max_length=5, keep_head=4)


def test_messages_without_any_text_are_rejected():
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    rows = [None, [], chat(""), chat(" ", "\n"), chat(None), chat("w1", None), [None], chat("w1")]
    result = tokenize(pa.array(rows, kind), messages_column="c")
    assert lists(result)[-1] == [BOS, USER, 6, ASSISTANT]
    null, empty = "null_prompt", "empty_prompt"
    assert reasons(result) == {0: null, 1: empty, 2: empty, 3: empty, 4: null, 5: null, 6: null}


def test_messages_that_the_template_refuses_reject_their_row_without_its_text():
    template = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('no: ' + messages[0]['content']) }}{% endif %}w1"
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    column = pa.array([chat("w1"), chat(SECRET, roles=("system",)), chat(SECRET, roles=(None,)), chat("w2")], kind)
    result = tokenize(column, messages_column="c", template=template)
    assert lists(result) == [[6], None, None, [6]]
    assert reasons(result) == {1: "bad_text", 2: "bad_text"}
    assert "SECRET" not in repr(result.rejects)


def test_messages_that_are_not_utf8_reject_their_row_alone():
    messages = pa.StructArray.from_arrays([pa.array(["user"] * 3), broken_text([b"w1", BAD, GOOD])], ["role", "content"])
    result = tokenize(pa.LargeListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int64()), messages), messages_column="c")
    assert lists(result) == [[BOS, USER, 6, ASSISTANT], None, [BOS, USER, UNK, ASSISTANT]]
    assert reasons(result) == {1: "bad_text"}


def test_messages_without_a_template_are_a_model_error():
    with pytest.raises(ModelError, match="no chat template"):
        tokenizer_of(template=None, messages_column="c")


def test_a_text_column_is_never_put_through_the_template():
    assert lists(tokenize(["w1"])) == [[BOS, 6]]


# --- ready-made ids ------------------------------------------------------------------------------------------------

KINDS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_ready_made_ids_of_every_integer_type_are_used_as_they_are(kind):
    for name in ("ids", "prompt"):
        result = tokenize(pa.array([[5, 6], [2], [64]], pa.large_list(kind)), token_ids_column=name, eos=True)
        assert lists(result) == [[5, 6], [2], [64]]


@pytest.mark.parametrize("make", [pa.list_, pa.large_list, lambda kind: pa.list_(kind, 3)])
def test_ready_made_ids_are_read_from_every_kind_of_list(job, tmp_path, make):
    column = pa.array([[5, 6, 7], [8, 9, 10]], make(pa.int32()))
    inputs = write_prompts(tmp_path / "a.parquet", ["w0 w1 w2", "w3 w4 w5"], ids=column)
    job.run(inputs=(str(inputs),), token_ids_column="ids")
    tokenizer = make_tokenizer(bos=False)
    job.run(inputs=(str(inputs),), model=str(save_llama(tmp_path / "m", tokenizer=tokenizer)), output=tmp_path / "text")
    assert pq.read_table(job.out).equals(pq.read_table(tmp_path / "text"))


def test_ready_made_ids_that_the_model_cannot_read_are_rejected_with_the_id():
    rows = [[5], None, [], [5, None], [-1, 5], [5, 65], [2**40], [64, 0], [None]]
    result = tokenize(pa.array(rows, pa.large_list(pa.int64())), token_ids_column="c")
    assert lists(result) == [[5], *[None] * 6, [64, 0], None]
    bad = "bad_token_ids"
    assert reasons(result) == {1: "null_prompt", 2: "empty_prompt", 3: bad, 4: bad, 5: bad, 6: bad, 8: bad}
    assert result.rejects[4].detail == "id -1 is outside 0 to 64"
    assert result.rejects[6].detail == f"id {2**40} is outside 0 to 64"


def test_ready_made_ids_above_the_signed_range_are_rejected():
    result = tokenize(pa.array([[2**64 - 1], [5]], pa.large_list(pa.uint64())), token_ids_column="c")
    assert result.rejects[0].detail == f"id {2**64 - 1} is outside 0 to 64"
    assert lists(result)[1] == [5]


def test_ready_made_ids_are_cut_like_text():
    column = pa.array([list(range(5, 45))])
    for options, kept in (({}, LONG[-4:]), ({"truncate": "right"}, LONG[:4]), ({"keep_head": 1}, LONG[:1] + LONG[-3:])):
        assert lists(tokenize(column, token_ids_column="c", max_length=4, **options)) == [ids(*kept)]
    assert reasons(tokenize(column, token_ids_column="c", max_length=4, truncate="reject")) == {0: "too_long"}
    assert lists(tokenize(column, token_ids_column="c", max_length=1)) == [ids(39)]


# --- tokenizer and model -------------------------------------------------------------------------------------------


def test_an_id_above_the_models_vocabulary_is_a_model_error_that_names_both_numbers():
    with pytest.raises(ModelError, match="gives id 64, but the model has embeddings for 64 tokens"):
        tokenize([words(0), words(59)], vocabulary=64)
    assert lists(tokenize([words(58)], vocabulary=64)) == [[BOS, 63]]
    with pytest.raises(ModelError, match="gives id 64"):
        tokenize(pa.array([chat(words(59))]), vocabulary=64, messages_column="c")


def test_tokens_added_without_resizing_the_model_are_a_model_error_in_a_run(job, tmp_path):
    model = save_llama(tmp_path / "model")
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["added"])
    tokenizer.save_pretrained(model)
    inputs = write_prompts(tmp_path / "a.parquet", ["w1", "w2 added"])
    with pytest.raises(ModelError, match="without resizing the model"):
        job.run(inputs=(str(inputs),), model=str(model))


def test_a_folder_without_a_tokenizer_is_a_model_error(tmp_path):
    with pytest.raises(ModelError, match="the tokenizer cannot be loaded: "):
        load_tokenizer(str(tmp_path), RunConfig(inputs=()))


def test_a_damaged_tokenizer_file_is_a_model_error(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ModelError, match="the tokenizer cannot be loaded: "):
        load_tokenizer(str(tmp_path), RunConfig(inputs=()))


def test_describe_names_every_token_of_an_example():
    described = tokenizer_of(eos=True).describe("w1 é")
    assert described == [(BOS, "<s>"), (6, "w1"), (UNK, "<unk>"), (EOS, "</s>")]


# --- the whole way -------------------------------------------------------------------------------------------------


def test_an_appended_eos_is_what_the_model_reads_last(job, tmp_path):
    adds = save_llama(tmp_path / "adds", tokenizer=make_tokenizer(eos=True))
    job.run(model=str(adds), output=tmp_path / "adds_eos")
    job.run(append_eos=True, output=tmp_path / "appended")
    job.run(output=tmp_path / "plain")
    scores = [pq.read_table(tmp_path / name)["scores"].to_pylist() for name in ("adds_eos", "appended", "plain")]
    assert scores[0] == scores[1]
    assert scores[0] != scores[2]


def test_messages_and_control_tokens_are_counted_in_a_run(job, tmp_path):
    column = pa.array([chat("w1"), chat("w1 </s>"), chat(words(*LONG, *LONG)), None])
    inputs = write_prompts(tmp_path / "a.parquet", WORDS[:4], chat=column)
    totals = job.run(inputs=(str(inputs),), messages_column="chat", max_rejects="25%")
    assert (totals["rows_out"], totals["rejects"]) == (3, 1)
    assert (totals["control_token_rows"], totals["truncated_rows"], totals["tokens"]) == (1, 1, 4 + 5 + 64)
