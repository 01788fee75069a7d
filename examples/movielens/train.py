"""A small Llama in which every movie is a token, trained from scratch to say which movie comes next.

    python examples/movielens/train.py [--data examples/movielens/out] [--seeds 1 2] [--epochs 60] [--refit]

Reads train.parquet (all but each user's last two), valid.parquet (the last but one; when to stop) and movies.parquet. It
does not open prompts.parquet, where the test item is. Writes into the same folder:

model-1/        a 2-layer Llama, 128 wide, and a tokenizer that knows a word for each movie; one for each seed
tokens.parquet  item_id, title, year, genres, token_ids: the movie's one token, for `prefill-score embed --from-lm-head`

At every position of a history the hidden state is multiplied with the rows of all movies (input and output share them) and
a softmax over the whole catalogue has to find the movie that came next: no sampled negatives. With --refit there is a
second training for the number of epochs that validation chose, the validation item included, as a service would do it. What
helps (README.md has the figures):

- A movie's row is a vector of its own plus one for each of its genres and its release years; they are added up when the
  model is saved. A rare movie has something to stand on from the first step.
- Movies that stand in the history already are left out of the softmax, as `--exclude-column` leaves them out of the list.
- Interactions with the same timestamp come in a new order in every epoch: their order in the file means nothing.
- What is kept is a running mean of the weights over the last few hundred steps, which is steadier than any one of them.
- Dropout on the input and on what each layer adds. It lives in this file; the saved model is a plain Llama.
"""

import argparse
import copy
import dataclasses
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from prepare import word_of
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WIDTH, LAYERS, HEADS, INNER, DROPOUT = 128, 2, 2, 512, 0.4
POSITIONS = 256  # <s>, and the newest 255 movies of a history
LEARNING_RATE, BATCH, EPOCHS, PATIENCE, EVERY = 0.001, 16, 60, 5, 2
DECAY = 0.998  # of the running mean of the weights, by step
SPECIALS = ("<pad>", "<s>", "<unk>")
PAD, BOS = 0, 1
FIRST_MOVIE = len(SPECIALS)  # the token id of movie number 0; the others follow
YEARS = (1940, 1960, 1970, 1980, 1985, 1990, 1993, 1995, 1996, 1997, 1998)


@dataclass(frozen=True)
class Data:
    """What training may see. Items are numbered by their row in movies.parquet, from 0."""

    movies: pl.DataFrame
    train: pl.DataFrame  # user_id, item_ids, timestamps
    valid: pl.DataFrame  # user_id, prompt, seen_items, next_item
    number: dict[int, int]  # of an item id

    def numbers(self, items: list[int]) -> np.ndarray:
        return np.array([self.number[item] for item in items])


def read(folder: Path) -> Data:
    movies, train, valid = (pl.read_parquet(folder / f"{name}.parquet") for name in ("movies", "train", "valid"))
    return Data(movies, train, valid, {item: i for i, item in enumerate(movies["item_id"])})


def make_tokenizer(data: Data) -> PreTrainedTokenizerFast:
    words = [*SPECIALS, *map(word_of, data.movies["item_id"])]
    tokenizer = Tokenizer(models.WordLevel({word: token for token, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        unk_token="<unk>",
        pad_token="<pad>",
        model_max_length=POSITIONS,
        truncation_side="left",
    )


def features(movies: pl.DataFrame) -> torch.Tensor:
    """[N, f]: one or more genres and one span of years a movie, each row of length 1 (or zero, where nothing is known)."""
    genres = sorted({genre for row in movies["genres"] for genre in row})
    table = torch.zeros(len(movies), len(genres) + len(YEARS) + 1)
    for row, (found, year) in enumerate(movies.select("genres", "year").iter_rows()):
        table[row, [genres.index(genre) for genre in found]] = 1
        if year is not None:
            table[row, len(genres) + int(np.searchsorted(YEARS, year, side="right"))] = 1
    return F.normalize(table)


def drop_out(module: nn.Module, _: object, output: Any) -> Any:
    """A forward hook: dropout on what a layer adds to the stream. Attention gives a pair, of which the first is that."""
    if isinstance(output, tuple):
        return (F.dropout(output[0], DROPOUT, module.training), *output[1:])
    return F.dropout(output, DROPOUT, module.training)


class Recommender(nn.Module):
    """A Llama whose vocabulary is made of movies' own vectors and of their features'."""

    def __init__(self, data: Data) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=FIRST_MOVIE + len(data.movies),
            hidden_size=WIDTH,
            intermediate_size=INNER,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            max_position_embeddings=POSITIONS,
            tie_word_embeddings=True,
            bos_token_id=BOS,
            eos_token_id=None,
            pad_token_id=PAD,
        )
        self.llama = LlamaForCausalLM(config)
        self.register_buffer("features", F.pad(features(data.movies), (0, 0, FIRST_MOVIE, 0)), persistent=False)
        self.of_features = nn.Parameter(config.initializer_range * torch.randn(self.features.shape[1], WIDTH))
        for layer in self.llama.model.layers:
            layer.self_attn.register_forward_hook(drop_out)
            layer.mlp.register_forward_hook(drop_out)

    def rows(self) -> torch.Tensor:
        """[V, d] the vocabulary: movies' rows are from FIRST_MOVIE on."""
        return self.llama.model.embed_tokens.weight + self.features @ self.of_features

    def hidden(self, input_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """[B, T] -> [B, T, d]. Padding is on the right, where a causal model does not look."""
        inputs = F.dropout(F.embedding(input_ids, rows), DROPOUT, self.training)
        return self.llama.model(inputs_embeds=inputs, use_cache=False).last_hidden_state

    def save(self, folder: Path) -> None:
        """A plain Llama: the rows as they are used."""
        with torch.no_grad():
            self.llama.model.embed_tokens.weight.copy_(self.rows())
            self.of_features.zero_()
        self.llama.save_pretrained(folder)


@dataclass(frozen=True)
class Stretch:
    """A part of a history that fits into the model, and what came before it: movies' numbers, oldest first."""

    movies: np.ndarray
    before: np.ndarray


def stretches(data: Data, rng: np.random.Generator) -> Iterator[Stretch]:
    """All histories, cut from the end into stretches. Ties are in a new order; half of the time the cuts are elsewhere."""
    room = POSITIONS - 1
    for items, times in data.train.select("item_ids", "timestamps").iter_rows():
        movies = data.numbers(items)[np.lexsort((rng.random(len(items)), times))]
        end = len(movies)
        if end > room and rng.random() < 0.5:
            end -= int(rng.integers(0, room // 2))
        while end > 1:
            begin = max(0, end - room)
            yield Stretch(movies[begin:end], movies[:begin])
            end = begin


def batches(rows: list[Stretch], rng: np.random.Generator) -> list[list[Stretch]]:
    """Stretches of similar length together, the batches in random order."""
    order = sorted(range(len(rows)), key=lambda i: (len(rows[i].movies) // 20, rng.random()))
    groups = [[rows[i] for i in order[start : start + BATCH]] for start in range(0, len(order), BATCH)]
    return [groups[i] for i in rng.permutation(len(groups))]


def padded(rows: list[np.ndarray]) -> torch.Tensor:
    """[B, T] tokens of rows of movies' numbers, each row with <s> before it."""
    table = torch.full((len(rows), 1 + max(map(len, rows))), PAD)
    table[:, 0] = BOS
    for i, row in enumerate(rows):
        table[i, 1 : 1 + len(row)] = torch.from_numpy(row) + FIRST_MOVIE
    return table


def learn(model: Recommender, batch: list[Stretch]) -> float:
    """Forward and backward: mean cross-entropy of the next movie, over the movies that are not in the history already.

    The logits [T, N] of one stretch at a time are made, used and forgotten: all at once they would be most of the memory,
    and too large for the processor's cache.
    """
    rows = model.rows()
    hidden = model.hidden(padded([s.movies for s in batch])[:, :-1], rows)
    hidden_leaf, movies_leaf = hidden.detach().requires_grad_(), rows.detach()[FIRST_MOVIE:].requires_grad_()
    count, total = sum(len(s.movies) for s in batch), 0.0
    for states, stretch in zip(hidden_leaf, batch, strict=True):
        places = np.arange(len(stretch.movies))  # the movie at place p is to be told from the state at p: <s> is at 0
        taken_at = np.full(len(movies_leaf), len(places))
        taken_at[stretch.movies], taken_at[stretch.before] = places, -1
        logits = states[: len(places)] @ movies_leaf.T
        logits = logits.masked_fill(torch.from_numpy(taken_at[None, :] < places[:, None]), -1e4)
        loss = F.cross_entropy(logits, torch.from_numpy(stretch.movies), reduction="sum") / count
        loss.backward()
        total += loss.item()
    torch.autograd.backward([hidden, rows], [hidden_leaf.grad, F.pad(movies_leaf.grad, (0, 0, FIRST_MOVIE, 0))])
    return total


@torch.inference_mode()
def user_vectors(model: Recommender, histories: list[np.ndarray]) -> np.ndarray:
    """[n, d] the state after each history's newest 255 movies: what `prefill-score run` computes of its prompt."""
    model.eval()
    newest = [history[-(POSITIONS - 1) :] for history in histories]
    rows, vectors = model.rows(), np.empty((len(newest), WIDTH), np.float32)
    order = sorted(range(len(newest)), key=lambda i: len(newest[i]))
    for start in range(0, len(order), 64):
        batch = order[start : start + 64]
        hidden = model.hidden(padded([newest[i] for i in batch]), rows)
        vectors[batch] = hidden[range(len(batch)), [len(newest[i]) for i in batch]].numpy()
    model.train()
    return vectors


def ndcg_at_10(scores: np.ndarray, wanted: np.ndarray, seen: list[np.ndarray]) -> float:
    """Mean of 1 / log2(rank + 1) where the rank is at most 10. scores: [n, N] of the whole catalogue; seen: item numbers."""
    scores = scores.copy()
    for row, items in zip(scores, seen, strict=True):
        row[items] = -np.inf
    rank = 1 + (scores > scores[np.arange(len(scores)), wanted][:, None]).sum(1)
    return float(np.where(rank <= 10, 1 / np.log2(rank + 1), 0).mean())


def validate(model: Recommender, data: Data) -> float:
    """NDCG@10 on the validation items, seen items excluded."""
    seen = [data.numbers(items) for items in data.valid["seen_items"].to_list()]
    movies = model.rows().detach()[FIRST_MOVIE:].numpy()
    return ndcg_at_10(user_vectors(model, seen) @ movies.T, data.numbers(data.valid["next_item"].to_list()), seen)


@torch.no_grad()
def follow(mean: Recommender, model: Recommender, decay: float) -> None:
    """mean = decay * mean + (1 - decay) * model, for every weight."""
    for old, new in zip(mean.parameters(), model.parameters(), strict=True):
        old.lerp_(new, 1 - decay)


def fit(data: Data, epochs: int, seed: int, *, judge: bool = True) -> tuple[Recommender, int]:
    """The running mean of the weights, and after how many epochs.

    With judge: at the best epoch by `validate`, ending when PATIENCE looks in a row were no better. Else after all epochs.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = Recommender(data)
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE, betas=(0.9, 0.98))
    mean, step = copy.deepcopy(model), 0
    best, chosen, kept, waited, began = -1.0, 0, mean.state_dict(), 0, time.monotonic()
    for epoch in range(1, epochs + 1):
        losses = []
        for batch in batches(list(stretches(data, rng)), rng):
            losses.append(learn(model, batch))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            follow(mean, model, min(DECAY, step / (step + 10)))
        if epoch % EVERY and epoch != epochs:
            continue
        score = validate(mean, data) if judge else float(epoch)
        said = f", validation NDCG@10 {score:.4f}" if judge else ""
        print(f"seed {seed}, epoch {epoch}: loss {np.mean(losses):.3f}{said}, {time.monotonic() - began:.0f} s", flush=True)
        waited = 0 if score > best else waited + 1
        if score > best:
            best, chosen, kept = score, epoch, {name: value.clone() for name, value in mean.state_dict().items()}
        if waited == PATIENCE:
            break
    mean.load_state_dict(kept)
    return mean.eval(), chosen


def with_validation(data: Data) -> Data:
    """The validation item at the end of the training history: all that came before the test."""
    grown = data.train.with_columns(
        pl.concat_list("item_ids", data.valid["next_item"]).alias("item_ids"),
        pl.concat_list("timestamps", data.valid["next_timestamp"]).alias("timestamps"),
    )
    return dataclasses.replace(data, train=grown)


def train(folder: Path, epochs: int, refit: bool, seed: int) -> None:
    """One model, from `folder` into `folder`/model-<seed>."""
    torch.set_num_threads(1)  # matrices are small; and the result does not depend on the number of cores
    data = read(folder)
    model, epochs = fit(data, epochs, seed)
    print(f"seed {seed}: best after {epochs} epochs, validation NDCG@10 {validate(model, data):.4f}", flush=True)
    if refit:
        model, _ = fit(with_validation(data), epochs, seed, judge=False)
    model.save(folder / f"model-{seed}")
    make_tokenizer(data).save_pretrained(folder / f"model-{seed}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train small causal LMs on MovieLens histories, one a seed, side by side.")
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "out")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--refit", action="store_true", help="then train again, on the validation item too")
    args = parser.parse_args()
    if len(args.seeds) == 1:
        train(args.data, args.epochs, args.refit, args.seeds[0])
    else:  # a process each, because each takes one core
        line = [sys.executable, __file__, "--data", str(args.data), "--epochs", str(args.epochs), *["--refit"] * args.refit]
        trainings = [subprocess.Popen([*line, "--seeds", str(seed)]) for seed in args.seeds]
        if max(training.wait() for training in trainings):
            sys.exit("a training failed")
    movies = read(args.data).movies
    tokens = pl.Series([[FIRST_MOVIE + i] for i in range(len(movies))], dtype=pl.List(pl.Int64))
    movies.with_columns(token_ids=tokens).write_parquet(args.data / "tokens.parquet")


if __name__ == "__main__":
    main()
