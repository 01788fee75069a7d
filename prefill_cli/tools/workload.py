"""Prompts as a recommender writes them, for a bench without data: invented, and the same for the same numbers.

One instruction for all, a line about the user, a history whose length is log-normal (a few are ten times the median),
and one user in twelve without a history, whose prompt is that of every other new user of the country.
"""

import numpy as np

INSTRUCTION = (
    "You rank titles for a streaming service. Below is what one member did lately, oldest first: every line names a title, "
    "its genre, and whether the member finished it, gave it up, liked it or saw it twice. What is recent counts more than "
    "what is old, what comes again counts more than what came once, and a title that was given up counts against its "
    "genre. Evenings on a television allow for long titles, a phone on the way to work does not. Sum up in the last word "
    "what the member will want next.\n"
)
COUNTRIES = ("AT", "CL", "KE", "KR", "NO", "VN")
DEVICES = ("television", "phone", "tablet")
GENRES = ("animation", "biography", "comedy", "crime", "drama", "fantasy", "music", "mystery", "sport", "western")
DEEDS = ("finished", "gave up", "liked", "saw twice")
ADJECTIVES = (
    "Amber",
    "Brave",
    "Crooked",
    "Distant",
    "Early",
    "Frozen",
    "Gentle",
    "Hollow",
    "Idle",
    "Jagged",
    "Quiet",
    "Tall",
)
NOUNS = ("Anchor", "Bridge", "Candle", "Dance", "Engine", "Ferry", "Harbour", "Lantern", "Meadow", "Orchard", "Tide", "Wolf")


def synthetic_prompts(rows: int, seed: int = 0) -> list[str]:
    """`rows` prompts of 150 to 1 100 tokens, about, for a tokenizer of English."""
    rng = np.random.default_rng(seed)
    prompts = []
    for _ in range(rows):
        country = rng.choice(COUNTRIES)
        if rng.random() < 1 / 12:
            prompts.append(f"{INSTRUCTION}Country {country}. A new member without a history.\nNext:")
            continue
        titles = min(60, max(1, int(rng.lognormal(2.2, 0.75))))
        words = [[rng.choice(kind) for kind in (ADJECTIVES, NOUNS, GENRES, DEEDS)] for _ in range(titles)]
        history = "; ".join(f"{a} {noun} {rng.integers(1950, 2026)}, {genre}, {deed}" for a, noun, genre, deed in words)
        prompts.append(f"{INSTRUCTION}Country {country}. Mostly on a {rng.choice(DEVICES)}.\n{history}\nNext:")
    return prompts
