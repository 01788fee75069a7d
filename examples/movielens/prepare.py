"""MovieLens-100K as this tool wants it: every user's history as a prompt, the last item held out.

    python examples/movielens/prepare.py [--out examples/movielens/out] [--wheel recbole-1.2.1-py3-none-any.whl]

The data are two files in the wheel of the package recbole, which pip downloads without its dependencies. Nothing of the
package is installed or run.

movies.parquet    item_id int64, title, year, genres list<string>: the whole catalogue, 1 682 movies
train.parquet     user_id int64, item_ids list<int64>, timestamps list<int64>: all but the last two, oldest first
valid.parquet     user_id, prompt, seen_items list<int64>, next_item, next_timestamp: the last but one, after all before it
prompts.parquet   the same for the last: the test, which nothing but `prefill-score run` and `evaluate` reads

Order: by timestamp; interactions of one user with the same timestamp stay in the order of the file (a stable sort), as in
RecBole. Half of all interactions have the timestamp of the one before: people rated a page of movies at a time. Within
such a group the file's order is arbitrary (the item id rises in 50.2 % of the steps), so nothing can be learned from it.
Leave-one-out as in SASRec (Kang and McAuley, 2018): no user and no movie is filtered out; every user has at least 20.
"""

import argparse
import hashlib
import io
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import polars as pl

HERE = Path(__file__).parent
VERSION = "1.2.1"
SHA256 = "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407"
FOLDER = "recbole/dataset_example/ml-100k"


def word_of(item: int) -> str:
    """A movie is one word of the prompt and one token of the model."""
    return f"movie_{item}"


def prompt_of(items: Sequence[int]) -> str:
    """A history, oldest first."""
    return " ".join(map(word_of, items))


def fetch(folder: Path) -> Path:
    """The wheel, downloaded by pip unless it is there already."""
    wheel = folder / f"recbole-{VERSION}-py3-none-any.whl"
    if not wheel.exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
        subprocess.run([*pip, f"recbole=={VERSION}"], check=True)
    return wheel


def read_wheel(wheel: Path) -> tuple[str, str]:
    """The texts of ml-100k.inter and ml-100k.item.

    Raises:
        SystemExit: not the wheel that the figures were made with.
    """
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != SHA256:
        raise SystemExit(
            f"{wheel}: not recbole {VERSION} as tested: SHA-256 {found}, expected {SHA256}; remove it, start again"
        )
    with zipfile.ZipFile(wheel) as files:
        inter, item = (files.read(f"{FOLDER}/ml-100k.{kind}").decode() for kind in ("inter", "item"))
    return inter, item


def read_atomic(text: str) -> pl.DataFrame:
    """One of RecBole's atomic files: tab-separated, the header's names followed by their types (user_id:token)."""
    table = pl.read_csv(io.StringIO(text), separator="\t", infer_schema=False, quote_char=None)
    return table.rename({name: name.split(":")[0] for name in table.columns})


def histories(inter: pl.DataFrame) -> pl.DataFrame:
    """A row a user, by id: user_id, item_ids and timestamps, oldest first, ties in the file's order."""
    whole = inter.select(pl.col("user_id", "item_id").cast(pl.Int64), pl.col("timestamp").cast(pl.Float64).cast(pl.Int64))
    ordered = whole.sort("user_id", "timestamp", maintain_order=True)
    return ordered.group_by("user_id", maintain_order=True).agg(item_ids="item_id", timestamps="timestamp")


def held_out(users: pl.DataFrame, last: int) -> pl.DataFrame:
    """The prompts for the item that is `last` from the end (1: the test, 2: validation), after all that came before it."""
    item, time = (pl.col(name).list.get(-last) for name in ("item_ids", "timestamps"))
    seen = pl.col("item_ids").list.head(pl.col("item_ids").list.len() - last)
    rows = users.select("user_id", seen_items=seen, next_item=item, next_timestamp=time)
    prompts = pl.Series("prompt", map(prompt_of, rows["seen_items"].to_list()))
    return rows.insert_column(1, prompts)


def catalogue(item: pl.DataFrame) -> pl.DataFrame:
    return item.select(
        pl.col("item_id").cast(pl.Int64),
        pl.col("movie_title").alias("title"),
        pl.col("release_year").cast(pl.Int64, strict=False).alias("year"),
        pl.col("class").fill_null("").str.split(" ").list.eval(pl.element().filter(pl.element() != "")).alias("genres"),
    ).sort("item_id")


def write(inter: str, item: str, out: Path) -> None:
    """The four files, from the texts of the two atomic files."""
    out.mkdir(parents=True, exist_ok=True)
    users = histories(read_atomic(inter))
    train = users.with_columns(pl.col("item_ids", "timestamps").list.head(pl.col("item_ids").list.len() - 2))
    catalogue(read_atomic(item)).write_parquet(out / "movies.parquet")
    train.write_parquet(out / "train.parquet")
    held_out(users, 2).write_parquet(out / "valid.parquet")
    held_out(users, 1).write_parquet(out / "prompts.parquet")
    print(f"{out}: {users.height:,} users, {users['item_ids'].list.len().sum():,} interactions")


def main() -> None:
    parser = argparse.ArgumentParser(description="MovieLens-100K as prompts, leave-one-out.")
    parser.add_argument("--out", type=Path, default=HERE / "out")
    parser.add_argument("--wheel", type=Path, help=f"recbole {VERSION}, instead of downloading it")
    args = parser.parse_args()
    if args.wheel is None:
        args.out.mkdir(parents=True, exist_ok=True)
    write(*read_wheel(args.wheel or fetch(args.out)), args.out)


if __name__ == "__main__":
    main()
