"""examples/movielens on a made-up catalogue in RecBole's format: nothing is downloaded."""

import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
from conftest import PROJECT, reference_top_k, reference_vectors

EXAMPLE = PROJECT / "examples" / "movielens"
MOVIES, USERS = 40, 30


def load(name: str) -> ModuleType:
    """A script of the example, under its own name, as its siblings import it."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, EXAMPLE / f"{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


prepare = load("prepare")


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """As the scripts set it."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def train():
    return load("train")


@pytest.fixture(scope="module")
def sasrec(train):
    return load("sasrec")


def inter(rows: list[tuple[int, int, int]]) -> str:
    """(user, item, timestamp) as an .inter file."""
    lines = [f"{user}\t{item}\t3\t{time}" for user, item, time in rows]
    return "\n".join(["user_id:token\titem_id:token\trating:float\ttimestamp:float", *lines]) + "\n"


ITEM = "\n".join(
    ["item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq"]
    + [f'{i}\tThe "{i}"\t{1930 + i}\t{"Drama Comedy" if i % 2 else "Film-Noir"}' for i in range(1, MOVIES)]
    + [f"{MOVIES}\tunknown\tunkonwn\t"]
)


@pytest.fixture(scope="module")
def rows() -> list[tuple[int, int, int]]:
    """30 users with 5 to 25 movies, two or three of them at a time, in a file that is in no order."""
    rng = np.random.default_rng(5)
    found = []
    for user in range(1, USERS + 1):
        items = rng.permutation(MOVIES)[: rng.integers(5, 26)] + 1
        found += [(user, int(item), 881_250_949 + 400 * (place // 3) ** 3) for place, item in enumerate(items)]
    return [found[i] for i in rng.permutation(len(found))]


@pytest.fixture(scope="module")
def data(rows, tmp_path_factory):
    """The four prepared files: a folder. Read only, but for what train adds."""
    folder = tmp_path_factory.mktemp("movielens")
    prepare.write(inter(rows), ITEM, folder)
    return folder


@pytest.fixture(scope="module")
def trained(data, train):
    """The folder after training of two models for two epochs, one process each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", "--data", str(data), "--epochs", "2"])
        train.main()
    return data


def test_histories_go_by_time_and_ties_keep_the_order_of_the_file(tmp_path):
    file = [(2, 9, 50), (1, 7, 30), (1, 3, 10), (1, 9, 20), (1, 5, 20), (1, 1, 20), (2, 4, 40), (2, 8, 60)]
    prepare.write(inter(file), ITEM, tmp_path)
    tests = pl.read_parquet(tmp_path / "prompts.parquet")
    assert tests["user_id"].to_list() == [1, 2]
    assert tests["seen_items"].to_list() == [[3, 9, 5, 1], [4, 9]]
    assert tests["next_item"].to_list() == [7, 8]


def test_the_last_item_is_the_test_the_one_before_is_validation_and_training_has_neither(data, rows):
    train, valid, test = (pl.read_parquet(data / f"{name}.parquet") for name in ("train", "valid", "prompts"))
    assert train["user_id"].to_list() == valid["user_id"].to_list() == test["user_id"].to_list() == list(range(1, USERS + 1))
    for user in range(USERS):
        kept, first, second = train["item_ids"][user].to_list(), valid["next_item"][user], test["next_item"][user]
        assert valid["seen_items"][user].to_list() == kept
        assert test["seen_items"][user].to_list() == [*kept, first]
        assert sorted([*kept, first, second]) == sorted(item for u, item, _ in rows if u == user + 1)
        assert len(train["timestamps"][user]) == len(kept)
        last = max(time for u, _, time in rows if u == user + 1)
        assert (user + 1, second, last) in rows


def test_a_prompt_names_the_history_and_never_the_held_out_item(data):
    for name in ("valid", "prompts"):
        for _, prompt, seen, following, _ in pl.read_parquet(data / f"{name}.parquet").iter_rows():
            assert prompt.split(" ") == [prepare.word_of(item) for item in seen]
            assert following not in seen


def test_movies_without_a_year_or_a_genre_and_titles_with_quotes_are_read(data):
    movies = pl.read_parquet(data / "movies.parquet")
    assert movies.row(0, named=True) == {"item_id": 1, "title": 'The "1"', "year": 1931, "genres": ["Drama", "Comedy"]}
    assert movies.row(MOVIES - 1, named=True) == {"item_id": MOVIES, "title": "unknown", "year": None, "genres": []}


def test_a_wheel_that_is_not_the_tested_one_is_refused(tmp_path, monkeypatch):
    wheel = tmp_path / "recbole.whl"
    with zipfile.ZipFile(wheel, "w") as files:
        files.writestr(f"{prepare.FOLDER}/ml-100k.inter", inter([(1, 1, 1)]))
        files.writestr(f"{prepare.FOLDER}/ml-100k.item", ITEM)
    with pytest.raises(SystemExit, match="not recbole"):
        prepare.read_wheel(wheel)
    monkeypatch.setattr(prepare, "SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    assert prepare.read_wheel(wheel) == (inter([(1, 1, 1)]), ITEM)


def test_training_needs_no_test_file(data, train, tmp_path):
    for name in ("movies", "train", "valid"):
        (tmp_path / f"{name}.parquet").write_bytes((data / f"{name}.parquet").read_bytes())
    found = train.read(tmp_path)
    model, epochs = train.fit(found, epochs=1, seed=3)
    assert (epochs, model.training) == (1, False)


def test_a_second_training_has_the_validation_item_and_still_not_the_test_item(data, train):
    found = train.read(data)
    grown, test = train.with_validation(found), pl.read_parquet(data / "prompts.parquet")
    assert grown.train["item_ids"].to_list() == test["seen_items"].to_list()
    times = grown.train["timestamps"].to_list()
    assert all(row == sorted(row) for row in times)
    assert [len(row) for row in times] == test["seen_items"].list.len().to_list()
    model, epochs = train.fit(grown, epochs=1, seed=1, judge=False)
    assert (epochs, model.training) == (1, False)


def test_ties_are_reordered_and_long_histories_are_cut_without_losing_a_movie(data, train, monkeypatch):
    monkeypatch.setattr(train, "POSITIONS", 13)
    found, orders = train.read(data), set()
    for seed in range(4):
        whole = list(train.stretches(found, np.random.default_rng(seed)))
        assert max(len(s.movies) for s in whole) == 12
        orders.add(tuple(np.concatenate([s.movies for s in whole])))
        for stretch in whole:
            both = [*stretch.before, *stretch.movies]
            assert len(set(both)) == len(both)
    assert len(orders) == 4
    uncut = [s for s in whole if len(s.before) + len(s.movies) <= 12]
    times = {tuple(sorted(found.numbers(row[0]))): row for row in found.train.select("item_ids", "timestamps").iter_rows()}
    assert uncut
    for stretch in (s for s in uncut if tuple(sorted(s.movies)) in times):
        items, stamps = times[tuple(sorted(stretch.movies))]
        when = dict(zip(found.numbers(items), stamps, strict=True))
        assert [when[movie] for movie in stretch.movies] == sorted(stamps), "only ties change places"


def test_the_gradient_is_that_of_the_whole_loss_at_once(data, train):
    import torch
    from torch.nn import functional as F

    found = train.read(data)
    torch.manual_seed(0)
    model = train.Recommender(found).eval()
    batch = list(train.stretches(found, np.random.default_rng(1)))[:6]
    batch.append(train.Stretch(batch[0].movies[3:], batch[0].movies[:3]))
    loss = train.learn(model, batch)
    got = {name: value.grad.clone() for name, value in model.named_parameters()}
    model.zero_grad()

    losses = []
    for stretch in batch:
        rows, seen = model.rows(), stretch.before.tolist()
        states = model.hidden(torch.tensor([[train.BOS, *(stretch.movies + train.FIRST_MOVIE)]]), rows)[0]
        for state, movie in zip(states, stretch.movies.tolist(), strict=False):
            unseen = [i for i in range(MOVIES) if i not in seen]
            logits = (state @ rows[train.FIRST_MOVIE :].T)[unseen]
            losses.append(F.cross_entropy(logits[None], torch.tensor([unseen.index(movie)])))
            seen.append(movie)
    whole = torch.stack(losses).mean()
    whole.backward()
    assert abs(whole.item() - loss) < 1e-5
    for name, value in model.named_parameters():
        assert torch.allclose(value.grad, got[name], atol=1e-5), name


def test_ndcg_counts_the_rank_among_items_not_seen(train):
    scores = np.array([[5.0, 4, 3, 2, 1], [1, 2, 3, 4, 5]])
    found = train.ndcg_at_10(scores, np.array([2, 4]), [np.array([0]), np.array([0])])
    assert found == pytest.approx((1 / np.log2(3) + 1) / 2)


def makefile_lines() -> list[list[str]]:
    """The words of `make movielens`, a list a command, without "cd … &&" and with the variables' values."""
    recipe = re.search(r"^movielens: .*\n((?:\t.*\n)+)", (PROJECT / "Makefile").read_text(), re.MULTILINE)
    assert recipe
    text = recipe[1].replace("cd examples/movielens && $(MOVIELENS)", "prefill-score").replace("$(BIN)/", "")
    return [shlex.split(line) for line in text.splitlines()]


def test_the_scripts_and_commands_of_make_movielens_are_these():
    lines = makefile_lines()
    scripts = [words[1] for words in lines if words[0] == "python"]
    assert scripts == [f"examples/movielens/{name}.py" for name in ("prepare", "train", "side_by_side", "side_by_side")]
    commands = [words[1] for words in lines if words[0] == "prefill-score"]
    assert commands == ["embed", "embed", "run", "evaluate", "embed", "embed", "search", "show", "evaluate"]
    assert len(lines) == len(scripts) + len(commands)


@pytest.fixture(scope="module")
def made(trained, tmp_path_factory):
    """The folder in which all that follows the training was done, and what was printed, by command."""
    folder = tmp_path_factory.mktemp("made")
    shutil.copy(EXAMPLE / "prefill-score.toml", folder)
    shutil.copytree(trained, folder / "out")
    printed: dict[str, list[str]] = {}
    for words in makefile_lines()[2:]:
        line = [sys.executable, "-m", "prefill_cli", *words[1:]]
        if words[0] == "python":
            line = [sys.executable, str(PROJECT / words[1]), *(w.removeprefix("examples/movielens/") for w in words[2:])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(PROJECT), os.environ.get("PYTHONPATH", "")])}
        done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        printed.setdefault(words[1], []).append(done.stdout)
    return folder / "out", printed


def items_and_users(out: Path, number: int) -> tuple[np.ndarray, np.ndarray]:
    """What plain Transformers gives of a model: rows of the movies [N, d], and states after the histories [n, d]."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, tokens = out / f"model-{number}", pl.read_parquet(out / "tokens.parquet")
    assert tokens["token_ids"].list.len().to_list() == [1] * MOVIES
    model = AutoModelForCausalLM.from_pretrained(folder)
    rows = model.get_output_embeddings().weight.detach().numpy()[tokens["token_ids"].list.first().to_numpy()]
    assert len(np.unique(rows, axis=0)) == MOVIES
    ids = AutoTokenizer.from_pretrained(folder)(pl.read_parquet(out / "prompts.parquet")["prompt"].to_list())["input_ids"]
    assert all(row[0] == 1 for row in ids)
    assert not any(2 in row for row in ids), "every word of a prompt is in the vocabulary"
    return rows, reference_vectors(folder, ids)


def check_lists(out: Path, result: str, vectors: np.ndarray, rows: np.ndarray, judged: str) -> None:
    """That lists and their judgement are those of vectors [n, d] and rows [N, d], the seen movies left out."""
    tests, lists, wanted = pq.read_table(out / "prompts.parquet"), pq.read_table(out / result), []
    for row in range(USERS):
        free = np.setdiff1d(np.arange(MOVIES), np.array(tests["seen_items"][row].as_py()) - 1)
        found, scores = reference_top_k(vectors[row : row + 1], rows[free], MOVIES)
        assert lists["scores"][row].as_py() == pytest.approx(scores[0], abs=1e-4)
        assert set(lists["item_ids"][row].as_py()) == set((free[found[0]] + 1).tolist())
        wanted.append(lists["item_ids"][row].as_py().index(tests["next_item"][row].as_py()) + 1)
    ranks, metrics = np.array(wanted), json.loads(judged)["metrics"]
    assert metrics["hit_rate"]["10"]["mean"] == pytest.approx((ranks <= 10).mean())
    assert metrics["ndcg"]["10"]["mean"] == pytest.approx(np.where(ranks <= 10, 1 / np.log2(ranks + 1), 0).mean())


def test_one_model_scores_as_plain_transformers_does(made):
    out, printed = made
    totals = json.loads(printed["run"][0])
    assert (totals["rows_out"], totals["rejects"], totals["unknown_ids"]) == (USERS, 0, 0)
    rows, vectors = items_and_users(out, 1)
    items = pl.read_parquet(out / "items-1.parquet")
    assert items["item_id"].to_list() == list(range(1, MOVIES + 1))
    assert np.array_equal(rows, items["embedding"].to_numpy())
    check_lists(out, "one", vectors, rows, printed["evaluate"][0])


def test_two_models_side_by_side_score_by_the_sum_of_both(made):
    out, printed = made
    pairs = [items_and_users(out, number) for number in (1, 2)]
    rows, vectors = (np.concatenate(both, axis=1) for both in zip(*pairs, strict=True))
    assert not np.array_equal(pairs[0][0], pairs[1][0])
    check_lists(out, "topk", vectors, rows, printed["evaluate"][1])


def test_vectors_of_other_rows_are_not_put_side_by_side(made, tmp_path):
    out, _ = made
    side_by_side = load("side_by_side").side_by_side
    pq.write_table(pq.read_table(out / "items-2.parquet").slice(1), tmp_path / "other.parquet")
    with pytest.raises(SystemExit, match=r"other\.parquet: its ids are not those of .*items-1\.parquet, row by row"):
        side_by_side([out / "items-1.parquet", tmp_path / "other.parquet"])


def test_two_trainings_with_one_seed_give_the_same_items(trained, train, data, tmp_path):
    for seed in (1, 2):
        model, epochs = train.fit(train.read(data), epochs=2, seed=seed)
        assert epochs == 2
        model.save(tmp_path / f"model-{seed}")
        name = f"model-{seed}/model.safetensors"
        assert (tmp_path / name).read_bytes() == (trained / name).read_bytes()


@pytest.mark.parametrize("loss", ["bce", "ce"])
def test_sasrec_s_vectors_do_not_depend_on_padding_or_neighbours_and_know_the_order(data, sasrec, loss):
    import torch

    model, score = sasrec.fit(data, loss, epochs=1, seed=0)
    assert 0 <= score <= 1
    alone = sasrec.user_vectors(model, [[3, 1, 2]])
    assert np.allclose(sasrec.user_vectors(model, [[5] * 30, [3, 1, 2]])[1], alone, atol=1e-6)
    assert not np.allclose(sasrec.user_vectors(model, [[1, 3, 2]]), alone, atol=1e-4)
    model.eval()
    both = model(sasrec.padded([[3, 1, 2], [3, 1, 7]]))
    assert torch.allclose(both[0, -2], both[1, -2], atol=1e-6), "a state does not see what comes after it"


def test_sasrec_s_negatives_are_never_in_the_history(sasrec):
    found = sasrec.negatives_of([1, 2, 3, 4] * 20, 6, np.random.default_rng(0))
    assert len(found) == 79
    assert set(found) == {5, 6}
