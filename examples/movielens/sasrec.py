"""SASRec itself (Kang and McAuley, ICDM 2018) on the same split: what the language model is compared with.

    python examples/movielens/sasrec.py [--data examples/movielens/out] [--loss bce|ce] [--seed 1]

bce: as published. Two blocks of one head, width 50, the last 200 items, dropout 0.2, learned positions, item embeddings
shared between input and output; for every position one uniform negative that the user has not in his history, binary
cross-entropy; Adam (0.001, betas 0.9 and 0.98); at most 200 epochs. Batches are of 32 users instead of 128: with 943 users
an epoch would have eight steps.
ce: cross-entropy over the whole catalogue instead, which Klenitskiy and Vasilev (RecSys 2023) found to be far better.

The epoch is chosen by NDCG@10 on the validation item. Users' vectors (after the validation item, so for the test) and
the items' go into DATA/sasrec-LOSS-users.parquet and -items.parquet, for `prefill-score search`.
"""

import argparse
import copy
from pathlib import Path

import numpy as np
import polars as pl
import torch
from torch import nn
from torch.nn import functional as F
from train import ndcg_at_10

WIDTH, BLOCKS, HEADS, LENGTH, DROPOUT = 50, 2, 1, 200, 0.2
LEARNING_RATE, BATCH, EPOCHS, PATIENCE, EVERY = 0.001, 32, 200, 6, 5


class Block(nn.Module):
    """Self-attention, then a network at every position. Only queries are normalised, as in the authors' code."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.network_norm = nn.LayerNorm(WIDTH, eps=1e-8), nn.LayerNorm(WIDTH, eps=1e-8)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, DROPOUT, batch_first=True)
        self.inner, self.outer, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(DROPOUT)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """x: [B, L, d]; hidden: [B, L, L], true where the query (second axis) must not see the key (third)."""
        queries = self.attention_norm(x)
        x = queries + self.attention(queries, x, x, attn_mask=hidden, need_weights=False)[0]
        x = self.network_norm(x)
        return x + self.dropout(self.outer(self.dropout(F.relu(self.inner(x)))))


class SASRec(nn.Module):
    """Item numbers from 1; 0 pads on the left."""

    def __init__(self, items: int) -> None:
        super().__init__()
        self.items, self.positions = nn.Embedding(items + 1, WIDTH, padding_idx=0), nn.Embedding(LENGTH, WIDTH)
        self.dropout, self.blocks = nn.Dropout(DROPOUT), nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH, eps=1e-8)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_normal_(parameter)
        with torch.no_grad():
            self.items.weight[0] = 0

    def forward(self, histories: torch.Tensor) -> torch.Tensor:
        """[B, L] item numbers -> [B, L, d]"""
        kept = (histories != 0).unsqueeze(-1)
        length = histories.shape[1]
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        hidden = (later | ~kept.mT) & ~torch.eye(length, dtype=torch.bool)  # padding sees itself: no empty softmax
        x = self.dropout(self.items(histories) * WIDTH**0.5 + self.positions.weight[-length:]) * kept
        for block in self.blocks:
            x = block(x, hidden) * kept
        return self.norm(x)


def padded(histories: list[list[int]]) -> torch.Tensor:
    """[B, L], the last 200 items of each at most, zeros before them."""
    newest = [history[-LENGTH:] for history in histories]
    width = max(map(len, newest))
    return torch.tensor([[0] * (width - len(h)) + h for h in newest])


def batches(histories: list[list[int]], rng: np.random.Generator) -> list[list[list[int]]]:
    """Users of similar length together, for the sake of time; which, and in what order, is random."""
    order = sorted(range(len(histories)), key=lambda i: (min(len(histories[i]), LENGTH) // 40, rng.random()))
    groups = [[histories[i] for i in order[start : start + BATCH]] for start in range(0, len(order), BATCH)]
    return [groups[i] for i in rng.permutation(len(groups))]


def loss_of(model: SASRec, batch: list[list[int]], kind: str, rng: np.random.Generator) -> torch.Tensor:
    inputs, targets = padded([h[:-1] for h in batch]), padded([h[1:] for h in batch])
    known = targets != 0
    vectors, wanted = model(inputs)[known], targets[known]
    if kind == "ce":
        return F.cross_entropy(vectors @ model.items.weight[1:].T, wanted - 1)
    n_items = len(model.items.weight) - 1
    negatives = np.concatenate([negatives_of(h, n_items, rng) for h in batch])
    positive = (vectors * model.items(wanted)).sum(-1)
    negative = (vectors * model.items(torch.from_numpy(negatives))).sum(-1)
    return F.softplus(-positive).mean() + F.softplus(negative).mean()


def negatives_of(history: list[int], n_items: int, rng: np.random.Generator) -> np.ndarray:
    """One item that is not in the history for each of its targets."""
    free = np.setdiff1d(np.arange(1, n_items + 1), history)
    return rng.choice(free, min(len(history) - 1, LENGTH))


@torch.inference_mode()
def user_vectors(model: SASRec, histories: list[list[int]]) -> np.ndarray:
    """[n, d]"""
    model.eval()
    parts = [model(padded(histories[i : i + BATCH]))[:, -1] for i in range(0, len(histories), BATCH)]
    model.train()
    return torch.cat(parts).numpy()


def fit(data: Path, kind: str, epochs: int, seed: int) -> tuple[SASRec, float]:
    """The model of the best epoch, and its NDCG@10 on the validation item, seen items excluded."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    train, valid = (pl.read_parquet(data / f"{name}.parquet") for name in ("train", "valid"))
    histories, seen, wanted = train["item_ids"].to_list(), valid["seen_items"].to_list(), valid["next_item"].to_numpy()
    model = SASRec(pl.read_parquet(data / "movies.parquet").height)
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE, betas=(0.9, 0.98))
    best, best_model, waited = -1.0, model, 0
    for epoch in range(1, epochs + 1):
        for batch in batches(histories, rng):
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(model, batch, kind, rng)
            loss.backward()
            optimizer.step()
        if epoch % EVERY == 0 or epoch == epochs:
            items = model.items.weight.detach()[1:].numpy()
            score = ndcg_at_10(user_vectors(model, seen) @ items.T, wanted - 1, [np.array(s) - 1 for s in seen])
            print(f"epoch {epoch}: loss {loss.item():.3f}, validation NDCG@10 {score:.4f}", flush=True)
            waited = 0 if score > best else waited + 1
            if score > best:
                best, best_model = score, copy.deepcopy(model)
            if waited == PATIENCE:
                break
    return best_model, best


def write_vectors(table: pl.DataFrame, vectors: np.ndarray, path: Path) -> None:
    """The table with a column embedding: lists of one length, float32."""
    kind = pl.Array(pl.Float32, vectors.shape[1])
    table.with_columns(embedding=pl.Series(vectors.astype(np.float32), dtype=kind)).write_parquet(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="SASRec on the same split.")
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "out")
    parser.add_argument("--loss", choices=("bce", "ce"), default="bce")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, score = fit(args.data, args.loss, args.epochs, args.seed)
    print(f"validation NDCG@10 {score:.4f}, seen items excluded")
    movies, test = (pl.read_parquet(args.data / f"{name}.parquet") for name in ("movies", "prompts"))
    vectors = user_vectors(model, test["seen_items"].to_list())
    write_vectors(test.drop("prompt"), vectors, args.data / f"sasrec-{args.loss}-users.parquet")
    write_vectors(movies, model.items.weight.detach()[1:].numpy(), args.data / f"sasrec-{args.loss}-items.parquet")


if __name__ == "__main__":
    main()
