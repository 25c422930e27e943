"""A drafting method in one file: guess that each token is followed by what followed it most often so far.

Try it:  outrider generate "Count from one to thirty in words." --draft examples/copycat.py --show-draft
"""

from collections import Counter, defaultdict
from dataclasses import dataclass

from outrider import Drafter, Proposal, register


@register("copycat")
class Copycat(Drafter):
    @dataclass(frozen=True)
    class Config:
        depth: int = 3  # becomes --draft examples/copycat.py:depth=5

    def __init__(self, config):
        self.depth = self.nodes = config.depth
        self.after = defaultdict(Counter)  # token -> how often each token followed it
        self.seen = {}  # request id -> tokens already counted

    def propose(self, batch, budget):
        guesses = []
        for request, depth in zip(batch.requests, budget.depth, strict=True):
            tokens = request.tokens
            for i in range(self.seen.get(request.id, 1), len(tokens)):
                self.after[tokens[i - 1]][tokens[i]] += 1
            self.seen[request.id] = len(tokens)
            chain = [tokens[-1]]
            while len(chain) <= depth and self.after[chain[-1]]:
                chain.append(self.after[chain[-1]].most_common(1)[0][0])
            guesses.append(chain[1:])
        return Proposal.chains(guesses)
