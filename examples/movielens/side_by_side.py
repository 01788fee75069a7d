"""Vectors of several models side by side: the dot product of the long vectors is the sum of the models' own scores.

    python examples/movielens/side_by_side.py items-1.parquet items-2.parquet -o items.parquet

Every file has the same ids in the same order; other columns come from the first. Do it to the items' files and to the
users', and `prefill-score search` ranks by the models' mean.
"""

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def side_by_side(paths: list[Path]) -> pa.Table:
    """The first table, with vectors [n, d1 + d2 + …].

    Raises:
        SystemExit: the files are not of the same rows.
    """
    tables = [pq.read_table(path) for path in paths]
    first = tables[0]
    for path, table in zip(paths, tables, strict=True):
        if not table.column(0).equals(first.column(0)):
            raise SystemExit(f"{path}: its ids are not those of {paths[0]}, row by row")
    vectors = [table["embedding"].combine_chunks() for table in tables]
    joined = np.concatenate([v.flatten().to_numpy().reshape(len(v), -1) for v in vectors], axis=1)
    column = pa.FixedSizeListArray.from_arrays(pa.array(joined.ravel()), joined.shape[1])
    place = first.schema.get_field_index("embedding")
    # Not the first file's metadata, which says that one model made the vectors.
    return first.set_column(place, "embedding", column).replace_schema_metadata()


def main() -> None:
    parser = argparse.ArgumentParser(description="Join vector files of the same rows, vector by vector.")
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    pq.write_table(side_by_side(args.files), args.output)


if __name__ == "__main__":
    main()
