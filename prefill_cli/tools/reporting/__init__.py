"""The page of a report: figures, plots, words."""
