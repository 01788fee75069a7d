"""prefill-score: user prompts in Parquet → one prefill pass → exact top-k items in Parquet."""

__version__ = "0.1.0"
