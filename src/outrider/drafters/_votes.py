"""Matches vote on what comes next, with their length: on the next token, then on the one after that among those that agree."""

from __future__ import annotations

from ..types import ROOT

Nodes = list[tuple[int, int]]
"""Guesses as (token, parent's index)."""
Voices = list[tuple[int, list[int]]]
"""Matches as voters: length, and the tokens it vouches for."""


def chain(speakers: Voices, floor: float) -> tuple[list[int], float]:
    """The path that has most votes at each step, and how many of its tokens are expected to be right."""
    total = sum([length for length, _ in speakers])
    path, hope, least = list[int](), 0.0, floor * total
    while len(speakers) > 1:
        i, votes, most = len(path), dict[int, int](), 0
        said = speakers[0][1][i : min([len(tokens) for _, tokens in speakers])]
        if all(tokens[i : i + len(said)] == said for _, tokens in speakers):  # of one mind
            most = sum([length for length, _ in speakers])
        else:
            for length, tokens in speakers:
                vote = votes[tokens[i]] = votes.get(tokens[i], 0) + length
                if vote > most:
                    most, said = vote, [tokens[i]]
        if most < least:
            return path, hope / total
        path += said
        hope += most * len(said)
        speakers = [voice for voice in speakers if len(voice[1]) > len(path) and voice[1][i] == said[0]]
    for length, tokens in speakers:
        if length >= least:
            hope += length * (len(tokens) - len(path))
            path += tokens[len(path) :]
    return path, hope / total if total else 0.0


def tree(speakers: Voices, width: int, nodes: int, floor: float) -> tuple[Nodes, float]:
    """The likeliest `nodes` nodes, at most `width` under one parent, parents first; and how many tokens of them are expected to
    be right."""
    total = sum(length for length, _ in speakers)
    index, votes = dict[tuple[int, int], int](), list[int]()
    for length, tokens in speakers:
        at = ROOT
        for token in tokens:
            at = index.setdefault((token, at), len(votes))
            if at == len(votes):
                votes.append(0)
            votes[at] += length
    names = list(index)
    order = sorted((v for v in range(len(votes)) if votes[v] >= floor * total), key=lambda v: -votes[v])
    kept, children, hope = {ROOT: ROOT}, dict[int, int](), 0.0
    for v in order:  # a parent has no fewer votes than its child, and came first
        parent = names[v][1]
        if len(kept) > nodes or parent not in kept or children.get(parent, 0) >= width:
            continue
        children[parent] = children.get(parent, 0) + 1
        kept[v] = len(kept) - 1
        hope += votes[v] / total
    return [(names[v][0], kept[names[v][1]]) for v in kept if v != ROOT], hope
