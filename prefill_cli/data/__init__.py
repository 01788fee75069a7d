"""Parquet in, Parquet out: prompts, tokens, parts, staging. The only rooms that know ids; torch is not used here."""
