"""Text files -> numbers: Penn Treebank by words (Mikolov's preparation), tiny Shakespeare by characters."""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from rtopk.studies.tasks.data import DataError, find, verified

PTB = {
    "ptb.train.txt": "f26c4b92c5fdc7b3f8c7cdcb991d8420",
    "ptb.valid.txt": "aa0affc06ff7c36e977d7cd49e3839bf",
    "ptb.test.txt": "8b80168b89c18661a38ef683c0dc3721",
}
PTB_FOLDERS = ("ptb", "simple-examples/data")
SHAKESPEARE = {"input.txt": "6fb458f1232090904fb40fe944165e91"}
SHAKESPEARE_FOLDERS = ("shakespeare",)


@dataclass(frozen=True)
class Corpus:
    """Three parts of a text as token numbers, and where the lines of the training part begin."""

    train: Tensor  # (tokens,) int64
    validation: Tensor
    test: Tensor
    words: int
    lines: Tensor  # (lines,) int64, positions in train


def ptb(vocabulary: int = 0) -> Corpus:
    """Read Penn Treebank; with a vocabulary, words beyond the most frequent ones become <unk>."""
    contents = verified(find(*PTB_FOLDERS), PTB)
    parts = []
    for name, raw in contents.items():
        try:
            parts.append(raw.decode("ascii").replace("\n", " <eos> ").split())
        except UnicodeDecodeError as error:
            raise DataError(f"{name} must be plain ASCII text: {error}") from error
        if not parts[-1]:
            raise DataError(f"{name} is empty")
    # Most frequent first, ties by the alphabet: the same numbers on every machine.
    counts = Counter(parts[0])
    names = sorted(counts, key=lambda word: (-counts[word], word))
    if vocabulary:
        kept = [word for word in names if word != "<unk>"][: vocabulary - 1]
        names = ["<unk>", *kept]
    number = {word: position for position, word in enumerate(names)}
    unknown = number.get("<unk>")
    train, valid, test = (
        _encode(part, number, unknown, name) for part, name in zip(parts, contents, strict=True)
    )
    ends = (train == number["<eos>"]).nonzero()[:, 0]
    lines = torch.cat([torch.zeros(1, dtype=torch.int64), ends[:-1] + 1])
    return Corpus(train, valid, test, len(names), lines)


def shakespeare() -> Corpus:
    """Read tiny Shakespeare by characters; the last tenth is the test part, the tenth before validation."""
    raw = verified(find(*SHAKESPEARE_FOLDERS), SHAKESPEARE)["input.txt"]
    bytes_, tokens = torch.unique(torch.frombuffer(bytearray(raw), dtype=torch.uint8), return_inverse=True)
    tenth = len(tokens) // 10
    train, validation, test = tokens.split([len(tokens) - 2 * tenth, tenth, tenth])
    newline = int((bytes_ == ord("\n")).nonzero()[0])
    ends = (train == newline).nonzero()[:, 0]
    lines = torch.cat([torch.zeros(1, dtype=torch.int64), ends[ends < len(train) - 1] + 1])
    return Corpus(train, validation, test, len(bytes_), lines)


def _encode(words: list[str], number: dict[str, int], unknown: int | None, name: str) -> Tensor:
    try:
        return torch.tensor([number[w] if unknown is None else number.get(w, unknown) for w in words])
    except KeyError as error:
        raise DataError(
            f"{name} has the word {error} that the training part lacks, and there is no <unk>"
        ) from error
