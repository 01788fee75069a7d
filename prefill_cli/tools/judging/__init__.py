"""How good lists are: metrics, intervals, a baseline, another run beside them."""
