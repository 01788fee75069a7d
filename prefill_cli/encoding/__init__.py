"""Token ids in row order → vectors in row order. Knows nothing of Parquet, ids or items."""
