"""Stream text from jsonl shards in a bucket, tokenise it, and train a small language model.

    python examples/text_stream/text_stream.py                          with a local GCS server
    python examples/text_stream/text_stream.py --uri gs://bucket/tmp    with a real bucket

The texts are made: sentences of a small grammar, in which the topic of a document decides on its
words. `train/0017.jsonl` holds documents as lines such as `{"id": "0017-003", "text": "..."}`.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
import uuid
from collections import Counter
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

import aioflux
from aioflux.data import IterableDataset, jsonl, loader
from aioflux.testing import GCSServer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

NUM_SHARDS = 10
NUM_DOCUMENTS = 300
"""Documents in each shard."""
NUM_TOPICS = 16
NUM_PIECES = 1000
NUM_WORKERS = 2
BATCH_DOCUMENTS = 32
ROW_TOKENS = 64
WINDOW_TOKENS = 8
GOAL = 20.0

SYLLABLES = ("ba", "chi", "do", "fe", "gru", "ka", "li", "mo", "ne", "pra", "ru", "sti", "to", "vu")
PIECE = re.compile(r" ?\w+|\W", re.ASCII)
END = 0
"""Token between documents. Tokens 1 to 256 are single bytes, higher tokens are pieces of text."""
FIRST_PIECE = 257


def made_documents(shard: int) -> Iterator[str]:
    """Yield the texts of a shard; the number of the shard is the seed."""
    draw = np.random.default_rng(shard)
    topics = draw.integers(NUM_TOPICS, size=NUM_DOCUMENTS).tolist()
    for topic in topics:
        words = ["".join(word) for word in np.random.default_rng(topic).choice(SYLLABLES, (32, 3))]
        nouns, verbs = words[:24], words[24:]
        choices = draw.integers((24, 8, 24), size=(draw.integers(4, 16), 3)).tolist()
        yield " ".join(f"The {nouns[a]} {verbs[b]}s a {nouns[c]}." for a, b, c in choices)


def made_shards() -> Iterator[tuple[str, bytes]]:
    """Yield key and bytes of each shard."""
    for shard in range(NUM_SHARDS):
        lines = (
            json.dumps({"id": f"{shard:04d}-{number:03d}", "text": text}) + "\n"
            for number, text in enumerate(made_documents(shard))
        )
        yield f"train/{shard:04d}.jsonl", "".join(lines).encode()


class Tokeniser:
    """Lossless encoding of text to tokens: a token for each common piece, bytes for the rest."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces
        self._tokens = {piece: token for token, piece in enumerate(pieces, FIRST_PIECE)}

    @classmethod
    def learned(cls, texts: Iterable[str]) -> Tokeniser:
        """Return a tokeniser of the most common pieces: words with leading space, punctuation."""
        counts = Counter(piece for text in texts for piece in PIECE.findall(text))
        return cls([piece for piece, _ in counts.most_common(NUM_PIECES)])

    def __len__(self) -> int:
        return FIRST_PIECE + len(self.pieces)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        tokens: list[int] = []
        for piece in PIECE.findall(text):
            token = self._tokens.get(piece)
            if token is None:
                tokens += (byte + 1 for byte in piece.encode())
            else:
                tokens.append(token)
        return tokens

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens, without the ends of documents."""
        parts = (
            self.pieces[token - FIRST_PIECE].encode()
            if token >= FIRST_PIECE
            else bytes([token - 1])
            for token in tokens
            if token != END
        )
        return b"".join(parts).decode()

    def save(self, store: aioflux.sync.Store) -> None:
        """Store the tokeniser next to the texts; a trained model needs the same tokens."""
        store.put("tokeniser.json", json.dumps(self.pieces).encode())

    @classmethod
    def load(cls, store: aioflux.sync.Store) -> Tokeniser:
        """Return the tokeniser that `save` stored."""
        return cls(json.loads(store.get("tokeniser.json")))


def tokenise(tokeniser: Tokeniser, document: dict[str, str]) -> list[int]:
    """Return the tokens of a document and `END`; runs in the workers."""
    return [*tokeniser.encode(document["text"]), END]


def pack(documents: list[list[int]]) -> tuple[torch.Tensor, int, int]:
    """Pack consecutive documents into rows; return rows, number of documents, number of tokens.

    A row starts with the last token of the previous row, because its first token is not predicted.
    """
    tokens = [END, *chain.from_iterable(documents)]
    num_rows = math.ceil((len(tokens) - 1) / ROW_TOKENS)
    rows = torch.full((num_rows * ROW_TOKENS + 1,), END)
    rows[: len(tokens)] = torch.tensor(tokens)
    return rows.unfold(0, ROW_TOKENS + 1, ROW_TOKENS), len(documents), len(tokens) - 1


class LanguageModel(nn.Module):
    """A small model that predicts a token from the previous eight tokens."""

    def __init__(self, num_tokens: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, width // 2)
        self.window = nn.Conv1d(width // 2, width, WINDOW_TOKENS)
        self.last = nn.Linear(width, num_tokens)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting each token of the rows except the first."""
        before = self.embedding(rows[:, :-1]).transpose(1, 2)
        seen = self.window(nn.functional.pad(before, (WINDOW_TOKENS - 1, 0)))
        logits = self.last(seen.relu().transpose(1, 2))
        return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def stream(name: str, batches: Iterable[tuple[torch.Tensor, int, int]]) -> Iterator[torch.Tensor]:
    """Yield the rows of each batch, and print the rate at the end."""
    documents = tokens = 0
    begun = time.perf_counter()
    for rows, num_documents, num_tokens in batches:
        documents += num_documents
        tokens += num_tokens
        yield rows
    seconds = time.perf_counter() - begun
    print(
        f"{name:<24}{seconds:>8.2f} s{documents:>12,} documents{tokens:>14,} tokens"
        f"{tokens / seconds:>14,.0f} tokens/s",
        flush=True,
    )


def run(uri: str, endpoint_url: str | None = None) -> None:
    """Upload the texts, build the tokeniser, and stream two epochs: one read, one for training."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the network is too small for more threads
    with aioflux.sync.open_store(uri, endpoint_url=endpoint_url) as store:
        num_bytes = sum(store.put_many(made_shards()).sizes)
        Tokeniser.learned(made_documents(0)).save(store)
        tokeniser = Tokeniser.load(store)
    print(f"put {NUM_SHARDS} shards of {num_bytes / 1e6:.1f} MB; {len(tokeniser)} tokens are known")

    dataset = IterableDataset(
        f"{uri}/train",
        records=jsonl(),
        transform=partial(tokenise, tokeniser),
        shuffle=True,
        shuffle_buffer=500,
        endpoint_url=endpoint_url,
    )
    batches = loader(dataset, batch_size=BATCH_DOCUMENTS, num_workers=NUM_WORKERS, collate_fn=pack)
    for _ in stream("epoch 0, read only", batches):
        pass

    model = LanguageModel(len(tokeniser))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    dataset.set_epoch(1)  # another order, the same on all ranks
    for rows in stream("epoch 1, trained on", batches):
        optimizer.zero_grad()
        loss = model(rows)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    choices = math.exp(sum(losses[-10:]) / 10)
    print(f"it first chose among {math.exp(losses[0]):,.0f} tokens, at the end among {choices:.1f}")
    if choices > GOAL:
        raise SystemExit("the example failed")


def main() -> None:
    """Choose the bucket, run, and clean up."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--uri", help="a bucket and prefix, such as gs://bucket/tmp")
    parser.add_argument("--keep", action="store_true", help="do not delete the objects at the end")
    arguments = parser.parse_args()
    if arguments.uri is None:
        with GCSServer(buckets=("bucket",)) as server:
            run("gs://bucket/text", server.url)
        return
    # A new prefix, so that no existing object is overwritten or deleted.
    uri = f"{arguments.uri.rstrip('/')}/text-{uuid.uuid4().hex[:8]}"
    try:
        run(uri)
    finally:
        if not arguments.keep:
            with aioflux.sync.open_store(uri) as store:
                store.delete_many(store.list_all())


if __name__ == "__main__":
    main()
