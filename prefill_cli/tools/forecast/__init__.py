"""What a run will compute, and how long that takes."""
