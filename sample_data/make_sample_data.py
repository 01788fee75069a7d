"""Make everything in sample_data/ from one seed: an invented catalogue, 2 000 users, and a model that knows them.

    python sample_data/make_sample_data.py [--out sample_data] [--seed 7] [--steps 1200]

prompts.parquet   user_id int64, prompt string, seen_items list<string>, next_item string (held out)
items.parquet     item_id string, title string, genre string, embedding fixed_size_list<float32>[64]
model/            a 2-layer Llama-style causal LM, a byte-level BPE tokenizer trained on the prompts, a chat template

The catalogue has 12 genres of 5 shelves of 20 titles. A user likes one to three shelves, drifts to others over time,
often takes the follower of the last title of a shelf, and now and then what everybody takes. The model is trained on
*other* users drawn from the same process (never on the 2 000 in prompts.parquet): at the end of each history entry and
at the last token, the hidden state dotted with a learned item embedding has to rank the item that was taken next. A
small language-model loss beside it keeps the vocabulary head meaningful.

At the end it prints held-out recall@10 over the whole catalogue, seen items excluded, for the model and for the list
of the most popular items. About four minutes on two cores.
"""

import argparse
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

USERS, TRAINING_USERS, SHELVES_PER_GENRE, TITLES_PER_SHELF = 2_000, 24_000, 5, 20
HIDDEN, POSITIONS, VOCABULARY = 64, 512, 2_048
BOS, EOS, PAD, USER, ASSISTANT = "<s>", "</s>", "<pad>", "<|user|>", "<|assistant|>"
INSTRUCTION = "Suggest what this member watches next, recent titles first in mind.\n"
COUNTRIES = ("Brazil", "France", "Germany", "India", "Japan", "Mexico", "Nigeria", "Sweden")
DEVICES = ("tv", "phone", "tablet")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

ADJECTIVES = (
    "Amber Ashen Broken Burning Cobalt Copper Crimson Crooked Distant Drifting Electric Empty Endless Faded Fallen "
    "Forgotten Frozen Gilded Hidden Hollow Iron Ivory Last Lonely Lost Midnight Northern Painted Paper Quiet Restless "
    "Scarlet Second Silent Silver Southern Stolen Velvet Wandering Winter"
).split()
# Twenty nouns a genre: four to each of its five shelves, so that a title tells its shelf to those who can read.
NOUNS = {
    "adventure": "Caravan Compass Lagoon Expedition Summit Galleon Jungle Canyon Voyage Map Oasis Raft Pass Treasure "
    "Frontier Trail Volcano Glacier Harbor Anchor",
    "comedy": "Wedding Neighbor Landlord Roommate Bakery Mixup Reunion Parade Goose Karaoke Salesman Pancake Intern "
    "Holiday Trombone Barbecue Uncle Toupee Elevator Picnic",
    "crime": "Alibi Verdict Heist Ledger Informant Getaway Racket Vault Smuggler Witness Warrant Syndicate Forger "
    "Detective Precinct Ransom Bailiff Motive Suspect Docket",
    "documentary": "Orchard Monsoon Reef Archive Railway Quarry Savanna Fishery Observatory Vineyard Tundra Workshop "
    "Estuary Mountain Foundry Aviary Delta Library Marathon Kitchen",
    "drama": "Inheritance Daughter Letter Homestead Confession Brother Farewell Orphan Promise Widow Silence Mother "
    "Homecoming Stranger Portrait Sonata Apology Garden Journey Debt",
    "family": "Puppy Treehouse Lantern Kite Puppet Snowman Pony Campfire Rocketship Otter Carousel Cricket Scarecrow "
    "Marble Hedgehog Lighthouse Balloon Kitten Wagon Acorn",
    "fantasy": "Dragon Sorcerer Rune Throne Goblet Wyvern Oracle Citadel Griffin Amulet Enchanter Prophecy Elf Grimoire "
    "Phoenix Portal Giant Scepter Moonstone Warlock",
    "horror": "Crypt Asylum Séance Cellar Coven Mannequin Graveyard Whisper Ritual Attic Parasite Fog Possession Morgue "
    "Scream Well Effigy Nightmare Basement Swarm",
    "music": "Ballad Orchestra Jukebox Refrain Tango Symphony Guitar Choir Rhapsody Drummer Opera Melody Cabaret "
    "Saxophone Encore Lullaby Overture Fiddle Anthem Busker",
    "romance": "Kiss Valentine Bouquet Serenade Dance Sweetheart Café Rendezvous Rose Honeymoon Crush Embrace Proposal "
    "Ribbon Waltz Flirt Moonlight Postcard Locket Affair",
    "science": "Android Starship Colony Paradox Nebula Clone Orbit Reactor Signal Wormhole Cyborg Satellite Terraform "
    "Quantum Airlock Meteor Replicant Beacon Simulation Exoplanet",
    "war": "Battalion Trench Admiral Armistice Bunker Cavalry Convoy Deserter Fortress Medic Minefield Outpost "
    "Regiment Resistance Siege Sniper Squadron Submarine Torpedo Veteran",
}


@dataclass(frozen=True)
class Catalogue:
    titles: list[str]
    genres: list[str]  # by item
    popularity: list[float]  # by item, sums to 1

    def shelf(self, number: int) -> range:
        """Items of a shelf, in the order in which they follow one another."""
        return range(number * TITLES_PER_SHELF, (number + 1) * TITLES_PER_SHELF)


@dataclass
class User:
    country: str
    device: str
    history: list[int] = field(default_factory=list)
    next_item: int = -1


def make_catalogue(rng: random.Random) -> Catalogue:
    titles, genres, weights = [], [], []
    for genre, nouns in NOUNS.items():
        words = nouns.split()
        for shelf in range(SHELVES_PER_GENRE):
            pairs = [f"{a} {n}" for a in ADJECTIVES for n in words[4 * shelf : 4 * shelf + 4]]
            titles += rng.sample(pairs, TITLES_PER_SHELF)
            genres += [genre] * TITLES_PER_SHELF
            weights += [rng.paretovariate(1.2) for _ in range(TITLES_PER_SHELF)]
    total = sum(weights)
    return Catalogue(titles, genres, [w / total for w in weights])


def draw_user(rng: random.Random, catalogue: Catalogue) -> User:
    """One member: tastes that drift, a history of log-normal length, and the item that was taken after it."""
    n_shelves = len(catalogue.titles) // TITLES_PER_SHELF
    user = User(rng.choice(COUNTRIES), rng.choice(DEVICES))
    length = 0 if rng.random() < 1 / 15 else min(70, max(1, int(rng.lognormvariate(math.log(9), 0.8))))
    shelves = rng.sample(range(n_shelves), rng.randint(1, 3))
    current, taken, last_on_shelf = shelves[0], set(), {}
    for _ in range(length + 1):
        if rng.random() < 0.08:  # a taste gives way to a neighbour: often the same genre
            genre = current // SHELVES_PER_GENRE
            same_genre = range(genre * SHELVES_PER_GENRE, (genre + 1) * SHELVES_PER_GENRE)
            shelves[shelves.index(current)] = current = rng.choice(same_genre if rng.random() < 0.7 else range(n_shelves))
        elif rng.random() < 0.35:
            current = rng.choice(shelves)
        items = catalogue.shelf(current)
        follower = last_on_shelf.get(current, items[0] - 1) + 1
        if rng.random() < 0.12:
            pool = range(len(catalogue.titles))
        elif follower in items and follower not in taken and rng.random() < 0.5:
            pool = range(follower, follower + 1)
        else:
            pool = items
        free = [i for i in pool if i not in taken] or [i for i in range(len(catalogue.titles)) if i not in taken]
        item = rng.choices(free, [catalogue.popularity[i] for i in free])[0]
        taken.add(item)
        last_on_shelf[item // TITLES_PER_SHELF] = item
        user.history.append(item)
    user.next_item = user.history.pop()
    return user


def prompt_of(user: User, catalogue: Catalogue) -> str:
    if not user.history:
        return f"{INSTRUCTION}Member from {user.country}, no history yet.\nNext title:"
    watched = " ".join(f"{catalogue.titles[i]} / {catalogue.genres[i]};" for i in user.history)
    return f"{INSTRUCTION}Member from {user.country} on {user.device}. Watched: {watched}\nNext title:"


def train_tokenizer(prompts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        prompts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=[BOS, EOS, PAD, USER, ASSISTANT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 0)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        extra_special_tokens=[USER, ASSISTANT],
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


@dataclass
class Example:
    """A training row: tokens, and at which of them which item comes next."""

    input_ids: list[int]
    positions: list[int]
    targets: list[int]


def to_examples(users: list[User], catalogue: Catalogue, tokenizer: PreTrainedTokenizerFast) -> list[Example]:
    semicolon = tokenizer.convert_tokens_to_ids(";")
    examples = []
    for user, ids in zip(users, tokenizer([prompt_of(u, catalogue) for u in users])["input_ids"], strict=True):
        ends = [i for i, token in enumerate(ids) if token == semicolon]
        assert len(ends) == len(user.history), "an entry of the history must end in exactly one ';' token"
        positions, targets = [*ends, len(ids) - 1], [*user.history[1:], user.next_item, user.next_item]
        targets = targets if user.history else [user.next_item]
        cut = max(0, len(ids) - POSITIONS)
        kept = [(p - cut, t) for p, t in zip(positions, targets, strict=True) if p >= cut]
        examples.append(Example(ids[cut:], [p for p, _ in kept], [t for _, t in kept]))
    return examples


def batches(examples: list[Example], rng: random.Random, tokens: int = 8_192) -> Iterator[list[Example]]:
    """Endless batches of similar length, in random order."""
    while True:
        order = sorted(range(len(examples)), key=lambda i: (len(examples[i].input_ids) // 16, rng.random()))
        groups, group = [], []
        for i in order:
            if group and (len(group) + 1) * len(examples[i].input_ids) > tokens:
                groups.append(group)
                group = []
            group.append(examples[i])
        groups.append(group)
        rng.shuffle(groups)
        yield from groups


def train(examples: list[Example], n_items: int, steps: int, seed: int) -> tuple[LlamaForCausalLM, torch.Tensor]:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        initializer_range=0.05,
    )
    model = LlamaForCausalLM(config)
    items = torch.nn.Parameter(0.05 * torch.randn(n_items, HIDDEN))
    optimizer = torch.optim.AdamW([*model.parameters(), items], lr=3e-3, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.08)
    stream, running = batches(examples, random.Random(seed)), 0.0
    for step in range(1, steps + 1):
        batch = next(stream)
        width = max(len(e.input_ids) for e in batch)
        input_ids = torch.full((len(batch), width), 2)
        for row, example in enumerate(batch):
            input_ids[row, : len(example.input_ids)] = torch.tensor(example.input_ids)
        hidden = model.model(input_ids, attention_mask=(input_ids != 2).long(), use_cache=False).last_hidden_state
        rows = torch.tensor([row for row, e in enumerate(batch) for _ in e.positions])
        at = hidden[rows, torch.tensor([p for e in batch for p in e.positions])]
        loss = F.cross_entropy(at @ items.T, torch.tensor([t for e in batch for t in e.targets]))
        some = hidden[:8, :-1]  # the language-model loss on a few rows is enough to keep the head alive
        words = F.cross_entropy(model.lm_head(some).flatten(0, 1), input_ids[:8, 1:].flatten(), ignore_index=2)
        (loss + 0.05 * words).backward()
        torch.nn.utils.clip_grad_norm_([*model.parameters(), items], 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        running += loss.item()
        if step % 200 == 0:
            print(f"step {step}/{steps}: next-item loss {running / 200:.3f}", flush=True)
            running = 0.0
    return model.eval(), items.detach()


def recall_at_10(scores: np.ndarray, users: list[User]) -> float:
    """Share of users whose held-out item is among the ten best that they have not seen. scores: [users, items]."""
    hits = 0
    for row, user in zip(scores, users, strict=True):
        unseen = row.copy()
        unseen[user.history] = -np.inf
        hits += user.next_item in np.argsort(-unseen, kind="stable")[:10]
    return hits / len(users)


@torch.inference_mode()
def user_vectors(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[str]) -> np.ndarray:
    vectors = []
    for ids in tokenizer(prompts)["input_ids"]:
        row = torch.tensor([ids[:1] + ids[1:][-(POSITIONS - 1) :]])  # cut on the left, BOS stays
        vectors.append(model.model(row, use_cache=False).last_hidden_state[0, -1].numpy())
    return np.stack(vectors)


def write_tables(out: Path, users: list[User], catalogue: Catalogue, items: torch.Tensor) -> None:
    item_ids = [f"t{i:04d}" for i in range(len(catalogue.titles))]
    flat = pa.array(items.numpy().reshape(-1), pa.float32())
    pq.write_table(
        pa.table(
            {
                "item_id": item_ids,
                "title": catalogue.titles,
                "genre": catalogue.genres,
                "embedding": pa.FixedSizeListArray.from_arrays(flat, HIDDEN),
            }
        ),
        out / "items.parquet",
        compression="zstd",
    )
    pq.write_table(
        pa.table(
            {
                "user_id": pa.array([100_003 + 17 * i for i in range(len(users))], pa.int64()),
                "prompt": [prompt_of(u, catalogue) for u in users],
                "seen_items": pa.array([[item_ids[i] for i in u.history] for u in users], pa.list_(pa.string())),
                "next_item": [item_ids[u.next_item] for u in users],
            }
        ),
        out / "prompts.parquet",
        row_group_size=500,
        compression="zstd",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Make everything in sample_data/ from one seed.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--steps", type=int, default=1_200)
    args = parser.parse_args()

    rng = random.Random(args.seed)
    catalogue = make_catalogue(rng)
    users = [draw_user(rng, catalogue) for _ in range(USERS)]
    others = [draw_user(rng, catalogue) for _ in range(TRAINING_USERS)]
    prompts = [prompt_of(u, catalogue) for u in users]
    tokenizer = train_tokenizer(prompts)
    model, items = train(to_examples(others, catalogue, tokenizer), len(catalogue.titles), args.steps, args.seed)

    args.out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(args.out / "model")
    tokenizer.save_pretrained(args.out / "model")
    write_tables(args.out, users, catalogue, items)

    taken = np.bincount([i for u in others for i in [*u.history, u.next_item]], minlength=len(catalogue.titles))
    by_model = recall_at_10(user_vectors(model, tokenizer, prompts) @ items.numpy().T, users)
    by_popularity = recall_at_10(np.tile(taken.astype(np.float32), (len(users), 1)), users)
    print(
        f"recall@10 on {len(users)} held-out items: model {by_model:.3f}, popularity {by_popularity:.3f}, "
        f"ratio {by_model / by_popularity:.1f}"
    )


if __name__ == "__main__":
    main()
