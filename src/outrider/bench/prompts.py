"""Prompts for the audit: short, of many kinds, some of which repeat themselves so that lookup has something to find."""

from __future__ import annotations

PROMPTS: tuple[str, ...] = (
    "The river rose overnight, and by morning the lower field was",
    "List five things to check before a long bicycle tour:\n1.",
    "def mean(values):\n    total = 0\n    for value in values:\n        total",
    "Question: Why is the sky dark at night?\nAnswer:",
    "red, green, blue, red, green, blue, red, green,",
    "Dear neighbour,\n\nthank you for looking after the cat while we were",
    "In 1869 two railway crews met in the desert.",
    "SELECT name, price FROM goods WHERE price > 10 ORDER BY",
    "Recipe for lentil soup (four people)\n\n- 250 g lentils\n- 1 onion\n-",
    "Translate into French.\nEnglish: good morning\nFrench: bonjour\nEnglish: good night\nFrench:",
    "A haiku about an old bridge:\n",
    "The committee met on Tuesday. The committee decided that the committee",
    '{"name": "Ada", "age": 36, "city": "London"}\n{"name": "Alan", "age": 41,',
    "Once there was a lighthouse keeper who",
    "Water boils at 100 degrees, but on a high mountain it",
    "for i in range(10):\n    print(i)\nfor j in range(10):\n    print(",
    "Pros and cons of working from home.\nPros:",
    "x = 3, y = 4, so x * x + y * y =",
    "The opposite of cold is hot. The opposite of big is small. The opposite of early is",
    "Minutes of the garden club, March. Present: Ines, Tom, Ravi. Absent:",
    "<ul>\n  <li>tea</li>\n  <li>coffee</li>\n  <li>",
    "Nobody had opened the attic since",
    "Explain to a child how a kite stays in the air.",
    "ERROR 2024-03-01 disk full\nERROR 2024-03-02 disk full\nERROR 2024-03-03",
)
"""Our own sentences; order matters little, `audit --prompts N` takes the first N and goes round."""
