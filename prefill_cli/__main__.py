"""`python -m prefill_cli` is `prefill-score`."""

from prefill_cli.cli import main

main()
